//! Hooks for tests and proofs: a mirror that breaks one rule, to show that a simulation notices, and small regions.

/// A rule that the mirror breaks, to show that a simulation notices.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Mutation {
    /// None.
    #[default]
    None,
    /// Changes go to the replicas before the labels mark their regions dirty.
    SkipMark,
    /// Changes complete before the labels mark the replicas that missed them out of sync.
    CompleteEarly,
    /// Reads go to resyncing replicas too.
    ReadResyncing,
    /// Regions leave the labels without a flush of the replicas.
    ClearUnflushed,
    /// A resync makes blocks unreadable that every in-sync replica has lost, although the resyncing replica can read
    /// them.
    PoisonLastCopy,
    /// An older copy counts as the current one.
    ForgetStale,
    /// A region that becomes nosync, or is reconciled, during the flush of a resync counts as resynced.
    ForgetFlushing,
    /// What an offline replica lacks is forgotten when the regions around it are clean.
    ForgetOutOfSync,
    /// Assembly ignores lineages: replicas diverged only where labels mark each other out of sync.
    SkipLineage,
    /// Changes go to a resyncing replica before its own label says that it lacks regions.
    SkipOwnLabel,
    /// The own label of a removed replica is not written.
    SkipRemovedLabel,
    /// A replica that is written alone forgets the sessions that changed it.
    ForgetSessions,
    /// A replica that was offline at the opening gets its place by the order of the names, whatever its label says.
    TrustOrder,
    /// Reattaching skips the check for changes that were made without the other replicas.
    ReattachDiverged,
    /// A replica that reattaches while labels are written counts as having its own label.
    LateLabel,
    /// Event counts continue without a gap at each opening.
    CountOn,
    /// Bitmap pages count as read, without a check of their bytes.
    TrustPages,
    /// Overlapping changes do not wait for each other.
    Unordered,
}

/// How a mirror of a test differs from one in use.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct TestHooks {
    /// The rule that it breaks.
    pub mutation: Mutation,
    /// Base-2 logarithm of the blocks of a region of a new mirror; `None` for the usual size.
    pub region_shift: Option<u32>,
}
