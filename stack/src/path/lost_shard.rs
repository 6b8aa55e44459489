//! A shard that is lost, in a volume of which what is left is read.

use sealblock_block::{
    Abilities, BadBlock, BadBlocks, Device, Error, ErrorKind, Geometry, Operation, Outcome, Request, Response,
};

/// Has the place of the lost shard: each of its blocks is unreadable.
pub(crate) struct LostShard {
    geometry: Geometry,
    abilities: Abilities,
    why: String,
}

impl LostShard {
    /// In place of a shard that is lost for this reason, beside one that is not.
    pub fn beside(other: &impl Device, why: String) -> LostShard {
        LostShard { geometry: other.geometry().clone(), abilities: other.abilities(), why }
    }

    fn error(&self) -> Error {
        ErrorKind::Media { reason: self.why.clone() }.into()
    }
}

impl Device for LostShard {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn abilities(&self) -> Abilities {
        self.abilities
    }

    async fn execute(&self, request: Request) -> Outcome {
        match request.operation {
            // Nothing is written where this is.
            Operation::Flush => Ok(Response::Done),
            Operation::Read(_) => {
                let blocks = request.extents.one().iter().map(BadBlock::media).collect();
                Err(BadBlocks::new(blocks).map_or_else(|| self.error(), Error::from))
            }
            _ => Err(self.error()),
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;
    use sealblock_block::Expectations;
    use sealblock_media_memory::MemoryDevice;
    use sealblock_units::{BlockSize, Extent};

    use super::*;

    #[test]
    fn each_block_is_unreadable_and_nothing_else_succeeds_but_a_flush() {
        let lost = LostShard::beside(&MemoryDevice::new(BlockSize::B4096, 16, None), "the end is gone".to_owned());
        let execute = |request| lost.execute(request).now_or_never().unwrap();
        let extent = Extent::from_raw(3, 2).unwrap();
        let error = execute(Request::read(extent, Expectations::NONE)).unwrap_err();
        let named: Vec<u64> = error.bad_blocks().unwrap().as_slice().iter().map(|bad| bad.lba.get()).collect();
        assert_eq!(named, [3, 4]);
        let error = execute(Request::verify(extent, Expectations::NONE)).unwrap_err();
        assert!(error.to_string().contains("the end is gone"));
        assert!(matches!(execute(Request::flush()), Ok(Response::Done)));
    }
}
