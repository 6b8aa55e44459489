//! Watches the files under served targets: logs when a file is deleted, renamed, replaced or truncated, and when that is undone.

use std::io;
use std::thread;
use std::time::Duration;

use sealblock_media_file::{Backing, BackingError, open_files};

/// How often files are looked at.
const EVERY: Duration = Duration::from_secs(1);

/// Looks after the files that this process has open, until it ends. On a thread of its own: a file system may be long in answering.
///
/// # Errors
/// When the system has no thread for it.
pub fn watch() -> io::Result<()> {
    let check = || loop {
        thread::sleep(EVERY);
        for backing in open_files() {
            if let Some(news) = backing.check() {
                report(&backing, news);
            }
        }
    };
    thread::Builder::new().name("backing".to_owned()).spawn(check).map(drop)
}

fn report(backing: &Backing, news: Option<BackingError>) {
    let file = backing.path().display();
    match news {
        Some(BackingError::Gone) => tracing::error!(%file, "the file in use was deleted or renamed"),
        Some(BackingError::Replaced) => {
            tracing::error!(%file, "the file in use was replaced by another file")
        }
        Some(BackingError::CutOff { left_bytes, length_bytes }) => {
            tracing::error!(%file, left_bytes, length_bytes, "the file in use was truncated");
        }
        None => tracing::warn!(%file, "the file is back"),
    }
}
