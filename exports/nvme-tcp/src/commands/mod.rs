//! Commands of several requests, and commands that wait: one file each.

pub(crate) mod abort;
pub(crate) mod annex;
pub(crate) mod copy;
pub(crate) mod fused;
pub(crate) mod later;
pub(crate) mod lba_status;
