//! Information that Linux provides only by `ioctl`: where bytes are stored, and which metadata block devices have. Also
//! locks of ranges of files, and threads that wait for a filesystem which their process serves.
//!
//! Invariants: every `ioctl` reads and changes nothing. Data from the kernel are parsed like untrusted input: every
//! offset and number in them is checked against the bytes that are present. Structures are those of the kernel's
//! user-space headers, which are named at each.

#![allow(unsafe_code)]

pub mod apart;
pub mod block_metadata;
pub mod btrfs;
pub mod device_mapper;
pub mod fiemap;
pub mod range_lock;

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Calls the kernel.
///
/// # Safety
///
/// `buffer` has at least the bytes of the structure of `request`, followed by all bytes that the kernel may write
/// according to the structure; and every address in it refers to memory that is valid for the length that the structure
/// states.
unsafe fn call(fd: BorrowedFd<'_>, request: u32, buffer: &mut [u64]) -> io::Result<()> {
    // SAFETY: the caller's buffer is what `request` needs; the kernel keeps no address of it after the call.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), request as libc::Ioctl, buffer.as_mut_ptr()) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// A buffer of this many bytes, rounded up, all zeroes, aligned for every structure.
fn words(bytes: usize) -> Vec<u64> {
    vec![0; bytes.div_ceil(8)]
}

/// The bytes of a buffer.
fn bytes_of(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

/// Puts bytes into a buffer. Bytes for which there is no room are omitted.
fn put(words: &mut [u64], at_bytes: usize, bytes: &[u8]) {
    for (number, byte) in bytes.iter().enumerate() {
        let at = at_bytes + number;
        if let Some(word) = words.get_mut(at / 8) {
            let mut there = word.to_ne_bytes();
            there[at % 8] = *byte;
            *word = u64::from_ne_bytes(there);
        }
    }
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(at..at.checked_add(2)?)?.try_into().ok()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at.checked_add(4)?)?.try_into().ok()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_ne_bytes(bytes.get(at..at.checked_add(8)?)?.try_into().ok()?))
}

/// The text from `at` to the first zero, or to the end.
fn text_at(bytes: &[u8], at: usize) -> Option<&[u8]> {
    let rest = bytes.get(at..)?;
    Some(rest.split(|byte| *byte == 0).next().unwrap_or_default())
}

/// The error for an invalid structure in the kernel's response.
fn invalid(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_put_is_read_and_nothing_is_read_behind_the_end() {
        let mut buffer = words(20);
        put(&mut buffer, 4, &7_u32.to_ne_bytes());
        put(&mut buffer, 9, b"text");
        put(&mut buffer, 24, b"no room");
        let bytes = bytes_of(&buffer);
        assert_eq!((bytes.len(), u32_at(&bytes, 4), text_at(&bytes, 9)), (24, Some(7), Some(&b"text"[..])));
        assert_eq!((u64_at(&bytes, 17), u16_at(&bytes, 23), u32_at(&bytes, usize::MAX)), (None, None, None));
        assert_eq!((text_at(&bytes, 24), text_at(&bytes, 25)), (Some(&b""[..]), None));
    }
}
