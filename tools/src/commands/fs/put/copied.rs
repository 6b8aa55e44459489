//! What `fs put` copied, and what it lost on the way.

use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use serde::Serialize;

use super::super::place::printable;
use super::super::write::Done;
use crate::exit::Exit;

/// Losses that are listed; all are counted.
const MAX_LISTED: usize = 10_000;

/// What was copied, in JSON.
#[derive(Default, Serialize)]
pub(super) struct Copied {
    pub(super) to: String,
    /// Without directories.
    pub(super) files: u64,
    /// Of file data.
    pub(super) bytes: u64,
    pub(super) lost: Vec<Lost>,
    pub(super) lost_unlisted: u64,
    /// Extended attributes that could not be copied.
    pub(super) not_set: u64,
}

/// A file that was not copied, in JSON.
#[derive(Serialize)]
pub(super) struct Lost {
    pub(super) path: String,
    pub(super) why: String,
}

impl Copied {
    pub(super) fn lose(&mut self, path: &Path, why: impl ToString) {
        let lost = Lost { path: printable(path.as_os_str().as_bytes()), why: why.to_string() };
        match self.lost.len() < MAX_LISTED {
            true => self.lost.push(lost),
            false => self.lost_unlisted += 1,
        }
    }
}

impl Done for Copied {
    fn exit(&self) -> Exit {
        if self.lost.is_empty() { Exit::Clean } else { Exit::DamageFound }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn losses_beyond_the_limit_are_counted() {
        let mut copied = Copied::default();
        assert_eq!(copied.exit(), Exit::Clean);
        (0..MAX_LISTED + 2).for_each(|_| copied.lose(Path::new("a"), "why"));
        assert_eq!((copied.lost.len(), copied.lost_unlisted, copied.exit()), (MAX_LISTED, 2, Exit::DamageFound));
    }
}
