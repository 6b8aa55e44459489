//! For proofs of the proofs: a mirror with one rule broken, and smaller regions than any disk needs.

/// A rule that is broken, to show that a simulation notices.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Mutation {
    /// None.
    #[default]
    None,
    /// Changes go to the replicas before the labels say that their regions may differ.
    SkipMark,
    /// Changes are answered before the labels say which replica has missed them.
    CompleteEarly,
    /// Replicas that are not up to date are read.
    ReadResyncing,
    /// Regions leave the labels although replicas were not flushed.
    ClearUnflushed,
    /// What no member in sync has any more is made unreadable on one that is brought up to date, too.
    PoisonLastCopy,
    /// An older copy that a member keeps is taken for the current one.
    ForgetStale,
    /// What becomes suspect while progress is flushed is taken for brought, and so is what is made alike later.
    ForgetFlushing,
    /// What a member that is away has missed is forgotten when the regions around it are clean.
    ForgetOutOfSync,
    /// Which sessions have changed a replica is not looked at when replicas are put together: it is as if nobody had written any
    /// apart but where labels say that replicas were left behind.
    SkipLineage,
    /// Changes go to a replica that is brought up to date before its own label says so.
    SkipOwnLabel,
    /// A replica that is taken out is not told.
    SkipRemovedLabel,
    /// A replica that is written by itself forgets which sessions have changed it.
    ForgetSessions,
    /// A replica that was away at the opening is, when it comes back, the one whose place the order of the names gave it, whatever its
    /// label says.
    TrustOrder,
    /// A replica that comes back is taken back whatever was written on it without the others.
    ReattachDiverged,
    /// A replica that comes back while labels are written is taken to have got its own.
    LateLabel,
    /// Openings go on counting labels where the last one stopped.
    CountOn,
    /// What is read of a bitmap page is believed, whole or not.
    TrustPages,
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
