//! Filesystems by their names: which targets hold one, which subvolume is meant, and which path in it.
//!
//! ```text
//! name      = target { "+" target } [ ":" [ subvolume ] ] [ "/" path ]
//! ```
//!
//! A path of this machine ends where the longest file or block device ends that there is, so `disk.img/etc/fstab` is a file in an image. Any other target
//! is as much of the text as reads as one, up to a slash; in brackets it ends where they end, which is the only way to name a
//! subvolume, or another device, behind a name with colons or signs of its own. Behind a lone colon the path begins at the first subvolume, with a number
//! between colon and slash at the subvolume that has it, and without a colon at the default subvolume.

use std::ffi::OsStr;
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use futures_util::future::LocalBoxFuture;
use sealblock_block::{Device as _, ErrorKind};
use sealblock_btrfs::{Candidate, CopyFault, Filesystem, FsError, OpenOptions};

use crate::error::{Cause, StackError};
use crate::open::open_bytes;
use crate::opened::OpenTarget;
use crate::opened::held::Access;
use crate::target::{TargetError, TargetName, has_kind};
use crate::whole::ByteView;

/// The most bytes of a name.
pub const MAX_NAME_BYTES: usize = 64 << 10;

/// Where a path begins.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Start {
    /// At the subvolume that is mounted where none is named.
    Default,
    /// At the first subvolume, in which all others lie.
    TopLevel,
    /// At the subvolume with this number.
    Subvolume(u64),
}

/// A filesystem, and a place in it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FilesystemName {
    /// Its devices.
    pub targets: Vec<TargetName>,
    /// Where the path begins.
    pub start: Start,
    /// The path, without a slash before it; empty for the place where it begins.
    pub path: Vec<u8>,
    /// True if a place was named, be it by a slash alone.
    pub has_place: bool,
}

impl FilesystemName {
    /// Reads a name. Which paths are there decides how it is read.
    ///
    /// # Errors
    /// Why it is none.
    pub fn parse(text: &OsStr) -> Result<FilesystemName, String> {
        if text.len() > MAX_NAME_BYTES {
            return Err(format!("the name has {} bytes, more than {MAX_NAME_BYTES}", text.len()));
        }
        let (mut targets, mut rest) = (Vec::new(), text.as_bytes());
        loop {
            let (target, behind) = first_target(rest)?;
            targets.push(target);
            match behind.split_first() {
                Some((b'+', behind)) => rest = behind,
                _ => {
                    rest = behind;
                    break;
                }
            }
        }
        let has_place = !rest.is_empty();
        let (start, path) = match rest.split_first() {
            None => (Start::Default, rest),
            Some((b'/', path)) => (Start::Default, path),
            Some((b':', place)) => start_of(place),
            Some(_) => {
                let rest = String::from_utf8_lossy(rest);
                return Err(format!("a target must be followed by +, : or a path, not by {rest:?}"));
            }
        };
        Ok(FilesystemName { targets, start, path: path.to_vec(), has_place })
    }

    /// The devices alone.
    pub fn devices(&self) -> String {
        self.targets.iter().map(ToString::to_string).collect::<Vec<_>>().join("+")
    }

    /// Opens the devices and the filesystem on them, for reading.
    ///
    /// # Errors
    /// Says what could not be opened and why.
    pub fn open(&self, options: OpenOptions) -> LocalBoxFuture<'_, Result<OpenFilesystem, StackError>> {
        Box::pin(self.open_by(options, open_to_read))
    }

    /// Opens the devices for writing, and the filesystem on them. Nothing of it is written yet. Whether its content can
    /// be written, its engine decides.
    ///
    /// # Errors
    /// Says what could not be opened and why. A device that is mounted or in use is refused, and so are a member of a
    /// mirror or stripe, one that may lack what was written last, and one that is read-only.
    pub fn open_to_write(&self) -> LocalBoxFuture<'_, Result<OpenFilesystem, StackError>> {
        Box::pin(self.open_by(OpenOptions::default(), open_device_to_write))
    }

    async fn open_by(
        &self,
        options: OpenOptions,
        open: fn(&TargetName) -> LocalBoxFuture<'_, Result<OpenTarget, StackError>>,
    ) -> Result<OpenFilesystem, StackError> {
        let (mut opened, mut candidates) = (Vec::new(), Vec::new());
        for target in &self.targets {
            let one = match open(target).await {
                Ok(one) => one,
                Err(error) => return close_all(opened, Err(error)).await,
            };
            candidates.push(Candidate { name: target.to_string(), device: one.device.clone() });
            opened.push(one);
        }
        match Filesystem::open(candidates, options).await {
            Ok(filesystem) => Ok(OpenFilesystem { filesystem, opened }),
            Err(error) => {
                close_all(opened, Err(filesystem_error("open the filesystem on", &error).on(self.devices()))).await
            }
        }
    }
}

impl fmt::Display for FilesystemName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.devices())?;
        match self.start {
            // What lies below a place is not the whole filesystem, and is not called by its name.
            Start::Default if self.has_place && self.path.is_empty() => f.write_str("/")?,
            Start::Default => {}
            Start::TopLevel => f.write_str(":")?,
            Start::Subvolume(id) => write!(f, ":{id}")?,
        }
        if self.path.is_empty() { Ok(()) } else { write!(f, "/{}", String::from_utf8_lossy(&self.path)) }
    }
}

/// An open filesystem and its targets.
pub struct OpenFilesystem {
    /// The filesystem.
    pub filesystem: Filesystem,
    opened: Vec<OpenTarget>,
}

impl OpenFilesystem {
    /// The targets, in the order in which they were named.
    pub fn targets(&self) -> &[OpenTarget] {
        &self.opened
    }

    /// Bytes of payload received from other hosts until now; `None` if all targets are local.
    pub fn received_bytes(&self) -> Option<u64> {
        self.opened.iter().filter_map(OpenTarget::received_bytes).reduce(u64::saturating_add)
    }

    /// Works with the filesystem, then closes the targets.
    ///
    /// # Errors
    /// Those of the work, or why a target could not be closed.
    pub async fn close_after<T>(
        self,
        work: impl AsyncFnOnce(&OpenFilesystem) -> Result<T, StackError>,
    ) -> Result<T, StackError> {
        let result = work(&self).await;
        let OpenFilesystem { filesystem, opened } = self;
        drop(filesystem);
        close_all(opened, result).await
    }
}

fn open_to_read(target: &TargetName) -> LocalBoxFuture<'_, Result<OpenTarget, StackError>> {
    Box::pin(async move { ByteView::open(target, Access::ReadOlder).await.map(|whole| whole.opened) })
}

fn open_device_to_write(target: &TargetName) -> LocalBoxFuture<'_, Result<OpenTarget, StackError>> {
    Box::pin(async move {
        let opened = open_bytes(target, Access::Write).await?;
        if opened.device.abilities().writable {
            return Ok(opened);
        }
        let refused = StackError::new(Cause::Unsuitable, "write to", "it is read-only").on(target);
        opened.close(Err(refused)).await
    })
}

async fn close_all<T>(opened: Vec<OpenTarget>, result: Result<T, StackError>) -> Result<T, StackError> {
    let mut result = result;
    for one in opened {
        result = one.close(result).await;
    }
    result
}

/// A failure of a filesystem while `doing` something.
pub fn filesystem_error(doing: impl Into<String>, error: &FsError) -> StackError {
    let cause = match error {
        error if error.is_damage() => Cause::Damaged,
        FsError::Absent(_) | FsError::Kind(_) => Cause::Absent,
        FsError::Devices(_) => Cause::Usage,
        FsError::WriteFailed(_) => Cause::Io,
        _ => Cause::Unsuitable,
    };
    let failure = StackError::new(cause, doing, error);
    match error {
        FsError::WriteFailed(failed) if failed.copies.iter().any(|copy| has_no_space(&copy.fault)) => {
            failure.advise("free space where the devices of the filesystem have theirs")
        }
        FsError::Lost(_) | FsError::Map(_) | FsError::NoSum { .. } | FsError::SumsLost { .. } => failure.advise("use `sealblock fs rescue`, which copies out the good parts, also from older roots (`sealblock fs info` lists them)"),
        _ => failure,
    }
}

/// True if a copy could not be written because the medium below has no space.
fn has_no_space(fault: &CopyFault) -> bool {
    matches!(fault, CopyFault::Unreadable(error) if matches!(error.kind(), ErrorKind::NoSpace { .. }))
}

/// The target that a text begins with, and what is behind it.
fn first_target(text: &[u8]) -> Result<(TargetName, &[u8]), String> {
    if text.first() == Some(&b'[') {
        let end = bracketed(text).ok_or("unclosed bracket")?;
        let inner = std::str::from_utf8(&text[1..end]).map_err(|_| "a target in brackets is not UTF-8")?;
        return Ok((inner.parse().map_err(|error| format!("{error}"))?, &text[end + 1..]));
    }
    let as_text = std::str::from_utf8(text).unwrap_or_default();
    for (prefix, of_path) in [("file:", TargetName::File as fn(PathBuf) -> TargetName), ("raw:", TargetName::Raw)] {
        if let Some(path) = text.strip_prefix(prefix.as_bytes()) {
            let length = existing(path)?;
            return Ok((of_path(PathBuf::from(OsStr::from_bytes(&path[..length]))), &path[length..]));
        }
    }
    if has_kind(as_text) {
        return longest_target(as_text);
    }
    let length = existing(text)?;
    let path = OsStr::from_bytes(&text[..length]);
    // The name decides whether it is a drive.
    let target = path.to_str().and_then(|path| path.parse().ok()).unwrap_or_else(|| TargetName::File(path.into()));
    Ok((target, &text[length..]))
}

/// As much of a text as reads as a target, up to a slash or its end, of which every file could be there: in `mirror:a,b/etc`, `b/etc` is
/// no second replica that is missing if `b` is a file, or is missing itself.
fn longest_target(text: &str) -> Result<(TargetName, &[u8]), String> {
    let ends = text.match_indices('/').map(|(at, _)| at).chain([text.len()]).rev();
    let (mut longest, mut failure) = (None, None);
    for end in ends {
        match text[..end].parse() {
            Ok(target) if could_be_there(&target) => return Ok((target, &text.as_bytes()[end..])),
            // It fails to open, with its own reason.
            Ok(target) => longest = longest.or(Some((target, &text.as_bytes()[end..]))),
            Err(error) => failure = failure.or(Some(error)),
        }
    }
    let why = || failure.map_or_else(|| "no target".to_owned(), |error: TargetError| error.to_string());
    longest.ok_or_else(why)
}

/// Whether each local part is a file or device, or lies in a folder and is missing.
fn could_be_there(target: &TargetName) -> bool {
    let folder_of = |path: &Path| path.parent().filter(|folder| !folder.as_os_str().is_empty()).map(Path::to_owned);
    target.leaves().into_iter().filter_map(TargetName::path).all(|path| match path.metadata() {
        // A slash at the end says that it is a folder.
        _ if path.as_os_str().as_bytes().ends_with(b"/") => false,
        Ok(there) => !there.is_dir(),
        Err(_) => folder_of(path).is_none_or(|folder| folder.is_dir()),
    })
}

/// The length of the longest part up to a sign between targets, subvolumes and paths that is a file or a block device.
fn existing(text: &[u8]) -> Result<usize, String> {
    let is_sign = |at: &usize| text.get(*at).is_none_or(|byte| matches!(byte, b'/' | b':' | b'+'));
    let is_file =
        |end: &usize| Path::new(OsStr::from_bytes(&text[..*end])).metadata().is_ok_and(|found| !found.is_dir());
    let found = (1..=text.len()).rev().filter(is_sign).find(is_file);
    found.ok_or_else(|| format!("no prefix of {:?} is a file or a block device", String::from_utf8_lossy(text)))
}

/// Where the bracket that a text begins with is closed.
fn bracketed(text: &[u8]) -> Option<usize> {
    let mut open = 0_usize;
    text.iter().position(|byte| {
        match byte {
            b'[' => open += 1,
            b']' => open -= 1,
            _ => {}
        }
        open == 0
    })
}

/// What stands behind a colon.
fn start_of(place: &[u8]) -> (Start, &[u8]) {
    let end = place.iter().position(|byte| *byte == b'/').unwrap_or(place.len());
    let number = std::str::from_utf8(&place[..end]).ok().filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()));
    match number.and_then(|text| text.parse().ok()) {
        Some(id) => (Start::Subvolume(id), place[end..].strip_prefix(b"/").unwrap_or_default()),
        None => (Start::TopLevel, place.strip_prefix(b"/").unwrap_or(place)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<FilesystemName, String> {
        FilesystemName::parse(OsStr::new(text))
    }

    #[test]
    fn a_path_ends_where_the_longest_file_ends() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
        for name in ["a.img", "a.img:b", "c+d"] {
            std::fs::write(folder.path().join(name), b"").unwrap();
        }
        let name = parse(&format!("{}/etc/fstab", at("a.img"))).unwrap();
        assert_eq!((name.targets, name.start), (vec![TargetName::File(at("a.img").into())], Start::Default));
        assert_eq!((&name.path[..], name.has_place), (&b"etc/fstab"[..], true));
        let name = parse(&at("a.img:b")).unwrap();
        assert_eq!((name.targets, name.has_place), (vec![TargetName::File(at("a.img:b").into())], false));
        let name = parse(&format!("{}+{}:home/alice", at("c+d"), at("a.img"))).unwrap();
        assert_eq!((name.targets.len(), name.start, &name.path[..]), (2, Start::TopLevel, &b"home/alice"[..]));
        let name = parse(&format!("raw:{}:257/x", at("a.img"))).unwrap();
        assert_eq!(name.targets, [TargetName::Raw(at("a.img").into())]);
        assert_eq!((name.start, &name.path[..]), (Start::Subvolume(257), &b"x"[..]));
        assert_eq!(parse(&format!("{}:", at("a.img"))).unwrap().start, Start::TopLevel);
        assert!(parse(&at("b.img")).unwrap_err().contains("no prefix of"));
        assert!(parse(folder.path().to_str().unwrap()).is_err(), "a folder is no image");
        assert!(parse(&format!("[raw:{}]x", at("a.img"))).unwrap_err().contains("followed by"));
    }

    #[test]
    fn other_targets_end_at_a_slash_or_with_their_brackets() {
        let uri = "nvme+tcp://host/nqn.2014-08.org:disk";
        let name = parse(uri).unwrap();
        assert_eq!((name.targets, name.has_place), (vec![uri.parse().unwrap()], false));
        let name = parse(&format!("{uri}/1/etc/fstab")).unwrap();
        assert_eq!((name.targets, &name.path[..]), (vec![format!("{uri}/1").parse().unwrap()], &b"etc/fstab"[..]));
        let name = parse(&format!("[{uri}]+[{uri}2]:home")).unwrap();
        assert_eq!((name.targets.len(), name.start, &name.path[..]), (2, Start::TopLevel, &b"home"[..]));
        let name = parse("[mirror:[offset:0..9,mem:1MiB],mem:1MiB]/x").unwrap();
        assert_eq!((name.targets.len(), &name.path[..]), (1, &b"x"[..]));
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
        std::fs::write(at("a"), b"").unwrap();
        let mirror = format!("mirror:{},{}", at("a"), at("b"));
        for is_there in [false, true] {
            for path in ["", "/", "/etc/fstab", "//etc//fstab"] {
                let name = parse(&format!("{mirror}{path}")).unwrap();
                assert_eq!(name.targets, [mirror.parse().unwrap()], "b is there: {is_there}");
                assert_eq!(name.path, path.strip_prefix('/').unwrap_or_default().as_bytes());
            }
            std::fs::write(at("b"), b"").unwrap();
        }
        for bad in ["[mem:1MiB", "nvme+tcp://", "", "+", "mem:"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn bytes_that_are_no_text_are_a_path() {
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("image");
        std::fs::write(&image, b"").unwrap();
        let text = [image.as_os_str().as_bytes(), b"/\xff\xfe"].concat();
        assert_eq!(FilesystemName::parse(OsStr::from_bytes(&text)).unwrap().path, b"\xff\xfe");
    }
}
