//! Media: bytes at offsets, below the last device.

use std::fmt;
use std::io;
use std::rc::Rc;

use futures_util::future::join_all;
use sealblock_runtime_memory::{Buffer, Slice};

use crate::{Error, ErrorKind, WriteData};

/// The kind of a [`MediumError`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MediumErrorKind {
    /// No space is left.
    NoSpace,
    /// The medium is read-only.
    ReadOnly,
    /// The medium ends before the requested bytes.
    PastEnd,
    /// The medium does not support the operation; the caller may use another one.
    Unsupported,
    /// Everything else: a read or write error, a lost device.
    Failed,
}

/// A failed operation on a medium.
#[derive(Debug)]
pub struct MediumError {
    /// The kind of the error.
    pub kind: MediumErrorKind,
    /// The operation that failed, such as "write".
    pub doing: &'static str,
    /// Where it failed, in bytes.
    pub offset_bytes: u64,
    /// The error of the system.
    pub reason: String,
}

impl MediumError {
    /// The error of a system call.
    pub fn from_io(doing: &'static str, offset_bytes: u64, error: &io::Error) -> MediumError {
        let kind = match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => {
                MediumErrorKind::NoSpace
            }
            io::ErrorKind::ReadOnlyFilesystem | io::ErrorKind::PermissionDenied => MediumErrorKind::ReadOnly,
            io::ErrorKind::UnexpectedEof => MediumErrorKind::PastEnd,
            io::ErrorKind::Unsupported => MediumErrorKind::Unsupported,
            _ => MediumErrorKind::Failed,
        };
        MediumError { kind, doing, offset_bytes, reason: error.to_string() }
    }

    /// True if other ranges of the medium may still be readable.
    pub fn is_local(&self) -> bool {
        matches!(self.kind, MediumErrorKind::Failed | MediumErrorKind::PastEnd)
    }
}

impl fmt::Display for MediumError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at byte {}: {}", self.doing, self.offset_bytes, self.reason)
    }
}

impl std::error::Error for MediumError {}

impl From<MediumError> for Error {
    fn from(error: MediumError) -> Error {
        let reason = error.to_string();
        match error.kind {
            MediumErrorKind::NoSpace => ErrorKind::NoSpace { reason },
            MediumErrorKind::ReadOnly => ErrorKind::ReadOnly,
            _ => ErrorKind::Media { reason },
        }
        .into()
    }
}

/// Bytes of a page of notes.
pub const NOTE_PAGE_BYTES: usize = 4096;

/// Whether a medium supports notes ([`Medium::note`]).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NoteKeeping {
    /// It does not: what must survive the death of this process must be durable.
    None,
    /// Nothing on the medium survives the death of this process, so notes are useless.
    Needless,
    /// It keeps notes as long as the machine runs. Each boot has its own identity.
    UntilReboot([u8; 16]),
}

/// Stores bytes: a file, a disk, or the simulator's disk.
///
/// Offsets and lengths are multiples of [`Medium::sector_bytes`], those of reads of [`Medium::read_unit_bytes`]. One
/// sector is written whole or not at all; a longer write may tear between sectors. A write is durable only after a
/// later [`Medium::sync`] has returned; before that a crash may keep any subset of its sectors. Writes may be done in
/// any order. Buffers are passed by value because an operation outlives a future that is dropped.
pub trait Medium {
    /// Length in bytes.
    fn len_bytes(&self) -> u64;

    /// Unit of reads and writes, in bytes: 512 or 4096.
    fn sector_bytes(&self) -> u32;

    /// Unit of reads, in bytes: the same as for writes, unless the medium can read parts of a sector. Data written in
    /// units smaller than a sector cannot be crash-consistent, but can be read.
    fn read_unit_bytes(&self) -> u32 {
        self.sector_bytes()
    }

    /// True if reads usually wait for a disk, so that many should be in flight where memory permits. Others return data
    /// of a cache, and the fewer are in flight, the nearer are these data.
    fn reads_wait(&self) -> bool {
        false
    }

    /// True if the medium is read-only.
    fn is_read_only(&self) -> bool;

    /// True if [`Medium::punch`] deallocates space.
    fn can_punch(&self) -> bool;

    /// A buffer that this medium reads and writes best, such as one registered with the kernel. Its content is
    /// arbitrary.
    fn buffer(&self, len_bytes: usize) -> Buffer {
        Buffer::zeroed(len_bytes)
    }

    /// Fills `into` with the bytes at `offset_bytes`; returns the buffer on success and on error.
    fn read(&self, offset_bytes: u64, into: Buffer) -> impl Future<Output = (Result<(), MediumError>, Buffer)>;

    /// Writes `from` at `offset_bytes`.
    fn write(&self, offset_bytes: u64, from: Slice) -> impl Future<Output = Result<(), MediumError>>;

    /// Writes the data of blocks, one after the other, from `offset_bytes` on: each part from its own buffer.
    fn write_blocks(&self, offset_bytes: u64, data: &WriteData) -> impl Future<Output = Result<(), MediumError>> {
        async move {
            let mut slices = data.slices();
            let (first, second) = (slices.next(), slices.next());
            if let (Some(alone), None) = (first, second) {
                return self.write(offset_bytes, alone.clone()).await;
            }
            let mut end = offset_bytes;
            let writes = data.slices().map(|slice| {
                let start = end;
                end += slice.len() as u64;
                self.write(start, slice.clone())
            });
            join_all(writes).await.into_iter().collect()
        }
    }

    /// Whether [`Medium::note`] works, and until when notes are kept.
    fn note_keeping(&self) -> NoteKeeping {
        NoteKeeping::None
    }

    /// Writes bytes that survive the death of this process, but need not survive that of the machine, in whole pages of
    /// [`NOTE_PAGE_BYTES`] at a multiple of that. After the death of the process each page has been written completely
    /// or not at all. A later read returns them, even in another process. The range must not be written in another way
    /// at the same time. A later sync may or may not make them durable.
    ///
    /// # Errors
    /// [`MediumErrorKind::Unsupported`] unless [`Medium::note_keeping`] says that notes are kept, and errors of the
    /// system.
    fn note(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), MediumError> {
        let _ = bytes;
        let reason = "this medium takes no notes".to_owned();
        Err(MediumError { kind: MediumErrorKind::Unsupported, doing: "note", offset_bytes, reason })
    }

    /// Waits until writes whose futures were polled have been submitted, so that the caller can compute while they are
    /// in flight. Returns at once if nothing holds them back.
    fn submitted(&self) -> impl Future<Output = ()> {
        std::future::ready(())
    }

    /// Makes every write that has returned durable.
    fn sync(&self) -> impl Future<Output = Result<(), MediumError>>;

    /// Waits until no write, punch or zero whose future was dropped is in flight. Until then such an operation may
    /// still change its range, so the caller must not reuse the range.
    fn drain(&self) -> impl Future<Output = ()>;

    /// Makes `length_bytes` at `offset_bytes` read as zeroes and deallocates their space if the medium can.
    fn punch(&self, offset_bytes: u64, length_bytes: u64) -> impl Future<Output = Result<(), MediumError>>;

    /// True if [`Medium::discard`] deallocates space.
    fn can_discard(&self) -> bool {
        self.can_punch()
    }

    /// Discards `length_bytes` at `offset_bytes`: their content is not needed any more, and their space is deallocated
    /// if the medium can. They read as zeroes afterwards if [`Medium::can_punch`]; otherwise their content is
    /// undefined. A medium without an operation of its own for this punches.
    fn discard(&self, offset_bytes: u64, length_bytes: u64) -> impl Future<Output = Result<(), MediumError>> {
        self.punch(offset_bytes, length_bytes)
    }

    /// Reserves space, so that later writes to `length_bytes` at `offset_bytes` do not fail for lack of it. The content
    /// does not change. A medium that cannot reserve space returns [`MediumErrorKind::Unsupported`].
    fn reserve(&self, offset_bytes: u64, length_bytes: u64) -> impl Future<Output = Result<(), MediumError>> {
        let _ = (offset_bytes, length_bytes);
        std::future::ready(Ok(()))
    }

    /// True if these bytes are known to be zeroes that take no space; false if they are not, or if it is unknown.
    fn is_hole(&self, offset_bytes: u64, length_bytes: u64) -> bool {
        let _ = (offset_bytes, length_bytes);
        false
    }

    /// The status of the bytes at `offset_bytes`: the length of the first run of the same status, between 1 and
    /// `length_bytes`, and whether it is known to be zeroes that take no space.
    fn status_at(&self, offset_bytes: u64, length_bytes: u64) -> (u64, bool) {
        (length_bytes, self.is_hole(offset_bytes, length_bytes))
    }

    /// Makes `length_bytes` at `offset_bytes` read as zeroes, keeping the space.
    fn zero(&self, offset_bytes: u64, length_bytes: u64) -> impl Future<Output = Result<(), MediumError>>;

    /// Makes the medium `length_bytes` long, a multiple of its sectors; new bytes are zeroes. Durable after the next
    /// sync: a crash before that leaves either length. A medium of fixed length, such as a block device, does not
    /// change, and returns [`MediumErrorKind::NoSpace`] if it is shorter.
    fn set_len(&self, length_bytes: u64) -> impl Future<Output = Result<(), MediumError>> {
        let current_bytes = self.len_bytes();
        std::future::ready(if length_bytes <= current_bytes {
            Ok(())
        } else {
            let reason = format!("the medium has only {current_bytes} bytes");
            Err(MediumError {
                kind: MediumErrorKind::NoSpace,
                doing: "set the length",
                offset_bytes: length_bytes,
                reason,
            })
        })
    }

    /// The device on this medium has failed and writes nothing more, for this reason. A medium that is a part of another
    /// one stops the devices on the other parts, too, if they belong together.
    fn give_up(&self, why: &str) {
        let _ = why;
    }
}

/// Passes on to the medium below what a medium on it does not change: the properties of [`Medium`], its buffers, and
/// waiting for its operations. `medium_properties!(self => &self.below);` in an `impl Medium`. A new property belongs
/// here: with its default, a medium that forgets it hides what is below.
#[macro_export]
macro_rules! medium_properties {
    ($self:ident => $below:expr) => {
        fn sector_bytes(&$self) -> u32 {
            $crate::Medium::sector_bytes($below)
        }

        fn read_unit_bytes(&$self) -> u32 {
            $crate::Medium::read_unit_bytes($below)
        }

        fn reads_wait(&$self) -> bool {
            $crate::Medium::reads_wait($below)
        }

        fn is_read_only(&$self) -> bool {
            $crate::Medium::is_read_only($below)
        }

        fn can_punch(&$self) -> bool {
            $crate::Medium::can_punch($below)
        }

        fn can_discard(&$self) -> bool {
            $crate::Medium::can_discard($below)
        }

        fn buffer(&$self, len_bytes: usize) -> ::sealblock_runtime_memory::Buffer {
            $crate::Medium::buffer($below, len_bytes)
        }

        fn note_keeping(&$self) -> $crate::NoteKeeping {
            $crate::Medium::note_keeping($below)
        }

        fn submitted(&$self) -> impl ::core::future::Future<Output = ()> {
            $crate::Medium::submitted($below)
        }

        fn drain(&$self) -> impl ::core::future::Future<Output = ()> {
            $crate::Medium::drain($below)
        }
    };
}

/// Implements `Medium` for a pointer, so that a medium can outlive the devices that are opened on it.
macro_rules! medium_behind {
    ($($pointer:ty),*) => {$(
        impl<M: Medium> Medium for $pointer {
            fn len_bytes(&self) -> u64 {
                (**self).len_bytes()
            }

            medium_properties!(self => &**self);

            fn read(&self, offset_bytes: u64, into: Buffer) -> impl Future<Output = (Result<(), MediumError>, Buffer)> {
                (**self).read(offset_bytes, into)
            }

            fn write(&self, offset_bytes: u64, from: Slice) -> impl Future<Output = Result<(), MediumError>> {
                (**self).write(offset_bytes, from)
            }

            fn note(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), MediumError> {
                (**self).note(offset_bytes, bytes)
            }

            fn sync(&self) -> impl Future<Output = Result<(), MediumError>> {
                (**self).sync()
            }

            fn discard(&self, offset_bytes: u64, length_bytes: u64) -> impl Future<Output = Result<(), MediumError>> {
                (**self).discard(offset_bytes, length_bytes)
            }

            fn punch(&self, offset_bytes: u64, length_bytes: u64) -> impl Future<Output = Result<(), MediumError>> {
                (**self).punch(offset_bytes, length_bytes)
            }

            fn reserve(&self, offset_bytes: u64, length_bytes: u64) -> impl Future<Output = Result<(), MediumError>> {
                (**self).reserve(offset_bytes, length_bytes)
            }

            fn is_hole(&self, offset_bytes: u64, length_bytes: u64) -> bool {
                (**self).is_hole(offset_bytes, length_bytes)
            }

            fn status_at(&self, offset_bytes: u64, length_bytes: u64) -> (u64, bool) {
                (**self).status_at(offset_bytes, length_bytes)
            }

            fn zero(&self, offset_bytes: u64, length_bytes: u64) -> impl Future<Output = Result<(), MediumError>> {
                (**self).zero(offset_bytes, length_bytes)
            }

            fn set_len(&self, length_bytes: u64) -> impl Future<Output = Result<(), MediumError>> {
                (**self).set_len(length_bytes)
            }

            fn give_up(&self, why: &str) {
                (**self).give_up(why);
            }
        }
    )*};
}

medium_behind!(&M, Rc<M>);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_the_system_keep_their_kind() {
        // Error numbers of Linux: EIO, ENOSPC, EDQUOT, EFBIG, EROFS, EOPNOTSUPP.
        let kinds = [
            (5, MediumErrorKind::Failed),
            (28, MediumErrorKind::NoSpace),
            (122, MediumErrorKind::NoSpace),
            (27, MediumErrorKind::NoSpace),
            (30, MediumErrorKind::ReadOnly),
            (95, MediumErrorKind::Unsupported),
        ];
        for (number, kind) in kinds {
            let error = MediumError::from_io("write", 4096, &io::Error::from_raw_os_error(number));
            assert_eq!(error.kind, kind, "{error}");
            assert!(error.to_string().starts_with("write at byte 4096: "));
        }
        let error = MediumError::from_io("read", 0, &io::ErrorKind::UnexpectedEof.into());
        assert_eq!(error.kind, MediumErrorKind::PastEnd);
    }

    #[test]
    fn full_and_read_only_media_keep_their_error_kind() {
        let of = |kind| {
            let error = MediumError { kind, doing: "write", offset_bytes: 0, reason: "so".to_owned() };
            Error::from(error).into_kind()
        };
        let reason = "write at byte 0: so".to_owned();
        assert_eq!(of(MediumErrorKind::NoSpace), ErrorKind::NoSpace { reason: reason.clone() });
        assert_eq!(of(MediumErrorKind::ReadOnly), ErrorKind::ReadOnly);
        assert_eq!(of(MediumErrorKind::Failed), ErrorKind::Media { reason });
    }
}
