//! The model of a target: subsystems, namespaces, controllers and their shared state. Does not depend on connections.

pub(crate) mod async_events;
pub(crate) mod checksums;
pub(crate) mod command_error;
pub(crate) mod controller;
pub(crate) mod damage;
pub(crate) mod damage_list;
pub(crate) mod damage_pages;
pub(crate) mod handover;
pub(crate) mod limits;
pub(crate) mod namespace;
pub(crate) mod registry;
pub(crate) mod subsystem;
pub(crate) mod sync;
