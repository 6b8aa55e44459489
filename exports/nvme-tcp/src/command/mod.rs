//! Checks, translates and executes commands on the model. Does not depend on connections.

pub(crate) mod copy;
pub(crate) mod features;
pub(crate) mod fused;
pub(crate) mod identify;
pub(crate) mod io;
pub(crate) mod lba_status;
pub(crate) mod logs;
pub(crate) mod properties;
pub(crate) mod queue_context;
pub(crate) mod reply;
pub(crate) mod reserved;
pub(crate) mod slots;
