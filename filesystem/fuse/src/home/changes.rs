//! Serves a filesystem that can be changed.

use std::time::Duration;

use fuser::{Errno, FileHandle, ReplyCreate, ReplyEmpty, ReplyEntry, ReplyIoctl, ReplyWrite};

use super::writable::{Writable, flags_of_open};
use super::{CACHE_TIMEOUT, GENERATION, Served, answer_entry, answer_reading};
use crate::attributes::{entry, file_attr};
use crate::call::{ChangeRequest, Forget, FsRequest, NewName};
use crate::changes::{Changes, CopyRange, OpenMode, RenameMode, Write, WriteFs, XattrMode};
use crate::error::FsError;
use crate::interface::{Attributes, MAX_COOKIE, MAX_NAME_BYTES, MAX_XATTR_BYTES};

impl<F: WriteFs> Served for Writable<'_, F> {
    fn patience(&self) -> Option<Duration> {
        Some(self.patience)
    }

    async fn answer(&self, request: FsRequest) {
        let known = Some(&self.known);
        match request {
            FsRequest::Open { ino, mode, bypasses_cache, reply } => self.open(ino, mode, bypasses_cache, reply).await,
            FsRequest::Release { ino, writes, .. } => {
                if writes {
                    self.notifier.closed(ino);
                }
                answer_reading(self.fs, known, MAX_COOKIE, request).await;
            }
            FsRequest::Seek { ino, reply, offset, what } => match self.write_back(ino).await {
                Ok(()) => {
                    let request = FsRequest::Seek { ino, offset, what, reply };
                    answer_reading(self.fs, known, MAX_COOKIE, request).await;
                }
                Err(error) => reply.error(error.report_change("seek", ino)),
            },
            FsRequest::OpenDirectory { ino, reply } => self.open_directory(ino, reply).await,
            FsRequest::ReleaseDirectory { handle, reply } => {
                self.release_directory(handle);
                reply.ok();
            }
            FsRequest::Change(request) => answer_change(self, request).await,
            FsRequest::ReadDirectory { ino, handle, cookie, .. }
            | FsRequest::ReadDirectoryPlus { ino, handle, cookie, .. } => {
                let end = self.end_of_directory(ino, handle, cookie).await;
                answer_reading(self.fs, known, end, request).await;
            }
            other => answer_reading(self.fs, known, MAX_COOKIE, other).await,
        }
    }

    fn forget(&self, forget: Forget) {
        self.known.forget(forget);
    }

    fn forget_all(&self) {
        self.known.forget_all();
    }

    fn next_forgotten(&self) -> Option<impl Future<Output = ()>> {
        let forgotten = self.known.next_forgotten()?;
        Some(async move { self.fs.forgotten(forgotten.ino).await })
    }
}

/// Answers a request for a change.
async fn answer_change<F: WriteFs>(served: &Writable<'_, F>, request: ChangeRequest) {
    if longest_name(&request) > MAX_NAME_BYTES {
        return request.refuse(Errno::ENAMETOOLONG);
    }
    let fs = served.fs;
    match request {
        ChangeRequest::Create { new, mode, bypasses_cache, reply } => {
            create(served, &new, mode, bypasses_cache, reply).await;
        }
        ChangeRequest::Make { new, content, reply } => {
            let made = fs.make(new.as_new(), content.as_content()).await;
            answer_made(served, made, ("make", new.parent), reply);
        }
        ChangeRequest::Link { ino, parent, name, reply } => {
            let linked = fs.link(ino, parent, &name).await;
            answer_made(served, linked, ("link", ino), reply);
        }
        ChangeRequest::Unlink { parent, name, reply } => {
            answer_empty(fs.unlink(parent, &name).await, ("unlink", parent), reply);
        }
        ChangeRequest::Rmdir { parent, name, reply } => {
            answer_empty(fs.rmdir(parent, &name).await, ("rmdir", parent), reply);
        }
        ChangeRequest::Rename { from: (from, old), to: (to, new), mode, reply } => {
            answer_empty(rename(served, (from, &old), (to, &new), mode).await, ("rename", from), reply);
        }
        ChangeRequest::SetAttributes { ino, changes, reply } => match fs.set_attributes(ino, &changes).await {
            Ok(attributes) => reply.attr(&CACHE_TIMEOUT, &file_attr(&attributes)),
            Err(error) => reply.error(error.report_change("set attributes", ino)),
        },
        other => answer_content(served, other).await,
    }
}

/// Answers requests that change no names.
async fn answer_content<F: WriteFs>(served: &Writable<'_, F>, request: ChangeRequest) {
    let fs = served.fs;
    match request {
        ChangeRequest::Write { write, reply } => answer_write(served, write, reply).await,
        ChangeRequest::Sync { ino, data_only, reply } => {
            let synced = fs.sync(ino, data_only).await;
            served.notifier.synced(ino);
            answer_empty(synced, ("sync", ino), reply);
        }
        ChangeRequest::SyncDirectory { ino, reply } => {
            answer_empty(fs.sync_directory(ino).await, ("sync directory", ino), reply);
        }
        ChangeRequest::Allocate { ino, what, range, keeps_size, kills_set_id, reply } => {
            let allocated = match kill_set_id(served, ino, kills_set_id).await {
                Ok(()) => fs.allocate(ino, what, range, keeps_size).await,
                Err(error) => Err(error),
            };
            answer_empty(allocated, ("allocate", ino), reply);
        }
        ChangeRequest::CopyRange { copy, kills_set_id, reply } => copy_range(served, copy, kills_set_id, reply).await,
        ChangeRequest::SetXattr { ino, name, value, mode, groups, reply } => {
            let set = set_xattr(served, ino, (&name, &value), mode, groups).await;
            answer_empty(set, ("set attribute", ino), reply);
        }
        ChangeRequest::RemoveXattr { ino, name, reply } => {
            answer_empty(fs.remove_xattr(ino, &name).await, ("remove attribute", ino), reply);
        }
        ChangeRequest::Ioctl { caller, ino, command, argument, answer_bytes, reply } => {
            answer_ioctl(fs.ioctl(caller, ino, command, &argument, answer_bytes).await, answer_bytes, ino, reply);
        }
        // The caller answers these.
        ChangeRequest::Create { .. }
        | ChangeRequest::Make { .. }
        | ChangeRequest::Link { .. }
        | ChangeRequest::Unlink { .. }
        | ChangeRequest::Rmdir { .. }
        | ChangeRequest::Rename { .. }
        | ChangeRequest::SetAttributes { .. } => {}
    }
}

/// The length of the longest name in a request; 0 without one.
fn longest_name(request: &ChangeRequest) -> usize {
    match request {
        ChangeRequest::Create { new, .. } | ChangeRequest::Make { new, .. } => new.name.len(),
        ChangeRequest::Link { name, .. } | ChangeRequest::Unlink { name, .. } | ChangeRequest::Rmdir { name, .. } => {
            name.len()
        }
        ChangeRequest::Rename { from, to, .. } => from.1.len().max(to.1.len()),
        _ => 0,
    }
}

async fn create<F: WriteFs>(
    served: &Writable<'_, F>,
    new: &NewName,
    mode: OpenMode,
    bypasses_cache: bool,
    reply: ReplyCreate,
) {
    let (attributes, opened) = match served.fs.create(new.as_new(), mode).await {
        Ok(created) => created,
        Err(error) => return reply.error(error.report_change("create", new.parent)),
    };
    match entry(&attributes, served.fs.root()) {
        Ok(attr) => {
            served.known.add(attributes.ino);
            if mode.writes {
                served.notifier.opened(attributes.ino);
            }
            let handle = FileHandle(opened.handle);
            reply.created(&CACHE_TIMEOUT, &attr, GENERATION, handle, flags_of_open(bypasses_cache));
        }
        Err(error) => {
            served.fs.release(attributes.ino, opened.handle).await;
            reply.error(error.report_change("create", new.parent));
        }
    }
}

/// Renames. A file that gets the name of another one first gets what programs wrote to it.
async fn rename<F: WriteFs>(
    served: &Writable<'_, F>,
    from: (u64, &[u8]),
    to: (u64, &[u8]),
    mode: RenameMode,
) -> Result<(), FsError> {
    // What is wrong with a name, the rename itself finds out.
    if mode != RenameMode::NoReplace
        && served.is_any_written()
        && let Ok(target) = served.fs.lookup(to.0, to.1).await
        && let Ok(source) = served.fs.lookup(from.0, from.1).await
    {
        served.write_back(source.ino).await?;
        if mode == RenameMode::Exchange {
            served.write_back(target.ino).await?;
        }
    }
    served.fs.rename(from, to, mode).await
}

fn answer_made<F: WriteFs>(
    served: &Writable<'_, F>,
    made: Result<Attributes, FsError>,
    (operation, ino): (&str, u64),
    reply: ReplyEntry,
) {
    match made.and_then(|attributes| entry(&attributes, served.fs.root())) {
        Ok(attr) => answer_entry(Some(&served.known), &attr, reply),
        Err(error) => reply.error(error.report_change(operation, ino)),
    }
}

fn answer_empty(done: Result<(), FsError>, (operation, ino): (&str, u64), reply: ReplyEmpty) {
    match done {
        Ok(()) => reply.ok(),
        Err(error) => reply.error(error.report_change(operation, ino)),
    }
}

async fn answer_write<F: WriteFs>(served: &Writable<'_, F>, write: Write, reply: ReplyWrite) {
    let (ino, written, was_cached) = (write.ino, write.data.len() as u32, write.keeps_times);
    let is_killing = write.kills_set_id && served.has_set_id(ino).await;
    let begun = served.notifier.begin_write();
    match served.fs.write(write).await {
        Ok(()) => {
            begun.succeed();
            if is_killing {
                served.notifier.attributes(ino);
            }
            if was_cached {
                served.notifier.grown(ino);
            }
            reply.written(written);
        }
        Err(error) => {
            // Before the kernel knows.
            drop(begun);
            reply.error(error.report_change("write", ino));
        }
    }
}

/// Removes the set-user-ID and set-group-ID bits before the content changes, if the caller may not keep them.
async fn kill_set_id<F: WriteFs>(served: &Writable<'_, F>, ino: u64, kills_set_id: bool) -> Result<(), FsError> {
    if kills_set_id && served.has_set_id(ino).await {
        served.fs.set_attributes(ino, &Changes { kills_set_id, ..Changes::default() }).await?;
        served.notifier.attributes(ino);
    }
    Ok(())
}

async fn copy_range<F: WriteFs>(served: &Writable<'_, F>, copy: CopyRange, kills_set_id: bool, reply: ReplyWrite) {
    let copied = match kill_set_id(served, copy.to.0, kills_set_id).await {
        Ok(()) => served.fs.copy_range(copy).await,
        Err(error) => Err(error),
    };
    match copied {
        // At most as many as were asked for, which fit.
        Ok(bytes) if bytes <= copy.bytes => reply.written(bytes as u32),
        Ok(_) => reply.error(Errno::EIO),
        Err(error) => reply.error(error.report_change("copy", copy.to.0)),
    }
}

async fn set_xattr<F: WriteFs>(
    served: &Writable<'_, F>,
    ino: u64,
    (name, value): (&[u8], &[u8]),
    mode: XattrMode,
    groups: Option<Vec<u32>>,
) -> Result<(), FsError> {
    if value.len() > MAX_XATTR_BYTES {
        return Err(FsError::TooLarge);
    }
    let kills_set_group_id = match groups {
        Some(groups) => !groups.contains(&served.fs.attributes(ino).await?.gid),
        None => false,
    };
    served.fs.set_xattr(ino, name, value, mode, kills_set_group_id).await
}

fn answer_ioctl(answer: Result<Vec<u8>, FsError>, most_bytes: u32, ino: u64, reply: ReplyIoctl) {
    match answer {
        Ok(answer) if answer.len() <= most_bytes as usize => reply.ioctl(0, &answer),
        Ok(_) => reply.error(Errno::EIO),
        // The kernel makes ENOTTY of it.
        Err(FsError::NotImplemented) => reply.error(Errno::ENOTTY),
        Err(error) => reply.error(error.report("ioctl", ino)),
    }
}
