//! Storage tags through passthrough: formats with a storage tag are written, and checked by the target and by the host.
//!
//! The test builds the host's tuples itself, from the figure in the NVM Command Set specification and its examples of
//! checksums, so that target and test cannot share a mistake.

use anyhow::{Context, Result, ensure};

use crate::context::TestContext;

/// The tuple of one format: name of the volume, guard, bits of the storage tag, bytes of the guard, and the guards of
/// 4096 bytes of ffh and of 00h.
struct Format {
    name: &'static str,
    guard: &'static str,
    storage_bits: u8,
    guard_bytes: usize,
    ones: u64,
    zeroes: u64,
}

/// Both guards that leave room for a storage tag beside a long reference tag; the checksums are from the specification.
const FORMATS: [Format; 3] = [
    Format { name: "s32", guard: "crc32c", storage_bits: 16, guard_bytes: 4, ones: 0x25C1_FE13, zeroes: 0x98F9_4189 },
    Format {
        name: "s32-40",
        guard: "crc32c",
        storage_bits: 40,
        guard_bytes: 4,
        ones: 0x25C1_FE13,
        zeroes: 0x98F9_4189,
    },
    Format {
        name: "s64",
        guard: "crc64",
        storage_bits: 20,
        guard_bytes: 8,
        ones: 0xC0DD_BA73_02EC_A3AC,
        zeroes: 0x6482_D367_EB22_B64E,
    },
];

impl Format {
    /// A tuple: guard, application tag, then the storage tag and the reference tag, which share the remaining bits;
    /// most significant byte first.
    fn tuple(&self, guard: u64, app_tag: u16, storage_tag: u64, ref_tag: u64) -> Vec<u8> {
        let space_bytes = 16 - self.guard_bytes - 2;
        let ref_bits = space_bytes * 8 - usize::from(self.storage_bits);
        let space = u128::from(storage_tag) << ref_bits | u128::from(ref_tag);
        let parts = [
            &guard.to_be_bytes()[8 - self.guard_bytes..],
            &app_tag.to_be_bytes(),
            &space.to_be_bytes()[16 - space_bytes..],
        ];
        parts.concat()
    }

    /// A right tag and a wrong one, with all bits in use.
    fn storage_tags(&self) -> (u64, u64) {
        let tag = 0xB6_E5C3_A597 >> (40 - self.storage_bits);
        (tag, tag ^ 1 << (self.storage_bits - 1))
    }
}

/// Bytes as arguments of a shell's `printf`.
fn escaped(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("\\{byte:03o}")).collect()
}

pub fn run(context: &mut TestContext<'_>) -> Result<()> {
    for format in &FORMATS {
        context.sealblock.create(format.name, "4MiB", &["--guard", format.guard])?;
        split(context, format)?;
    }
    let names = FORMATS.each_ref().map(|format| format.name);
    let mut server = context.sealblock.serve(&names, &["--protection", "shown"])?;
    for format in &FORMATS {
        let (right, wrong) = format.storage_tags();
        let script = SCRIPT
            .replace("@NAME@", format.name)
            .replace("@BITS@", &format.storage_bits.to_string())
            .replace("@RIGHT@", &right.to_string())
            .replace("@WRONG@", &wrong.to_string())
            .replace("@STORED@", &escaped(&format.tuple(format.ones, 0x1234, right, 7)))
            .replace("@MADE@", &escaped(&format.tuple(format.zeroes, 0x4321, right, 9)))
            .replace("@COPIED@", &escaped(&format.tuple(format.ones, 0x1234, right, 30)));
        context.sh(&server, &script).with_context(|| format!("format {}", format.name))?;
    }
    server.stop()?;
    names.iter().try_for_each(|name| context.sealblock.succeed(&["verify", name]).map(drop))
}

/// Splits the space between storage and reference tag in an empty volume, as the format requires. `create` has no
/// option for it, so the test writes it to all superblocks, whose layout is in `docs/formats/protected-volume.md`.
fn split(context: &TestContext<'_>, format: &Format) -> Result<()> {
    let path = context.sealblock.folder.join(format.name);
    let mut volume = context.sealblock.content(format.name)?;
    for at in [0, 0x8000, volume.len() - 0x1000] {
        let superblock = &mut volume[at..at + 512];
        ensure!(
            superblock[508..] == crc32c(&superblock[..508]).to_le_bytes(),
            "the superblock is drawn in another way"
        );
        superblock[58] = format.storage_bits;
        let sum = crc32c(&superblock[..508]);
        superblock[508..].copy_from_slice(&sum.to_le_bytes());
    }
    std::fs::write(path, volume).context("writing the volume")
}

/// CRC-32C, bit by bit.
fn crc32c(bytes: &[u8]) -> u32 {
    let step = |crc: u32, _| crc >> 1 ^ if crc & 1 == 1 { 0x82F6_3B78 } else { 0 };
    !bytes.iter().fold(u32::MAX, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), step))
}

const SCRIPT: &str = r#"
dev=$(attach @NAME@)
char=/dev/ng${dev#nvme}
ask() { command=$1; shift; rm -f /tmp/back; nvme $command $char --namespace-id=1 --block-count=0 --app-tag-mask=0xffff "$@"; }
nvme nvm-id-ns /dev/$dev --namespace-id=1 --output-format=json | tr -d ' \n' >/tmp/id
grep -q '"sts":@BITS@,' /tmp/id || { cat /tmp/id; fail "the size of the storage tag"; }
tr '\0' '\377' </dev/zero | head -c 4096 >/tmp/ones
head -c 4096 /dev/zero >/tmp/zeroes
# The target makes the tuple, as the specification draws it.
ask write --start-block=7 --data-size=4096 --data=/tmp/ones --prinfo=15 --app-tag=0x1234 --ref-tag=7 --storage-tag=@RIGHT@
(cat /tmp/ones; printf '@STORED@') >/tmp/wanted
ask read --start-block=7 --data-size=4112 --data=/tmp/back --prinfo=7 --app-tag=0x1234 --ref-tag=7 --storage-tag=@RIGHT@ --storage-tag-check
cmp /tmp/wanted /tmp/back || { tail -c 16 /tmp/back | od -A n -t x1; fail "the tuple that the target made"; }
ask read --start-block=7 --data-size=4096 --data=/tmp/back --prinfo=15 --app-tag=0x1234 --ref-tag=7 --storage-tag=@RIGHT@ --storage-tag-check
cmp /tmp/ones /tmp/back
# Checks: the right tag, a wrong one, and a wrong one that no check covers.
ask verify --start-block=7 --prinfo=7 --app-tag=0x1234 --ref-tag=7 --storage-tag=@RIGHT@ --storage-tag-check
refused "Storage Tag Check Error" ask verify --start-block=7 --prinfo=7 --app-tag=0x1234 --ref-tag=7 --storage-tag=@WRONG@ --storage-tag-check
refused "Storage Tag Check Error" ask read --start-block=7 --data-size=4096 --data=/tmp/back --prinfo=8 --storage-tag=@WRONG@ --storage-tag-check
refused "Storage Tag Check Error" ask read --start-block=7 --data-size=4112 --data=/tmp/back --prinfo=0 --storage-tag=@WRONG@ --storage-tag-check
ask verify --start-block=7 --prinfo=7 --app-tag=0x1234 --ref-tag=7 --storage-tag=@WRONG@
refused "Reference Tag Check Error\|Invalid Protection" ask verify --start-block=7 --prinfo=1 --ref-tag=8
refused "Application Tag Check Error" ask verify --start-block=7 --prinfo=2 --app-tag=0x1235
# The host makes it; what does not match is refused and not written.
(cat /tmp/zeroes; printf '@MADE@') >/tmp/made
ask write --start-block=9 --data-size=4112 --data=/tmp/made --prinfo=7 --app-tag=0x4321 --ref-tag=9 --storage-tag=@RIGHT@ --storage-tag-check
ask read --start-block=9 --data-size=4112 --data=/tmp/back --prinfo=7 --app-tag=0x4321 --ref-tag=9 --storage-tag=@RIGHT@ --storage-tag-check
cmp /tmp/made /tmp/back
(cat /tmp/ones; printf '@MADE@') >/tmp/wrong
refused "Guard Check Error" ask write --start-block=9 --data-size=4112 --data=/tmp/wrong --prinfo=4
refused "Storage Tag Check Error" ask write --start-block=9 --data-size=4112 --data=/tmp/made --prinfo=0 --storage-tag=@WRONG@ --storage-tag-check
refused "Application Tag Check Error" ask write --start-block=9 --data-size=4112 --data=/tmp/made --prinfo=2 --app-tag=0x4320
refused "Reference Tag Check Error" ask write --start-block=10 --data-size=4112 --data=/tmp/made --prinfo=1 --ref-tag=10
ask read --start-block=9 --data-size=4112 --data=/tmp/back --prinfo=7 --app-tag=0x4321 --ref-tag=9 --storage-tag=@RIGHT@ --storage-tag-check
cmp /tmp/made /tmp/back || fail "a write that was refused changed the block"
# Copy takes guard, application and storage tag along and makes the reference tag that of the place.
nvme copy $char --namespace-id=1 --sdlba=30 --slbs=7 --blocks=0 --format=1 --prinfor=4 --prinfow=4 --ref-tag=30 --expected-ref-tags=7
(cat /tmp/ones; printf '@COPIED@') >/tmp/wanted
ask read --start-block=30 --data-size=4112 --data=/tmp/back --prinfo=7 --app-tag=0x1234 --ref-tag=30 --storage-tag=@RIGHT@ --storage-tag-check
cmp /tmp/wanted /tmp/back || fail "the copy's tuple"
detach @NAME@
"#;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_those_of_the_specification() {
        assert_eq!(u64::from(crc32c(&[0xFF; 4096])), FORMATS[0].ones);
        assert_eq!(u64::from(crc32c(&[0; 4096])), FORMATS[0].zeroes);
    }

    #[test]
    fn tuples_are_drawn_with_the_storage_tag_above_the_reference_tag() {
        let tuple = FORMATS[2].tuple(0x0102_0304_0506_0708, 0x090A, 0xB_CDEF, 0x123_4567);
        assert_eq!(tuple, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0xBC, 0xDE, 0xF1, 0x23, 0x45, 0x67]);
        let tuple = FORMATS[0].tuple(1, 2, 0x0304, 5);
        assert_eq!(tuple, [0, 0, 0, 1, 0, 2, 3, 4, 0, 0, 0, 0, 0, 0, 0, 5]);
    }

    #[test]
    fn storage_tags_use_all_their_bits() {
        for format in &FORMATS {
            let (right, wrong) = format.storage_tags();
            assert!(right >> (format.storage_bits - 1) == 1 && wrong >> format.storage_bits == 0 && right != wrong);
        }
    }
}
