//! A device whose reads touch every byte of the data.
//!
//! A raw file as a baseline would return data that no core ever loads, which no user of data does. What a medium
//! loses when its data are loaded at all, before any checksum, shows against this.

use std::hint::black_box;

use sealblock_block::{Abilities, Device, Geometry, Outcome, Request, Response};

/// See the module's header.
pub struct Touched<D>(pub D);

impl<D: Device> Device for Touched<D> {
    fn geometry(&self) -> &Geometry {
        self.0.geometry()
    }

    fn abilities(&self) -> Abilities {
        self.0.abilities()
    }

    async fn execute(&self, operation: Request) -> Outcome {
        let answer = self.0.execute(operation).await?;
        if let Response::Data(data) = &answer {
            let words = data.data().as_chunks::<8>().0;
            black_box(words.iter().fold(0, |seen, word| seen ^ u64::from_le_bytes(*word)));
        }
        Ok(answer)
    }
}
