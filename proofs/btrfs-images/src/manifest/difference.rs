//! The differences of two manifests, as lines for people, bounded in number and length.

use std::fmt::{Debug, Display};

use super::lines::{escape, hex};
use super::{Entry, Manifest};

/// The maximum number of lines of a difference, not counting the last line, which gives the number of omitted lines.
pub const MAX_DIFFERENCES: usize = 100;
/// The maximum number of characters of a value in a difference.
const MAX_SHOWN: usize = 200;

impl Manifest {
    /// The differences between this manifest, the expected one, and `found`: a line for each missing or additional
    /// path, and for each differing field. Empty if there are none; otherwise at most [`MAX_DIFFERENCES`] lines and one
    /// with the number of omitted lines.
    pub fn difference(&self, found: &Manifest) -> Vec<String> {
        let mut lines = Vec::new();
        let mut count = 0_usize;
        let mut add = |line: String| {
            count += 1;
            if count <= MAX_DIFFERENCES {
                lines.push(line);
            }
        };
        for (path, expected) in &self.entries {
            match found.entries.get(path) {
                Some(found) if expected == found => {}
                Some(found) => expected.compare(found, |field| add(format!("{}: {field}", name(path)))),
                None => add(format!("{}: missing", name(path))),
            }
        }
        for path in found.entries.keys().filter(|path| !self.entries.contains_key(*path)) {
            add(format!("{}: not expected", name(path)));
        }
        if count > MAX_DIFFERENCES {
            lines.push(format!("and {} more differences", count - MAX_DIFFERENCES));
        }
        lines
    }
}

impl Entry {
    /// Gives a line for each field that differs.
    fn compare(&self, found: &Entry, mut add: impl FnMut(String)) {
        let mut field = |name: &str, expected: String, found: String| {
            if expected != found {
                let (expected, found) = shown(&expected, &found);
                add(format!("{name}: expected {expected}, found {found}"));
            }
        };
        let of = |value: &dyn Display| value.to_string();
        let debug = |value: &dyn Debug| format!("{value:?}");
        field("kind", debug(&self.kind), debug(&found.kind));
        field("mode", format!("{:04o}", self.mode), format!("{:04o}", found.mode));
        field("uid", of(&self.uid), of(&found.uid));
        field("gid", of(&self.gid), of(&found.gid));
        field("nlink", of(&self.nlink), of(&found.nlink));
        field("size", of(&self.size), of(&found.size));
        field("atime", of(&self.atime), of(&found.atime));
        field("mtime", of(&self.mtime), of(&found.mtime));
        field("ctime", of(&self.ctime), of(&found.ctime));
        field("device", debug(&self.device), debug(&found.device));
        let optional = |value: &Option<Vec<u8>>| value.as_ref().map_or("none".to_owned(), |value| name(value));
        field("target", optional(&self.target), optional(&found.target));
        field("same inode as", optional(&self.same_as), optional(&found.same_as));
        let digest = |value: &Option<[u8; 32]>| value.map_or("none".to_owned(), |value| hex(&value));
        field("content", digest(&self.content), digest(&found.content));
        for attribute in self.xattrs.keys().chain(found.xattrs.keys().filter(|key| !self.xattrs.contains_key(*key))) {
            let value = |entry: &Entry| optional(&entry.xattrs.get(attribute).cloned());
            field(&format!("xattr {}", escape(attribute)), value(self), value(found));
        }
    }
}

/// A path or value for people.
fn name(bytes: &[u8]) -> String {
    if bytes.is_empty() { "(empty)".to_owned() } else { escape(bytes) }
}

/// Two values; if they are long, from shortly before their first difference.
fn shown(one: &str, other: &str) -> (String, String) {
    if one.len() <= MAX_SHOWN && other.len() <= MAX_SHOWN {
        return (one.to_owned(), other.to_owned());
    }
    let same = one.bytes().zip(other.bytes()).take_while(|(one, other)| one == other).count();
    let start = same.saturating_sub(20);
    let part = |value: &str| {
        let part: String = value.chars().skip(start).take(MAX_SHOWN).collect();
        format!("{} characters, from {start}: {part}", value.len())
    };
    (part(one), part(other))
}
