//! What goes wrong, where, and how often; and how it is written down.

use std::fmt;
use std::time::Duration;

/// One kind of fault. Units are blocks on a device and sectors on a medium.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// `read-error`: a unit cannot be read.
    ReadError,
    /// `write-error`: a write of the unit fails as a whole and changes nothing.
    WriteError,
    /// `no-space`: the same, because no space is left.
    NoSpace,
    /// `flush-error`: a flush fails, and does not take place.
    FlushError,
    /// `lost-flush`: a flush is answered and does not take place.
    LostFlush,
    /// `flip`: a unit is read with one bit inverted, always the same one. What is stored stays good.
    Flip,
    /// `flip-write`: a unit is stored with one bit inverted, and with the tags of the right data.
    FlipWrite,
    /// `lost-write`: a write of the unit is answered and does not take place.
    LostWrite,
    /// `misdirected-write`: a unit is stored, tags and all, in another's place.
    MisdirectedWrite,
    /// `torn-write`: on a device, the write ends before this block and is answered; on a medium, the sector keeps its old
    /// bytes from some byte on, and the rest of the write takes place.
    TornWrite,
    /// `delay=TIME`: the request waits this long before anything else.
    Delay(Duration),
}

impl Fault {
    /// Number of kinds.
    pub(crate) const KINDS: usize = 11;

    /// Every kind but the delay, which needs a time, in the order of [`Fault::index`].
    pub(crate) const WITHOUT_TIME: [Fault; Fault::KINDS - 1] = [
        Fault::ReadError,
        Fault::WriteError,
        Fault::NoSpace,
        Fault::FlushError,
        Fault::LostFlush,
        Fault::Flip,
        Fault::FlipWrite,
        Fault::LostWrite,
        Fault::MisdirectedWrite,
        Fault::TornWrite,
    ];

    /// The name in rules and reports.
    pub const fn name(self) -> &'static str {
        match self {
            Fault::ReadError => "read-error",
            Fault::WriteError => "write-error",
            Fault::NoSpace => "no-space",
            Fault::FlushError => "flush-error",
            Fault::LostFlush => "lost-flush",
            Fault::Flip => "flip",
            Fault::FlipWrite => "flip-write",
            Fault::LostWrite => "lost-write",
            Fault::MisdirectedWrite => "misdirected-write",
            Fault::TornWrite => "torn-write",
            Fault::Delay(_) => "delay",
        }
    }

    /// Position in tables; the same for delays of any length.
    pub(crate) const fn index(self) -> usize {
        match self {
            Fault::ReadError => 0,
            Fault::WriteError => 1,
            Fault::NoSpace => 2,
            Fault::FlushError => 3,
            Fault::LostFlush => 4,
            Fault::Flip => 5,
            Fault::FlipWrite => 6,
            Fault::LostWrite => 7,
            Fault::MisdirectedWrite => 8,
            Fault::TornWrite => 9,
            Fault::Delay(_) => 10,
        }
    }

    /// Whether it befalls flushes, which are about no unit in particular.
    pub(crate) const fn is_of_flush(self) -> bool {
        matches!(self, Fault::FlushError | Fault::LostFlush)
    }
}

/// How often a rule holds: exact decimals of a percent, so that no arithmetic of the machine's enters.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Chance(u32);

impl Chance {
    /// Parts that make up certainty: seven decimals of a percent.
    pub(crate) const PARTS: u32 = 1_000_000_000;
    /// Every time.
    pub const ALWAYS: Chance = Chance(Chance::PARTS);

    /// This many parts in a thousand million, or nothing for more than that.
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

    /// What the two have in common.
    pub(crate) fn meet(self, other: Span) -> Option<Span> {
        let meet = Span { first: self.first.max(other.first), last: self.last.min(other.last) };
        (meet.first <= meet.last).then_some(meet)
    }
}

/// One rule.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rule {
    /// What goes wrong.
    pub fault: Fault,
    /// For which units.
    pub span: Span,
    /// How often: for each unit each time, but once a request for delays and flushes.
    pub chance: Chance,
}

/// A seed and rules, as `seed=7;read-error@100..200;flip@5;lost-write%0.01;delay=10ms@0..99`.
///
/// A rule is a name, for `delay` a time in `us`, `ms` or `s`, and then, in any order, `@UNIT` or `@FIRST..LAST` (both ends
/// included) and `%PERCENT` with up to seven decimals. Without `@` it holds everywhere, without `%` every time. The text is
/// parsed with `str::parse` and written with `Display`.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Rules {
    /// What chance is decided by.
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
