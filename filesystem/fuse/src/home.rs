//! The filesystem's side: answers requests on its core, concurrently and in any order.

use std::ffi::OsStr;
use std::ops::RangeInclusive;
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

use fuser::{
    Errno, FileAttr, FileHandle, Generation, INodeNo, ReplyDirectory, ReplyDirectoryPlus, ReplyEntry, ReplyXattr,
};

use crate::attributes::{DIRECTORY_FLAGS, READ_ONLY_FLAGS, check_ino, entry, file_attr, file_type, no_entry, unknown};
use crate::call::{Forget, FsRequest};
use crate::error::FsError;
use crate::interface::{DirectoryEntry, Kind, MAX_COOKIE, MAX_NAME_BYTES, MAX_XATTR_BYTES, ReadFs, Seek, Statistics};
use crate::known::Known;

mod changes;
mod writable;

pub use writable::Writable;

/// How long the kernel may cache replies. Nothing changes unless the kernel asks for it or is told, so this only has to
/// be longer than any mount lasts.
const CACHE_TIMEOUT: Duration = Duration::from_secs(365 * 86400);
/// The generation of all inodes: no inode number is ever reused.
const GENERATION: Generation = Generation(0);
/// The number of entries that are read before their attributes are read.
const ENTRY_BATCH: usize = 64;

/// A filesystem as a session serves it, on its core.
pub trait Served {
    /// How long requests in flight are awaited when serving ends; without a time they are dropped.
    fn patience(&self) -> Option<Duration>;

    /// Answers a request.
    fn answer(&self, request: FsRequest) -> impl Future<Output = ()>;

    /// The kernel forgets.
    fn forget(&self, forget: Forget);

    /// The kernel is gone, and has forgotten everything.
    fn forget_all(&self);

    /// An inode that the kernel has forgotten; the filesystem is told so in the future.
    fn next_forgotten(&self) -> Option<impl Future<Output = ()>>;
}

/// A filesystem that is only read. It need not know what the kernel forgets.
pub struct ReadOnly<'a, F>(pub &'a F);

impl<F: ReadFs> Served for ReadOnly<'_, F> {
    fn patience(&self) -> Option<Duration> {
        None
    }

    async fn answer(&self, request: FsRequest) {
        match request {
            FsRequest::OpenDirectory { reply, .. } => reply.opened(FileHandle(0), DIRECTORY_FLAGS),
            FsRequest::ReleaseDirectory { reply, .. } => reply.ok(),
            FsRequest::Open { mode, reply, .. } if mode.writes || mode.truncates => reply.error(Errno::EROFS),
            FsRequest::Change(request) => request.refuse(Errno::EROFS),
            other => answer_reading(self.0, None, MAX_COOKIE, other).await,
        }
    }

    fn forget(&self, _forget: Forget) {}

    fn forget_all(&self) {}

    fn next_forgotten(&self) -> Option<impl Future<Output = ()>> {
        None::<std::future::Ready<()>>
    }
}

/// Answers what changes nothing. `known` counts the inodes that the kernel gets to know. Of a directory, only entries
/// up to the cookie `end` are returned.
async fn answer_reading<F: ReadFs>(fs: &F, known: Option<&Known>, end: u64, request: FsRequest) {
    match request {
        FsRequest::Lookup { parent, name, reply } => lookup(fs, known, (parent, &name), reply).await,
        FsRequest::ReadDirectory { ino, cookie, reply, .. } => read_directory(fs, ino, cookie..=end, reply).await,
        FsRequest::ReadDirectoryPlus { ino, cookie, reply, .. } => {
            read_directory_plus(fs, known, ino, cookie..=end, reply).await;
        }
        FsRequest::Xattr { ino, name, size_bytes, reply } => {
            let value = fs.xattr(ino, &name).await;
            answer_xattr(value, size_bytes, ("an attribute", ino), reply);
        }
        FsRequest::Xattrs { ino, size_bytes, reply } => {
            let names = fs.xattrs(ino).await.map(|names| names.into_iter().flat_map(|name| [name, vec![0]].concat()));
            answer_xattr(names.map(Iterator::collect), size_bytes, ("attributes", ino), reply);
        }
        other => answer_plain(fs, other).await,
    }
}

/// Requests whose reply is the filesystem's result.
async fn answer_plain<F: ReadFs>(fs: &F, request: FsRequest) {
    match request {
        FsRequest::Attributes { ino, reply } => match fs.attributes(ino).await {
            Ok(attributes) => reply.attr(&CACHE_TIMEOUT, &file_attr(&attributes)),
            Err(error) => reply.error(error.report("attributes", ino)),
        },
        FsRequest::Open { ino, reply, .. } => match fs.open(ino).await {
            Ok(handle) => reply.opened(FileHandle(handle), READ_ONLY_FLAGS),
            Err(error) => reply.error(error.report_change("open", ino)),
        },
        FsRequest::Release { ino, handle, reply, .. } => {
            fs.release(ino, handle).await;
            reply.ok();
        }
        FsRequest::Read { ino, handle, offset, size_bytes, reply } => {
            match fs.read(ino, handle, offset, size_bytes).await {
                Ok(data) if data.len() <= size_bytes as usize => reply.data(&data),
                Ok(_) => reply.error(Errno::EIO),
                Err(error) => reply.error(error.report("read", ino)),
            }
        }
        FsRequest::Seek { ino, offset, what, reply } => match seek(fs, ino, offset, what).await {
            Ok(offset) => reply.offset(offset),
            Err(error) => reply.error(error.report("seek", ino)),
        },
        FsRequest::ReadLink { ino, reply } => match fs.read_link(ino).await {
            Ok(target) => reply.data(&target),
            Err(error) => reply.error(error.report("read link", ino)),
        },
        FsRequest::Statistics { reply } => match fs.statistics().await {
            Ok(Statistics { block_size_bytes, blocks, free_blocks, available_blocks, inodes: (inodes, free) }) => {
                let (size, name_bytes) = (block_size_bytes, MAX_NAME_BYTES as u32);
                reply.statfs(blocks, free_blocks, available_blocks, inodes, free, size, name_bytes, size);
            }
            Err(error) => reply.error(error.report("statistics", fs.root())),
        },
        // The callers answer these.
        FsRequest::Lookup { .. }
        | FsRequest::OpenDirectory { .. }
        | FsRequest::ReleaseDirectory { .. }
        | FsRequest::ReadDirectory { .. }
        | FsRequest::ReadDirectoryPlus { .. }
        | FsRequest::Xattr { .. }
        | FsRequest::Xattrs { .. }
        | FsRequest::Change(_) => {}
    }
}

async fn lookup<F: ReadFs>(fs: &F, known: Option<&Known>, (parent, name): (u64, &[u8]), reply: ReplyEntry) {
    if name.len() > MAX_NAME_BYTES {
        return reply.error(Errno::ENAMETOOLONG);
    }
    match fs.lookup(parent, name).await.and_then(|attributes| entry(&attributes, fs.root())) {
        Ok(attr) => answer_entry(known, &attr, reply),
        // The kernel caches this reply as well.
        Err(FsError::NotFound) => reply.entry(&CACHE_TIMEOUT, &no_entry(), GENERATION),
        Err(error) => reply.error(error.report("lookup", parent)),
    }
}

/// Makes an inode known to the kernel. If the reply cannot be sent, the kernel is gone, and has forgotten everything.
fn answer_entry(known: Option<&Known>, attr: &FileAttr, reply: ReplyEntry) {
    // The kernel can forget it as soon as it has the reply, but that is handled on this core, so not before this
    // returns.
    known.inspect(|known| known.add(attr.ino.0));
    reply.entry(&CACHE_TIMEOUT, attr, GENERATION);
}

async fn seek<F: ReadFs>(fs: &F, ino: u64, offset: u64, what: Seek) -> Result<i64, FsError> {
    let found = fs.seek(ino, offset, what).await?;
    i64::try_from(found).map_err(|_| FsError::TooLarge)
}

async fn read_directory<F: ReadFs>(fs: &F, ino: u64, range: RangeInclusive<u64>, mut reply: ReplyDirectory) {
    let mut count = 0_usize;
    let read = checked_entries(fs, ino, range, |one| {
        let is_full = reply.add(INodeNo(one.ino), one.next_cookie, file_type(one.kind), OsStr::from_bytes(one.name));
        count += usize::from(!is_full);
        !is_full
    });
    // Entries before the damage are returned; the next call begins at the damage.
    match read.await {
        Err(error) if count == 0 => reply.error(error.report_change("read directory", ino)),
        _ => reply.ok(),
    }
}

/// Reads entries with attributes. An inode whose attributes are damaged is also listed, with attributes that the kernel
/// does not cache; so the kernel requests them and gets the error.
async fn read_directory_plus<F: ReadFs>(
    fs: &F,
    known: Option<&Known>,
    ino: u64,
    range: RangeInclusive<u64>,
    mut reply: ReplyDirectoryPlus,
) {
    let (mut cookie, mut handed_out, mut is_first) = (*range.start(), Vec::new(), true);
    'full: loop {
        let mut batch: Vec<(u64, Kind, Vec<u8>, u64)> = Vec::with_capacity(ENTRY_BATCH);
        let read = checked_entries(fs, ino, cookie..=*range.end(), |one| {
            let has_room = batch.len() < ENTRY_BATCH;
            if has_room {
                batch.push((one.ino, one.kind, one.name.to_vec(), one.next_cookie));
            }
            has_room
        });
        match read.await {
            Err(error) if batch.is_empty() && is_first => {
                return reply.error(error.report_change("read directory", ino));
            }
            _ if batch.is_empty() => break,
            _ => is_first = false,
        }
        for (ino, kind, name, next_cookie) in batch {
            let attributes = fs.attributes(ino).await.ok().filter(|found| found.ino == ino);
            let (kept, attr) = match attributes {
                Some(attributes) => (CACHE_TIMEOUT, file_attr(&attributes)),
                None => (Duration::ZERO, unknown(ino, kind)),
            };
            if reply.add(INodeNo(ino), next_cookie, OsStr::from_bytes(&name), &kept, &attr, GENERATION) {
                break 'full;
            }
            // The kernel ignores the inodes of these two.
            handed_out.extend((!matches!(&name[..], b"." | b"..")).then_some(ino));
            cookie = next_cookie;
        }
    }
    known.inspect(|known| handed_out.into_iter().for_each(|ino| known.add(ino)));
    reply.ok();
}

/// Reads entries from the first cookie to the last, and stops at the first invalid one.
async fn checked_entries<F: ReadFs>(
    fs: &F,
    ino: u64,
    range: RangeInclusive<u64>,
    mut take: impl FnMut(DirectoryEntry<'_>) -> bool,
) -> Result<(), FsError> {
    let mut wrong = Ok(());
    let mut add = |one: DirectoryEntry<'_>| {
        if one.next_cookie > *range.end() && one.next_cookie <= MAX_COOKIE {
            return false;
        }
        wrong = check_entry(&one, fs.root());
        wrong.is_ok() && take(one)
    };
    let read = fs.read_directory(ino, *range.start(), &mut add).await;
    read.and(wrong)
}

/// Refuses entries that would make the kernel refuse the whole directory.
fn check_entry(one: &DirectoryEntry<'_>, root: u64) -> Result<(), FsError> {
    let is_name = (1..=MAX_NAME_BYTES).contains(&one.name.len()) && !one.name.iter().any(|byte| b"/\0".contains(byte));
    match (is_name, one.next_cookie) {
        // A directory has entries for itself and for its parent.
        (true, 1..=MAX_COOKIE) if matches!(one.name, b"." | b"..") => Ok(()),
        (true, 1..=MAX_COOKIE) => check_ino(one.ino, root),
        (false, _) => {
            Err(FsError::Damaged(format!("an entry with the name {:?}", one.name.escape_ascii().to_string())))
        }
        (_, cookie) => Err(FsError::Damaged(format!("an entry with the cookie {cookie}"))),
    }
}

/// The answer to a request for an attribute's value, or for all names, with room for `size_bytes`; 0 asks for the size.
#[derive(Debug, PartialEq, Eq)]
enum XattrAnswer {
    Size(u32),
    Data(Vec<u8>),
    Refused(FsError),
    NoRoom,
}

fn xattr_answer(value: Result<Vec<u8>, FsError>, size_bytes: u32) -> XattrAnswer {
    match value {
        Err(error) => XattrAnswer::Refused(error),
        Ok(value) if value.len() > MAX_XATTR_BYTES => XattrAnswer::Refused(FsError::TooLarge),
        Ok(value) if size_bytes == 0 => XattrAnswer::Size(value.len() as u32),
        Ok(value) if value.len() > size_bytes as usize => XattrAnswer::NoRoom,
        Ok(value) => XattrAnswer::Data(value),
    }
}

fn answer_xattr(value: Result<Vec<u8>, FsError>, size_bytes: u32, (operation, ino): (&str, u64), reply: ReplyXattr) {
    match xattr_answer(value, size_bytes) {
        XattrAnswer::Size(size) => reply.size(size),
        XattrAnswer::Data(value) => reply.data(&value),
        XattrAnswer::Refused(error) => reply.error(error.report(operation, ino)),
        XattrAnswer::NoRoom => reply.error(Errno::ERANGE),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_attribute_is_measured_returned_or_refused_by_the_room_for_it() {
        let value = vec![7; 100];
        assert_eq!(xattr_answer(Ok(value.clone()), 0), XattrAnswer::Size(100));
        assert_eq!(xattr_answer(Ok(value.clone()), 99), XattrAnswer::NoRoom);
        assert_eq!(xattr_answer(Ok(value.clone()), 100), XattrAnswer::Data(value));
        let most = vec![7; MAX_XATTR_BYTES];
        assert_eq!(xattr_answer(Ok(most), 0), XattrAnswer::Size(65_536));
        let more = vec![7; MAX_XATTR_BYTES + 1];
        assert_eq!(xattr_answer(Ok(more), 0), XattrAnswer::Refused(FsError::TooLarge));
        let absent = xattr_answer(Err(FsError::NoAttribute), 0);
        assert_eq!(absent, XattrAnswer::Refused(FsError::NoAttribute));
    }

    #[test]
    fn entries_that_the_kernel_would_refuse_are_damage() {
        let entry = |name, next_cookie| DirectoryEntry { ino: 300, kind: Kind::Regular, name, next_cookie };
        let long = [b'n'; MAX_NAME_BYTES + 1];
        let dots = DirectoryEntry { ino: 256, ..entry(b"..", 2) };
        for good in [entry(b"a", 1), entry(&long[1..], MAX_COOKIE), entry(b"\xff\n", 3), dots] {
            assert_eq!(check_entry(&good, 256), Ok(()));
        }
        for (bad, why) in [
            (entry(b"", 1), "name \"\""),
            (entry(&long, 1), "name"),
            (entry(b"a/b", 1), "name \"a/b\""),
            (entry(b"a\0b", 1), "name"),
            (entry(b"a", 0), "cookie 0"),
            (entry(b"a", MAX_COOKIE + 1), "cookie 9223372036854775808"),
            (DirectoryEntry { ino: 256, ..entry(b"a", 1) }, "inode number 256"),
            (DirectoryEntry { ino: 1, ..entry(b"a", 1) }, "inode number 1"),
        ] {
            let error = check_entry(&bad, 256).unwrap_err();
            assert!(matches!(&error, FsError::Damaged(what) if what.contains(why)), "{error}");
        }
    }
}
