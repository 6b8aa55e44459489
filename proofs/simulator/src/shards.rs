//! Volumes in shards: each shard is on a core of its own, and hosts use the volume from any core.

use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;

use futures_util::future::join_all;
use sealblock_block::{Abilities, Device, DynDevice, Geometry, Outcome, Request, RequestKind};
use sealblock_layers_stripe::ShardLayer;
use sealblock_media_volume::format::{Container, Layout, Seed};
use sealblock_media_volume::shards::{OpenShards, create_container, open_shards, summarise};
use sealblock_media_volume::{AnsweredChanges, CreateOptions, OpenOptions, OpenVolume, VolumeInfo};
use sealblock_units::ByteCount;

use crate::cores::{Cores, Crossing};
use crate::disk::{Image, SimDisk};
use crate::executor::Executor;
use crate::random::Random;
use crate::system::{BoxedWork, Redundant, Session, System, VolumeProfile, lone_entries, redundant_parts};

/// A defect of a volume in shards, to show that the simulator detects it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum ShardMutation {
    /// None.
    #[default]
    None,
    /// A Flush goes to one shard only.
    FlushOne,
    /// The next opening deals blocks in other units.
    OtherUnits,
}

/// Protected volumes in shards.
#[derive(Clone, Copy, Debug, Default)]
pub struct ShardedVolumes {
    /// The defect.
    pub mutation: ShardMutation,
}

/// The choices that a seed makes for its volume in addition to its profile.
struct Dealing {
    shards: u32,
    unit_blocks: u64,
    cores: usize,
}

/// Drawn from the identity, which is random, so that the rest of a seed does not depend on shards.
fn draw(profile: &VolumeProfile) -> Dealing {
    let random = Random::new(u64::from_le_bytes(*profile.uuid.first_chunk().expect("16 bytes")) ^ (1 << 43));
    let (shards, unit_blocks) = (*random.pick(&[2, 2, 3, 4]), *random.pick(&[1, 4, 8]));
    Dealing { shards, unit_blocks, cores: random.between(1, 4) as usize }
}

/// How a volume of this profile is dealt to its shards. It follows from the first 8 bytes of its identity.
///
/// # Panics
/// If the profile is impossible.
pub fn container_of(profile: &VolumeProfile) -> Container {
    let Dealing { shards, unit_blocks, .. } = draw(profile);
    let identity = (profile.uuid, profile.protection);
    let blocks = (profile.block_size, profile.sector_bytes);
    let container = Container::with_units(identity, blocks, profile.capacity_blocks, (shards, unit_blocks));
    container.expect("drawn shapes are possible")
}

/// The layout of each shard, the offset of its window in sectors, and the salt of its checksums.
fn windows(profile: &VolumeProfile) -> Vec<(Layout, u64, Seed)> {
    let container = container_of(profile);
    let window = |shard| {
        let first = container.window(shard).offset / u64::from(profile.sector_bytes);
        (*container.shard_layout(), first, Seed::of(&container.shard_uuid(shard)))
    };
    (0..container.shards()).map(window).collect()
}

fn moved(runs: &[Range<u64>], by: u64) -> impl Iterator<Item = Range<u64>> {
    runs.iter().map(move |run| run.start + by..run.end + by)
}

impl System for ShardedVolumes {
    fn disk_bytes(&self, profile: &VolumeProfile) -> u64 {
        container_of(profile).medium_bytes()
    }

    fn survives_kills(&self) -> bool {
        true
    }

    fn parts(&self, profile: &VolumeProfile) -> (u32, u64) {
        let Dealing { shards, unit_blocks, .. } = draw(profile);
        (shards, unit_blocks)
    }

    fn redundant(&self, profile: &VolumeProfile, _: &Image) -> Vec<Redundant> {
        let mut all: Vec<Redundant> = Vec::new();
        for (layout, first, _) in windows(profile) {
            let parts = redundant_parts(&layout);
            all.resize_with(parts.len(), || Redundant { runs: Vec::new(), is_repaired_at_open: true });
            for (all, part) in all.iter_mut().zip(parts) {
                all.runs.extend(moved(&part.runs, first));
                all.is_repaired_at_open = part.is_repaired_at_open;
            }
        }
        let sector = |offset: u64| offset / u64::from(profile.sector_bytes);
        let copies = container_of(profile).copy_offsets().map(|offset| sector(offset)..sector(offset) + 1);
        all.push(Redundant { runs: copies.to_vec(), is_repaired_at_open: true });
        all
    }

    fn single_copy(&self, profile: &VolumeProfile, image: &Image) -> Vec<u64> {
        windows(profile)
            .into_iter()
            .flat_map(|(layout, first, seed)| lone_entries(&layout, image, first, seed))
            .collect()
    }

    fn create(&self, disk: SimDisk, profile: VolumeProfile) -> BoxedWork<()> {
        let options = CreateOptions {
            block_size: profile.block_size,
            capacity_blocks: profile.capacity_blocks,
            protection: profile.protection,
            uuid: profile.uuid,
            preallocate: false,
        };
        let container = container_of(&profile);
        Box::pin(async move { create_container(&disk, &options, &container).await.map_err(|error| error.to_string()) })
    }

    fn open(&self, disk: SimDisk, executor: Executor, profile: VolumeProfile, read_only: bool) -> BoxedWork<Session> {
        let idle_after = Duration::from_micros(profile.idle_us);
        let VolumeProfile { cache_bytes, seal_in_flight_bytes, notes_half_bytes, .. } = profile;
        let options = OpenOptions {
            read_only,
            cache_bytes,
            idle_after,
            seal_in_flight_bytes,
            notes_half_bytes,
            ..OpenOptions::default()
        };
        let (mutation, cores) = (self.mutation, draw(&profile).cores);
        Box::pin(async move {
            let opened = open_shards(disk, executor.clone(), &options).await.map_err(|error| error.to_string())?;
            let OpenShards { shards, volumes } = opened.ok_or("there is no volume in shards")?;
            let infos: Vec<(u32, VolumeInfo)> =
                (0..).zip(&volumes).map(|(shard, opened)| (shard, opened.description.clone())).collect();
            let description = summarise(shards.container(), shards.copies(), &infos);
            let mut handles = Vec::new();
            for OpenVolume { volume, worker, .. } in volumes {
                drop(executor.spawn("worker", worker.run()));
                handles.push(volume);
            }
            let random = Random::new(description.write_seq ^ (1 << 44) ^ u64::from(profile.uuid[0]));
            let cores = Cores::new(cores, executor, random.fork("cores"));
            let devices: Vec<DynDevice> =
                handles.iter().map(|volume| DynDevice::new("shard", Rc::clone(volume))).collect();
            let is_other = mutation == ShardMutation::OtherUnits && description.write_seq > 4;
            let unit_blocks = shards.container().unit_blocks() << u32::from(is_other);
            let layers = (0..cores.count()).map(|core| {
                let numbered = devices.iter().cloned().enumerate();
                let seen = numbered.map(|(shard, device)| cores.seen_from(core, shard % cores.count(), device));
                let unit = ByteCount::new(unit_blocks << profile.block_size.shift());
                let layer = ShardLayer::new(seen.collect(), unit, shards.container().capacity_blocks());
                let layer = layer.map_err(|error| error.to_string())?;
                Ok(if cores.count() > 1 { layer.sealed_before() } else { layer })
            });
            let layers = layers.collect::<Result<_, String>>()?;
            let stack = DynDevice::new("volume", OnCores { layers, random, mutation });
            let lost: Option<BoxedWork<()>> = match description.answered {
                AnsweredChanges::MayBeLost(_) => {
                    let handles = handles.clone();
                    Some(Box::pin(async move {
                        let forgotten = join_all(handles.iter().map(|volume| volume.forget_lost())).await;
                        forgotten.into_iter().collect::<Result<(), _>>().map_err(|error| error.to_string())
                    }))
                }
                AnsweredChanges::AllDurable | AnsweredChanges::Noted(_) => None,
            };
            let close = Box::pin(async move {
                let closed = join_all(handles.iter().map(|volume| volume.close())).await;
                closed.into_iter().collect::<Result<(), _>>().map_err(|error| error.to_string())
            });
            Ok(Session { stack, close, lost })
        })
    }
}

/// The volume on each core; each request comes from any of them.
struct OnCores {
    layers: Vec<ShardLayer<Crossing<DynDevice>>>,
    random: Random,
    mutation: ShardMutation,
}

impl Device for OnCores {
    fn geometry(&self) -> &Geometry {
        self.layers[0].geometry()
    }

    fn abilities(&self) -> Abilities {
        self.layers[0].abilities()
    }

    async fn execute(&self, request: Request) -> Outcome {
        let layer = &self.layers[self.random.below(self.layers.len() as u64) as usize];
        if request.kind() == RequestKind::Flush && self.mutation == ShardMutation::FlushOne {
            return layer.shards()[0].execute(request).await;
        }
        layer.execute(request).await
    }
}
