//! The error number that a program gets for a failure.

use sealblock_btrfs::FsError;

use crate::data::OF_READ_ONLY_SUBVOLUME;
use crate::engine::EngineError;
use crate::file_map::FileMapError;
use crate::plan::PlanError;
use crate::space::SpaceError;
use crate::subvolumes::SubvolumeError;
use crate::transaction::ChangeError;

impl EngineError {
    /// The error number of Linux. What is damaged gives EUCLEAN, what cannot be read EIO. After the filesystem stopped,
    /// operations give EROFS; the caller gives EIO to a program that waits for its writes to be durable.
    pub fn errno(&self) -> i32 {
        match self {
            EngineError::Change(error) => of_change(error),
            EngineError::Read(FsError::NotWritable(_)) => libc::EROFS,
            EngineError::Read(_) => libc::EIO,
            EngineError::Stopped(_) => libc::EROFS,
        }
    }
}

fn of_change(error: &ChangeError) -> i32 {
    match error {
        ChangeError::Plan(error) => of_plan(error),
        ChangeError::Subvolume(error) => of_subvolume(error),
        ChangeError::File(error) => of_file(error),
        ChangeError::Space(SpaceError::Full(_)) => libc::ENOSPC,
        ChangeError::NoTree(_) => libc::ENOENT,
        ChangeError::Item(_) | ChangeError::Csums(_) => libc::EUCLEAN,
        // These are not refusals of what a program asked for, but contradictions within the filesystem or the engine.
        ChangeError::NewSnapshot(_)
        | ChangeError::Tree(_)
        | ChangeError::Refs(_)
        | ChangeError::Space(_)
        | ChangeError::Need(_) => libc::EIO,
    }
}

fn of_plan(error: &PlanError) -> i32 {
    match error {
        PlanError::Exists => libc::EEXIST,
        PlanError::NotFound | PlanError::EmptyTarget => libc::ENOENT,
        PlanError::NoAttribute => libc::ENODATA,
        PlanError::NotEmpty => libc::ENOTEMPTY,
        PlanError::NotADirectory => libc::ENOTDIR,
        PlanError::IsADirectory => libc::EISDIR,
        PlanError::NameTooLong { .. } => libc::ENAMETOOLONG,
        PlanError::InvalidName | PlanError::InvalidArgument(_) | PlanError::BelowItself => libc::EINVAL,
        PlanError::Unsupported(_) => libc::EOPNOTSUPP,
        PlanError::TooManyLinks => libc::EMLINK,
        PlanError::CollisionsFull => libc::EOVERFLOW,
        PlanError::NoSpaceForXattr | PlanError::NoNumber(_) => libc::ENOSPC,
        PlanError::LinkOfDirectory => libc::EPERM,
        PlanError::Protected { flag: OF_READ_ONLY_SUBVOLUME, .. } => libc::EROFS,
        PlanError::Protected { flag: "read-only", .. } => libc::EACCES,
        PlanError::Protected { .. } => libc::EPERM,
        PlanError::IsSubvolume(_) => libc::EXDEV,
        PlanError::InUse { .. } => libc::EBUSY,
        PlanError::Damaged { .. } | PlanError::Shape { .. } => libc::EUCLEAN,
        PlanError::Tree(_) => libc::EIO,
    }
}

fn of_subvolume(error: &SubvolumeError) -> i32 {
    match error {
        SubvolumeError::HasSubvolume(_) => libc::ENOTEMPTY,
        SubvolumeError::IsDefault => libc::EPERM,
        SubvolumeError::Absent(_) => libc::ENOENT,
        SubvolumeError::Name => libc::ENAMETOOLONG,
        SubvolumeError::NoNumber => libc::ENOSPC,
        SubvolumeError::ReadOnly(_) => libc::EROFS,
        SubvolumeError::Crossing => libc::EXDEV,
        SubvolumeError::NotASubvolume => libc::EINVAL,
    }
}

fn of_file(error: &FileMapError) -> i32 {
    match error {
        FileMapError::Tree(_) => libc::EIO,
        FileMapError::Shape { .. } | FileMapError::Item { .. } | FileMapError::Overlap { .. } => libc::EUCLEAN,
        FileMapError::TooLarge { .. } => libc::EFBIG,
        FileMapError::Range { .. } | FileMapError::Sums { .. } => libc::EINVAL,
        FileMapError::Occupied { .. } | FileMapError::Inline(_) | FileMapError::New { .. } => libc::EIO,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::space::Use;

    #[test]
    fn refusals_have_the_numbers_that_programs_expect() {
        let plan = |error| ChangeError::Plan(error);
        for (error, number) in [
            (plan(PlanError::Exists), libc::EEXIST),
            (plan(PlanError::IsSubvolume(256)), libc::EXDEV),
            (plan(PlanError::Unsupported("why")), libc::EOPNOTSUPP),
            (plan(PlanError::Protected { ino: 257, flag: "read-only" }), libc::EACCES),
            (plan(PlanError::Protected { ino: 257, flag: "immutable" }), libc::EPERM),
            (plan(PlanError::Protected { ino: 257, flag: OF_READ_ONLY_SUBVOLUME }), libc::EROFS),
            (ChangeError::File(FileMapError::TooLarge { ino: 257, end: u64::MAX }), libc::EFBIG),
            (ChangeError::Space(SpaceError::Full(Use::Metadata)), libc::ENOSPC),
            (ChangeError::Space(SpaceError::NoGroup(1)), libc::EIO),
            (ChangeError::Subvolume(SubvolumeError::ReadOnly(256)), libc::EROFS),
            (ChangeError::Subvolume(SubvolumeError::Crossing), libc::EXDEV),
            (ChangeError::NoTree(256), libc::ENOENT),
        ] {
            assert_eq!(EngineError::Change(error).errno(), number, "{error}");
        }
        assert_eq!(EngineError::Stopped("why".into()).errno(), libc::EROFS);
    }
}
