//! Whether what a device reads as is what was written to it last.
//!
//! Seals show that a block is what was written there once. They do not show that nothing was written after it: a device that has
//! lost its log, or was put back to a state of yesterday, has blocks that all match their seals and are older. That is a state of
//! the device and not of a request, so a device tells it beside its abilities ([`crate::Abilities::freshness`]), layers combine it
//! as they combine those, and openers refuse such a device unless their caller has said that older content will do.
//!
//! One reason is enough to say why: a group of several devices names the first.

use std::fmt;

use crate::WhyUnchecked;

/// Whether a device has what was written to it last.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Freshness {
    /// Nothing is known to be missing.
    #[default]
    Current,
    /// Blocks that match their seals may be older than what was written and flushed.
    MayBeOlder(WhyOlder),
}

/// Why blocks of a device may be older than what was written last.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(u8)]
pub enum WhyOlder {
    /// The log, or a part of it, is lost.
    LogLost = 0,
    /// Parts of the device are from different times: some was put back to an earlier state.
    RolledBack = 1,
    /// It is a replica that is out of sync. Bit 2 before it was never sent: writes that were not flushed are no older content.
    OutOfSync = 3,
    /// Another host says so, and not why, or in a way that this program does not know.
    Unknown = 4,
    /// It was a member of a group, and every copy of its label is lost, which may have marked it as out of sync; or it is a mirror of
    /// which a replica lost its label, which may have marked the others.
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

    /// Why a check of such a device leaves its blocks unchecked: they match their seals, which is no proof that they are the last.
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
    /// Why blocks may be older, if they may.
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

    /// The freshness of a device that has blocks of both.
    #[must_use]
    pub const fn and(self, other: Freshness) -> Freshness {
        match self {
            Freshness::Current => other,
            Freshness::MayBeOlder(_) => self,
        }
    }

    /// As bits, to send to another host: 0 for current content, else one for the reason.
    pub const fn bits(self) -> u8 {
        match self {
            Freshness::Current => 0,
            Freshness::MayBeOlder(why) => 1 << why as u8,
        }
    }

    /// What another host says. Bits that are not known count as [`WhyOlder::Unknown`]: something is missing.
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
            let older = Freshness::MayBeOlder(why);
            assert_eq!(Freshness::from_bits(older.bits()), older);
        }
        assert_eq!(Freshness::from_bits(1 << 2), Freshness::MayBeOlder(WhyOlder::Unknown), "of no reason");
        assert_eq!(Freshness::from_bits(1 << 7), Freshness::MayBeOlder(WhyOlder::Unknown));
    }
}
