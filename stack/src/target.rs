//! Target names: one syntax for everything a command can work on.
//!
//! ```text
//! target    = "[" target "]" | kind
//! kind      = path | "file:" path | "raw:" path | "mem:" size ["?preallocate"] | "null:" size
//!           | drive ["?pract=0" | "?pract=1"]
//!           | "nvme+tcp://" host [":" port] "/" nqn ["/" nsid] ["?" option "&" option ...]
//!           | "nbd://" host [":" port] ["/" export] ["?connections=" number]
//!           | "nbd+unix:///" [export] "?socket=" path ["&connections=" number]
//!           | ("mirror:" | "stripe" ["-" size] ["-nolabel"] ":" | "multipath:") target "," target ...
//!           | "offset:" range "," target
//!           | "fault:" "[" rules "]" "," target
//! ```
//!
//! A drive is a path of the form `/dev/nvmeXnY`, `/dev/ngXnY` or, without an option, `/dev/sdX` or `/dev/sgX`. A path that links to one,
//! as those in `/dev/disk/by-id` do, is a path, and opens as the drive.
//!
//! The commas of a group count outside of brackets only, so a member with commas of its own needs brackets. What an
//! offset or a fault works on is all that follows its comma. A bare path may not look like another kind, begin with a
//! bracket, or be `-`; `file:` and `raw:` take any. In the two URI forms, `%` and two digits stand for a byte.
//!
//! Names are untrusted input: parsing bounds length, depth and members, has no side effects, and does not panic. A
//! target prints in a form that reads back as the same target.

mod address;
mod error;
mod options;
mod parse;
mod piece;
#[cfg(test)]
mod tests;
mod uri;

use std::fmt;
use std::num::{NonZeroU16, NonZeroU32};
use std::path::{Path, PathBuf};
use std::slice;

use sealblock_block::MemberPath;
use sealblock_media_linux::NodeKind;
use sealblock_units::ByteCount;

pub use address::{Address, Host, NBD_PORT, NVME_TCP_PORT, NbdAddress};
pub use error::{MAX_DEPTH, MAX_MEMBERS, MAX_TEXT_BYTES, TargetError, TargetErrorKind};
pub use options::RemoteOptions;
pub(crate) use parse::has_kind;
pub use piece::encode;

use crate::quantity::exact;
use crate::range::BlockRange;

/// What a command works on.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum TargetName {
    /// A protected volume, or a block device. A plain file only where bytes are copied or compared.
    File(PathBuf),
    /// The bytes of a plain file or block device as blocks, without seals. Never a volume, nor what is left of one.
    Raw(PathBuf),
    /// A device of the operating system that may take offloaded work: `/dev/nvmeXnY`, `/dev/ngXnY`, `/dev/sdX`, `/dev/sgX`.
    Linux {
        /// Its node.
        path: PathBuf,
        /// `pract`: whether an NVMe drive makes and checks tags (1) or they travel with the data (0).
        drive_makes_tags: Option<bool>,
    },
    /// Memory.
    Memory {
        /// Its size, in bytes. Never zero.
        size: ByteCount,
        /// `preallocate`: all of it is taken when it is opened, not when it is written.
        preallocate: bool,
    },
    /// A device of this size, in bytes, that stores nothing. Never zero.
    Null(ByteCount),
    /// A namespace over NVMe/TCP.
    NvmeTcp {
        /// Where its controller listens; port 4420 unless given.
        address: Address,
        /// NVMe Qualified Name of its subsystem: at most 223 bytes, beginning with `nqn.`.
        nqn: String,
        /// Which namespace of the subsystem; its only one unless given. Never the broadcast identifier.
        nsid: Option<NonZeroU32>,
        /// How the connection is made and used.
        options: RemoteOptions,
    },
    /// An export of an NBD server.
    Nbd {
        /// Where the server listens; port 10809 unless given.
        address: NbdAddress,
        /// Name of the export, possibly empty: the server's default. At most 4096 bytes.
        export: String,
        /// `connections`: how many to use where the server allows several; one unless given.
        connections: Option<NonZeroU16>,
    },
    /// One device made of several.
    Group {
        /// How they are joined.
        kind: GroupKind,
        /// The devices, at least two and at most [`MAX_MEMBERS`].
        members: Vec<TargetName>,
    },
    /// A slice of another target.
    Offset {
        /// Which blocks of it.
        range: BlockRange,
        /// The whole.
        target: Box<TargetName>,
    },
    /// A target that fails on purpose.
    Fault {
        /// When and how, in the words of the fault layer. Not empty; its brackets are in pairs.
        rules: String,
        /// What it fails in front of.
        target: Box<TargetName>,
    },
}

/// How the members of a group make one device.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum GroupKind {
    /// Each replica has all blocks.
    Mirror,
    /// Chunks are distributed over the members.
    Stripe {
        /// Bytes of a chunk, if given. Never zero.
        chunk: Option<ByteCount>,
        /// True if the members have labels with their order and chunk size.
        labelled: bool,
    },
    /// Each member is a path to the same device.
    Multipath,
}

impl GroupKind {
    /// The word in front of the colon.
    pub const fn name(self) -> &'static str {
        match self {
            GroupKind::Mirror => "mirror",
            GroupKind::Stripe { .. } => "stripe",
            GroupKind::Multipath => "multipath",
        }
    }
}

impl TargetName {
    /// Which blocks of its devices it has, and in which order, in words that name no device; `None` if all of a single one, or if labels
    /// on the devices tell it.
    pub fn arrangement(&self) -> Option<String> {
        match self {
            TargetName::Offset { range, target } => {
                Some(format!("offset {range} {}", target.arrangement().unwrap_or_default()))
            }
            TargetName::Group { kind: GroupKind::Stripe { chunk, labelled: false }, members } => {
                let members: Vec<_> = members.iter().map(|member| member.arrangement().unwrap_or_default()).collect();
                Some(format!("stripe {} {}", chunk.map_or(0, ByteCount::get), members.join(",")))
            }
            TargetName::Group { kind: GroupKind::Multipath, members } => members.first()?.arrangement(),
            TargetName::Fault { target, .. } => target.arrangement(),
            _ => None,
        }
    }

    /// True if nothing of it is left when the command ends: it is memory, or stores nothing.
    pub fn is_fleeting(&self) -> bool {
        match self {
            TargetName::Memory { .. } | TargetName::Null(_) => true,
            TargetName::Group { members, .. } => members.iter().all(TargetName::is_fleeting),
            TargetName::Offset { target, .. } | TargetName::Fault { target, .. } => target.is_fleeting(),
            TargetName::File(_)
            | TargetName::Raw(_)
            | TargetName::Linux { .. }
            | TargetName::NvmeTcp { .. }
            | TargetName::Nbd { .. } => false,
        }
    }

    /// True if any of its content is in memory, and so lost when it is closed.
    pub fn is_volatile(&self) -> bool {
        self.leaves().into_iter().any(|leaf| matches!(leaf, TargetName::Memory { .. }))
    }

    /// The target of a member of nested groups: the innermost one that is known. `None` without a group.
    pub fn member(&self, member: MemberPath) -> Option<&TargetName> {
        match self {
            // All its paths lead to the same device: no path is a bad member.
            TargetName::Group { kind: GroupKind::Multipath, members } => members.first()?.member(member),
            TargetName::Group { members, .. } => {
                let (number, within) = member.outermost()?;
                let target = members.get(number)?;
                Some(target.member(within).unwrap_or(target))
            }
            other => other.inner().first()?.member(member),
        }
    }

    /// The targets that it is made of; none for one that is not made of others.
    pub fn inner(&self) -> &[TargetName] {
        match self {
            TargetName::Group { members, .. } => members,
            TargetName::Offset { target, .. } | TargetName::Fault { target, .. } => slice::from_ref(target),
            TargetName::File(_)
            | TargetName::Raw(_)
            | TargetName::Linux { .. }
            | TargetName::Memory { .. }
            | TargetName::Null(_)
            | TargetName::NvmeTcp { .. }
            | TargetName::Nbd { .. } => &[],
        }
    }

    /// The targets that are made of no others, in order: itself, or those at the ends of what it is made of.
    pub fn leaves(&self) -> Vec<&TargetName> {
        match self.inner() {
            [] => vec![self],
            inner => inner.iter().flat_map(TargetName::leaves).collect(),
        }
    }

    /// The same target, which goes without labels where it is a stripe.
    pub fn without_label(self) -> TargetName {
        match self {
            TargetName::Group { kind: GroupKind::Stripe { chunk, .. }, members } => {
                TargetName::Group { kind: GroupKind::Stripe { chunk, labelled: false }, members }
            }
            other => other,
        }
    }

    /// The paths of all files and devices that it is made of.
    pub fn paths(&self) -> Vec<&Path> {
        self.leaves().into_iter().filter_map(TargetName::path).collect()
    }

    /// The same target, whose relative paths begin at this folder.
    #[must_use]
    pub fn relative_to(self, folder: &Path) -> TargetName {
        let below = |target: Box<TargetName>| Box::new(target.relative_to(folder));
        match self {
            TargetName::File(path) => TargetName::File(folder.join(path)),
            TargetName::Raw(path) => TargetName::Raw(folder.join(path)),
            TargetName::Linux { path, drive_makes_tags } => {
                TargetName::Linux { path: folder.join(path), drive_makes_tags }
            }
            TargetName::Group { kind, members } => TargetName::Group {
                kind,
                members: members.into_iter().map(|member| member.relative_to(folder)).collect(),
            },
            TargetName::Offset { range, target } => TargetName::Offset { range, target: below(target) },
            TargetName::Fault { rules, target } => TargetName::Fault { rules, target: below(target) },
            TargetName::Nbd { address: NbdAddress::Unix(path), export, connections } => {
                TargetName::Nbd { address: NbdAddress::Unix(folder.join(path)), export, connections }
            }
            other @ (TargetName::Memory { .. }
            | TargetName::Null(_)
            | TargetName::NvmeTcp { .. }
            | TargetName::Nbd { .. }) => other,
        }
    }

    /// The path of a file, block device or Linux device; nothing for a target that has none.
    pub fn path(&self) -> Option<&Path> {
        match self {
            TargetName::File(path) | TargetName::Raw(path) | TargetName::Linux { path, .. } => Some(path),
            _ => None,
        }
    }
}

impl fmt::Display for TargetName {
    /// A form that reads back as the same target.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TargetName::File(path) => {
                let path = path.to_string_lossy();
                let prefix = if is_bare_path(&path) { "" } else { "file:" };
                write!(f, "{prefix}{path}")
            }
            TargetName::Raw(path) => write!(f, "raw:{}", path.display()),
            TargetName::Linux { path, drive_makes_tags } => {
                write!(f, "{}", path.display())?;
                drive_makes_tags.map_or(Ok(()), |makes| write!(f, "?pract={}", u8::from(makes)))
            }
            TargetName::Memory { size, preallocate } => {
                write!(f, "mem:{}{}", exact(*size), if *preallocate { "?preallocate" } else { "" })
            }
            TargetName::Null(size) => write!(f, "null:{}", exact(*size)),
            TargetName::NvmeTcp { address, nqn, nsid, options } => {
                write!(f, "nvme+tcp://{address}/{}", encode(nqn, ":"))?;
                nsid.map_or(Ok(()), |nsid| write!(f, "/{nsid}"))?;
                options.fmt(f)
            }
            TargetName::Nbd { address, export, connections } => {
                f.write_str(&address.uri(export))?;
                let mark = if matches!(address, NbdAddress::Tcp(_)) { '?' } else { '&' };
                connections.map_or(Ok(()), |connections| write!(f, "{mark}connections={connections}"))
            }
            TargetName::Group { kind, members } => {
                match kind {
                    GroupKind::Stripe { chunk, labelled } => {
                        chunk.map_or(Ok(()), |chunk| write!(f, "stripe-{}", exact(chunk)))?;
                        write!(f, "{}", if chunk.is_none() { "stripe" } else { "" })?;
                        write!(f, "{}:", if *labelled { "" } else { "-nolabel" })?;
                    }
                    _ => write!(f, "{}:", kind.name())?,
                }
                members.iter().enumerate().try_for_each(|(at, member)| write_member(f, at, member))
            }
            TargetName::Offset { range, target } => write!(f, "offset:{range},{target}"),
            TargetName::Fault { rules, target } => write!(f, "fault:[{rules}],{target}"),
        }
    }
}

/// A member of a group, in brackets if it has commas of its own.
fn write_member(f: &mut fmt::Formatter<'_>, at: usize, member: &TargetName) -> fmt::Result {
    let (comma, member) = (if at == 0 { "" } else { "," }, member.to_string());
    if member.contains(',') { write!(f, "{comma}[{member}]") } else { write!(f, "{comma}{member}") }
}

/// Whether a path needs no `file:` to be read as the path of a file.
fn is_bare_path(text: &str) -> bool {
    !text.is_empty()
        && text != "-"
        && !text.starts_with('[')
        && scheme(text).is_none()
        && !is_linux_device(text)
        && !has_drive_options(text)
}

/// A word with a colon in front of everything else, as only kinds of targets have.
fn scheme(text: &str) -> Option<&str> {
    let (word, _) = text.split_once(':')?;
    let fits = |c: char| c.is_ascii_alphanumeric() || "+-.".contains(c);
    (word.starts_with(|c: char| c.is_ascii_alphabetic()) && word.chars().all(fits)).then(|| &text[..=word.len()])
}

/// True if the path is `/dev/nvmeXnY`, `/dev/ngXnY`, `/dev/sdX` or `/dev/sgX`: a Linux device that may take offloaded work.
///
/// Judged by name: the open finds out whether it exists and what it can do. Partitions are ordinary block devices, since
/// the kernel takes no passthrough commands through them.
fn is_linux_device(path: &str) -> bool {
    let name = path.strip_prefix("/dev/").filter(|name| !name.contains('/'));
    name.is_some_and(|name| NodeKind::of(Path::new(name)) != NodeKind::Other)
}

/// True if a text begins as a drive with options does.
fn has_drive_options(text: &str) -> bool {
    text.split_once('?').is_some_and(|(path, _)| is_linux_device(path))
}
