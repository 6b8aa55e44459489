//! The rules: which fault, where, and how often; parsing and printing them. Every part of the text has a limit, and no
//! text causes a panic.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use sealblock_block::RequestKind;

/// One kind of fault. Units are blocks on a device and sectors on a medium.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// `read-error`: a unit cannot be read.
    ReadError,
    /// `write-error`: a write of the unit fails as a whole and changes nothing.
    WriteError,
    /// `no-space`: the same, because no space is left.
    NoSpace,
    /// `flush-error`: a flush fails without flushing.
    FlushError,
    /// `lost-flush`: a flush completes without flushing.
    LostFlush,
    /// `flip`: a unit is read with one bit inverted, always the same one. The stored unit stays good.
    Flip,
    /// `flip-write`: a unit is stored with one bit inverted, and with the tags of the right data.
    FlipWrite,
    /// `lost-write`: a write completes without storing the unit.
    LostWrite,
    /// `misdirected-write`: a unit is stored, with its tags, at the address of another one.
    MisdirectedWrite,
    /// `torn-write`: on a device, the write stores the blocks before this one and completes; on a medium, the sector
    /// keeps its old bytes from some byte on, and the rest of the write is stored.
    TornWrite,
    /// `abort-verify` and the like: a request of this kind fails as if the device did not support it, although the
    /// device says that it does, like a drive that aborts the command with *Invalid Command Opcode*.
    Abort(RequestKind),
    /// `delay=TIME`: the request waits this long before anything else.
    Delay(Duration),
}

impl Fault {
    /// Number of kinds.
    pub(crate) const KINDS: usize = Fault::WITHOUT_TIME.len() + 1;

    /// The name of a delay.
    pub(crate) const DELAY: &str = "delay";

    /// Every kind except the delay, which needs a time, with its name, in the order of [`Fault::index`].
    pub(crate) const WITHOUT_TIME: [(Fault, &str); 16] = [
        (Fault::ReadError, "read-error"),
        (Fault::WriteError, "write-error"),
        (Fault::NoSpace, "no-space"),
        (Fault::FlushError, "flush-error"),
        (Fault::LostFlush, "lost-flush"),
        (Fault::Flip, "flip"),
        (Fault::FlipWrite, "flip-write"),
        (Fault::LostWrite, "lost-write"),
        (Fault::MisdirectedWrite, "misdirected-write"),
        (Fault::TornWrite, "torn-write"),
        (Fault::Abort(RequestKind::Verify), "abort-verify"),
        (Fault::Abort(RequestKind::Compare), "abort-compare"),
        (Fault::Abort(RequestKind::CompareAndWrite), "abort-compare-and-write"),
        (Fault::Abort(RequestKind::WriteZeroes), "abort-write-zeroes"),
        (Fault::Abort(RequestKind::Discard), "abort-discard"),
        (Fault::Abort(RequestKind::Copy), "abort-copy"),
    ];

    /// Its name in rules and reports.
    pub fn name(self) -> &'static str {
        Fault::WITHOUT_TIME.get(self.index()).map_or(Fault::DELAY, |(_, name)| name)
    }

    /// Its position in tables; the same for delays of any length.
    pub(crate) fn index(self) -> usize {
        let known = Fault::WITHOUT_TIME.iter().position(|(fault, _)| *fault == self);
        known.unwrap_or(Fault::WITHOUT_TIME.len())
    }

    /// True if it is a fault of reads or writes.
    pub(crate) const fn is_of_blocks(self) -> bool {
        match self {
            Fault::ReadError
            | Fault::WriteError
            | Fault::NoSpace
            | Fault::Flip
            | Fault::FlipWrite
            | Fault::LostWrite
            | Fault::MisdirectedWrite
            | Fault::TornWrite => true,
            Fault::FlushError | Fault::LostFlush | Fault::Abort(_) | Fault::Delay(_) => false,
        }
    }

    /// True if it is a fault of flushes, which have no units.
    pub(crate) const fn is_of_flush(self) -> bool {
        matches!(self, Fault::FlushError | Fault::LostFlush)
    }
}

/// How often a rule applies: exact decimals of a percent, so that the result is the same on every machine.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Chance(u32);

impl Chance {
    /// Parts that make up certainty: seven decimals of a percent.
    pub(crate) const PARTS: u32 = 1_000_000_000;
    /// Every time.
    pub const ALWAYS: Chance = Chance(Chance::PARTS);

    /// This many parts in a thousand million; `None` if there are more.
    pub const fn from_parts(parts: u32) -> Option<Chance> {
        if parts <= Chance::PARTS { Some(Chance(parts)) } else { None }
    }

    /// Parts in a thousand million.
    pub const fn parts(self) -> u32 {
        self.0
    }
}

impl fmt::Display for Chance {
    /// As a percentage without trailing zeroes.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (whole, rest) = (self.0 / 10_000_000, self.0 % 10_000_000);
        match rest {
            0 => write!(f, "{whole}"),
            _ => write!(f, "{whole}.{}", format!("{rest:07}").trim_end_matches('0')),
        }
    }
}

/// A run of units, both ends included.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Span {
    /// The first unit.
    pub first: u64,
    /// The last unit, not before the first.
    pub last: u64,
}

impl Span {
    /// Every unit.
    pub const ALL: Span = Span { first: 0, last: u64::MAX };

    /// The intersection of the two.
    pub(crate) fn meet(self, other: Span) -> Option<Span> {
        let meet = Span { first: self.first.max(other.first), last: self.last.min(other.last) };
        (meet.first <= meet.last).then_some(meet)
    }
}

/// One rule.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rule {
    /// The fault.
    pub fault: Fault,
    /// The units that it applies to.
    pub span: Span,
    /// How often: drawn for each unit of each request, but once per request for delays, flushes and aborted requests.
    pub chance: Chance,
}

/// A seed and rules, as `seed=7;read-error@100..200;flip@5;lost-write%0.01;delay=10ms@0..99`.
///
/// A rule is a name, for `delay` a time in `us`, `ms` or `s`, and then, in any order, `@UNIT` or `@FIRST..LAST` (both
/// ends included) and `%PERCENT` with up to seven decimals. Without `@` it applies to all units, without `%` every
/// time. `str::parse` reads the text and `Display` writes it.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Rules {
    /// The seed of every draw.
    pub seed: u64,
    /// The rules.
    pub rules: Vec<Rule>,
}

impl fmt::Display for Rules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "seed={}", self.seed)?;
        self.rules.iter().try_for_each(|rule| write!(f, ";{rule}"))
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.fault.name())?;
        if let Fault::Delay(delay) = self.fault {
            match delay.as_micros() {
                us if us.is_multiple_of(1_000_000) => write!(f, "={}s", us / 1_000_000)?,
                us if us.is_multiple_of(1_000) => write!(f, "={}ms", us / 1_000)?,
                us => write!(f, "={us}us")?,
            }
        }
        match self.span {
            Span::ALL => {}
            Span { first, last } if first == last => write!(f, "@{first}")?,
            Span { first, last } => write!(f, "@{first}..{last}")?,
        }
        if self.chance == Chance::ALWAYS { Ok(()) } else { write!(f, "%{}", self.chance) }
    }
}

/// The maximum number of rules.
const RULES_LIMIT: usize = 64;
/// The maximum length of the text, in bytes.
const TEXT_LIMIT_BYTES: usize = 4096;
/// The maximum delay.
const DELAY_LIMIT: Duration = Duration::from_secs(3600);

/// Why a text is not a list of rules.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum RuleError {
    /// The text is too long.
    #[error("the rules are {bytes} bytes long, at most {TEXT_LIMIT_BYTES} are taken")]
    TooLong {
        /// Bytes of the text.
        bytes: usize,
    },
    /// There are too many rules.
    #[error("there are {rules} rules, at most {RULES_LIMIT} are taken")]
    TooMany {
        /// Number of rules.
        rules: usize,
    },
    /// There is nothing between two semicolons.
    #[error("a rule is missing between two ';', or at an end")]
    Empty,
    /// The name is unknown.
    #[error(
        "'{0}' is no fault: use read-error, write-error, no-space, flush-error, lost-flush, flip, flip-write, lost-write, \
         misdirected-write, torn-write, abort-verify, abort-compare, abort-compare-and-write, abort-write-zeroes, abort-discard, \
         abort-copy, delay=TIME or seed=NUMBER"
    )]
    Name(String),
    /// The text after `@` is not a range of units.
    #[error("'{0}' in '@{0}' is not where: write a number or FIRST..LAST, both included and in this order")]
    Span(String),
    /// The text after `%` is not a percentage.
    #[error("'{0}' in '%{0}' is not a percentage: use 0 to 100 with at most seven decimals, such as 0.01")]
    Chance(String),
    /// The text after `delay=` is not a time.
    #[error("'{0}' is not a delay: use a whole number and us, ms or s, up to an hour, such as 10ms")]
    Delay(String),
    /// The text after `seed=` is not a number.
    #[error("'{0}' is not a seed: use a whole number below 2^64")]
    Seed(String),
    /// Something is given twice.
    #[error("{what} is given twice")]
    Twice {
        /// What it is, such as "the seed".
        what: &'static str,
    },
    /// The fault does not accept this mark.
    #[error("{name} takes no '{mark}'")]
    Misplaced {
        /// The fault.
        name: &'static str,
        /// `=`, `@` or `%`.
        mark: char,
    },
}

impl FromStr for Rules {
    type Err = RuleError;

    fn from_str(text: &str) -> Result<Rules, RuleError> {
        if text.len() > TEXT_LIMIT_BYTES {
            return Err(RuleError::TooLong { bytes: text.len() });
        }
        let (mut seed, mut rules) = (None, Vec::new());
        for part in text.split(';').map(str::trim) {
            match part.strip_prefix("seed=") {
                Some(_) if seed.is_some() => return Err(RuleError::Twice { what: "the seed" }),
                Some(value) => seed = Some(number(value).ok_or_else(|| RuleError::Seed(value.to_owned()))?),
                None => rules.push(rule(part)?),
            }
        }
        if rules.len() > RULES_LIMIT {
            return Err(RuleError::TooMany { rules: rules.len() });
        }
        Ok(Rules { seed: seed.unwrap_or(0), rules })
    }
}

/// Parses one rule: a name, then marks with their values.
fn rule(text: &str) -> Result<Rule, RuleError> {
    const MARKS: [char; 3] = ['=', '@', '%'];
    if text.is_empty() {
        return Err(RuleError::Empty);
    }
    let (name, mut rest) = text.split_at(text.find(MARKS).unwrap_or(text.len()));
    let (mut time, mut span, mut chance) = (None, None, None);
    while let Some(mark) = rest.chars().next() {
        // Every mark is one byte, and `rest` starts with one.
        let behind = &rest[1..];
        let (value, next) = behind.split_at(behind.find(MARKS).unwrap_or(behind.len()));
        match mark {
            '=' => once(&mut time, value, "the delay")?,
            '@' => once(&mut span, parse_span(value)?, "the place of a rule")?,
            _ => once(&mut chance, parse_chance(value)?, "the chance of a rule")?,
        }
        rest = next;
    }
    let fault = fault(name, time)?;
    if fault.is_of_flush() && span.is_some() {
        return Err(RuleError::Misplaced { name: fault.name(), mark: '@' });
    }
    Ok(Rule { fault, span: span.unwrap_or(Span::ALL), chance: chance.unwrap_or(Chance::ALWAYS) })
}

fn once<T>(place: &mut Option<T>, value: T, what: &'static str) -> Result<(), RuleError> {
    match place.replace(value) {
        None => Ok(()),
        Some(_) => Err(RuleError::Twice { what }),
    }
}

fn fault(name: &str, time: Option<&str>) -> Result<Fault, RuleError> {
    if name == Fault::DELAY {
        return parse_delay(time.unwrap_or("")).map(Fault::Delay);
    }
    let known = Fault::WITHOUT_TIME.into_iter().find(|(_, known)| *known == name);
    let (fault, _) = known.ok_or_else(|| RuleError::Name(name.to_owned()))?;
    if time.is_some() {
        return Err(RuleError::Misplaced { name: fault.name(), mark: '=' });
    }
    Ok(fault)
}

fn parse_span(text: &str) -> Result<Span, RuleError> {
    let (first, last) = text.split_once("..").unwrap_or((text, text));
    match (number(first), number(last)) {
        (Some(first), Some(last)) if first <= last => Ok(Span { first, last }),
        _ => Err(RuleError::Span(text.to_owned())),
    }
}

/// Parses exact decimals, without binary fractions.
fn parse_chance(text: &str) -> Result<Chance, RuleError> {
    let refuse = || RuleError::Chance(text.to_owned());
    let (whole, decimals) = text.split_once('.').unwrap_or((text, "0"));
    if decimals.is_empty() || decimals.len() > 7 {
        return Err(refuse());
    }
    let whole = number(whole).filter(|percent| *percent <= 100).ok_or_else(refuse)?;
    let decimals = number(&format!("{decimals:0<7}")).ok_or_else(refuse)?;
    let parts = u32::try_from(whole * 10_000_000 + decimals).map_err(|_| refuse())?;
    Chance::from_parts(parts).ok_or_else(refuse)
}

fn parse_delay(text: &str) -> Result<Duration, RuleError> {
    let refuse = || RuleError::Delay(text.to_owned());
    let digits = text.find(|c: char| !c.is_ascii_digit()).ok_or_else(refuse)?;
    let (count, unit) = text.split_at(digits);
    let count = number(count).ok_or_else(refuse)?;
    let delay = match unit {
        "us" => Duration::from_micros(count),
        "ms" => Duration::from_millis(count),
        "s" => Duration::from_secs(count),
        _ => return Err(refuse()),
    };
    if delay <= DELAY_LIMIT { Ok(delay) } else { Err(refuse()) }
}

/// Parses a whole number in plain digits, without the sign that the standard library accepts.
fn number(text: &str) -> Option<u64> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok())?
}

#[cfg(test)]
mod tests;
