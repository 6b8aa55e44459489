//! `sealblock fs mount`: a filesystem that this process reads, as a mount of this machine's kernel.

use sealblock_btrfs::inode::FileKind;
use sealblock_fuse::{Ended, Options, Session};
use sealblock_runtime_reactor::shutdown_signal;
use sealblock_stack::{Cause, StackError};

use super::mounted::Mounted;
use super::place::{resolve, with_filesystem};
use crate::cli::FsMount;
use crate::exit::Exit;
use crate::report::say;

/// Mounts, and serves until somebody unmounts or a signal comes.
pub fn run(arguments: &FsMount) -> Result<Exit, StackError> {
    let place = &arguments.place;
    with_filesystem(place, async |open| {
        let root = resolve(open, place, true).await?;
        let fail = |cause, why: String| StackError::new(cause, "mounting", why).on(arguments.point.display());
        if root.kind != FileKind::Directory {
            return Err(fail(Cause::Usage, format!("{place} is no directory")));
        }
        let mounted = Mounted::new(&open.filesystem, &root).map_err(|error| fail(Cause::Damaged, error.to_string()))?;
        let options = Options { source: place.to_string(), allow_other: arguments.allow_other, ..Options::default() };
        let session = Session::mount(&arguments.point, sealblock_fuse::ReadFs::root(&mounted), &options);
        let session = session.map_err(|error| fail(Cause::Refused, error.to_string()))?;
        say(&format!("{place} is mounted on {}; umount or Ctrl-C ends it", session.point().display()))?;
        let stop = async {
            if let Err(error) = shutdown_signal().await {
                tracing::warn!(%error, "signals do not end the mount; umount does");
                std::future::pending::<()>().await;
            }
        };
        match session.serve(&mounted, stop).await {
            Ok(Ended::Unmounted | Ended::Stopped) => Ok(Exit::Clean),
            Err(error) => Err(fail(Cause::Io, error.to_string())),
        }
    })
}
