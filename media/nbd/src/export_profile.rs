//! An export's geometry, limits and abilities, from the server's information about it.
//!
//! Pure, so that tests cover every inconsistent server.

use sealblock_block::{Abilities, Ability, Freshness, Geometry, Limits, RequestKind};
use sealblock_protocols_nbd::client::ExportInfo;
use sealblock_protocols_nbd::wire::transmission;
use sealblock_units::{BlockCount, BlockSize};

use crate::{ConnectError, Options};

/// Maximum bytes that one BLOCK_STATUS covers; the gate sends several at a time.
const ALLOCATION_BYTES: u64 = 64 << 20;

/// An export as a device.
#[derive(Clone, Debug)]
pub(crate) struct ExportProfile {
    pub(crate) geometry: Geometry,
    pub(crate) abilities: Abilities,
    /// The server supports FLUSH, so writes are volatile.
    pub(crate) flush: bool,
    /// The server supports FUA.
    pub(crate) fua: bool,
    /// Several connections see each other's writes and flushes.
    pub(crate) can_multi_conn: bool,
    /// The identity of its content, if the server says it.
    pub(crate) uuid: Option<[u8; 16]>,
}

impl ExportProfile {
    /// The profile of the export that `info` describes.
    ///
    /// # Errors
    /// [`ConnectError::Unsupported`] if no [`BlockSize`] suits the server's block sizes and the export's size.
    pub(crate) fn of(info: &ExportInfo, options: &Options) -> Result<ExportProfile, ConnectError> {
        use transmission as t;
        let block_size = block_size(info, options.small_blocks)?;
        let block = block_size.bytes() as u64;
        let max_bytes = u64::from(options.transfer_bytes.min(info.sizes.largest)).max(block);
        let limits = Limits {
            max_verify_blocks: blocks(ALLOCATION_BYTES, block),
            ..Limits::new(block_size, max_bytes as usize, blocks(options.zero_bytes.into(), block).get())
        };
        let has = |flag| info.has(flag);
        let abilities = Abilities {
            writable: !has(t::READ_ONLY),
            // NBD has no flag that promises a hole after WRITE_ZEROES.
            unmap_zeroes: false,
            offloads: true,
            freshness: Freshness::from_bits(info.older),
            ..Abilities::BASIC
        }
        .with([RequestKind::Discard], Ability::native_if(has(t::SEND_TRIM)))
        .with([RequestKind::WriteZeroes], Ability::native_if(has(t::SEND_WRITE_ZEROES)))
        .with([RequestKind::BlockStatus], Ability::native_if(info.context.is_some()));
        let capacity_blocks = info.size_bytes >> block_size.shift();
        let geometry = Geometry { block_size, capacity_blocks, protection: None, limits };
        Ok(ExportProfile {
            geometry,
            abilities,
            flush: has(t::SEND_FLUSH),
            fua: has(t::SEND_FUA),
            can_multi_conn: has(t::CAN_MULTI_CONN),
            uuid: info.identity.uuid,
        })
    }

    /// Refuses an export that differs from `before`: an open device does not change.
    pub(crate) fn check_unchanged(&self, before: &ExportProfile) -> Result<(), ConnectError> {
        let changed = |what: String| Err(ConnectError::Changed { what });
        if let Some((now, then)) = self.uuid.zip(before.uuid).filter(|(now, then)| now != then) {
            let [now, then] = [now, then].map(|uuid| format!("{:032x}", u128::from_be_bytes(uuid)));
            return changed(format!("the one with the identity {now}, not {then}"));
        }
        if self.geometry.capacity_bytes() != before.geometry.capacity_bytes() {
            let (now, then) = (self.geometry.capacity_bytes(), before.geometry.capacity_bytes());
            return changed(format!("{now} bytes, not {then}"));
        }
        if self.geometry != before.geometry {
            return changed("other block sizes".to_owned());
        }
        if let Some(why) = self.abilities.freshness.why_older().filter(|_| before.abilities.freshness.is_current()) {
            return changed(format!("blocks may be older now than what was written: {why}"));
        }
        if self.abilities != before.abilities || (self.flush, self.fua) != (before.flush, before.fua) {
            return changed("other abilities".to_owned());
        }
        Ok(())
    }
}

/// 4096 bytes if the export's size is a multiple of it, otherwise 512; with `is_small` 512 if the server supports it.
fn block_size(info: &ExportInfo, is_small: bool) -> Result<BlockSize, ConnectError> {
    let (size, smallest) = (info.size_bytes, u64::from(info.sizes.smallest));
    let unsupported = |why: String| Err(ConnectError::Unsupported(why));
    let largest = BlockSize::B4096.bytes() as u64;
    if smallest > largest {
        return unsupported(format!(
            "the server takes blocks of {smallest} bytes and more, and {largest} are the most here"
        ));
    }
    let sizes = match is_small && smallest <= BlockSize::B512.bytes() as u64 {
        true => [BlockSize::B512, BlockSize::B4096],
        false => [BlockSize::B4096, BlockSize::B512],
    };
    let fitting = sizes.into_iter().find(|block| size.is_multiple_of(block.bytes() as u64));
    match fitting.filter(|block| block.bytes() as u64 >= smallest) {
        Some(block) if block.bytes() as u64 <= u64::from(info.sizes.largest) => Ok(block),
        Some(block) => unsupported(format!(
            "the server takes {} bytes at once, less than a block of {}",
            info.sizes.largest,
            block.bytes()
        )),
        None => unsupported(format!(
            "its {size} bytes are not a multiple of 512 bytes or of the server's minimum block size, {smallest}"
        )),
    }
}

/// Whole blocks in `bytes`, at least one.
fn blocks(bytes: u64, block: u64) -> BlockCount {
    u32::try_from(bytes / block).ok().and_then(BlockCount::new).unwrap_or(BlockCount::ONE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use sealblock_block::WhyOlder;
    use sealblock_protocols_nbd::Identity;
    use sealblock_protocols_nbd::client::{BlockSizes, ReplyStyle};

    fn info(size_bytes: u64, sizes: BlockSizes, flags: u16) -> ExportInfo {
        let (name, description) = (None, String::new());
        ExportInfo {
            name,
            description,
            size_bytes,
            flags,
            sizes,
            style: ReplyStyle::Structured,
            context: Some(1),
            is_fenced: false,
            older: 0,
            identity: Identity::default(),
        }
    }

    #[test]
    fn an_export_that_may_be_older_says_why_and_one_that_becomes_so_is_left() {
        let of = |older| {
            let told = ExportInfo { older, ..info(1 << 20, BlockSizes::default(), 1) };
            ExportProfile::of(&told, &Options::default()).unwrap()
        };
        let (current, lost) = (of(0), of(1));
        assert!(current.abilities.freshness.is_current());
        assert_eq!(lost.abilities.freshness, Freshness::MayBeOlder(WhyOlder::LogLost));
        let refused = lost.check_unchanged(&current).unwrap_err().to_string();
        assert!(refused.contains("blocks may be older now") && refused.contains("its log"), "{refused}");
        assert!(lost.check_unchanged(&lost).is_ok());
    }

    #[test]
    fn an_export_of_another_identity_is_left_and_an_unknown_one_is_not() {
        let of = |uuid: Option<[u8; 16]>| {
            let identity = Identity { uuid, devices: Vec::new() };
            let told = ExportInfo { identity, ..info(1 << 20, BlockSizes::default(), 1) };
            ExportProfile::of(&told, &Options::default()).unwrap()
        };
        let refused = of(Some([1; 16])).check_unchanged(&of(Some([2; 16]))).unwrap_err().to_string();
        assert!(refused.contains(&"01".repeat(16)) && refused.contains(&"02".repeat(16)), "{refused}");
        for (now, then) in [(Some([1; 16]), Some([1; 16])), (None, Some([1; 16])), (Some([1; 16]), None)] {
            assert!(of(now).check_unchanged(&of(then)).is_ok());
        }
    }

    fn profile(size_bytes: u64, sizes: BlockSizes, flags: u16) -> Result<ExportProfile, String> {
        ExportProfile::of(&info(size_bytes, sizes, flags), &Options::default()).map_err(|error| error.to_string())
    }

    fn sizes(smallest: u32, largest: u32) -> BlockSizes {
        BlockSizes { smallest, best: smallest.max(4096), largest }
    }

    #[test]
    fn blocks_are_as_large_as_the_size_allows() {
        let of = |size, smallest| {
            profile(size, sizes(smallest, 32 << 20), 1).map(|profile| profile.geometry.block_size.bytes())
        };
        assert_eq!(of(1 << 20, 1), Ok(4096));
        assert_eq!(of((1 << 20) + 512, 1), Ok(512));
        assert_eq!(of(0, 512), Ok(4096), "an export may be empty");
        assert!(of((1 << 20) + 512, 4096).unwrap_err().contains("not a multiple of 512 bytes"));
        assert!(of(1000, 1).unwrap_err().contains("not a multiple of 512 bytes"));
        assert!(of(1 << 20, 8192).unwrap_err().contains("8192 bytes and more"));
    }

    #[test]
    fn blocks_are_as_small_as_the_server_takes_them_where_that_is_asked_for() {
        let of = |size, smallest| {
            let options = Options { small_blocks: true, ..Options::default() };
            let profile = ExportProfile::of(&info(size, sizes(smallest, 32 << 20), 1), &options);
            profile.map(|profile| profile.geometry.block_size.bytes()).map_err(|error| error.to_string())
        };
        assert_eq!((of(1 << 20, 1), of(1 << 20, 512), of((1 << 20) + 512, 1)), (Ok(512), Ok(512), Ok(512)));
        assert_eq!((of(1 << 20, 1024), of(1 << 20, 4096)), (Ok(4096), Ok(4096)));
        assert!(of((1 << 20) + 512, 4096).unwrap_err().contains("not a multiple of 512 bytes"));
    }

    #[test]
    fn requests_are_as_long_as_both_sides_take() {
        let of = |largest| {
            profile(1 << 20, sizes(1, largest), 1).map(|profile| profile.geometry.limits.max_transfer_blocks.get())
        };
        assert_eq!((of(32 << 20), of(u32::MAX), of(64 << 10)), (Ok(256), Ok(256), Ok(16)));
        assert!(of(2048).unwrap_err().contains("less than a block"));
    }

    #[test]
    fn abilities_are_those_of_the_flags() {
        use transmission as t;
        let none = profile(1 << 20, BlockSizes::default(), t::HAS_FLAGS | t::READ_ONLY).unwrap();
        assert!(!none.abilities.writable && !none.flush && !none.fua && !none.can_multi_conn);
        let removing =
            |abilities: Abilities| [RequestKind::Discard, RequestKind::WriteZeroes].map(|kind| abilities.get(kind));
        assert_eq!(removing(none.abilities), [Ability::Absent; 2]);
        let flags = t::SEND_FLUSH | t::SEND_FUA | t::SEND_TRIM | t::SEND_WRITE_ZEROES | t::CAN_MULTI_CONN;
        let all = profile(1 << 20, BlockSizes::default(), flags).unwrap();
        assert!(all.abilities.writable && all.flush && all.fua && all.can_multi_conn && !all.abilities.unmap_zeroes);
        assert_eq!(removing(all.abilities), [Ability::Native; 2]);
        assert!(matches!(all.check_unchanged(&none), Err(ConnectError::Changed { .. })));
        assert!(all.check_unchanged(&all).is_ok());
        let larger = profile(2 << 20, BlockSizes::default(), flags).unwrap();
        assert!(larger.check_unchanged(&all).unwrap_err().to_string().contains("2097152 bytes, not 1048576"));
    }
}
