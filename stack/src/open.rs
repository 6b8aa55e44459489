//! Opens the device that a target name names.

use std::path::Path;
use std::sync::Arc;
use std::thread;

use futures_channel::oneshot;
use futures_util::future::LocalBoxFuture;
use sealblock_block::{Device, ErrorKind, Freshness};
use sealblock_layers_fault::{FaultLayer, Rules};
use sealblock_layers_offset::OffsetLayer;
use sealblock_media_file::FileMedium;
use sealblock_media_linux::linked_drive;
use sealblock_media_memory::{MemoryDevice, MemoryStore, PreallocateError};
use sealblock_media_nbd::NbdDevice;
use sealblock_media_null::NullDevice;
use sealblock_runtime_reactor::pool;
use sealblock_units::{BlockSize, ByteCount};

use crate::error::{Cause, StackError};
use crate::failures::{OLDER_GROUP, device_error};
use crate::groups::membership::guard;
use crate::groups::mirror::MirrorOptions;
use crate::groups::{mirror, multipath, stripe};
use crate::opened::OpenTarget;
use crate::opened::connections::RemoteConnection;
use crate::opened::damage_view::DamageView;
use crate::opened::held::{Access, CloseHandle, Usage};
use crate::opened::info::TargetInfo;
use crate::opened::out_of_sync::mark;
use crate::opened::target_identity::TargetIdentity;
use crate::path::files::{FileKind, medium_of, open_raw, raw, remains_error};
use crate::path::mapped::raw_or_mapped;
use crate::path::occupied::{check_opened, check_parts};
use crate::path::signature::check_free;
use crate::path::{FORCE_ADVICE, PlainFilePolicy, RemainsPolicy, kind_of, open_file, open_linux};
use crate::program::ReactorClock;
use crate::quantity::count;
use crate::range::BlockRange;
use crate::remote::{connect, connect_nbd};
use crate::target::{GroupKind, TargetName};

/// Why no list of bad blocks is kept.
const IN_MEMORY: &str = "data in memory is lost with the process";
/// Why what another host's server knows of bad blocks is not known here.
const NOT_LISTED: &str = "its server was not queried, or has no list of them";
const NOT_OVER_NBD: &str = "NBD cannot report them; use `sealblock status` on its host, or verify it";

/// Opens a target outside any group.
///
/// # Errors
/// Says what could not be opened and why; bad usage if the target's numbers are invalid. A member of a mirror or stripe
/// is not opened for writing.
pub fn open(target: &TargetName, access: Access) -> LocalBoxFuture<'_, Result<OpenTarget, StackError>> {
    open_for(target, access, Usage::Alone)
}

/// Opens a target for a certain use.
///
/// # Errors
/// As [`open`], but for what `usage` allows.
pub fn open_for(
    target: &TargetName,
    access: Access,
    usage: Usage,
) -> LocalBoxFuture<'_, Result<OpenTarget, StackError>> {
    Box::pin(async move {
        let opened = check_fresh(open_device(target, access, usage).await?, access).await?;
        match (access.writes(), usage) {
            (true, Usage::Unchanged) => Ok(mark(opened).await),
            (true, _) => guard(opened, usage).await,
            // What a replica is worth for its mirror, the mirror finds out.
            (false, Usage::AsMember | Usage::Member) => Ok(opened),
            (false, Usage::Alone | Usage::Unchanged | Usage::Forced) => check_fresh(mark(opened).await, access).await,
        }
    })
}

/// Opens a target outside any group, of which a plain file is one by its bare path, too.
///
/// # Errors
/// As [`open`].
pub(crate) fn open_bytes(target: &TargetName, access: Access) -> LocalBoxFuture<'_, Result<OpenTarget, StackError>> {
    Box::pin(async move {
        match target {
            TargetName::File(path) if linked_drive(path).is_none() => {
                let opened = open_file(target, path, access, PlainFilePolicy::Taken).await?;
                let opened = check_fresh(opened, access).await?;
                if access.writes() { guard(opened, Usage::Alone).await } else { Ok(mark(opened).await) }
            }
            _ => open(target, access).await,
        }
    })
}

/// Refuses a device that may lack what was written last, unless who opens it accepts that.
fn check_fresh(opened: OpenTarget, access: Access) -> LocalBoxFuture<'static, Result<OpenTarget, StackError>> {
    Box::pin(check_fresh_of(opened, access))
}

async fn check_fresh_of(opened: OpenTarget, access: Access) -> Result<OpenTarget, StackError> {
    match opened.device.abilities().freshness {
        Freshness::MayBeOlder(why) if !access.accepts_older() => {
            let refused = device_error("open", &ErrorKind::MayBeOlder(why).into()).on(opened.target()).lasting();
            let refused = refused.advise_if(opened.target().path().is_none().then_some(OLDER_GROUP));
            opened.close(Err(refused)).await
        }
        _ => Ok(opened),
    }
}

/// Opens a target for reading past what is lost: an export by itself in blocks as small as its server takes them, so that one of them takes
/// no others with it. Numbers of blocks in its name, or in names of which it is a part, are of its usual size.
///
/// # Errors
/// As [`open`].
pub(crate) fn open_past_damage(
    target: &TargetName,
    access: Access,
) -> LocalBoxFuture<'_, Result<OpenTarget, StackError>> {
    Box::pin(async move {
        match target {
            TargetName::Nbd { address, export, connections } => {
                let opened = open_export(target, connect_nbd(address, export, *connections, true, access)).await?;
                check_fresh(opened, access).await
            }
            _ => open(target, access).await,
        }
    })
}

async fn open_export(
    target: &TargetName,
    connecting: impl Future<Output = Result<NbdDevice, StackError>>,
) -> Result<OpenTarget, StackError> {
    let device = connecting.await.map_err(|error| error.on(target))?;
    let (export, connection) = (device.info().clone(), RemoteConnection::new(target, device.monitor()));
    let info = TargetInfo { export: Some(export), connection: Some(connection), ..TargetInfo::plain("NBD export") };
    Ok(OpenTarget::remote(target, device.clone(), info, vec![CloseHandle::Nbd(device)], NOT_OVER_NBD))
}

/// Not an `async` function, nor are those below: targets contain targets, and on its way to the innermost one the stack
/// must hold no more for each than handles of futures that are on the heap.
fn open_device(
    target: &TargetName,
    access: Access,
    usage: Usage,
) -> LocalBoxFuture<'_, Result<OpenTarget, StackError>> {
    match target {
        TargetName::Offset { range, target: whole } => Box::pin(open_offset(target, *range, whole, access, usage)),
        TargetName::Fault { rules, target: inner } => Box::pin(open_fault(target, rules, inner, access, usage)),
        TargetName::Group { kind, members } => open_group(target, *kind, members, access, usage),
        _ => open_leaf(target, access),
    }
}

/// Opens a group of targets.
fn open_group<'a>(
    target: &'a TargetName,
    kind: GroupKind,
    members: &'a [TargetName],
    access: Access,
    usage: Usage,
) -> LocalBoxFuture<'a, Result<OpenTarget, StackError>> {
    match kind {
        GroupKind::Mirror => Box::pin(async move {
            check_apart(target, members)?;
            mirror::open(target, members, access, open_for).await
        }),
        GroupKind::Stripe { chunk, labelled } => Box::pin(async move {
            check_apart(target, members)?;
            stripe::open(target, chunk, labelled, members, (access, usage), open_for).await
        }),
        GroupKind::Multipath => Box::pin(multipath::open(target, members, access, usage, open_for)),
    }
}

/// Opens a target that contains no others.
fn open_leaf(target: &TargetName, access: Access) -> LocalBoxFuture<'_, Result<OpenTarget, StackError>> {
    match target {
        TargetName::File(path) => Box::pin(async move {
            match linked_drive(path) {
                Some(node) => open_linux(target, &node, None, access, RemainsPolicy::Kept).await,
                None => open_file(target, path, access, PlainFilePolicy::Refused).await,
            }
        }),
        TargetName::Linux { path, drive_makes_tags } => {
            Box::pin(open_linux(target, path, *drive_makes_tags, access, RemainsPolicy::Kept))
        }
        TargetName::Raw(path) => Box::pin(open_raw(target, path, access)),
        TargetName::Memory { size, preallocate } => Box::pin(open_memory(target, *size, *preallocate)),
        TargetName::Null(size) => Box::pin(std::future::ready(open_null(target, *size))),
        TargetName::NvmeTcp { address, nqn, nsid, options } => Box::pin(async move {
            let device = connect(address, nqn, *nsid, options).await.map_err(|error| error.on(target))?;
            let (remote, namespace) = (Some(device.info()), Some(device.clone()));
            let connection = Some(RemoteConnection::new(target, device.monitor()));
            let info = TargetInfo { remote, namespace, connection, ..TargetInfo::plain("NVMe/TCP namespace") };
            Ok(OpenTarget::remote(target, device.clone(), info, vec![CloseHandle::NvmeTcp(device)], NOT_LISTED))
        }),
        TargetName::Nbd { address, export, connections } => {
            Box::pin(open_export(target, connect_nbd(address, export, *connections, false, access)))
        }
        TargetName::Offset { .. } | TargetName::Fault { .. } | TargetName::Group { .. } => {
            unreachable!("targets that contain others are not leaves")
        }
    }
}

fn open_null(target: &TargetName, size: ByteCount) -> Result<OpenTarget, StackError> {
    let (block_size, blocks) = blocks_of(target, size)?;
    let open = move || NullDevice::new(block_size, blocks, None);
    let info = TargetInfo::plain("null");
    Ok(OpenTarget::leaf_on_every_core(target, open(), move || Ok(open()), info, IN_MEMORY))
}

/// Refuses a group with two members that share bytes, which would be no redundancy. Slices are distinguished by their devices.
fn check_apart(target: &TargetName, members: &[TargetName]) -> Result<(), StackError> {
    let members: Vec<TargetIdentity> = members.iter().map(TargetIdentity::of).collect();
    for (at, member) in members.iter().enumerate() {
        let shared = members[..at].iter().find_map(|other| Some((other, member.shared_with(other)?)));
        if let Some((other, _)) = shared.filter(|(other, _)| !other.is_part() || !member.is_part()) {
            let why = format!("{member} and {other} are the same device or file");
            return Err(StackError::new(Cause::Refused, "open", why).on(target).advise("give two different targets"));
        }
    }
    Ok(())
}

/// Memory, all of which is taken now if that is wanted.
async fn open_memory(target: &TargetName, size: ByteCount, preallocate: bool) -> Result<OpenTarget, StackError> {
    let (block_size, blocks) = blocks_of(target, size)?;
    let mut store = MemoryStore::new(block_size, blocks, None);
    if preallocate {
        store = fill(store).await.map_err(|error| error.on(target))?;
    }
    let store = Arc::new(store);
    let open = move || MemoryDevice::on(Arc::clone(&store)).with_pool(pool());
    let info = TargetInfo::plain("memory");
    Ok(OpenTarget::leaf_on_every_core(target, open(), move || Ok(open()), info, IN_MEMORY))
}

/// Fills a store on a thread of its own, since a core that serves other devices must not wait for seconds.
async fn fill(store: MemoryStore) -> Result<MemoryStore, StackError> {
    const ACTION: &str = "allocate the memory";
    let (send, receive) = oneshot::channel();
    // Without a receiver, nobody waits for the memory any more.
    let work = move || drop(send.send(store.preallocate()));
    let spawned = thread::Builder::new().name("preallocate".to_owned()).spawn(work);
    spawned.map_err(|error| StackError::io("start a thread", &error))?;
    match receive.await {
        Ok(Ok(store)) => Ok(store),
        Ok(Err(error @ PreallocateError::NoRoom { .. })) => {
            Err(StackError::new(Cause::Full, ACTION, error).advise("use a smaller size, or leave out ?preallocate"))
        }
        Ok(Err(error @ PreallocateError::System(_))) => Err(StackError::new(Cause::Full, ACTION, error)),
        Err(_panicked) => Err(StackError::new(Cause::Io, ACTION, "the thread that does it failed")),
    }
}

/// Opens a slice of another target.
async fn open_offset(
    target: &TargetName,
    range: BlockRange,
    whole: &TargetName,
    access: Access,
    usage: Usage,
) -> Result<OpenTarget, StackError> {
    let below = open_for(whole, access, usage.hidden()).await?;
    let span = below.span(Some(range))?;
    let is_part = below.is_part || span.blocks() < below.device.geometry().capacity_blocks;
    let device = below
        .device
        .layered(target.to_string(), move |whole| OffsetLayer::new(whole, span.first(), span.blocks()))
        .map_err(|error| StackError::new(Cause::Usage, "open", error).on(target))?;
    let damage = DamageView::slice(&below.info.damage, span.first().get(), span.blocks());
    let info = TargetInfo { damage, ..TargetInfo::over("offset", [below.info]) };
    Ok(OpenTarget { is_part, ..OpenTarget::of(target, device, info, below.held) })
}

/// Opens a target with injected faults.
async fn open_fault(
    target: &TargetName,
    rules: &str,
    inner: &TargetName,
    access: Access,
    usage: Usage,
) -> Result<OpenTarget, StackError> {
    let rules: Rules =
        rules.parse().map_err(|error| StackError::new(Cause::Usage, "parse the rules", error).on(target))?;
    let below = open_for(inner, access, usage).await?;
    let is_part = below.is_part;
    let device = FaultLayer::new(below.device, rules, ReactorClock);
    let info = TargetInfo::over("fault", [below.info]);
    let damage = info.damage.clone();
    // Blocks that it makes fail are bad as far as anybody above can see.
    let opened = OpenTarget::leaf(target, device, info, below.held, "faults are injected by this process");
    let damage = DamageView::all(vec![damage, opened.info.damage.clone()]);
    Ok(OpenTarget { info: TargetInfo { damage, ..opened.info }, is_part, ..opened })
}

/// The blocks of a device that only a size is known of: the larger ones where they fit.
fn blocks_of(target: &TargetName, size: ByteCount) -> Result<(BlockSize, u64), StackError> {
    let fitting = [BlockSize::B4096, BlockSize::B512]
        .into_iter()
        .find(|block| size.get().is_multiple_of(block.bytes() as u64))
        .ok_or_else(|| {
            StackError::new(
                Cause::Usage,
                "use the size",
                format!("{} is not a multiple of the block size", count(size.get(), "byte")),
            )
            .on(target)
            .advise("use a multiple of 512")
        })?;
    Ok((fitting, size.get() >> fitting.shift()))
}

/// A path to overwrite.
pub enum Overwritten {
    /// A volume or a block device, which keeps its size.
    Device(Box<OpenTarget>),
    /// A plain file, which gets any size.
    Plain(FileMedium),
}

/// What a path may hold that is overwritten.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Overwriting {
    /// Anything.
    Anything,
    /// Nothing that may still be needed: no remains of a volume, no device with a [`crate::Signature`], and no plain file of a known
    /// format other than this one, which is that of the data to be written.
    Free {
        /// The format of the data, if it is known.
        format: Option<&'static str>,
    },
}

/// Opens a path to overwrite it: a volume as a volume, anything else as bytes.
///
/// # Errors
/// If the path has something that `overwriting` does not allow.
pub fn overwrite<'a>(
    target: &'a TargetName,
    path: &'a Path,
    overwriting: Overwriting,
    usage: Usage,
) -> LocalBoxFuture<'a, Result<Overwritten, StackError>> {
    Box::pin(async move {
        let force = overwriting == Overwriting::Anything;
        let remains = if force { RemainsPolicy::Replaced } else { RemainsPolicy::NotReplaced };
        let drive = match target {
            TargetName::Linux { drive_makes_tags, .. } => Some((path.to_owned(), *drive_makes_tags)),
            _ => linked_drive(path).map(|node| (node, None)),
        };
        if let Some((node, drive_makes_tags)) = drive {
            let opened =
                guard(open_linux(target, &node, drive_makes_tags, Access::Write, remains).await?, usage).await?;
            return Ok(Overwritten::Device(Box::new(free(opened, overwriting).await?)));
        }
        let medium = medium_of(path, Access::Write).await?;
        match kind_of(&medium, Access::Write, remains).await? {
            FileKind::Remains(parts) if !force => Err(remains_error("write", path, &parts).advise(FORCE_ADVICE)),
            FileKind::Volume => {
                drop(medium);
                let opened = overwrite_device(target, overwriting, usage).await?;
                Ok(Overwritten::Device(Box::new(opened)))
            }
            FileKind::Remains(_) | FileKind::Raw => {
                if let Overwriting::Free { format } = overwriting {
                    check_free(&medium, format).await?;
                }
                replace(target, path, medium).await
            }
        }
    })
}

/// Opens a target that is no plain file to overwrite it.
///
/// # Errors
/// If it, or a file or device that it is made of, has something that `overwriting` does not allow.
pub fn overwrite_device(
    target: &TargetName,
    overwriting: Overwriting,
    usage: Usage,
) -> LocalBoxFuture<'_, Result<OpenTarget, StackError>> {
    Box::pin(async move {
        if let Overwriting::Free { format } = overwriting {
            check_parts(target, format, open_for).await?;
        }
        free(open_for(target, Access::Write, usage).await?, overwriting).await
    })
}

/// Opens a target to overwrite its blocks: a plain file as it is, with its size, anything else as [`overwrite`] and
/// [`overwrite_device`] do.
///
/// # Errors
/// If it, or what it is made of, has something that `overwriting` does not allow; of a plain file also what an image
/// of a disk may have.
pub fn overwrite_blocks(
    target: &TargetName,
    overwriting: Overwriting,
    usage: Usage,
) -> LocalBoxFuture<'_, Result<OpenTarget, StackError>> {
    Box::pin(async move {
        let path = match target {
            TargetName::File(path) | TargetName::Raw(path) | TargetName::Linux { path, .. } => path,
            _ => return overwrite_device(target, overwriting, usage).await,
        };
        match overwrite(target, path, overwriting, usage).await? {
            Overwritten::Device(opened) => Ok(*opened),
            Overwritten::Plain(medium) => free(raw(target, path, medium)?, overwriting).await,
        }
    })
}

/// The open target, if nothing is there that `overwriting` does not allow; otherwise it is closed.
async fn free(opened: OpenTarget, overwriting: Overwriting) -> Result<OpenTarget, StackError> {
    let checked = match overwriting {
        Overwriting::Anything => Ok(()),
        Overwriting::Free { .. } => check_opened(&opened).await,
    };
    match checked {
        Ok(()) => Ok(opened),
        Err(refused) => opened.close(Err(refused)).await,
    }
}

async fn replace(target: &TargetName, path: &Path, medium: FileMedium) -> Result<Overwritten, StackError> {
    match medium.is_block_device() {
        true => Ok(Overwritten::Device(Box::new(raw_or_mapped(target, path, medium).await?))),
        false => Ok(Overwritten::Plain(medium)),
    }
}

/// Makes a mirror of these devices; see [`sealblock_layers_mirror::create`].
///
/// # Errors
/// Why they cannot become one.
pub fn create_mirror<'a>(
    target: &'a TargetName,
    replicas: &'a [TargetName],
    options: &'a MirrorOptions,
) -> LocalBoxFuture<'a, Result<OpenTarget, StackError>> {
    Box::pin(async move { mirror::create(target, replicas, options, open_for).await })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program::on_reactor;

    fn opened(name: &str) -> Result<u64, StackError> {
        let target: TargetName = name.parse().expect("a target name");
        on_reactor(async {
            let opened = open(&target, Access::Write).await?;
            let bytes = opened.device.geometry().capacity_bytes();
            opened.close(Ok(bytes)).await
        })
    }

    #[test]
    fn memory_can_be_taken_when_it_is_opened_and_must_be_there() {
        assert_eq!(opened("mem:4MiB?preallocate"), Ok(4 << 20));
        assert_eq!(opened("mem:1PiB"), Ok(1 << 50), "nothing is taken before it is written");
        let refused = opened("mem:1PiB?preallocate").expect_err("no machine has as much");
        let text = refused.to_string();
        assert!(text.contains("'mem:1PiB?preallocate': 1073741824 MiB of memory are needed, and"), "{text}");
        assert_eq!(refused.cause(), Cause::Full);
        // Members of groups are opened in the same way.
        assert!(opened("stripe-nolabel:mem:4MiB?preallocate,mem:1PiB?preallocate").is_err());
    }
}
