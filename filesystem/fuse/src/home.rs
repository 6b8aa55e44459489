//! The filesystem's side: answers requests on its core, concurrently and in any order.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

use fuser::{
    Errno, FileHandle, FopenFlags, Generation, INodeNo, ReplyDirectory, ReplyDirectoryPlus, ReplyEntry, ReplyXattr,
};

use crate::attributes::{check_ino, entry, file_attr, file_type, no_entry, unknown};
use crate::call::{Call, FsRequest};
use crate::error::FsError;
use crate::interface::{DirectoryEntry, Kind, MAX_COOKIE, MAX_NAME_BYTES, MAX_XATTR_BYTES, ReadFs, Seek, Statistics};

/// How long the kernel may cache replies. Nothing changes, so this only has to be longer than any mount lasts.
const CACHE_TIMEOUT: Duration = Duration::from_secs(365 * 86400);
/// The generation of all inodes: no inode number is ever reused.
const GENERATION: Generation = Generation(0);
/// The number of entries that are read before their attributes are read.
const ENTRY_BATCH: usize = 64;

/// Answers one call.
pub async fn answer<F: ReadFs>(fs: &F, call: Call) {
    let Call { request, permit } = call;
    match request {
        FsRequest::Lookup { parent, name, reply } => lookup(fs, parent, &name, reply).await,
        FsRequest::ReadDirectory { ino, cookie, reply } => read_directory(fs, ino, cookie, reply).await,
        FsRequest::ReadDirectoryPlus { ino, cookie, reply } => read_directory_plus(fs, ino, cookie, reply).await,
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
    drop(permit);
}

/// Requests whose reply is the filesystem's result.
async fn answer_plain<F: ReadFs>(fs: &F, request: FsRequest) {
    match request {
        FsRequest::Attributes { ino, reply } => match fs.attributes(ino).await {
            Ok(attributes) => reply.attr(&CACHE_TIMEOUT, &file_attr(&attributes)),
            Err(error) => reply.error(error.report("attributes", ino)),
        },
        FsRequest::Open { ino, reply } => match fs.open(ino).await {
            Ok(handle) => reply.opened(FileHandle(handle), FopenFlags::FOPEN_KEEP_CACHE | FopenFlags::FOPEN_NOFLUSH),
            // The kernel would take ENOSYS to mean that files need not be opened.
            Err(FsError::NotImplemented) => reply.error(Errno::EOPNOTSUPP),
            Err(error) => reply.error(error.report("open", ino)),
        },
        FsRequest::Release { ino, handle, reply } => {
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
        // The caller answers these.
        FsRequest::Lookup { .. }
        | FsRequest::ReadDirectory { .. }
        | FsRequest::ReadDirectoryPlus { .. }
        | FsRequest::Xattr { .. }
        | FsRequest::Xattrs { .. } => {}
    }
}

async fn lookup<F: ReadFs>(fs: &F, parent: u64, name: &[u8], reply: ReplyEntry) {
    if name.len() > MAX_NAME_BYTES {
        return reply.error(Errno::ENAMETOOLONG);
    }
    match fs.lookup(parent, name).await.and_then(|attributes| entry(&attributes, fs.root())) {
        Ok(attr) => reply.entry(&CACHE_TIMEOUT, &attr, GENERATION),
        // The kernel caches this reply as well.
        Err(FsError::NotFound) => reply.entry(&CACHE_TIMEOUT, &no_entry(), GENERATION),
        Err(error) => reply.error(error.report("lookup", parent)),
    }
}

async fn seek<F: ReadFs>(fs: &F, ino: u64, offset: u64, what: Seek) -> Result<i64, FsError> {
    let found = fs.seek(ino, offset, what).await?;
    i64::try_from(found).map_err(|_| FsError::TooLarge)
}

async fn read_directory<F: ReadFs>(fs: &F, ino: u64, cookie: u64, mut reply: ReplyDirectory) {
    let mut count = 0_usize;
    let read = checked_entries(fs, ino, cookie, |one| {
        let is_full = reply.add(INodeNo(one.ino), one.next_cookie, file_type(one.kind), OsStr::from_bytes(one.name));
        count += usize::from(!is_full);
        !is_full
    });
    // Entries before the damage are returned; the next call begins at the damage.
    match read.await {
        Err(error) if count == 0 => reply.error(error.report("read directory", ino)),
        _ => reply.ok(),
    }
}

/// Reads entries with attributes. An inode whose attributes are damaged is also listed, with attributes that the kernel
/// does not cache; so the kernel requests them and gets the error.
async fn read_directory_plus<F: ReadFs>(fs: &F, ino: u64, mut cookie: u64, mut reply: ReplyDirectoryPlus) {
    let mut is_first = true;
    loop {
        let mut batch: Vec<(u64, Kind, Vec<u8>, u64)> = Vec::with_capacity(ENTRY_BATCH);
        let read = checked_entries(fs, ino, cookie, |one| {
            let has_room = batch.len() < ENTRY_BATCH;
            if has_room {
                batch.push((one.ino, one.kind, one.name.to_vec(), one.next_cookie));
            }
            has_room
        });
        match read.await {
            Err(error) if batch.is_empty() && is_first => return reply.error(error.report("read directory", ino)),
            _ if batch.is_empty() => return reply.ok(),
            _ => is_first = false,
        }
        for (ino, kind, name, next_cookie) in batch {
            let known = fs.attributes(ino).await.ok().filter(|known| known.ino == ino);
            let (kept, attr) = match known {
                Some(attributes) => (CACHE_TIMEOUT, file_attr(&attributes)),
                None => (Duration::ZERO, unknown(ino, kind)),
            };
            if reply.add(INodeNo(ino), next_cookie, OsStr::from_bytes(&name), &kept, &attr, GENERATION) {
                return reply.ok();
            }
            cookie = next_cookie;
        }
    }
}

/// Reads entries, and stops at the first invalid one.
async fn checked_entries<F: ReadFs>(
    fs: &F,
    ino: u64,
    cookie: u64,
    mut take: impl FnMut(DirectoryEntry<'_>) -> bool,
) -> Result<(), FsError> {
    let mut wrong = Ok(());
    let mut add = |one: DirectoryEntry<'_>| {
        wrong = check_entry(&one, fs.root());
        wrong.is_ok() && take(one)
    };
    let read = fs.read_directory(ino, cookie, &mut add).await;
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
