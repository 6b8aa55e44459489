//! Connections: one task for each, and the commands that act on it.

pub(crate) mod admin;
pub(crate) mod dispatch;
mod later;
pub(crate) mod pairs;
mod placement;
pub(crate) mod shutdown;
pub(crate) mod task;
