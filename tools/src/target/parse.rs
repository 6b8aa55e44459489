//! From text to [`TargetName`].
//!
//! Recursive descent over pieces of the text that know where they begin. Each level of nesting reads its piece a fixed
//! number of times and depth is bounded, so the time is linear in the length.

use std::path::PathBuf;

use sealblock_units::ByteCount;

use super::error::{TargetError, TargetErrorKind};
use super::{GroupKind, MAX_DEPTH, MAX_MEMBERS, MAX_TEXT_BYTES, TargetName, uri};

/// A part of the text, and the byte where it begins.
#[derive(Clone, Copy)]
pub(super) struct Piece<'a> {
    pub text: &'a str,
    pub at: usize,
}

/// A problem and the byte where it is.
#[derive(Debug)]
pub(super) struct Fail {
    pub at: usize,
    pub problem: TargetErrorKind,
}

impl<'a> Piece<'a> {
    /// What is behind `prefix`, if the piece begins with it.
    fn strip(self, prefix: &str) -> Option<Piece<'a>> {
        let text = self.text.strip_prefix(prefix)?;
        Some(Piece { text, at: self.at + prefix.len() })
    }

    /// The parts before and behind the first `mark`.
    pub fn split_once(self, mark: char) -> Option<(Piece<'a>, Piece<'a>)> {
        let (before, behind) = self.text.split_once(mark)?;
        let at = self.at + before.len() + mark.len_utf8();
        Some((Piece { text: before, at: self.at }, Piece { text: behind, at }))
    }

    /// The problem, at the beginning of this piece.
    pub fn fail<T>(self, problem: impl Into<TargetErrorKind>) -> Result<T, Fail> {
        Err(Fail { at: self.at, problem: problem.into() })
    }

    fn fail_at<T>(self, offset: usize, problem: TargetErrorKind) -> Result<T, Fail> {
        Err(Fail { at: self.at + offset, problem })
    }
}

/// What reads the rest of a piece behind its prefix. The number is the depth of the target.
type Reader = fn(Piece<'_>, usize) -> Result<TargetName, Fail>;

const KINDS: &[(&str, Reader)] = &[
    ("file:", |rest, _| path(rest).map(TargetName::File)),
    ("raw:", |rest, _| path(rest).map(TargetName::Raw)),
    ("mem:", |rest, _| size(rest).map(TargetName::Memory)),
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

/// Reads a whole text.
pub(super) fn parse(text: &str) -> Result<TargetName, TargetError> {
    let whole = Piece { text, at: 0 };
    let result = if text.len() > MAX_TEXT_BYTES {
        whole.fail_at(MAX_TEXT_BYTES, TargetErrorKind::TooLong)
    } else {
        target(whole, 0)
    };
    result.map_err(|fail| located(text, fail))
}

/// The error with the place of its problem in characters.
pub(super) fn located(text: &str, Fail { at, problem }: Fail) -> TargetError {
    let column = 1 + text.char_indices().take_while(|(byte, _)| *byte < at).count();
    TargetError { column, problem }
}

/// Whether a path needs no `file:` to be read as the path of a file.
pub(super) fn is_bare_path(text: &str) -> bool {
    !text.is_empty() && text != "-" && !text.starts_with('[') && scheme(text).is_none() && !is_linux_device(text)
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
        text if is_linux_device(text) => Ok(TargetName::Linux(PathBuf::from(text))),
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

/// A word with a colon in front of everything else, as only kinds of targets have.
fn scheme(text: &str) -> Option<&str> {
    let (word, _) = text.split_once(':')?;
    let fits = |c: char| c.is_ascii_alphanumeric() || "+-.".contains(c);
    (word.starts_with(|c: char| c.is_ascii_alphabetic()) && word.chars().all(fits)).then(|| &text[..=word.len()])
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
                    return piece.fail_at(begin, TargetErrorKind::ManyLegs(kind.name()));
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

/// True if the path is `/dev/nvmeXnY`, `/dev/ngXnY` or `/dev/sdX`: a Linux device that may take offloaded work.
///
/// Judged by name: the open finds out whether it exists and what it can do. Partitions are ordinary block devices, since
/// the kernel takes no passthrough commands through them.
fn is_linux_device(path: &str) -> bool {
    let Some(name) = path.strip_prefix("/dev/") else { return false };
    let namespace = name.strip_prefix("nvme").or_else(|| name.strip_prefix("ng"));
    let is_namespace =
        namespace.and_then(|rest| rest.split_once('n')).is_some_and(|(x, y)| is_number(x) && is_number(y));
    let is_disk = name.strip_prefix("sd").is_some_and(|x| !x.is_empty() && x.bytes().all(|b| b.is_ascii_lowercase()));
    is_namespace || is_disk
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_linux_devices_are_recognised_and_nothing_else() {
        for path in ["/dev/nvme0n1", "/dev/nvme12n34", "/dev/ng0n1", "/dev/sda", "/dev/sdaa"] {
            assert!(is_linux_device(path), "{path}");
        }
        for path in
            ["/dev/nvme0", "/dev/nvme0n1p1", "/dev/ng0", "/dev/sda1", "/dev/sd", "/dev/shm/v", "/dev/vda", "sda"]
        {
            assert!(!is_linux_device(path), "{path}");
        }
    }
}
