//! The checksums themselves, over any bytes.
//!
//! The CRCs come from `crc-fast`, through its fixed entry points: its digest, which `append` needs, copies some 200
//! bytes of parameters first. `append` continues a finished CRC: all three CRCs have equal initial and final XOR, so
//! the finished value of an empty message is 0, and the running state can be had back from a finished value.

mod ip;

pub use ip::{ip_checksum, ip_checksum_append};

use crc_fast::{CrcAlgorithm, Digest};

use crate::GuardKind;

/// CRC-16/T10-DIF of `bytes` (polynomial 8BB7h, not reflected, initial value 0).
#[inline]
pub fn crc16(bytes: &[u8]) -> u16 {
    match bytes.try_into() {
        Ok(block) if !bytes.as_ptr().addr().is_multiple_of(VECTOR_BYTES) => crc16_realigned(block),
        _ => crc_fast::checksum(CrcAlgorithm::Crc16T10Dif, bytes) as u16,
    }
}

/// The alignment that `crc-fast` wants: it takes the bytes before and behind the whole vectors in slow small steps.
const VECTOR_BYTES: usize = 16;

/// Every second block of 512 bytes that is interleaved with 8-byte tuples starts between two vectors. To copy it
/// first takes less than half as long as the slow steps do; larger blocks gain nothing from a copy.
fn crc16_realigned(block: &[u8; 512]) -> u16 {
    #[repr(align(64))]
    struct Aligned([u8; 512]);
    crc_fast::checksum(CrcAlgorithm::Crc16T10Dif, &Aligned(*block).0) as u16
}

/// CRC-32C of `bytes` (polynomial 1EDC6F41h, reflected; RFC 3720 appendix B.4).
#[inline]
pub fn crc32c(bytes: &[u8]) -> u32 {
    crc_fast::crc32_iscsi(bytes)
}

/// CRC-64/NVME of `bytes` (polynomial AD93D23594C93659h, reflected; the 64-bit guard of the NVM Command Set
/// specification).
#[inline]
pub fn crc64(bytes: &[u8]) -> u64 {
    crc_fast::crc64_nvme(bytes)
}

/// The CRC-16/T10-DIF of what `crc` was computed over followed by `bytes`; start with 0.
pub fn crc16_append(crc: u16, bytes: &[u8]) -> u16 {
    let mut digest = Digest::new_with_init_state(CrcAlgorithm::Crc16T10Dif, u64::from(crc));
    digest.update(bytes);
    digest.finalize() as u16
}

/// The CRC-32C of what `crc` was computed over followed by `bytes`; start with 0.
pub fn crc32c_append(crc: u32, bytes: &[u8]) -> u32 {
    let mut digest = Digest::new_with_init_state(CrcAlgorithm::Crc32Iscsi, u64::from(!crc));
    digest.update(bytes);
    digest.finalize() as u32
}

/// The CRC-64/NVME of what `crc` was computed over followed by `bytes`; start with 0.
pub fn crc64_append(crc: u64, bytes: &[u8]) -> u64 {
    let mut digest = Digest::new_with_init_state(CrcAlgorithm::Crc64Nvme, !crc);
    digest.update(bytes);
    digest.finalize()
}

/// The guard of `bytes`, in the low [`GuardKind::bits`] bits.
#[inline]
pub fn compute(kind: GuardKind, bytes: &[u8]) -> u64 {
    match kind {
        GuardKind::Crc16 => u64::from(crc16(bytes)),
        GuardKind::Crc32c => u64::from(crc32c(bytes)),
        GuardKind::Crc64 => crc64(bytes),
        GuardKind::IpChecksum => u64::from(ip_checksum(bytes)),
    }
}

/// The guard of no bytes at all: what [`append`] starts with.
pub const fn empty(kind: GuardKind) -> u64 {
    match kind {
        GuardKind::Crc16 | GuardKind::Crc32c | GuardKind::Crc64 => 0,
        GuardKind::IpChecksum => 0xFFFF,
    }
}

/// The guard of what `guard` was computed over followed by `bytes`. For the IP checksum all parts but the last must
/// have an even number of bytes, since its words are 16 bits wide.
pub fn append(kind: GuardKind, guard: u64, bytes: &[u8]) -> u64 {
    match kind {
        GuardKind::Crc16 => u64::from(crc16_append(guard as u16, bytes)),
        GuardKind::Crc32c => u64::from(crc32c_append(guard as u32, bytes)),
        GuardKind::Crc64 => crc64_append(guard, bytes),
        GuardKind::IpChecksum => u64::from(ip_checksum_append(guard as u16, bytes)),
    }
}
