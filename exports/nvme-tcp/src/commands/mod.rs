//! Commands that are more than one operation on a device, or that wait for something: one file each.

pub(crate) mod abort;
pub(crate) mod annex;
pub(crate) mod copy;
pub(crate) mod fused;
pub(crate) mod later;
pub(crate) mod lba_status;
