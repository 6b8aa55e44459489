//! An export: a device, and what clients are told of it.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use sealblock_block::{Ability, RequestKind};
use sealblock_layers_cross_core::SharedDevice;
use sealblock_protocols_nbd as core;

/// A device under a name. Its protection information is made and checked here, so clients see plain blocks.
#[derive(Clone)]
pub struct Export {
    pub(crate) name: String,
    description: String,
    pub(crate) device: SharedDevice,
    is_read_only: bool,
    /// Kept for as long as a connection may use the device.
    _kept: Option<Arc<dyn Any + Send + Sync>>,
}

impl fmt::Debug for Export {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Export").field("name", &self.name).field("device", &self.device).finish_non_exhaustive()
    }
}

/// Why an export cannot be offered, or taken away.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SetupError {
    /// Two exports have one name.
    #[error("two exports are called {0:?}")]
    Duplicate(String),
    /// The protocol cannot tell clients of it: a name or description of more than 4096 bytes.
    #[error("clients cannot be told of the export {0:?}: names and descriptions have at most 4096 bytes")]
    TooLong(String),
    /// No export has this name.
    #[error("there is no export {0:?}")]
    Unknown(String),
}

impl Export {
    /// `device` under this name. The empty name is for clients that ask for none.
    pub fn new(name: impl Into<String>, device: SharedDevice) -> Export {
        Export { name: name.into(), description: String::new(), device, is_read_only: false, _kept: None }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The same, which keeps `kept` until it was taken away and its last connection has ended: whoever has a clone sees by its
    /// count of owners when the device may be closed.
    pub fn with_owner(mut self, kept: Arc<dyn Any + Send + Sync>) -> Export {
        self._kept = Some(kept);
        self
    }

    /// The same with text for people who list exports.
    pub fn described(mut self, description: impl Into<String>) -> Export {
        self.description = description.into();
        self
    }

    /// The same, which clients cannot write to.
    pub fn read_only(mut self) -> Export {
        self.is_read_only = true;
        self
    }

    /// The same, whose device has another size now.
    pub(crate) fn resized(&self, device: SharedDevice) -> Export {
        Export { device, ..self.clone() }
    }

    /// Whether both are one export, at different times.
    pub(crate) fn is_same(&self, other: &Export) -> bool {
        self.name == other.name && self.device.is_same(&other.device)
    }

    /// What clients are told.
    pub(crate) fn advertised(&self) -> core::Export {
        let (geometry, abilities) = (self.device.geometry(), self.device.abilities());
        let is_there = |kind| abilities.of(kind) != Ability::Absent;
        core::Export {
            name: self.name.clone(),
            description: self.description.clone(),
            size_bytes: geometry.capacity_bytes(),
            // Blocks are far smaller than 4 GiB.
            block_bytes: geometry.block_size.bytes() as u32,
            writable: !self.is_read_only && abilities.writable,
            trim: is_there(RequestKind::Discard),
            write_zeroes: is_there(RequestKind::WriteZeroes),
        }
    }
}
