//! Failures of the engine as errors for programs.

use sealblock_btrfs_engine::engine::EngineError;
use sealblock_fuse::FsError;

/// A change that is refused with an error number of Linux.
pub(super) fn refused(errno: i32, why: impl Into<String>) -> FsError {
    FsError::Refused { errno, why: why.into() }
}

/// A failure of an operation.
pub(super) fn to_fuse_error(error: EngineError) -> FsError {
    match error.errno() {
        libc::ENOENT => FsError::NotFound,
        libc::EEXIST => FsError::Exists,
        libc::ENODATA => FsError::NoAttribute,
        libc::EISDIR => FsError::IsADirectory,
        libc::ENOTDIR => FsError::NotADirectory,
        // Its text says what is damaged; a program gets EIO for both.
        libc::EUCLEAN | libc::EIO => FsError::Damaged(error.to_string()),
        errno => refused(errno, error.to_string()),
    }
}

/// A failure of a write, or of making something durable: the program relied on it. The engine reports once why nothing is
/// written any more.
pub(super) fn to_write_error(error: EngineError) -> FsError {
    match error {
        EngineError::Stopped(why) => refused(libc::EIO, &*why),
        error => to_fuse_error(error),
    }
}

#[cfg(test)]
mod tests {
    use sealblock_btrfs_engine::plan::PlanError;
    use sealblock_btrfs_engine::space::{SpaceError, Use};
    use sealblock_btrfs_engine::transaction::ChangeError;

    use super::*;

    #[test]
    fn programs_get_the_numbers_that_they_expect() {
        let of = |error| to_fuse_error(EngineError::Change(error));
        let errno = |error| match error {
            FsError::Refused { errno, .. } => errno,
            other => panic!("{other}"),
        };
        assert_eq!(of(ChangeError::Plan(PlanError::NotFound)), FsError::NotFound);
        assert_eq!(of(ChangeError::Plan(PlanError::Exists)), FsError::Exists);
        assert!(matches!(of(ChangeError::Space(SpaceError::NoGroup(1))), FsError::Damaged(_)));
        assert_eq!(errno(of(ChangeError::Space(SpaceError::Full(Use::Data)))), libc::ENOSPC);
        assert_eq!(errno(of(ChangeError::Plan(PlanError::NotEmpty))), libc::ENOTEMPTY);
        assert_eq!(errno(of(ChangeError::Plan(PlanError::IsSubvolume(257)))), libc::EXDEV);
        assert_eq!(errno(of(ChangeError::Plan(PlanError::TooManyLinks))), libc::EMLINK);
        assert_eq!(of(ChangeError::Plan(PlanError::NoAttribute)), FsError::NoAttribute);
        let stopped = || EngineError::Stopped("why".into());
        assert_eq!(errno(to_fuse_error(stopped())), libc::EROFS);
        assert_eq!(errno(to_write_error(stopped())), libc::EIO);
    }
}
