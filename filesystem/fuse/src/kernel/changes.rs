//! Flags and numbers of the kernel's requests for changes, as values of the filesystem's interface.

use std::ffi::OsStr;
use std::fs;
use std::time::{SystemTime, UNIX_EPOCH};

use fuser::{OpenAccMode, OpenFlags, RenameFlags, Request, TimeOrNow};
use rustix::fs::OFlags;

use crate::changes::{Allocate, Caller, Changes, NewTime, OpenMode, RenameMode, WriteDurability, XattrMode};
use crate::interface::{Kind, Time};

/// The maximum bytes of a copy: the largest number of whole pages that the answer, which has 32 bits, can express.
pub const MAX_COPY_BYTES: u64 = (u32::MAX - 4095) as u64;

// Flags of open(2).
const O_APPEND: i32 = OFlags::APPEND.bits() as i32;
const O_TRUNC: i32 = OFlags::TRUNC.bits() as i32;
const O_DIRECT: i32 = OFlags::DIRECT.bits() as i32;
/// Linux has this number on all of our machines; `rustix` has that of O_SYNC for both.
const O_DSYNC: i32 = 0o10000;
const O_SYNC: i32 = OFlags::SYNC.bits() as i32;
// Modes of fallocate(2).
const KEEP_SIZE: i32 = 1;
const PUNCH_HOLE: i32 = 2;
const ZERO_RANGE: i32 = 0x10;
// Modes of setxattr(2).
const XATTR_CREATE: i32 = 1;
const XATTR_REPLACE: i32 = 2;
/// The attribute with an inode's access control list.
const ACCESS_LIST: &str = "system.posix_acl_access";

/// Who asks.
pub fn caller(request: &Request) -> Caller {
    Caller { uid: request.uid(), gid: request.gid() }
}

/// How a file is opened.
pub fn open_mode(flags: OpenFlags, kills_set_id: bool) -> OpenMode {
    let access = flags.acc_mode();
    let truncates = flags.0 & O_TRUNC != 0;
    OpenMode {
        reads: access != OpenAccMode::O_WRONLY,
        writes: access != OpenAccMode::O_RDONLY,
        appends: flags.0 & O_APPEND != 0,
        truncates,
        is_direct: flags.0 & O_DIRECT != 0,
        kills_set_id: truncates && kills_set_id,
    }
}

/// What must be durable when a write is answered. If the write did not bypass the page cache, the kernel also sends a
/// sync, which then has little to do; a file can lose O_DIRECT while it is open, so this cannot be told apart.
pub fn durability(flags: OpenFlags) -> WriteDurability {
    // O_SYNC contains O_DSYNC.
    match flags.0 & O_SYNC {
        O_SYNC => WriteDurability::All,
        O_DSYNC => WriteDurability::Data,
        _ => WriteDurability::None,
    }
}

/// The kind of a new node; `None` for a directory, a symbolic link, and what is no kind.
pub fn kind_of_node(mode: u32) -> Option<Kind> {
    match mode & 0o170_000 {
        // mknod(2) takes no kind for a regular file.
        0 | 0o100_000 => Some(Kind::Regular),
        0o010_000 => Some(Kind::Fifo),
        0o020_000 => Some(Kind::CharDevice),
        0o060_000 => Some(Kind::BlockDevice),
        0o140_000 => Some(Kind::Socket),
        _ => None,
    }
}

/// What a rename does if the new name exists; `None` for flags that are unknown or contradict each other.
pub fn rename_mode(flags: RenameFlags) -> Option<RenameMode> {
    match flags {
        _ if flags.is_empty() => Some(RenameMode::Replace),
        RenameFlags::RENAME_NOREPLACE => Some(RenameMode::NoReplace),
        RenameFlags::RENAME_EXCHANGE => Some(RenameMode::Exchange),
        RenameFlags::RENAME_WHITEOUT => Some(RenameMode::Whiteout),
        _ => None,
    }
}

/// What fallocate(2) does, and whether the size stays; `None` for a mode that is not known.
pub fn allocation(mode: i32) -> Option<(Allocate, bool)> {
    let keeps_size = mode & KEEP_SIZE != 0;
    match mode & !KEEP_SIZE {
        0 => Some((Allocate::Reserve, keeps_size)),
        // A hole never changes the size, and Linux wants that to be said.
        PUNCH_HOLE if keeps_size => Some((Allocate::PunchHole, true)),
        ZERO_RANGE => Some((Allocate::Zero, keeps_size)),
        _ => None,
    }
}

/// Whether an attribute may or must exist; `None` for flags that are unknown or contradict each other.
pub fn xattr_mode(flags: i32) -> Option<XattrMode> {
    match flags {
        0 => Some(XattrMode::Set),
        XATTR_CREATE => Some(XattrMode::Create),
        XATTR_REPLACE => Some(XattrMode::Replace),
        _ => None,
    }
}

/// Attributes that change: mode, owner, group and size; last access, last change of the content, and of the inode.
pub fn changes(
    (mode, uid, gid, size_bytes): (Option<u32>, Option<u32>, Option<u32>, Option<u64>),
    (atime, mtime, ctime): (Option<TimeOrNow>, Option<TimeOrNow>, Option<SystemTime>),
    kills_set_id: bool,
) -> Changes {
    Changes {
        mode: mode.map(|mode| (mode & 0o7777) as u16),
        uid,
        gid,
        size_bytes,
        atime: atime.map(new_time),
        mtime: mtime.map(new_time),
        ctime: ctime.map(time),
        kills_set_id,
    }
}

fn new_time(time_or_now: TimeOrNow) -> NewTime {
    match time_or_now {
        TimeOrNow::Now => NewTime::Now,
        TimeOrNow::SpecificTime(specific) => NewTime::At(time(specific)),
    }
}

/// A time of the protocol. `fuser` subtracts the nanoseconds from negative seconds, to which they must be added.
fn time(time: SystemTime) -> Time {
    match time.duration_since(UNIX_EPOCH) {
        Ok(after) => Time { seconds: after.as_secs() as i64, nanoseconds: after.subsec_nanos() },
        Err(before) => {
            let before = before.duration();
            Time { seconds: 0_i64.wrapping_sub_unsigned(before.as_secs()), nanoseconds: before.subsec_nanos() }
        }
    }
}

/// The groups of which the caller is a member, if the attribute is an access control list, so that setting it may
/// remove the set-group-ID bit. The kernel has a flag for that, which does not reach us. Root may keep the bit.
pub fn groups_for_xattr(request: &Request, name: &OsStr) -> Option<Vec<u32>> {
    if name != ACCESS_LIST || request.uid() == 0 {
        return None;
    }
    // The caller waits for the answer, so its number is not reused. Without this file it is of another namespace.
    let status = fs::read_to_string(format!("/proc/{}/status", request.pid())).unwrap_or_default();
    Some([vec![request.gid()], supplementary_groups(&status)].concat())
}

/// The supplementary groups in the format of proc_pid_status(5).
fn supplementary_groups(status: &str) -> Vec<u32> {
    let line = status.lines().find_map(|line| line.strip_prefix("Groups:")).unwrap_or_default();
    line.split_whitespace().filter_map(|group| group.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn flags_of_open_are_the_modes_that_they_name() {
        let of = |flags| open_mode(OpenFlags(flags), true);
        assert_eq!(of(0), OpenMode { reads: true, ..OpenMode::default() });
        assert_eq!(of(1), OpenMode { writes: true, ..OpenMode::default() });
        let appending = OpenMode { reads: true, writes: true, appends: true, ..OpenMode::default() };
        assert_eq!(of(2 | O_APPEND), appending);
        let truncating = OpenMode { truncates: true, appends: false, kills_set_id: true, ..appending };
        assert_eq!(of(2 | O_TRUNC), truncating);
        assert_eq!(open_mode(OpenFlags(2 | O_TRUNC), false), OpenMode { kills_set_id: false, ..truncating });
        assert_eq!(of(O_DIRECT | O_SYNC), OpenMode { reads: true, is_direct: true, ..OpenMode::default() });
        let durabilities = [0, O_DSYNC, O_SYNC, O_DSYNC | O_DIRECT].map(|flags| durability(OpenFlags(flags)));
        let expected = [WriteDurability::None, WriteDurability::Data, WriteDurability::All, WriteDurability::Data];
        assert_eq!(durabilities, expected);
    }

    #[test]
    fn unknown_and_contradicting_modes_are_refused() {
        for (mode, expected) in [
            (0, Some((Allocate::Reserve, false))),
            (1, Some((Allocate::Reserve, true))),
            (3, Some((Allocate::PunchHole, true))),
            (0x10, Some((Allocate::Zero, false))),
            (0x11, Some((Allocate::Zero, true))),
            (2, None),
            (8, None),
            (0x13, None),
            (0x20, None),
            (0x40, None),
        ] {
            assert_eq!(allocation(mode), expected, "{mode:#x}");
        }
        let renames = [0, 1, 2, 4, 3, 8].map(|bits| rename_mode(RenameFlags::from_bits_retain(bits)));
        let [replace, no_replace, exchange, whiteout, contradiction, unknown] = renames;
        assert_eq!((replace, no_replace), (Some(RenameMode::Replace), Some(RenameMode::NoReplace)));
        assert_eq!((exchange, whiteout), (Some(RenameMode::Exchange), Some(RenameMode::Whiteout)));
        assert_eq!((contradiction, unknown), (None, None));
        let xattrs = [0, 1, 2, 3, 4].map(xattr_mode);
        let known = [XattrMode::Set, XattrMode::Create, XattrMode::Replace].map(Some);
        assert_eq!(xattrs, [known[0], known[1], known[2], None, None]);
        let kinds = [0, 0o100_644, 0o010_600, 0o060_600, 0o140_777, 0o040_755, 0o120_777].map(kind_of_node);
        let nodes = [Kind::Regular, Kind::Regular, Kind::Fifo, Kind::BlockDevice, Kind::Socket].map(Some);
        assert_eq!(kinds[..5], nodes);
        assert_eq!(kinds[5..], [None, None]);
    }

    #[test]
    fn times_before_1970_come_out_as_the_kernel_sent_them() {
        // What fuser makes of -2 seconds and 500 milliseconds.
        let fractional = UNIX_EPOCH - Duration::new(2, 500_000_000);
        assert_eq!(time(fractional), Time { seconds: -2, nanoseconds: 500_000_000 });
        assert_eq!(time(UNIX_EPOCH + Duration::new(7, 9)), Time { seconds: 7, nanoseconds: 9 });
        let first = UNIX_EPOCH - Duration::new(1 << 63, 0);
        assert_eq!(time(first), Time { seconds: i64::MIN, nanoseconds: 0 });
        assert_eq!(new_time(TimeOrNow::Now), NewTime::Now);
    }

    #[test]
    fn supplementary_groups_are_found() {
        assert_eq!(supplementary_groups("Name:\tx\nGid:\t1 1 1 1\nGroups:\t4 24 1000 \nNStgid:\t5\n"), [4, 24, 1000]);
        assert_eq!(supplementary_groups("Groups:\t\n"), [0_u32; 0]);
        assert_eq!(supplementary_groups(""), [0_u32; 0]);
    }
}
