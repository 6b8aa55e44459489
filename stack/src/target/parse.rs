//! From text to [`TargetName`].
//!
//! Recursive descent over pieces of the text that know where they begin. Each level of nesting reads its piece a fixed
//! number of times and depth is bounded, so the time is linear in the length.

use std::path::PathBuf;
use std::str::FromStr;

use sealblock_units::ByteCount;

use super::error::{MAX_DEPTH, MAX_MEMBERS, MAX_TEXT_BYTES, TargetError, TargetErrorKind};
use super::piece::{Fail, Piece, located};
use super::uri;
use super::{GroupKind, TargetName, has_drive_options, is_linux_device, scheme};

/// What reads the rest of a piece behind its prefix. The number is the depth of the target.
type Reader = fn(Piece<'_>, usize) -> Result<TargetName, Fail>;

const KINDS: &[(&str, Reader)] = &[
    ("file:", |rest, _| path(rest).map(TargetName::File)),
    ("raw:", |rest, _| path(rest).map(TargetName::Raw)),
    ("mem:", |rest, _| memory(rest)),
    ("null:", |rest, _| size(rest).map(TargetName::Null)),
    ("nvme+tcp://", |rest, _| uri::nvme_tcp(rest)),
    ("nvme+tcp:", |rest, _| rest.fail(TargetErrorKind::Slashes("nvme+tcp:"))),
    ("nbd://", |rest, _| uri::nbd(rest)),
    ("nbd:", |rest, _| rest.fail(TargetErrorKind::Slashes("nbd:"))),
    ("nbd+unix://", |rest, _| uri::nbd_unix(rest)),
    ("nbd+unix:", |rest, _| rest.fail(TargetErrorKind::Slashes("nbd+unix:"))),
    ("mirror:", |rest, depth| group(GroupKind::Mirror, rest, depth)),
    ("stripe:", |rest, depth| group(GroupKind::Stripe { chunk: None, labelled: true }, rest, depth)),
    ("multipath:", |rest, depth| group(GroupKind::Multipath, rest, depth)),
    ("offset:", offset),
    ("fault:", fault),
];

impl FromStr for TargetName {
    type Err = TargetError;

    fn from_str(text: &str) -> Result<TargetName, TargetError> {
        parse(text)
    }
}

/// True if a text begins with the word of a kind of target, and is no path whatever follows.
pub(crate) fn has_kind(text: &str) -> bool {
    KINDS.iter().any(|(prefix, _)| text.starts_with(prefix)) || text.starts_with("stripe-") && scheme(text).is_some()
}

/// Reads a whole text.
fn parse(text: &str) -> Result<TargetName, TargetError> {
    let whole = Piece { text, at: 0 };
    let result = if text.len() > MAX_TEXT_BYTES {
        whole.fail_at(MAX_TEXT_BYTES, TargetErrorKind::TooLong)
    } else if let Some(at) = text.find(char::is_control).filter(|at| !text[*at..].starts_with('\0')) {
        // Names are shown to people, on terminals and in logs, line by line.
        whole.fail_at(at, TargetErrorKind::Control)
    } else {
        target(whole, 0)
    };
    result.map_err(|fail| located(text, fail))
}

fn target(piece: Piece<'_>, depth: usize) -> Result<TargetName, Fail> {
    if depth > MAX_DEPTH {
        return piece.fail(TargetErrorKind::TooDeep);
    }
    let piece = unbracket(piece)?;
    if let Some((rest, read)) = KINDS.iter().find_map(|(prefix, read)| Some((piece.strip(prefix)?, read))) {
        return read(rest, depth);
    }
    // A path may begin with this word too, but not with a word and a colon.
    if let (Some(rest), Some(_)) = (piece.strip("stripe-"), scheme(piece.text)) {
        return stripe(rest, depth);
    }
    match piece.text {
        "-" => piece.fail(TargetErrorKind::Standard),
        text if is_linux_device(text) => Ok(TargetName::Linux { path: PathBuf::from(text), drive_makes_tags: None }),
        text if has_drive_options(text) => drive(piece),
        text => match scheme(text) {
            Some(scheme) => piece.fail(TargetErrorKind::Unknown(scheme.to_owned())),
            None => path(piece).map(TargetName::File),
        },
    }
}

/// What the brackets around a target hold, or the piece itself when there are none.
fn unbracket(piece: Piece<'_>) -> Result<Piece<'_>, Fail> {
    if !piece.text.starts_with('[') {
        return Ok(piece);
    }
    let (inner, rest) = bracketed(piece)?;
    if !rest.text.is_empty() {
        return rest.fail(TargetErrorKind::BehindBracket);
    }
    if inner.text.starts_with('[') { inner.fail(TargetErrorKind::Doubled) } else { Ok(inner) }
}

/// Splits a piece that begins with `[` into what its brackets hold and what is behind them.
fn bracketed(piece: Piece<'_>) -> Result<(Piece<'_>, Piece<'_>), Fail> {
    let mut open = 0_usize;
    for (at, mark) in piece.text.match_indices(['[', ']']) {
        open = if mark == "[" { open + 1 } else { open.saturating_sub(1) };
        if open == 0 {
            let inner = Piece { text: &piece.text[1..at], at: piece.at + 1 };
            return Ok((inner, Piece { text: &piece.text[at + 1..], at: piece.at + at + 1 }));
        }
    }
    piece.fail(TargetErrorKind::Unclosed)
}

/// A drive with an option. Only NVMe drives have one.
fn drive(piece: Piece<'_>) -> Result<TargetName, Fail> {
    let (path, option) = piece.split_once('?').unwrap_or((piece, piece));
    let drive_makes_tags = match option.text {
        "pract=0" => false,
        "pract=1" => true,
        other => return option.fail(TargetErrorKind::DriveOption(other.to_owned())),
    };
    if path.text.starts_with("/dev/sd") {
        return option.fail(TargetErrorKind::DriveOption(option.text.to_owned()));
    }
    Ok(TargetName::Linux { path: PathBuf::from(path.text), drive_makes_tags: Some(drive_makes_tags) })
}

fn path(piece: Piece<'_>) -> Result<PathBuf, Fail> {
    if piece.text.is_empty() {
        return piece.fail(TargetErrorKind::Missing);
    }
    match piece.text.find('\0') {
        Some(at) => piece.fail_at(at, TargetErrorKind::ZeroByte),
        None => Ok(PathBuf::from(piece.text)),
    }
}

fn size(piece: Piece<'_>) -> Result<ByteCount, Fail> {
    match piece.text.parse::<ByteCount>() {
        Ok(size) if size.get() == 0 => piece.fail(TargetErrorKind::NoBytes),
        Ok(size) => Ok(size),
        Err(error) => piece.fail(error),
    }
}

/// A size, and perhaps the option of memory.
fn memory(piece: Piece<'_>) -> Result<TargetName, Fail> {
    let Some((bytes, option)) = piece.split_once('?') else {
        return Ok(TargetName::Memory { size: size(piece)?, preallocate: false });
    };
    match option.text {
        "preallocate" => Ok(TargetName::Memory { size: size(bytes)?, preallocate: true }),
        other => option.fail(TargetErrorKind::MemoryOption(other.to_owned())),
    }
}

fn group(kind: GroupKind, piece: Piece<'_>, depth: usize) -> Result<TargetName, Fail> {
    let pieces = split(kind, piece)?;
    if pieces.len() < 2 {
        return piece.fail(TargetErrorKind::FewLegs(kind.name()));
    }
    let members = pieces.into_iter().map(|member| target(member, depth + 1)).collect::<Result<_, _>>()?;
    Ok(TargetName::Group { kind, members })
}

/// A stripe with a given chunk size, or with members without labels.
fn stripe(piece: Piece<'_>, depth: usize) -> Result<TargetName, Fail> {
    const UNLABELLED: &str = "nolabel";
    let (options, members) = piece.split_once(':').expect("what has a scheme has a colon");
    let (chunk, labelled) = match options.text.strip_suffix(UNLABELLED) {
        Some("") => (None, false),
        Some(sized) => match sized.strip_suffix('-') {
            Some(sized) => (Some(size(Piece { text: sized, at: options.at })?), false),
            None => (Some(size(options)?), true),
        },
        None => (Some(size(options)?), true),
    };
    group(GroupKind::Stripe { chunk, labelled }, members, depth)
}

/// The members of a group: the texts between commas outside of brackets.
fn split(kind: GroupKind, piece: Piece<'_>) -> Result<Vec<Piece<'_>>, Fail> {
    let (mut members, mut begin, mut open) = (Vec::new(), 0, Vec::new());
    let member = |begin: usize, end: usize| Piece { text: &piece.text[begin..end], at: piece.at + begin };
    for (at, mark) in piece.text.match_indices(['[', ']', ',']) {
        match mark {
            "[" => open.push(at),
            "]" if open.pop().is_none() => return piece.fail_at(at, TargetErrorKind::Unopened),
            "," if open.is_empty() => {
                members.push(member(begin, at));
                begin = at + 1;
                if members.len() >= MAX_MEMBERS {
                    return piece.fail_at(begin, TargetErrorKind::ManyMembers(kind.name()));
                }
            }
            _ => {}
        }
    }
    if let Some(at) = open.first() {
        return piece.fail_at(*at, TargetErrorKind::Unclosed);
    }
    members.push(member(begin, piece.text.len()));
    Ok(members)
}

fn offset(piece: Piece<'_>, depth: usize) -> Result<TargetName, Fail> {
    let Some((range, rest)) = piece.split_once(',') else {
        return piece.fail_at(piece.text.len(), TargetErrorKind::NoInner("offset"));
    };
    match range.text.parse() {
        Ok(range) => Ok(TargetName::Offset { range, target: Box::new(target(rest, depth + 1)?) }),
        Err(error) => range.fail(TargetErrorKind::Range(error)),
    }
}

fn fault(piece: Piece<'_>, depth: usize) -> Result<TargetName, Fail> {
    if !piece.text.starts_with('[') {
        return piece.fail(TargetErrorKind::NoRules);
    }
    let (rules, rest) = bracketed(piece)?;
    if rules.text.trim().is_empty() {
        return rules.fail(TargetErrorKind::NoRules);
    }
    match rest.strip(",") {
        Some(inner) => {
            Ok(TargetName::Fault { rules: rules.text.to_owned(), target: Box::new(target(inner, depth + 1)?) })
        }
        None => rest.fail(TargetErrorKind::NoInner("fault")),
    }
}
