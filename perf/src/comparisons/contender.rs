//! Contenders on files: raw files and protected volumes.

use std::hint::black_box;
use std::rc::Rc;
use std::time::Duration;

use sealblock_block::{Abilities, Device, Gate, Geometry, Outcome, Request, Response};
use sealblock_media_file::RawDevice;
use sealblock_runtime_reactor::sleep;
use sealblock_units::BlockSize;

use super::options::FileOptions;
use crate::counted::Counts;
use crate::load::{self, Load, Sample, Until};
use crate::setup::{
    FILL, OpenVolume, Prepared, Protection, Scratch, Turn, new_file, new_path, new_volume, open_volume,
};

/// A device whose reads load every byte of the data.
///
/// A raw file as the baseline would return data that no core ever loads, although real users load it. The difference
/// shows the cost of loading the data, without any checksum.
pub struct Touched<D>(pub D);

impl<D: Device> Device for Touched<D> {
    fn geometry(&self) -> &Geometry {
        self.0.geometry()
    }

    fn abilities(&self) -> Abilities {
        self.0.abilities()
    }

    async fn execute(&self, request: Request) -> Outcome {
        let response = self.0.execute(request).await?;
        if let Response::Data(data) = &response {
            let words = data.segments().iter().flat_map(|segment| segment.data.as_chunks::<8>().0);
            black_box(words.fold(0, |seen, word| seen ^ u64::from_le_bytes(*word)));
        }
        Ok(response)
    }
}

enum Measured {
    Raw(Rc<Gate<RawDevice>>),
    Touched(Rc<Gate<Touched<RawDevice>>>),
    Volume(OpenVolume),
}

/// One side of a comparison.
pub struct Contender {
    /// Its name in tables.
    pub name: String,
    device: Measured,
    _scratch: Scratch,
}

impl Contender {
    /// A raw file.
    pub async fn raw(name: &str, options: &FileOptions, prepared: Prepared) -> anyhow::Result<Contender> {
        let scratch = new_path(&options.dir, name)?;
        let medium = new_file(&scratch.0, options.size.get(), prepared).await?;
        let device = Measured::Raw(Rc::new(Gate::new("raw", RawDevice::new(medium, BlockSize::B4096)?)));
        Contender { name: name.to_owned(), device, _scratch: scratch }.filled(options, prepared).await
    }

    /// A raw file whose reader loads the data.
    pub async fn touched(options: &FileOptions, prepared: Prepared) -> anyhow::Result<Contender> {
        let name = "raw, data loaded".to_owned();
        let scratch = new_path(&options.dir, "touched")?;
        let medium = new_file(&scratch.0, options.size.get(), prepared).await?;
        let device = Touched(RawDevice::new(medium, BlockSize::B4096)?);
        let device = Measured::Touched(Rc::new(Gate::new("raw", device)));
        Contender { name, device, _scratch: scratch }.filled(options, prepared).await
    }

    /// A protected volume on a file.
    pub async fn volume(options: &FileOptions, guard: Protection, prepared: Prepared) -> anyhow::Result<Contender> {
        let name = format!("volume {}", guard.name());
        let scratch = new_path(&options.dir, &name)?;
        new_volume(&scratch.0, options.blocks(), guard, prepared).await?;
        let device = Measured::Volume(open_volume(&scratch.0, Turn::default()).await?);
        Contender { name, device, _scratch: scratch }.filled(options, prepared).await
    }

    /// All contenders have the same data, because disks may treat zeroes specially.
    async fn filled(self, options: &FileOptions, prepared: Prepared) -> anyhow::Result<Contender> {
        if prepared == Prepared::Written {
            self.turn(FILL, Until::Asked(options.blocks() / FILL.blocks), 1).await?;
        }
        Ok(self)
    }

    /// One turn.
    pub async fn turn(&self, load: Load, until: Until, seed: u64) -> anyhow::Result<Sample> {
        match &self.device {
            Measured::Raw(gate) => load::drive(Rc::clone(gate), load, until, seed).await,
            Measured::Touched(gate) => load::drive(Rc::clone(gate), load, until, seed).await,
            Measured::Volume(volume) => {
                volume.on_turn.set(true);
                let turn = load::drive(Rc::clone(&volume.gate), load, until, seed).await;
                volume.on_turn.set(false);
                turn
            }
        }
    }

    /// Leaves a volume idle, with its clock running.
    pub async fn sleep(&self, time: Duration) {
        let Measured::Volume(volume) = &self.device else { return };
        volume.on_turn.set(true);
        sleep(time).await;
        volume.on_turn.set(false);
    }

    /// The counters of a volume's medium; `None` for a raw file.
    pub fn counts(&self) -> Option<&Counts> {
        match &self.device {
            Measured::Raw(_) | Measured::Touched(_) => None,
            Measured::Volume(volume) => Some(&volume.counts),
        }
    }

    /// Closes and removes it.
    pub async fn close(self) -> anyhow::Result<()> {
        if let Measured::Volume(volume) = self.device {
            volume.close().await?;
        }
        Ok(())
    }
}
