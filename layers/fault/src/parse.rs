//! Reading rules. Everything has a limit, and no text makes it panic.

use std::str::FromStr;
use std::time::Duration;

use crate::rules::{Chance, Fault, Rule, Rules, Span};

/// The most rules, in number.
const RULES_LIMIT: usize = 64;
/// The longest text, in bytes.
const TEXT_LIMIT_BYTES: usize = 4096;
/// The longest delay.
const DELAY_LIMIT: Duration = Duration::from_secs(3600);

/// Why a text is no rules.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum RuleError {
    /// The text is longer than it may be.
    #[error("the rules are {bytes} bytes long, at most {TEXT_LIMIT_BYTES} are taken")]
    TooLong {
        /// Bytes of the text.
        bytes: usize,
    },
    /// There are more rules than there may be.
    #[error("there are {rules} rules, at most {RULES_LIMIT} are taken")]
    TooMany {
        /// Number of rules.
        rules: usize,
    },
    /// Between two semicolons stands nothing.
    #[error("a rule is missing between two ';', or at an end")]
    Empty,
    /// The name is not known.
    #[error(
        "'{0}' is no fault: use read-error, write-error, no-space, flush-error, lost-flush, flip, flip-write, lost-write, \
         misdirected-write, torn-write, delay=TIME or seed=NUMBER"
    )]
    Name(String),
    /// What stands behind `@` is not units.
    #[error("'{0}' in '@{0}' is not where: write a number or FIRST..LAST, both included and in this order")]
    Span(String),
    /// What stands behind `%` is no percentage.
    #[error("'{0}' in '%{0}' is no percentage: write 0 to 100 with at most seven decimals, such as 0.01")]
    Chance(String),
    /// What stands behind `delay=` is no time.
    #[error("'{0}' is no delay: write a whole number and us, ms or s, up to an hour, such as 10ms")]
    Delay(String),
    /// What stands behind `seed=` is no number.
    #[error("'{0}' is no seed: write a whole number below 2^64")]
    Seed(String),
    /// Something is said twice.
    #[error("{what} is given twice")]
    Twice {
        /// What, such as "the seed".
        what: &'static str,
    },
    /// Something is said where it means nothing.
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

/// One rule: a name, then marks with what stands behind them.
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
    if name == "delay" {
        return parse_delay(time.unwrap_or("")).map(Fault::Delay);
    }
    let known = Fault::WITHOUT_TIME.into_iter().find(|fault| fault.name() == name);
    let fault = known.ok_or_else(|| RuleError::Name(name.to_owned()))?;
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

/// Exact decimals, without the detour over binary fractions.
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

/// A whole number in plain digits, without the sign that the standard library takes.
fn number(text: &str) -> Option<u64> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok())?
}

#[cfg(test)]
mod tests;
