//! `sealblock fs ls`: lists a directory.

use std::fmt::Write as _;
use std::io::{self, BufWriter, Write};

use sealblock_btrfs::Filesystem;
use sealblock_btrfs::inode::{FileKind, Inode, Xattr};
use sealblock_btrfs::walk::{Met, Visit, Walk};
use sealblock_btrfs_format::items::inode::Timespec;
use sealblock_server::dates::moment;
use sealblock_stack::StackError;
use sealblock_stack::filesystem::filesystem_error;
use serde::Serialize;

use super::place::{printable, resolve, why_older, with_filesystem};
use crate::cli::FsLs;
use crate::exit::Exit;
use crate::report::{note, output_error};

/// An entry in JSON.
#[derive(Serialize)]
struct Entry {
    path: String,
    /// The path in hexadecimal digits, where it is no UTF-8.
    #[serde(skip_serializing_if = "Option::is_none")]
    path_bytes: Option<String>,
    #[serde(rename = "type")]
    kind: &'static str,
    #[serde(flatten)]
    inode: Option<Stat>,
    #[serde(skip_serializing_if = "Option::is_none")]
    link: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    xattrs: Option<Vec<NamedValue>>,
}

/// The fields of stat(2).
#[derive(Serialize)]
struct Stat {
    subvolume: u64,
    ino: u64,
    mode: u32,
    nlink: u32,
    uid: u32,
    gid: u32,
    size: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    major: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    minor: Option<u64>,
    atime: Time,
    mtime: Time,
    ctime: Time,
    btime: Time,
}

/// Seconds since 1970 and nanoseconds.
#[derive(Serialize)]
struct Time {
    s: i64,
    ns: u32,
}

/// An attribute; its value in hexadecimal digits.
#[derive(Serialize)]
struct NamedValue {
    name: String,
    value: String,
}

impl From<Timespec> for Time {
    fn from(time: Timespec) -> Time {
        Time { s: time.seconds.get(), ns: time.nanoseconds.get() }
    }
}

/// Lists.
pub fn run(arguments: &FsLs) -> Result<Exit, StackError> {
    let place = &arguments.place;
    with_filesystem(place, async |open| {
        let start = resolve(open, place, false).await?;
        let is_directory = start.kind == FileKind::Directory;
        let may_be_older = why_older(open).map(|older| older.name);
        let out = BufWriter::new(io::stdout());
        let mut listing = Listing { arguments, out, entries: 0, lost: Vec::new(), may_be_older };
        listing.begin()?;
        let mut walk = Walk::new(&open.filesystem, start, arguments.recursive);
        while let Some(visit) = walk.next().await {
            // A directory is not in its own list.
            if visit.path.is_empty() && is_directory && matches!(visit.met, Met::Inode(_)) {
                continue;
            }
            listing.add(&open.filesystem, visit).await?;
        }
        listing.end()
    })
}

struct Listing<'a> {
    arguments: &'a FsLs,
    out: BufWriter<io::Stdout>,
    entries: u64,
    /// What is lost, as many as are listed.
    lost: Vec<String>,
    may_be_older: Option<&'static str>,
}

/// Losses that a JSON object lists; all are on standard error otherwise.
const MAX_LISTED: usize = 10_000;

impl Listing<'_> {
    fn begin(&mut self) -> Result<(), StackError> {
        if self.arguments.json {
            let target = serde_json::to_string(&self.arguments.place.to_string()).unwrap_or_default();
            write!(self.out, "{{\"target\":{target},\"entries\":[").or_else(written)?;
        }
        Ok(())
    }

    async fn add(&mut self, filesystem: &Filesystem, visit: Visit) -> Result<(), StackError> {
        let place = &self.arguments.place;
        let inode = match visit.met {
            Met::Inode(inode) => Some(inode),
            Met::EmptyDirectory { .. } => None,
            Met::Lost(error) => return self.lost(&visit.path, &error.to_string()),
            Met::BadName(error) => return self.lost(&visit.path, &error.to_string()),
        };
        let path = if visit.path.is_empty() { place.path.clone() } else { visit.path };
        let details = self.arguments.long || self.arguments.json;
        let link = match inode.filter(|inode| details && inode.kind == FileKind::Symlink) {
            Some(inode) => match filesystem.read_link(&inode).await {
                Ok(link) => Some(link),
                Err(error) => {
                    self.lost(&path, &error.to_string())?;
                    None
                }
            },
            None => None,
        };
        if self.arguments.json {
            let xattrs = match inode.filter(|_| self.arguments.long) {
                Some(inode) => filesystem.xattrs(&inode).await.map(Some),
                None => Ok(None),
            };
            let xattrs = xattrs.map_err(|error| filesystem_error("read attributes", &error).on(place))?;
            let comma = if self.entries > 0 { "," } else { "" };
            let entry = serde_json::to_string(&entry(&path, inode.as_ref(), link, xattrs));
            let entry = entry.map_err(|error| output_error(&error.into()))?;
            write!(self.out, "{comma}{entry}").or_else(written)?;
        } else {
            let mut line = String::new();
            if self.arguments.long {
                line = long(inode.as_ref());
            }
            line.push_str(&printable(&path));
            if let Some(link) = link {
                let _ = write!(line, " -> {}", printable(&link));
            }
            writeln!(self.out, "{line}").or_else(written)?;
        }
        self.entries += 1;
        Ok(())
    }

    fn lost(&mut self, path: &[u8], why: &str) -> Result<(), StackError> {
        let line = format!("/{}: {why}", printable(path));
        if !self.arguments.json {
            self.out.flush().or_else(written)?;
            note(&format_args!("{}: {line}", self.arguments.place));
        }
        if self.lost.len() < MAX_LISTED {
            self.lost.push(line);
        }
        Ok(())
    }

    fn end(mut self) -> Result<Exit, StackError> {
        if self.arguments.json {
            let lost = serde_json::to_string(&self.lost).unwrap_or_default();
            let older = serde_json::to_string(&self.may_be_older).unwrap_or_default();
            writeln!(self.out, "],\"lost\":{lost},\"may_be_older\":{older}}}").or_else(written)?;
        }
        self.out.flush().or_else(written)?;
        Ok(if self.lost.is_empty() { Exit::Clean } else { Exit::DamageFound })
    }
}

/// A reader that has gone ends the command without a word.
fn written(error: io::Error) -> Result<(), StackError> {
    match error.kind() {
        io::ErrorKind::BrokenPipe => {
            Err(StackError::new(sealblock_stack::Cause::Unread, "print", "the reader is gone"))
        }
        _ => Err(output_error(&error)),
    }
}

fn kind_name(kind: FileKind) -> &'static str {
    match kind {
        FileKind::Regular => "file",
        FileKind::Directory => "directory",
        FileKind::Symlink => "symlink",
        FileKind::CharDevice => "char device",
        FileKind::BlockDevice => "block device",
        FileKind::Fifo => "fifo",
        FileKind::Socket => "socket",
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn entry(path: &[u8], inode: Option<&Inode>, link: Option<Vec<u8>>, xattrs: Option<Vec<Xattr>>) -> Entry {
    let stat = |inode: &Inode| {
        let (major, minor) = inode.device_numbers().unzip();
        Stat {
            subvolume: inode.tree.id,
            ino: inode.ino,
            mode: inode.item.mode.get(),
            nlink: inode.item.nlink.get(),
            uid: inode.item.uid.get(),
            gid: inode.item.gid.get(),
            size: inode.size(),
            major,
            minor,
            atime: inode.item.atime.into(),
            mtime: inode.item.mtime.into(),
            ctime: inode.item.ctime.into(),
            btime: inode.item.otime.into(),
        }
    };
    let named =
        |one: Xattr| NamedValue { name: String::from_utf8_lossy(&one.name).into_owned(), value: hex(&one.value) };
    Entry {
        path: String::from_utf8_lossy(path).into_owned(),
        path_bytes: std::str::from_utf8(path).is_err().then(|| hex(path)),
        kind: inode.map_or("directory", |inode| kind_name(inode.kind)),
        inode: inode.map(stat),
        link: link.map(|link| String::from_utf8_lossy(&link).into_owned()),
        xattrs: xattrs.map(|all| all.into_iter().map(named).collect()),
    }
}

/// The columns before the name.
fn long(inode: Option<&Inode>) -> String {
    let Some(inode) = inode else {
        return format!("{:<10} {:>3} {:>5} {:>5} {:>12} {:<20} ", "d?????????", "?", "?", "?", "?", "elsewhere");
    };
    let item = &inode.item;
    let size = match inode.device_numbers() {
        Some((major, minor)) => format!("{major}, {minor}"),
        None => inode.size().to_string(),
    };
    let (mode, time) = (permissions(inode.kind, item.mode.get()), moment(item.mtime.seconds.get()));
    format!("{mode} {:>3} {:>5} {:>5} {size:>12} {time} ", item.nlink, item.uid, item.gid)
}

/// As `ls -l` shows a mode.
fn permissions(kind: FileKind, mode: u32) -> String {
    let kind = match kind {
        FileKind::Regular => '-',
        FileKind::Directory => 'd',
        FileKind::Symlink => 'l',
        FileKind::CharDevice => 'c',
        FileKind::BlockDevice => 'b',
        FileKind::Fifo => 'p',
        FileKind::Socket => 's',
    };
    let mut text = String::from(kind);
    for (shift, special, letter) in [(6, 0o4000, 's'), (3, 0o2000, 's'), (0, 0o1000, 't')] {
        let bits = mode >> shift;
        text.push(if bits & 4 != 0 { 'r' } else { '-' });
        text.push(if bits & 2 != 0 { 'w' } else { '-' });
        text.push(match (mode & special != 0, bits & 1 != 0) {
            (true, true) => letter,
            (true, false) => letter.to_ascii_uppercase(),
            (false, true) => 'x',
            (false, false) => '-',
        });
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_are_shown_as_ls_does() {
        assert_eq!(permissions(FileKind::Regular, 0o100_644), "-rw-r--r--");
        assert_eq!(permissions(FileKind::Directory, 0o041_777), "drwxrwxrwt");
        assert_eq!(permissions(FileKind::Regular, 0o104_711), "-rws--x--x");
        assert_eq!(permissions(FileKind::Regular, 0o7000), "---S--S--T");
    }
}
