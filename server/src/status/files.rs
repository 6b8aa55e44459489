//! Files that were deleted, renamed, replaced or truncated while the process has them open.

use sealblock_media_file::{Backing, BackingError};
use sealblock_units::ByteCount;
use serde::{Deserialize, Serialize};

use super::health::Health;

/// What happened to a file that the server has open.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct FileError {
    /// The file.
    pub path: String,
    /// `gone`, `replaced` or `cut_off`.
    pub error: String,
    /// The remaining bytes of a truncated file.
    pub left_bytes: Option<u64>,
    /// Its previous length in bytes.
    pub length_bytes: Option<u64>,
}

impl FileError {
    /// The error found by the last check of a file.
    pub fn of(backing: &Backing) -> Option<FileError> {
        let (error, lengths) = match backing.error()? {
            BackingError::Gone => ("gone", None),
            BackingError::Replaced => ("replaced", None),
            BackingError::CutOff { left_bytes, length_bytes } => ("cut_off", Some((left_bytes, length_bytes))),
        };
        let (left_bytes, length_bytes) = lengths.unzip();
        let path = backing.path().display().to_string();
        Some(FileError { path, error: error.to_owned(), left_bytes, length_bytes })
    }

    /// The error as text.
    pub fn to_text(&self) -> String {
        let FileError { path, error, left_bytes, length_bytes } = self;
        match (left_bytes.zip(*length_bytes), error.as_str()) {
            (Some((left, length)), _) => {
                format!("{path} was truncated to {} of {}", ByteCount::new(left), ByteCount::new(length))
            }
            (None, "replaced") => format!("{path} was replaced: the file in use has no other name"),
            (None, _) => format!("{path} was deleted or renamed while in use"),
        }
    }

    /// The health of the data in the file: a truncated file has lost data; a deleted or replaced file is lost when the
    /// server exits.
    pub fn health(&self) -> Health {
        if self.left_bytes.is_some() { Health::Damaged } else { Health::Degraded }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_lost_bytes_is_damage_and_one_without_a_name_is_none() {
        let of = |error: &str, left_bytes: Option<u64>| {
            let (path, length_bytes) = ("/d/v".to_owned(), left_bytes.map(|_| 4096));
            let file = FileError { path, error: error.to_owned(), left_bytes, length_bytes };
            (file.to_text(), file.health())
        };
        assert_eq!(of("cut_off", Some(0)), ("/d/v was truncated to 0 B of 4 KiB".to_owned(), Health::Damaged));
        assert_eq!(of("gone", None), ("/d/v was deleted or renamed while in use".to_owned(), Health::Degraded));
        assert!(of("replaced", None).0.starts_with("/d/v was replaced"));
    }
}
