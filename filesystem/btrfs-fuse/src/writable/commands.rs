//! Commands for files and directories of a mount, by ioctl(2): the numbers and the bytes of their arguments.
//!
//! Numbers are those of `_IOR`, `_IOW` and `_IOWR` in Linux. All numbers in arguments are unsigned, of 64 bits, in the
//! order of bytes of the machine. A name has 256 bytes: the bytes of the name, and zeroes behind them.
//!
//! The kernel says who asks, but not to which groups the user belongs, so these commands ask for more than permissions: the
//! user owns what is changed and what is read, or is root.

use sealblock_btrfs_engine::data::{FilePlace, now};
use sealblock_btrfs_engine::inode::{Ownership, SETTABLE_FLAGS};
use sealblock_btrfs_engine::operations::{NewSnapshot, Resolved};
use sealblock_btrfs_format::items::inode::InodeFlags;
use sealblock_btrfs_format::key::objectid;
use sealblock_fuse::{Caller, FsError, Notifier, Waiting};

use super::error::{refused, to_fuse_error, to_write_error};
use super::{InodeId, Writable, place_of};

/// The type of these commands, in their numbers.
const TYPE: u32 = 0xb7;
/// Directions in numbers: the argument is read, the answer is written, both.
const NONE: u32 = 0;
const WRITE: u32 = 1;
const READ: u32 = 2;

/// Bytes of a name in an argument.
const NAME_BYTES: usize = 256;
/// Bytes of the arguments of commands for subvolumes: a number and a name, and then two more numbers.
const SUBVOLUME_BYTES: usize = 8 + NAME_BYTES;
const SNAPSHOT_BYTES: usize = SUBVOLUME_BYTES + 16;
/// Bytes of the extended flags: 4 of flags, and then what other filesystems have.
const EXTENDED_BYTES: usize = 28;

const fn number(direction: u32, kind: u32, command: u32, bytes: usize) -> u32 {
    direction << 30 | (bytes as u32) << 16 | kind << 8 | command
}

/// FS_IOC_GETFLAGS and FS_IOC_SETFLAGS of Linux, as `lsattr` and `chattr` use them.
pub const GET_FLAGS: u32 = number(READ, b'f' as u32, 1, 8);
/// See [`GET_FLAGS`].
pub const SET_FLAGS: u32 = number(WRITE, b'f' as u32, 2, 8);
/// FS_IOC_FSGETXATTR and FS_IOC_FSSETXATTR of Linux: some of the same flags under other numbers. The kernel asks for them
/// whenever it sets flags.
pub const GET_EXTENDED_FLAGS: u32 = number(READ, b'X' as u32, 31, EXTENDED_BYTES);
/// See [`GET_EXTENDED_FLAGS`].
pub const SET_EXTENDED_FLAGS: u32 = number(WRITE, b'X' as u32, 32, EXTENDED_BYTES);
/// FITRIM of Linux, as `fstrim` uses it: devices get the free space of data back. Only for root. Its argument has the
/// first byte, the number of bytes, and the least bytes of a run; the first two must stand for all of the filesystem. The
/// answer has the bytes that were discarded in place of the second one.
pub const TRIM: u32 = number(READ | WRITE, b'X' as u32, 121, 24);
/// Makes everything durable that was changed in the filesystem, also by others, and what programs have written.
pub const SYNC: u32 = number(NONE, TYPE, 0, 0);
/// Makes the file share a range of another one, or fails: the inode number of that file in this mount, the first byte in
/// it, the number of bytes or 0 for all up to its end, and the first byte in this file. Both must have been synced, and the
/// range must lie within this file: the kernel may not notice that it grows.
pub const CLONE: u32 = number(WRITE, TYPE, 1, 32);
/// Creates an empty subvolume in the directory: 0, and a name. The answer has the subvolume's number in place of the 0.
pub const SUBVOLUME_CREATE: u32 = number(READ | WRITE, TYPE, 2, SUBVOLUME_BYTES);
/// Deletes a subvolume of the directory, with all that is in it: 0, and its name. It must have no subvolumes in it.
pub const SUBVOLUME_DELETE: u32 = number(WRITE, TYPE, 3, SUBVOLUME_BYTES);
/// Makes a snapshot in the directory: 0, a name, the inode number of the top directory of a subvolume in this mount, and
/// 1 for a read-only one or 0. The answer has the snapshot's number in place of the first 0.
pub const SNAPSHOT_CREATE: u32 = number(READ | WRITE, TYPE, 4, SNAPSHOT_BYTES);
/// Makes a range of the file zeroes that are written, or fails: the first byte, and the number of bytes. The file has
/// NODATACOW and was synced before, and the range lies within it, as the kernel may not notice that it grows.
pub const WRITE_ZEROES: u32 = number(WRITE, TYPE, 5, 16);

/// Flags of Linux, and what they are in an inode.
const FLAGS: [(u32, InodeFlags); 9] = [
    (0x0000_0004, InodeFlags::COMPRESS),
    (0x0000_0008, InodeFlags::SYNC),
    (0x0000_0010, InodeFlags::IMMUTABLE),
    (0x0000_0020, InodeFlags::APPEND),
    (0x0000_0040, InodeFlags::NODUMP),
    (0x0000_0080, InodeFlags::NOATIME),
    (0x0000_0400, InodeFlags::NOCOMPRESS),
    (0x0001_0000, InodeFlags::DIRSYNC),
    (0x0080_0000, InodeFlags::NODATACOW),
];

/// The extended flags of Linux, and what they are in an inode.
const EXTENDED_FLAGS: [(u32, InodeFlags); 5] = [
    (0x08, InodeFlags::IMMUTABLE),
    (0x10, InodeFlags::APPEND),
    (0x20, InodeFlags::SYNC),
    (0x40, InodeFlags::NOATIME),
    (0x80, InodeFlags::NODUMP),
];

/// The numbers and the name in an argument.
struct Argument<'a> {
    bytes: &'a [u8],
}

impl<'a> Argument<'a> {
    /// # Errors
    /// If it has another size.
    fn new(bytes: &'a [u8], expected: usize) -> Result<Argument<'a>, FsError> {
        match bytes.len() == expected {
            true => Ok(Argument { bytes }),
            false => Err(refused(libc::EINVAL, format!("an argument of {} bytes, not {expected}", bytes.len()))),
        }
    }

    /// The number at a byte of the argument.
    fn number(&self, at: usize) -> u64 {
        let bytes = self.bytes.get(at..).and_then(|rest| rest.first_chunk());
        bytes.copied().map_or(0, u64::from_ne_bytes)
    }

    /// The name behind the first number.
    fn name(&self) -> Result<&'a [u8], FsError> {
        let name = self.bytes.get(8..SUBVOLUME_BYTES).unwrap_or_default();
        let end = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
        let is_padded = name.get(end..).is_some_and(|rest| rest.iter().all(|byte| *byte == 0));
        match self.number(0) {
            0 if end < NAME_BYTES && is_padded => Ok(name.get(..end).unwrap_or_default()),
            0 => Err(refused(libc::EINVAL, "a name that does not end with zeroes")),
            _ => Err(refused(libc::EINVAL, "an argument that does not begin with 0")),
        }
    }

    /// The argument with another number at its beginning, as the answer.
    fn answer(&self, number: u64) -> Vec<u8> {
        let mut answer = self.bytes.to_vec();
        answer.iter_mut().zip(number.to_ne_bytes()).for_each(|(byte, new)| *byte = new);
        answer
    }
}

impl Writable<'_> {
    /// Runs a command for an inode. The answer has at most `answer_bytes`.
    pub(super) async fn run_command(
        &self,
        caller: Caller,
        id: InodeId,
        (command, argument): (u32, &[u8]),
        answer_bytes: u32,
    ) -> Result<Vec<u8>, FsError> {
        let answer = match command {
            GET_FLAGS => {
                let flags = u64::from(shown_flags(&FLAGS, self.flags(id).await?)).to_ne_bytes();
                // The kernel asks for 4 bytes, programs for 8.
                flags[..flags.len().min(answer_bytes as usize)].to_vec()
            }
            GET_EXTENDED_FLAGS => {
                let mut answer = shown_flags(&EXTENDED_FLAGS, self.flags(id).await?).to_ne_bytes().to_vec();
                answer.resize(EXTENDED_BYTES, 0);
                answer
            }
            SET_FLAGS => self.set_flags(id, &FLAGS, argument).await?,
            SET_EXTENDED_FLAGS => {
                if argument.iter().skip(size_of::<u32>()).any(|byte| *byte != 0) {
                    return Err(refused(libc::EOPNOTSUPP, "only flags can be set"));
                }
                self.set_flags(id, &EXTENDED_FLAGS, argument).await?
            }
            TRIM => self.trim(caller, &Argument::new(argument, 24)?).await?,
            SYNC => {
                if let Some(kernel) = self.kernel()? {
                    kernel.write_back().await?;
                }
                self.sync_all().await.map_err(to_write_error)?;
                Vec::new()
            }
            CLONE => self.clone_file(caller, id, &Argument::new(argument, 32)?).await?,
            SUBVOLUME_CREATE => self.create_subvolume(caller, id, &Argument::new(argument, SUBVOLUME_BYTES)?).await?,
            SUBVOLUME_DELETE => self.remove_by_command(caller, id, &Argument::new(argument, SUBVOLUME_BYTES)?).await?,
            WRITE_ZEROES => self.write_zeroes(caller, id, &Argument::new(argument, 16)?).await?,
            SNAPSHOT_CREATE => self.create_snapshot(caller, id, &Argument::new(argument, SNAPSHOT_BYTES)?).await?,
            _ => return Err(FsError::NoSuchCommand),
        };
        match answer.len() <= answer_bytes as usize {
            true => Ok(answer),
            false => Err(refused(libc::EINVAL, "no room for the answer")),
        }
    }

    /// Refuses whoever neither owns an inode nor is root.
    async fn check_owner(&self, caller: Caller, id: InodeId) -> Result<(), FsError> {
        let item = self.engine.stat(id.root, id.ino).await.map_err(to_fuse_error)?;
        match caller.uid == 0 || caller.uid == item.uid.get() {
            true => Ok(()),
            false => Err(refused(libc::EPERM, "only for the owner")),
        }
    }

    async fn flags(&self, id: InodeId) -> Result<InodeFlags, FsError> {
        Ok(self.engine.stat(id.root, id.ino).await.map_err(to_fuse_error)?.flags())
    }

    /// Sets those flags that a table has. The kernel has checked that the user may do it.
    async fn set_flags(&self, id: InodeId, table: &[(u32, InodeFlags)], argument: &[u8]) -> Result<Vec<u8>, FsError> {
        let shown = argument.first_chunk().copied().map(u32::from_ne_bytes);
        let shown = shown.ok_or_else(|| refused(libc::EINVAL, "an argument without flags"))?;
        let wanted = stored_flags(table, shown).ok_or_else(|| refused(libc::EOPNOTSUPP, "unknown flags"))?;
        let in_table = table.iter().fold(InodeFlags::empty(), |all, (_, own)| all | *own);
        let others = self.flags(id).await?.intersection(SETTABLE_FLAGS).difference(in_table);
        self.engine.complete_writes(id.root, id.ino).await.map_err(to_write_error)?;
        self.engine.set_flags(id.root, id.ino, wanted | others, now()).await.map_err(to_fuse_error)?;
        Ok(Vec::new())
    }

    async fn trim(&self, caller: Caller, argument: &Argument<'_>) -> Result<Vec<u8>, FsError> {
        if caller.uid != 0 {
            return Err(refused(libc::EPERM, "only for root"));
        }
        if argument.number(0) != 0 || argument.number(8) < self.engine.data_space().total_bytes {
            return Err(refused(libc::EINVAL, "a part of the filesystem"));
        }
        let discarded = self.engine.discard_free(argument.number(16)).await.map_err(to_write_error)?;
        Ok([0, discarded, argument.number(16)].into_iter().flat_map(u64::to_ne_bytes).collect())
    }

    async fn clone_file(&self, caller: Caller, to: InodeId, argument: &Argument<'_>) -> Result<Vec<u8>, FsError> {
        let from = self.file(argument.number(0))?;
        for id in [from, to] {
            self.check_owner(caller, id).await?;
        }
        let kernel = self.kernel()?;
        if let Some(kernel) = &kernel {
            kernel.write_back_of(&[self.number(from)?, self.number(to)?]).await?;
        }
        let (source_size, size) = (self.regular(from).await?.size.get(), self.regular(to).await?.size.get());
        let (from_offset, to_offset) = (argument.number(8), argument.number(24));
        let bytes = match argument.number(16) {
            0 => source_size.saturating_sub(from_offset),
            bytes => bytes,
        };
        check_range(to_offset, bytes, size)?;
        let place = |id: InodeId, offset| FilePlace { root: id.root, ino: id.ino, offset };
        let clone = async || self.engine.clone_range(place(from, from_offset), place(to, to_offset), bytes).await;
        let cloned = self.with_space(clone).await;
        self.tell(kernel, to, None).await;
        cloned.map(|()| Vec::new()).map_err(to_write_error)
    }

    async fn write_zeroes(&self, caller: Caller, id: InodeId, argument: &Argument<'_>) -> Result<Vec<u8>, FsError> {
        self.check_owner(caller, id).await?;
        let kernel = self.kernel()?;
        if let Some(kernel) = &kernel {
            kernel.write_back_of(&[self.number(id)?]).await?;
        }
        let size = self.regular(id).await?.size.get();
        let (offset, bytes) = (argument.number(0), argument.number(8));
        check_range(offset, bytes, size)?;
        self.drop_rights(self.number(id)?, id, false).await?;
        let zero = async || self.engine.write_zeroes(id.root, id.ino, offset, bytes).await;
        let zeroed = self.with_space(zero).await;
        self.tell(kernel, id, None).await;
        zeroed.map(|()| Vec::new()).map_err(to_write_error)
    }

    async fn create_subvolume(
        &self,
        caller: Caller,
        directory: InodeId,
        argument: &Argument<'_>,
    ) -> Result<Vec<u8>, FsError> {
        self.check_owner(caller, directory).await?;
        let (name, kernel) = (argument.name()?, self.kernel()?);
        let owner = Ownership { uid: caller.uid, gid: caller.gid, permissions: 0o755 };
        let made = self
            .engine
            .create_subvolume(place_of(directory, name), self.new_uuid()?, &owner, now())
            .await
            .map_err(to_fuse_error)?;
        self.tell(kernel, directory, Some(name)).await;
        Ok(argument.answer(made))
    }

    async fn remove_by_command(
        &self,
        caller: Caller,
        directory: InodeId,
        argument: &Argument<'_>,
    ) -> Result<Vec<u8>, FsError> {
        let name = argument.name()?;
        self.check_owner(caller, directory).await?;
        if let Some(Resolved::Subvolume(root)) = self.resolve(directory, name).await? {
            self.check_owner(caller, super::top_of(root)).await?;
        }
        let kernel = self.kernel()?;
        self.delete_subvolume(directory, name).await?;
        self.tell(kernel, directory, Some(name)).await;
        Ok(Vec::new())
    }

    async fn create_snapshot(
        &self,
        caller: Caller,
        directory: InodeId,
        argument: &Argument<'_>,
    ) -> Result<Vec<u8>, FsError> {
        let name = argument.name()?;
        let source = self.find(argument.number(SUBVOLUME_BYTES))?;
        let source = source.filter(|source| source.ino == objectid::FIRST_FREE);
        let source = source.ok_or_else(|| refused(libc::EINVAL, "not the top directory of a subvolume"))?;
        let is_read_only = match argument.number(SUBVOLUME_BYTES + 8) {
            0 => false,
            1 => true,
            _ => return Err(refused(libc::EINVAL, "unknown flags")),
        };
        for id in [source, directory] {
            self.check_owner(caller, id).await?;
        }
        let kernel = self.kernel()?;
        if let Some(kernel) = &kernel {
            // What programs have written may still be in its cache.
            kernel.write_back().await?;
        }
        let new = NewSnapshot { source: source.root, uuid: self.new_uuid()?, is_read_only };
        let create = async || self.engine.create_snapshot(new, place_of(directory, name), now()).await;
        let made = self.with_space(create).await.map_err(to_fuse_error)?;
        self.tell(kernel, directory, Some(name)).await;
        Ok(argument.answer(made))
    }

    /// What a command can wait for, if anybody is to be told.
    ///
    /// # Errors
    /// As for [`Notifier::wait`](sealblock_fuse::Notifier::wait).
    fn kernel(&self) -> Result<Option<Waiting>, FsError> {
        self.notifier.get().map(Notifier::wait).transpose()
    }

    fn new_uuid(&self) -> Result<[u8; 16], FsError> {
        (self.options.new_uuid)().map_err(|error| refused(libc::EIO, error.to_string()))
    }

    /// Lets the kernel drop what it has of an inode that changed, and of a name in it: what a program does next must not
    /// meet the old content, or write it back.
    async fn tell(&self, kernel: Option<Waiting>, id: InodeId, name: Option<&[u8]>) {
        if let (Some(kernel), Ok(number)) = (kernel, self.number(id)) {
            kernel.changed(number, name).await;
        }
    }
}

/// Refuses a range behind the end of a file.
fn check_range(offset: u64, bytes: u64, size: u64) -> Result<(), FsError> {
    match offset.saturating_add(bytes) > size {
        true => Err(refused(libc::EINVAL, "the range ends behind the end of the file")),
        false => Ok(()),
    }
}

fn shown_flags(table: &[(u32, InodeFlags)], flags: InodeFlags) -> u32 {
    table.iter().filter(|(_, own)| flags.contains(*own)).fold(0, |all, (shown, _)| all | shown)
}

/// The flags of an inode; `None` if there are others.
fn stored_flags(table: &[(u32, InodeFlags)], shown: u32) -> Option<InodeFlags> {
    let known = table.iter().filter(|(known, _)| shown & known != 0);
    let (all, flags) = known.fold((0, InodeFlags::empty()), |(all, flags), (shown, own)| (all | shown, flags | *own));
    (all == shown).then_some(flags)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_that_are_documented() {
        assert_eq!((GET_FLAGS, SET_FLAGS, TRIM), (0x8008_6601, 0x4008_6602, 0xc018_5879));
        assert_eq!((GET_EXTENDED_FLAGS, SET_EXTENDED_FLAGS), (0x801c_581f, 0x401c_5820));
        assert_eq!((SYNC, CLONE), (0xb700, 0x4020_b701));
        assert_eq!((SUBVOLUME_CREATE, SUBVOLUME_DELETE), (0xc108_b702, 0x4108_b703));
        assert_eq!((SNAPSHOT_CREATE, WRITE_ZEROES), (0xc118_b704, 0x4010_b705));
    }

    #[test]
    fn flags_lead_back_and_unknown_ones_are_refused() {
        for table in [&FLAGS[..], &EXTENDED_FLAGS] {
            for (shown, own) in table {
                assert_eq!((shown_flags(table, *own), stored_flags(table, *shown)), (*shown, Some(*own)));
                assert!(SETTABLE_FLAGS.contains(*own));
            }
        }
        assert_eq!(stored_flags(&FLAGS, 0x0080_0008), Some(InodeFlags::NODATACOW | InodeFlags::SYNC));
        assert_eq!((stored_flags(&FLAGS, 0x0008_0000), stored_flags(&FLAGS, 0)), (None, Some(InodeFlags::empty())));
        assert_eq!(shown_flags(&FLAGS, InodeFlags::NODATASUM | InodeFlags::APPEND), 0x20);
    }

    #[test]
    fn arguments_have_their_size_and_names_end_with_zeroes() {
        assert!(Argument::new(&[0; 31], 32).is_err());
        let mut bytes = [0; SNAPSHOT_BYTES];
        bytes[8..12].copy_from_slice(b"name");
        bytes[SUBVOLUME_BYTES..][..8].copy_from_slice(&7_u64.to_ne_bytes());
        let argument = Argument::new(&bytes, SNAPSHOT_BYTES).unwrap();
        assert_eq!((argument.name().unwrap(), argument.number(SUBVOLUME_BYTES)), (&b"name"[..], 7));
        let answer = argument.answer(300);
        assert_eq!((&answer[..8], &answer[8..]), (&300_u64.to_ne_bytes()[..], &bytes[8..]));
        for at in [0, 20] {
            let mut bad = bytes;
            bad[at] = 1;
            assert!(Argument::new(&bad, SNAPSHOT_BYTES).unwrap().name().is_err());
        }
        let mut long = bytes;
        long[8..SUBVOLUME_BYTES].fill(b'n');
        assert!(Argument::new(&long, SNAPSHOT_BYTES).unwrap().name().is_err());
    }
}
