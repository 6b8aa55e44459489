//! Tuples as single integers.
//!
//! A tuple is read as one big-endian integer (64-bit ones widened), in which guard, application tag, storage tag and
//! reference tag follow each other from the most to the least significant bit. So every format shares the same
//! arithmetic, and a whole tuple is compared at once. [`GuardFormat`] gives a guard kind its constants at compile time, so
//! that the loop over blocks is compiled once for each kind.

use crate::guard;
use crate::{GuardKind, PiFormat, ProtectionType, Tuple};

/// An application tag that switches the checking of its block off.
pub(crate) const ESCAPE: u16 = 0xFFFF;

/// A guard kind as a type.
pub(crate) trait GuardFormat {
    const KIND: GuardKind;
    fn compute(bytes: &[u8]) -> u64;

    const TUPLE_BYTES: usize = Self::KIND.tuple_bytes();
    /// Where the application tag starts, and so how many bits the storage and reference tags have.
    const APP_SHIFT: u32 = Self::KIND.space_bits() as u32;
    /// Where the guard starts.
    const GUARD_SHIFT: u32 = Self::APP_SHIFT + 16;
    /// The largest guard.
    const GUARD_MASK: u64 = u64::MAX >> (64 - Self::KIND.bits());
}

macro_rules! wire {
    ($($name:ident: $compute:expr;)*) => { $(
        pub(crate) struct $name;
        impl GuardFormat for $name {
            const KIND: GuardKind = GuardKind::$name;
            #[inline(always)]
            fn compute(bytes: &[u8]) -> u64 {
                u64::from($compute(bytes))
            }
        }
    )* };
}

wire! {
    Crc16: guard::crc16;
    Crc32c: guard::crc32c;
    Crc64: guard::crc64;
    IpChecksum: guard::ip_checksum;
}

/// Calls a function that is generic over [`GuardFormat`] with the type of a guard kind.
macro_rules! for_kind {
    ($kind:expr, $function:ident $(:: <$($more:ty),*>)? ($($argument:expr),* $(,)?)) => {
        match $kind {
            $crate::GuardKind::Crc16 => $function::<$crate::wire::Crc16 $($(, $more)*)?>($($argument),*),
            $crate::GuardKind::Crc32c => $function::<$crate::wire::Crc32c $($(, $more)*)?>($($argument),*),
            $crate::GuardKind::Crc64 => $function::<$crate::wire::Crc64 $($(, $more)*)?>($($argument),*),
            $crate::GuardKind::IpChecksum => $function::<$crate::wire::IpChecksum $($(, $more)*)?>($($argument),*),
        }
    };
}
pub(crate) use for_kind;

/// The tuple at the start of `bytes`. Panics if there are too few.
#[inline(always)]
pub(crate) fn load(tuple_bytes: usize, bytes: &[u8]) -> u128 {
    if tuple_bytes == 8 {
        let (word, _) = bytes.split_first_chunk().expect("a tuple of a 16-bit guard has 8 bytes");
        u128::from(u64::from_be_bytes(*word))
    } else {
        let (word, _) = bytes.split_first_chunk().expect("a tuple of a 32-bit or 64-bit guard has 16 bytes");
        u128::from_be_bytes(*word)
    }
}

/// Puts the tuple at the start of `bytes`. Panics if there are too few.
#[inline(always)]
pub(crate) fn store(tuple_bytes: usize, word: u128, bytes: &mut [u8]) {
    if tuple_bytes == 8 {
        *bytes.first_chunk_mut().expect("a tuple of a 16-bit guard has 8 bytes") = (word as u64).to_be_bytes();
    } else {
        *bytes.first_chunk_mut().expect("a tuple of a 32-bit or 64-bit guard has 16 bytes") = word.to_be_bytes();
    }
}

/// The integer of a tuple; each field is cut to its width.
pub(crate) fn pack(format: PiFormat, tuple: &Tuple) -> u128 {
    let space = u32::from(format.guard().space_bits());
    let guard = tuple.guard & (u64::MAX >> (64 - format.guard().bits()));
    u128::from(guard) << (space + 16)
        | u128::from(tuple.app_tag) << space
        | u128::from(tuple.storage_tag & format.storage_tag_mask()) << format.reference_tag_bits()
        | u128::from(tuple.ref_tag & format.reference_tag_mask())
}

/// The fields of a tuple's integer.
pub(crate) fn unpack(format: PiFormat, word: u128) -> Tuple {
    let space = u32::from(format.guard().space_bits());
    Tuple {
        guard: (word >> (space + 16)) as u64,
        app_tag: (word >> space) as u16,
        storage_tag: (word >> format.reference_tag_bits()) as u64 & format.storage_tag_mask(),
        ref_tag: word as u64 & format.reference_tag_mask(),
    }
}

/// The bits of a tuple's integer that, all set, switch the checking of its block off.
pub(crate) fn escape_mask(format: PiFormat) -> u128 {
    let app = u128::from(ESCAPE) << format.guard().space_bits();
    match format.protection() {
        ProtectionType::Type1 | ProtectionType::Type2 => app,
        ProtectionType::Type3 => app | u128::from(format.reference_tag_mask()),
    }
}
