//! The shards of one volume as one device.
//!
//! A stripe of members that are parts of one volume: they have no labels, since the volume's own superblock has their
//! number and order, and nobody else knows them, so nothing names them. The volume ends within the last row of chunks,
//! and the reserved areas of all members are one.

use sealblock_block::{Abilities, Ability, Device, Geometry, Operation, Outcome, Request, RequestKind, ReservedArea};
use sealblock_units::ByteCount;

use crate::{StripeError, StripeLayer};

/// Shards as one device. See the file's header.
pub struct ShardLayer<D> {
    stripe: StripeLayer<D>,
    geometry: Geometry,
    seals: bool,
}

impl<D: Device> ShardLayer<D> {
    /// A device of `capacity_blocks` whose blocks are dealt to `shards`, in this order, in units of `unit` bytes.
    ///
    /// # Errors
    /// When the shards do not fit each other or the unit, or are too small together.
    pub fn new(shards: Vec<D>, unit: ByteCount, capacity_blocks: u64) -> Result<ShardLayer<D>, StripeError> {
        let mut stripe = StripeLayer::new(shards, unit)?;
        stripe.merger.names_members = false;
        let actual = stripe.geometry.capacity_blocks;
        if actual < capacity_blocks {
            return Err(StripeError::Short { actual, due: capacity_blocks });
        }
        let geometry = Geometry { capacity_blocks, ..stripe.geometry.clone() };
        Ok(ShardLayer { stripe, geometry, seals: true })
    }

    /// The same for shards that live on other cores: data are sealed before they cross, on the core of the caller.
    #[must_use]
    pub fn sealed_before(self) -> ShardLayer<D> {
        ShardLayer { seals: false, ..self }
    }

    /// The shards, in order.
    pub fn shards(&self) -> &[D] {
        self.stripe.members()
    }

    /// The shard that has a page of the bitmaps, and the page there.
    fn bitmap_page(&self, page: u32) -> (&D, u32) {
        let shards = self.shards();
        (&shards[page as usize % shards.len()], page / shards.len() as u32)
    }
}

impl<D: Device> Device for ShardLayer<D> {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn abilities(&self) -> Abilities {
        let pages = self.shards().iter().map(|shard| shard.abilities().bitmap_pages);
        let bitmap_pages = ReservedArea::bitmap_pages(self.geometry.capacity_bytes()).min(pages.sum());
        let abilities = Abilities { bitmap_pages, ..self.stripe.abilities() };
        if self.seals { abilities } else { abilities.with([RequestKind::Write], Ability::Emulated) }
    }

    async fn execute(&self, request: Request) -> Outcome {
        match request.operation {
            Operation::ReadReserved(ReservedArea::Bitmap { page }) => {
                let (shard, page) = self.bitmap_page(page);
                shard.execute(Request::read_reserved(ReservedArea::Bitmap { page })).await
            }
            Operation::WriteReserved(ReservedArea::Bitmap { page }, bytes) => {
                let (shard, page) = self.bitmap_page(page);
                shard.execute(Request::write_reserved(ReservedArea::Bitmap { page }, bytes)).await
            }
            _ => self.stripe.execute(request).await,
        }
    }

    fn executes_in_place(&self) -> bool {
        self.stripe.executes_in_place()
    }

    fn try_execute(&self, request: &Request) -> Option<Outcome> {
        self.stripe.try_execute(request)
    }
}

#[cfg(test)]
mod tests {
    use sealblock_media_memory::MemoryDevice;
    use sealblock_units::BlockSize;

    use super::*;

    fn layer(shards: usize, blocks: u64, capacity_blocks: u64) -> Result<ShardLayer<MemoryDevice>, StripeError> {
        let shards = (0..shards).map(|_| MemoryDevice::new(BlockSize::B4096, blocks, None)).collect();
        ShardLayer::new(shards, ByteCount::new(4 * 4096), capacity_blocks)
    }

    #[test]
    fn the_device_ends_within_the_last_row() {
        assert_eq!(layer(2, 16, 30).unwrap().geometry().capacity_blocks, 30);
        assert_eq!(layer(2, 16, 32).unwrap().geometry().capacity_blocks, 32);
        assert!(matches!(layer(2, 16, 33), Err(StripeError::Short { actual: 32, due: 33 })));
    }

    #[test]
    fn data_are_sealed_by_the_shards_or_before_they_cross_to_them() {
        let way = |layer: &ShardLayer<MemoryDevice>| layer.abilities().get(RequestKind::Write);
        let here = layer(2, 16, 30).unwrap();
        assert_eq!(way(&here), here.shards()[0].abilities().get(RequestKind::Write));
        assert_eq!(way(&here.sealed_before()), Ability::Emulated);
    }
}
