//! Freshness: whether a device has the newest content that was written to it.
//!
//! Seals show that a block has content that was once written there. They do not show that nothing was written later: a
//! device that has lost its log, or that was restored from an earlier state, has blocks that all match their seals and
//! are older. That is a property of the device and not of a request. So a device reports it with its abilities
//! ([`crate::Abilities::freshness`]), layers combine it like these, and openers refuse such a device unless their
//! caller accepts older content.
//!
//! One reason is enough: a group of several devices reports the first.

use std::fmt;

use crate::WhyUnchecked;

/// Whether a device has its newest content.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Freshness {
    /// Nothing is known to be missing.
    #[default]
    Current,
    /// Blocks that match their seals may be older than what was last written and flushed.
    MayBeOlder(WhyOlder),
}

/// Why blocks of a device may be older than their last writes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(u8)]
pub enum WhyOlder {
    /// The log, or a part of it, is lost.
    LogLost = 0,
    /// Parts of the device are from different times: some was restored from an earlier state.
    RolledBack = 1,
    /// It is a replica that is out of sync. Bit 2 is not used and was never sent: lost writes that were not flushed do
    /// not count as older content.
    OutOfSync = 3,
    /// Another host reports it, without a reason or with one that this program does not know.
    Unknown = 4,
    /// It was a member of a group, and every copy of its label is lost, which may have marked it as out of sync. Or it
    /// is a mirror with a replica that lost its label, which may have marked the others.
    LabelLost = 5,
}

impl WhyOlder {
    /// All reasons, in the order of their bits in [`Freshness::bits`].
    pub const ALL: [WhyOlder; 5] =
        [WhyOlder::LogLost, WhyOlder::RolledBack, WhyOlder::OutOfSync, WhyOlder::Unknown, WhyOlder::LabelLost];

    /// The name in JSON.
    pub const fn as_str(self) -> &'static str {
        match self {
            WhyOlder::LogLost => "log_lost",
            WhyOlder::RolledBack => "rolled_back",
            WhyOlder::OutOfSync => "out_of_sync",
            WhyOlder::Unknown => "unknown",
            WhyOlder::LabelLost => "label_lost",
        }
    }

    /// The reason of this name; an unknown one if it is of a later version.
    pub fn named(name: &str) -> WhyOlder {
        WhyOlder::ALL.into_iter().find(|why| why.as_str() == name).unwrap_or(WhyOlder::Unknown)
    }

    /// Why a check of such a device leaves its blocks unchecked: they match their seals, but may not be the newest.
    pub const fn why_unchecked(self) -> WhyUnchecked {
        match self {
            WhyOlder::OutOfSync => WhyUnchecked::OutOfSync,
            WhyOlder::LogLost | WhyOlder::RolledBack | WhyOlder::Unknown | WhyOlder::LabelLost => WhyUnchecked::LogLost,
        }
    }
}

impl fmt::Display for WhyOlder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            WhyOlder::LogLost => "its log, or a part of it, is lost",
            WhyOlder::RolledBack => "a part of it was put back to an earlier state",
            WhyOlder::OutOfSync => "it is a replica that is out of sync",
            WhyOlder::Unknown => "its server says so",
            WhyOlder::LabelLost => "every copy of the label of a replica or member is lost or was put back",
        })
    }
}

impl Freshness {
    /// Why blocks may be older; `None` if they are current.
    pub const fn why_older(self) -> Option<WhyOlder> {
        match self {
            Freshness::Current => None,
            Freshness::MayBeOlder(why) => Some(why),
        }
    }

    /// True if nothing is known to be missing.
    pub const fn is_current(self) -> bool {
        matches!(self, Freshness::Current)
    }

    /// The freshness of a device that has blocks of both devices.
    #[must_use]
    pub const fn and(self, other: Freshness) -> Freshness {
        match self {
            Freshness::Current => other,
            Freshness::MayBeOlder(_) => self,
        }
    }

    /// As bits, to send to another host: 0 for current content, else one bit for the reason.
    pub const fn bits(self) -> u8 {
        match self {
            Freshness::Current => 0,
            Freshness::MayBeOlder(why) => 1 << why as u8,
        }
    }

    /// Decodes the bits of another host. Unknown bits count as [`WhyOlder::Unknown`]: something is missing.
    pub fn from_bits(bits: u8) -> Freshness {
        let known = WhyOlder::ALL.into_iter().find(|why| bits & (1 << *why as u8) != 0);
        match (known, bits) {
            (_, 0) => Freshness::Current,
            (why, _) => Freshness::MayBeOlder(why.unwrap_or(WhyOlder::Unknown)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_of_several_is_current_only_if_all_are() {
        let (current, lost) = (Freshness::Current, Freshness::MayBeOlder(WhyOlder::LogLost));
        assert_eq!(current.and(current), current);
        assert_eq!((current.and(lost), lost.and(current)), (lost, lost));
        assert_eq!(lost.and(Freshness::MayBeOlder(WhyOlder::RolledBack)), lost);
        assert!(Freshness::default().is_current() && !lost.is_current());
    }

    #[test]
    fn bits_for_another_host_convert_back_and_unknown_ones_are_not_current() {
        assert_eq!(Freshness::from_bits(Freshness::Current.bits()), Freshness::Current);
        for why in WhyOlder::ALL {
            assert_eq!(WhyOlder::named(why.as_str()), why);
            let older = Freshness::MayBeOlder(why);
            assert_eq!(Freshness::from_bits(older.bits()), older);
        }
        assert_eq!(WhyOlder::named("a reason of later"), WhyOlder::Unknown);
        assert_eq!(Freshness::from_bits(1 << 2), Freshness::MayBeOlder(WhyOlder::Unknown), "of no reason");
        assert_eq!(Freshness::from_bits(1 << 7), Freshness::MayBeOlder(WhyOlder::Unknown));
    }
}
