//! `[scrub]`, and `scrub = { ... }` of a namespace.

use std::fmt;
use std::str::FromStr;

use sealblock_scrub::Settings;
use sealblock_stack::quantity::{Rate, Time};
use serde::Deserialize;

use super::text;

/// How namespaces are scrubbed.
#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
pub(super) struct ScrubTable {
    #[serde(deserialize_with = "text")]
    every: Option<Every>,
    #[serde(deserialize_with = "text")]
    rate: Option<Limit>,
    pause_when_busy: Option<bool>,
}

/// How often.
#[derive(Clone, Copy)]
enum Every {
    Never,
    Time(Time),
}

/// How fast.
#[derive(Clone, Copy)]
enum Limit {
    None,
    Rate(Rate),
}

impl FromStr for Every {
    type Err = String;

    fn from_str(text: &str) -> Result<Every, String> {
        match text.parse() {
            _ if text == "never" => Ok(Every::Never),
            Ok(Time(time)) if time.as_secs() == 0 => Err("every = less than a second: write 1s or more".to_owned()),
            Ok(time) => Ok(Every::Time(time)),
            Err(error) => Err(format!("{error}, or never")),
        }
    }
}

impl FromStr for Limit {
    type Err = String;

    fn from_str(text: &str) -> Result<Limit, String> {
        if text == "none" {
            return Ok(Limit::None);
        }
        text.parse()
            .map(Limit::Rate)
            .map_err(|error: sealblock_stack::quantity::RateError| fmt::format(format_args!("{error}, or none")))
    }
}

impl ScrubTable {
    /// What counts for a namespace: what its own table says, and else what `all` says.
    pub(super) fn over(&self, all: &ScrubTable) -> Settings {
        let usual = Settings::default();
        Settings {
            every: match self.every.or(all.every) {
                Some(Every::Time(time)) => Some(time.0),
                Some(Every::Never) | None => None,
            },
            rate: match self.rate.or(all.rate) {
                Some(Limit::Rate(rate)) => Some(rate.bytes_per_second()),
                Some(Limit::None) | None => None,
            },
            pause_when_busy: self.pause_when_busy.or(all.pause_when_busy).unwrap_or(usual.pause_when_busy),
        }
    }
}
