//! A read-only device.

use sealblock_block::{Abilities, Device, Geometry, Outcome, Request};
use sealblock_media_memory::MemoryDevice;
use sealblock_units::BlockSize;

/// Memory that reports itself read-only. It would execute writes, so its gate and the export must fail them.
pub struct Fixed(MemoryDevice);

impl Fixed {
    /// As large as the plain namespaces.
    pub fn new() -> Fixed {
        Fixed(MemoryDevice::new(BlockSize::B4096, super::BLOCKS, None))
    }
}

impl Device for Fixed {
    fn geometry(&self) -> &Geometry {
        self.0.geometry()
    }

    fn abilities(&self) -> Abilities {
        Abilities { writable: false, ..self.0.abilities() }
    }

    async fn execute(&self, request: Request) -> Outcome {
        self.0.execute(request).await
    }
}
