//! Files for tests: created by plans, and compared with a model.

use futures_executor::block_on;
use sealblock_btrfs_engine::change::Change;
use sealblock_btrfs_engine::engine::{Engine, EngineError};
use sealblock_btrfs_engine::inode::Ownership;
use sealblock_btrfs_engine::names::{NewFile, Place};
use sealblock_btrfs_engine::plan::Plan;
use sealblock_btrfs_engine::space::{SpaceError, Use};
use sealblock_btrfs_engine::transaction::ChangeError;
use sealblock_btrfs_engine::xattrs::XattrMode;
use sealblock_btrfs_format::items::inode::{InodeFlags, Timespec};
use sealblock_btrfs_format::key::objectid;
use sealblock_runtime_memory::Slice;

use crate::disks::Disks;

pub const ROOT: u64 = objectid::FS_TREE;

/// What a new file is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    Plain,
    /// With `btrfs.compression`.
    Compressed(&'static str),
    /// With the flag only.
    Compress,
    NoCow,
    NoSum,
}

impl Kind {
    pub fn has_sums(self) -> bool {
        !matches!(self, Kind::NoCow | Kind::NoSum)
    }
}

/// Creates a file in the top directory.
pub fn create(engine: &Engine, name: &str, kind: Kind) -> u64 {
    let now = Timespec { seconds: 1_700_000_000.into(), nanoseconds: 0.into() };
    let owner = Ownership { uid: 0, gid: 0, permissions: 0o644 };
    let created = engine.change(|transaction| {
        transaction.open_tree(ROOT)?;
        let geometry = *transaction.geometry();
        let view = transaction.view(ROOT)?;
        let mut plan = Plan::new(&view, transaction.plan_context(&geometry, now));
        let ino = plan.create(Place { directory: 256, name: name.as_bytes() }, NewFile::Regular, &owner)?;
        match kind {
            Kind::Plain => {}
            Kind::Compressed(value) => {
                plan.set_xattr(ino, b"btrfs.compression", value.as_bytes(), XattrMode::Set)?;
            }
            Kind::Compress => drop(plan.set_flags(ino, InodeFlags::COMPRESS)?),
            Kind::NoCow => drop(plan.set_flags(ino, InodeFlags::NODATACOW)?),
            Kind::NoSum => drop(plan.edit_inode(ino, |inode| {
                inode.flags = InodeFlags::NODATASUM.bits().into();
                Ok(())
            })?),
        }
        let changes = plan.into_changes();
        transaction.apply_change(&Change::of(ROOT, changes))?;
        Ok(ino)
    });
    block_on(created).unwrap()
}

/// The content of a whole file.
pub fn read_all(engine: &Engine, ino: u64, bytes: usize) -> Vec<u8> {
    let mut all = Vec::new();
    while all.len() < bytes {
        let data = block_on(engine.read(ROOT, ino, all.len() as u64, 1 << 20)).unwrap();
        if data.is_empty() {
            break;
        }
        all.extend_from_slice(&data);
    }
    all
}

#[track_caller]
pub fn assert_content(engine: &Engine, ino: u64, expected: &[u8]) {
    let found = read_all(engine, ino, expected.len() + 1);
    assert_eq!(found.len(), expected.len(), "the size of {ino}");
    assert_same(&found, expected);
}

#[track_caller]
pub fn assert_same(found: &[u8], expected: &[u8]) {
    let differs = found.iter().zip(expected).position(|(one, other)| one != other);
    assert!(differs.is_none(), "byte {differs:?} of {}", expected.len());
    assert_eq!(found.len(), expected.len(), "the number of bytes");
}

/// Writes all of it.
#[track_caller]
pub fn write(engine: &Engine, ino: u64, offset: u64, data: &[u8]) {
    let written = block_on(engine.write(ROOT, ino, offset, Slice::copy_from(data)));
    assert_eq!(written.unwrap(), data.len() as u64);
}

pub fn is_full(error: &EngineError) -> bool {
    matches!(error, EngineError::Change(ChangeError::Space(SpaceError::Full(Use::Data | Use::Metadata))))
}

/// The content of a file as the last commit has it.
pub fn read_committed(disks: &Disks, ino: u64) -> Vec<u8> {
    let filesystem = disks.open();
    block_on(async {
        let subvolume = filesystem.subvolume(ROOT).await.unwrap();
        let inode = filesystem.inode(subvolume.root, ino).await.unwrap();
        let mut all = Vec::new();
        while (all.len() as u64) < inode.size() {
            all.extend_from_slice(&filesystem.read(&inode, all.len() as u64, 1 << 20).await.unwrap());
        }
        all
    })
}
