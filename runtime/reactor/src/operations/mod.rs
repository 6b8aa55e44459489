//! The kinds of operations, one file each. To add one, copy `sync.rs`.

mod accept;
mod allocate;
mod connect;
mod read;
mod receive;
mod send;
mod sync;
mod write;

use std::io;

pub(crate) use accept::Accept;
pub(crate) use allocate::Allocate;
pub(crate) use connect::Connect;
pub(crate) use read::Read;
pub(crate) use receive::Receive;
pub(crate) use send::Send;
pub(crate) use sync::Sync;
pub(crate) use write::Write;

/// The most that Linux moves in one read or write, in bytes (`MAX_RW_COUNT`).
const TRANSFER_LIMIT_BYTES: usize = 0x7fff_f000;

/// Makes an entry for a descriptor that is either a slot of the ring's table or a number.
macro_rules! entry_for {
    ($target:expr, |$fd:ident| $entry:expr) => {
        match $target {
            $crate::ring::Target::Fixed(slot) => {
                let $fd = io_uring::types::Fixed(slot);
                $entry
            }
            $crate::ring::Target::Plain(number) => {
                let $fd = io_uring::types::Fd(number);
                $entry
            }
        }
    };
}
pub(crate) use entry_for;

/// The count that a system call returned, or its error.
fn counted(result: libc::ssize_t) -> io::Result<u32> {
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(u32::try_from(result).unwrap_or(u32::MAX))
}
