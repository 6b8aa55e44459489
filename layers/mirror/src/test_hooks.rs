//! For proofs of the proofs: a mirror with one rule broken, and smaller regions than any disk needs.

/// A rule that is broken, to show that a simulation notices.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Mutation {
    /// None.
    #[default]
    None,
    /// Changes go to the legs before the labels say that their regions may differ.
    SkipMark,
    /// Changes are answered before the labels say which leg has missed them.
    AnswerEarly,
    /// Legs that are not up to date are read.
    ReadRebuilding,
    /// Regions leave the labels although legs were not flushed.
    ClearUnflushed,
    /// What no member in sync has any more is made unreadable on one that is brought up to date, too.
    SpoilLastCopy,
    /// An older copy that a member keeps is taken for the current one.
    ForgetStale,
    /// What becomes suspect while progress is flushed is taken for brought, and so is what is made alike later.
    ForgetFlushing,
    /// What a member that is away has missed is forgotten when the regions around it are clean.
    ForgetMissed,
    /// Which sessions have changed a leg is not looked at when legs are put together: it is as if nobody had written any
    /// apart but where labels say that legs were left behind.
    SkipLineage,
    /// Changes go to a leg that is brought up to date before its own label says so.
    Untold,
    /// A leg that is taken out is not told.
    RemoveUntold,
    /// A leg that is written by itself forgets which sessions have changed it.
    ForgetSessions,
    /// A leg that was away at the opening is, when it comes back, the one whose place the order of the names gave it, whatever its
    /// label says.
    BelieveOrder,
    /// A leg that comes back is taken back whatever was written on it without the others.
    TakeAnybody,
    /// A leg that comes back while labels are written is taken to have got its own.
    LateLabel,
    /// Openings go on counting labels where the last one stopped.
    CountOn,
    /// What is read of a bitmap page is believed, whole or not.
    BelievePages,
    /// Overlapping changes do not wait for each other.
    Unordered,
}

/// How a mirror differs from those that people use.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct TestHooks {
    /// The broken rule.
    pub mutation: Mutation,
    /// A new mirror's regions have two to the power of this many blocks; nothing for the usual size.
    pub region_shift: Option<u32>,
}
