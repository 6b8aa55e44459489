//! An export: a device under a name, what clients see of it, and the limits of the server.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use sealblock_block::{Ability, RequestKind};
use sealblock_layers_cross_core::SharedDevice;
use sealblock_protocols_nbd as core;

/// A device under a name. The server makes and checks its protection information, so clients see plain blocks.
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

/// Why an export cannot be added, removed or resized.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SetupError {
    /// Two exports have one name.
    #[error("two exports are called {0:?}")]
    Duplicate(String),
    /// The protocol cannot describe it to clients: a name or description is longer than 4096 bytes.
    #[error("clients cannot be told of the export {0:?}: names and descriptions have at most 4096 bytes")]
    TooLong(String),
    /// No export has this name.
    #[error("there is no export {0:?}")]
    Unknown(String),
}

impl Export {
    /// Returns `device` under this name. The empty name is for clients that name no export.
    pub fn new(name: impl Into<String>, device: SharedDevice) -> Export {
        Export { name: name.into(), description: String::new(), device, is_read_only: false, _kept: None }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the same, which keeps `kept` until the export was removed and its last connection has ended. The owner
    /// of a clone sees by its reference count when the device may be closed.
    pub fn with_owner(mut self, kept: Arc<dyn Any + Send + Sync>) -> Export {
        self._kept = Some(kept);
        self
    }

    /// Returns the same with a description, which clients show in lists of exports.
    pub fn described(mut self, description: impl Into<String>) -> Export {
        self.description = description.into();
        self
    }

    /// Returns the same, read-only for clients.
    pub fn read_only(mut self) -> Export {
        self.is_read_only = true;
        self
    }

    /// Returns the same with the new size of its device.
    pub(crate) fn resized(&self, device: SharedDevice) -> Export {
        Export { device, ..self.clone() }
    }

    /// True if both are one export, before and after a resize.
    pub(crate) fn is_same(&self, other: &Export) -> bool {
        self.name == other.name && self.device.is_same(&other.device)
    }

    /// Returns what clients see.
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
