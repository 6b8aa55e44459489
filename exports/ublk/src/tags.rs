//! Tags of the host: the kernel's block layer makes and checks them, and the pass that checks them here also converts
//! them to those of the device, and back.

use std::io;

use sealblock_block::BadBlock;
use sealblock_integrity::{
    Checks, GuardKind, Keep, Mismatch, PiFormat, ProtectionType, RebaseTags, Sealed, Tags, Unverified, rebase, seal,
};
use sealblock_runtime_memory::Slice;
use sealblock_runtime_reactor::pool;
use sealblock_runtime_ublk::IntegrityChecksum;
use sealblock_units::{BlockSize, Lba};

/// The checksum with which the host's kernel protects blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HostGuard {
    /// The Internet checksum: the cheapest, but it does not detect exchanged 16-bit words.
    Ip,
    /// The CRC-16 of T10-DIF.
    Crc16,
    /// The CRC-64 of NVMe.
    Crc64,
}

impl HostGuard {
    /// All of them.
    pub const ALL: [HostGuard; 3] = [HostGuard::Ip, HostGuard::Crc16, HostGuard::Crc64];

    /// Its name on command lines and in JSON.
    pub const fn as_str(self) -> &'static str {
        match self {
            HostGuard::Ip => "ip",
            HostGuard::Crc16 => "crc16",
            HostGuard::Crc64 => "crc64",
        }
    }

    /// The format of the host's tags: Type 1, so that their reference tags are addresses.
    pub const fn format(self) -> PiFormat {
        let guard = match self {
            HostGuard::Ip => GuardKind::IpChecksum,
            HostGuard::Crc16 => GuardKind::Crc16,
            HostGuard::Crc64 => GuardKind::Crc64,
        };
        PiFormat::with_default_storage_tag(guard, ProtectionType::Type1)
    }

    /// The kernel's name for it.
    pub const fn checksum(self) -> IntegrityChecksum {
        match self {
            HostGuard::Ip => IntegrityChecksum::Ip,
            HostGuard::Crc16 => IntegrityChecksum::Crc16,
            HostGuard::Crc64 => IntegrityChecksum::Crc64,
        }
    }
}

/// Why blocks of a write are not written.
#[derive(Debug)]
pub(crate) enum BadWrite {
    /// Data and tags do not have the same shape.
    Shape,
    /// A block does not match its tag.
    Mismatch(BadBlock),
}

/// The blocks of a write with the host's tags, converted to the device's.
pub(crate) fn of_write(
    (data, tags): (Slice, Slice),
    size: BlockSize,
    host: PiFormat,
    device: Option<PiFormat>,
    start: Lba,
) -> Result<Sealed, BadWrite> {
    let arrived = Unverified::new(data, tags, size, Some(host)).map_err(|_| BadWrite::Shape)?;
    let checks = Checks::full(host, start);
    // The reference tags of the device can have more bits than the host's.
    let output = RebaseTags { initial_ref_tag: Keep::Replace(start.get()), ..RebaseTags::default() };
    arrived.rebase(device, &checks, &output).map_err(|found| {
        let first = found.into_iter().next().expect("blocks are refused for a mismatch");
        BadWrite::Mismatch(BadBlock::of_mismatch(start, &first))
    })
}

/// Delivers the host's tags for blocks that were read: `put` gets the tags of consecutive blocks, with their offset in
/// bytes.
///
/// # Errors
/// The errors of `put`; `InvalidData` for a block that no longer matches the device's tag, and then no tag was put.
pub(crate) fn put_of_read(
    blocks: &Sealed,
    host: PiFormat,
    start: Lba,
    mut put: impl FnMut(u32, &[u8]) -> io::Result<()>,
) -> io::Result<()> {
    let size = blocks.size();
    let mut done = 0;
    for segment in blocks.segments() {
        let (data, tags) = (&segment.data, &segment.tags);
        let count = (data.len() >> size.shift()) as u64;
        let first = start.get() + done;
        let mut made = pool().take(count as usize * host.tuple_bytes());
        match blocks.format() {
            Some(device) => {
                // Includes the guard of a block that was checked when it was read, because its data may have changed in
                // memory since then.
                let checks = Checks::full(device, Lba::new(first));
                let output = RebaseTags { initial_ref_tag: Keep::Replace(first), ..RebaseTags::default() };
                let ignore = &mut |_: Mismatch| {};
                if rebase(device, host, size, data, tags, &mut made, &checks, &output, ignore) > 0 {
                    return Err(io::ErrorKind::InvalidData.into());
                }
            }
            None => seal(host, size, data, &mut made, &Tags { initial_ref_tag: first, ..Tags::default() }),
        }
        put(done as u32 * host.tuple_bytes() as u32, &made)?;
        done += count;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use sealblock_integrity::Tuple;
    use sealblock_runtime_reactor::{Config, Reactor};

    use super::*;

    const SIZE: BlockSize = BlockSize::B512;
    const START: Lba = Lba::new((1 << 33) + 5);

    fn stored() -> Vec<Option<PiFormat>> {
        let formats = GuardKind::ALL
            .into_iter()
            .flat_map(|guard| ProtectionType::ALL.map(|kind| Some(PiFormat::with_default_storage_tag(guard, kind))));
        formats.chain([None]).collect()
    }

    fn data() -> Vec<u8> {
        (0..4 * 512_usize).map(|at| (at * 7 + at / 512) as u8).collect()
    }

    /// The tags that a kernel makes.
    fn host_tags(host: PiFormat, data: &[u8]) -> Vec<u8> {
        let mut tags = vec![0; 4 * host.tuple_bytes()];
        seal(host, SIZE, data, &mut tags, &Tags { initial_ref_tag: START.get(), ..Tags::default() });
        tags
    }

    #[test]
    fn what_a_host_writes_it_reads_with_the_same_tags_whatever_the_device_keeps() {
        let reactor = Reactor::new(Config::default()).unwrap();
        reactor.block_on(async {
            for (host, device) in
                HostGuard::ALL.into_iter().flat_map(|host| stored().into_iter().map(move |to| (host, to)))
            {
                let (host, data) = (host.format(), data());
                let tags = host_tags(host, &data);
                let pair = (Slice::copy_from(&data), Slice::copy_from(&tags));
                let written = of_write(pair, SIZE, host, device, START).unwrap();
                assert_eq!((written.format(), written.has_verified_guards()), (device, true));
                if let Some(device) = device {
                    let first = written.tuples().next().unwrap();
                    assert_eq!(first.ref_tag, device.reference_tag(START.get(), 0), "{host:?} {device:?}");
                }
                // In two segments, as a device may return them.
                let read = Sealed::join([written.slice(0, 1), written.slice(1, 3)]);
                let mut back = vec![0; tags.len()];
                put_of_read(&read, host, START, |at, part| {
                    back[at as usize..at as usize + part.len()].copy_from_slice(part);
                    Ok(())
                })
                .unwrap();
                assert_eq!(back, tags, "{host:?} {device:?}");
            }
        });
    }

    #[test]
    fn a_bit_that_changed_on_its_way_in_is_refused_by_its_block() {
        for (host, device) in HostGuard::ALL.into_iter().flat_map(|host| stored().into_iter().map(move |to| (host, to)))
        {
            let (host, good) = (host.format(), data());
            let tags = host_tags(host, &good);
            let mut bent = good.clone();
            bent[2 * 512 + 9] ^= 0x20;
            let pair = (Slice::copy_from(&bent), Slice::copy_from(&tags));
            let found = of_write(pair, SIZE, host, device, START).unwrap_err();
            assert!(matches!(found, BadWrite::Mismatch(bad) if bad.lba.get() == START.get() + 2), "{found:?}");
            let elsewhere = (Slice::copy_from(&good), Slice::copy_from(&tags));
            let moved = of_write(elsewhere, SIZE, host, device, Lba::new(START.get() + 1));
            assert!(matches!(moved, Err(BadWrite::Mismatch(_))), "a write for another address");
            let short = (Slice::copy_from(&good), Slice::copy_from(&tags[1..]));
            assert!(matches!(of_write(short, SIZE, host, device, START), Err(BadWrite::Shape)));
        }
    }

    #[test]
    fn a_block_without_content_has_no_guard_to_check() {
        let reactor = Reactor::new(Config::default()).unwrap();
        reactor.block_on(async {
            let device = PiFormat::with_default_storage_tag(GuardKind::Crc32c, ProtectionType::Type1);
            let escape = Tags { app_tag: 0xFFFF, initial_ref_tag: START.get(), ..Tags::default() };
            let read = Sealed::seal(Slice::copy_from(&[0; 512]), SIZE, Some(device), &escape);
            for host in HostGuard::ALL {
                put_of_read(&read, host.format(), START, |_, tags| {
                    assert!(Tuple::read(host.format(), tags).is_escaped(host.format()));
                    Ok(())
                })
                .unwrap();
            }
        });
    }
}
