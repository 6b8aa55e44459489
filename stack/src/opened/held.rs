//! How a target is opened, and what is left to close behind it.

use std::path::Path;
use std::rc::Rc;

use futures_util::future::{LocalBoxFuture, join_all};
use sealblock_block::{Error, ErrorKind};
use sealblock_media_nbd::NbdDevice;
use sealblock_media_nvme_tcp::NvmeTcpDevice;
use sealblock_media_volume::WhyLost;

use crate::opened::closing::CloseLimit;
use crate::opened::recorded::KeepDamage;
use crate::opened::shards::{FileVolume, ShardedVolume, log_maintenance};

/// How a command accesses a target. A target that may lack the last writes is opened only if the command accepts that, which is then
/// reported.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    /// Reads, shared with other readers.
    Read,
    /// The same, also blocks that may be older than what was written ([`OpenTarget::older_text`]).
    ///
    /// [`OpenTarget::older_text`]: crate::OpenTarget::older_text
    ReadOlder,
    /// Reads and writes, exclusively.
    Write,
    /// The same, and volumes do not move blocks while they are idle.
    WriteInPlace,
    /// Reads and writes, exclusively, also a mirror of which a replica has lost its label: the others have what counts.
    WriteWithoutLabel,
    /// Reads and writes as a replica: the mirror resynchronises one that may lack what was written last before anything of it counts.
    Replica,
    /// The same, and volumes do not move blocks while they are idle.
    ReplicaInPlace,
}

impl Access {
    /// True if it writes.
    pub fn writes(self) -> bool {
        !matches!(self, Access::Read | Access::ReadOlder)
    }

    /// True if volumes may move blocks while they are idle.
    pub(crate) fn relocates(self) -> bool {
        !matches!(self, Access::WriteInPlace | Access::ReplicaInPlace)
    }

    /// True if who opens it knows what to do with a device that may lack what was written last.
    pub fn accepts_older(self) -> bool {
        matches!(self, Access::ReadOlder | Access::Replica | Access::ReplicaInPlace)
    }

    /// How a replica of a mirror that is accessed like this is accessed: what its blocks are worth is for the mirror to judge.
    #[must_use]
    pub fn of_replica(self) -> Access {
        match self {
            Access::Read | Access::ReadOlder => Access::ReadOlder,
            Access::Write | Access::WriteWithoutLabel | Access::Replica => Access::Replica,
            Access::WriteInPlace | Access::ReplicaInPlace => Access::ReplicaInPlace,
        }
    }
}

/// The use that a device is opened for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Usage {
    /// Outside any group. Writes are refused if it is a member of a group.
    Alone,
    /// Outside any group, without writes to data.
    Unchanged,
    /// Outside any group, also if it is a member of one: `--force-member`.
    Forced,
    /// For the group on another host that it is a member of: `--as-member`.
    AsMember,
    /// By the group that it is a member of.
    Member,
}

impl Usage {
    /// The use of the devices under a layer that hides its label.
    pub(crate) fn hidden(self) -> Usage {
        match self {
            Usage::Member => Usage::Alone,
            other => other,
        }
    }
}

/// A group that opens and closes its own members.
pub(crate) trait Members {
    /// Closes what is open of them.
    fn close(&self, limit: CloseLimit) -> LocalBoxFuture<'_, Result<(), Error>>;

    /// Bytes of payload received from remote members until now; `None` if none is remote.
    fn received_bytes(&self) -> Option<u64>;

    /// As [`lost_answers`].
    fn lost_answers(&self) -> Vec<String>;

    /// As [`forget_lost`].
    fn forget_lost(&self) -> LocalBoxFuture<'_, Result<(), Error>>;
}

/// What an open target has to close.
#[derive(Clone)]
pub(crate) enum CloseHandle {
    /// The list of bad blocks of the volume that follows.
    Damage(Rc<dyn KeepDamage>),
    /// A volume of this process.
    Volume(Rc<FileVolume>),
    /// The shards of a volume of this process.
    Shards(Rc<ShardedVolume>),
    /// A connection over NVMe/TCP.
    NvmeTcp(NvmeTcpDevice),
    /// Connections over NBD.
    Nbd(NbdDevice),
    /// The replicas of a mirror, or paths.
    Members(Rc<dyn Members>),
}

/// Closes everything, at the same time. Boxed, since members have close handles in turn.
pub(crate) fn close_all(held: &[CloseHandle], limit: CloseLimit) -> LocalBoxFuture<'_, Result<(), Error>> {
    // A list is saved before its volume is closed.
    let parts = held.chunk_by(|held, _| matches!(held, CloseHandle::Damage(_)));
    let closings: Vec<_> = parts.map(|part| close_in_order(part, limit)).collect();
    Box::pin(async move { join_all(closings).await.into_iter().fold(Ok(()), Result::and) })
}

async fn close_in_order(held: &[CloseHandle], limit: CloseLimit) -> Result<(), Error> {
    let mut closed = Ok(());
    for held in held {
        closed = closed.and(match held {
            CloseHandle::Damage(list) => {
                // What is not saved is found again.
                limit.part(list.save()).await;
                Ok(())
            }
            CloseHandle::Volume(volume) => {
                let result = limit.close_volume(volume.close()).await.flatten();
                log_maintenance(volume.medium().below().path(), volume.upkeep());
                result
            }
            CloseHandle::Shards(volume) => limit.close_volume(volume.close()).await.flatten(),
            CloseHandle::NvmeTcp(device) => {
                let settled = settle(limit, device.settled()).await;
                if let Err(error) = limit.close(device.close()).await {
                    tracing::warn!(subsystem = %device.info().subsystem, %error, "disconnected without a shutdown");
                    device.disconnect();
                }
                settled.and_then(|()| sure(device.is_settled()))
            }
            // Members limit each part of their close.
            CloseHandle::Members(members) => members.close(limit).await,
            CloseHandle::Nbd(device) => {
                let settled = settle(limit, device.settled()).await;
                let closed = limit.close(device.close()).await;
                closed.and(settled).and_then(|()| sure(device.is_settled()))
            }
        });
    }
    closed
}

/// Waits until no lost connection can deliver an earlier change any more.
///
/// # Errors
/// If that is not sure when the time is up: whoever writes the same blocks next must know it.
pub(crate) async fn settle(limit: CloseLimit, settled: impl Future<Output = bool>) -> Result<(), Error> {
    sure(limit.part(settled).await.unwrap_or(false))
}

/// An error unless nothing of this device can be executed any more.
fn sure(is_settled: bool) -> Result<(), Error> {
    if is_settled { Ok(()) } else { Err(may_be_delivered()) }
}

#[cold]
fn may_be_delivered() -> Error {
    let reason = "a connection that was lost or closed may still deliver changes that were not answered: write the same blocks again only in a minute";
    ErrorKind::Unreachable { reason: reason.to_owned() }.into()
}

/// Saves lists of bad blocks, but for those of groups, which save them when they close.
pub(crate) async fn save_damage(held: &[CloseHandle]) {
    for held in held {
        if let CloseHandle::Damage(list) = held {
            list.save().await;
        }
    }
}

/// Of which volumes changes that were answered and not flushed may be lost, of which their hosts have not been told yet, and why, as text.
pub(crate) fn lost_answers(held: &[CloseHandle]) -> Vec<String> {
    let each = held.iter().flat_map(|held| match held {
        CloseHandle::Volume(volume) => {
            volume.may_be_lost().map(|why| lost_answers_of(volume.medium().below().path(), why)).into_iter().collect()
        }
        CloseHandle::Shards(volume) => {
            volume.may_be_lost().map(|why| lost_answers_of(volume.path(), why)).into_iter().collect()
        }
        CloseHandle::Members(members) => members.lost_answers(),
        // Their servers tell this host, as any other one.
        CloseHandle::NvmeTcp(_) | CloseHandle::Nbd(_) | CloseHandle::Damage(_) => Vec::new(),
    });
    each.collect()
}

/// The text of one volume in [`OpenTarget::lost_answers`](crate::OpenTarget::lost_answers): whose it is, and why.
pub fn lost_answers_of(path: &Path, why: WhyLost) -> String {
    format!("{}: {}", path.display(), why.as_str())
}

/// Has volumes not say any more that changes may be lost: their hosts were told, or need not be.
pub(crate) fn forget_lost(held: &[CloseHandle]) -> LocalBoxFuture<'_, Result<(), Error>> {
    Box::pin(async move {
        let mut forgotten = Ok(());
        for held in held {
            forgotten = forgotten.and(match held {
                CloseHandle::Volume(volume) => volume.forget_lost().await,
                CloseHandle::Shards(volume) => volume.forget_lost().await,
                CloseHandle::Members(members) => members.forget_lost().await,
                CloseHandle::NvmeTcp(_) | CloseHandle::Nbd(_) | CloseHandle::Damage(_) => Ok(()),
            });
        }
        forgotten
    })
}

/// Bytes of payload received from other hosts until now; `None` if nothing is remote.
pub(crate) fn received_bytes(held: &[CloseHandle]) -> Option<u64> {
    let remotes = held.iter().filter_map(|held| match held {
        CloseHandle::Volume(_) | CloseHandle::Shards(_) | CloseHandle::Damage(_) => None,
        CloseHandle::NvmeTcp(device) => Some(device.counters().received_bytes),
        CloseHandle::Nbd(device) => Some(device.counters().received_bytes),
        CloseHandle::Members(members) => members.received_bytes(),
    });
    remotes.reduce(u64::saturating_add)
}
