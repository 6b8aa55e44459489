//! Makes a specimen: on the simulator's disk, used, and stopped. Everything follows from one seed.
//!
//! A volume is used by several machines in turn. Each opens the state that the previous one left, and after each the
//! volume's bytes are saved as the content for stale sectors. The last machine stops in the requested state.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use sealblock_block::{Device, Durability, DynDevice, Request};
use sealblock_integrity::{GuardKind, PiFormat, ProtectionType};
use sealblock_media_volume::format::Layout;
use sealblock_simulator::checker::{Content, Patterns};
use sealblock_simulator::disk::{Behaviour, Image, SimDisk, Survival};
use sealblock_simulator::executor::{Executor, RunEnd};
use sealblock_simulator::random::Trace;
use sealblock_simulator::random::{Random, mix};
use sealblock_simulator::shards::{ShardedVolumes, container_of};
use sealblock_simulator::system::{Resizing, Session, System, VolumeProfile, Volumes};
use sealblock_units::{BlockSize, Extent, Lba};

use crate::look::{LIMITS, Seen, look};
use crate::medium::Overlay;
use crate::model::Model;
use crate::parts::Part;
use crate::scan;
use crate::specimen::{IDLE, Kind, Places, Specimen, State};

/// The maximum number of blocks of one request.
const MOST_AT_ONCE: u64 = 48;
/// The number of machines that use the other volume: more than use a specimen.
const LONGER: u64 = 8;
/// The size of a volume that is large enough to have bitmap pages; only its written parts are read.
const LARGE_BYTES: u64 = 514 << 20;

impl Specimen {
    /// Makes the volume for this seed.
    ///
    /// # Errors
    /// If the undamaged volume has a fault.
    pub fn make(seed: u64, state: State, kind: Kind) -> Result<Specimen, String> {
        let first_share = Random::new(seed).fork("size").between(20, 80);
        let shares = [first_share];
        Specimen::grown(seed, state, kind, if state == State::Resized { &shares } else { &[] })
    }

    /// The same for a volume that was created with about the first of these percentages of its blocks, and then resized
    /// to the others, and finally to all blocks. The resizes come before its use, or, for [`State::Resized`], after it.
    ///
    /// # Errors
    /// As for [`Specimen::make`].
    pub fn grown(seed: u64, state: State, kind: Kind, shares: &[u64]) -> Result<Specimen, String> {
        let random = Random::new(seed);
        let (shape, large) = (draw_shape(&random, kind), kind == Kind::Large);
        let mut sizes = shares.iter().map(|share| (shape.capacity_blocks * share / 100) | 1);
        let created = VolumeProfile { capacity_blocks: sizes.next().unwrap_or(shape.capacity_blocks), ..shape };
        let mut layout = Layout::new(shape.block_size, shape.sector_bytes, created.capacity_blocks)
            .map_err(|error| error.to_string())?;
        let patterns = Patterns::new(seed, shape.block_size, shape.protection);
        let sizes: Vec<u64> = sizes.chain((!shares.is_empty()).then_some(shape.capacity_blocks)).collect();
        let container = (kind == Kind::Shards).then(|| container_of(&shape));
        let [foreign, blank] = others([created, shape], layout, &sizes, kind, seed)?;
        let mut life = Life::of(created, shape, (kind, layout), patterns, random);
        life.create(created)?;
        let earlier = life.before(state, &sizes, &mut layout)?;
        life.run_server(false, last_stop(state, &life.random))?;
        let model = life.model.borrow().clone();
        let watched = watched(&model, large, &life.random);
        let mut specimen = Specimen {
            state,
            shape,
            container,
            parts: container
                .map_or_else(|| vec![Part::whole(shape.uuid, layout)], |container| Part::shards(&container)),
            patterns,
            model,
            image: Rc::new(flatten(&life.image)),
            earlier,
            foreign,
            blank,
            found: BTreeMap::new(),
            places: Places::default(),
            watched,
        };
        specimen.found = specimen.control()?;
        specimen.places = scan::find(&specimen)?;
        Ok(specimen)
    }

    /// Opens the undamaged volume and checks that the model permits every block.
    fn control(&self) -> Result<BTreeMap<Lba, Content>, String> {
        let overlay = Overlay::new(&self.image, self.shape.sector_bytes, true);
        let seen = look(self, &overlay).map_err(|error| format!("the undamaged volume does not open: {error}"))?;
        let mut found = BTreeMap::new();
        for (lba, seen) in seen.blocks {
            let content = match seen {
                Seen::Content(content) => content,
                Seen::Lost(_) if self.model.permits(lba, Content::Unreadable) => Content::Unreadable,
                other => return Err(format!("block {lba} of the undamaged volume: {other:?}")),
            };
            if !self.model.permits(lba, content) {
                let permitted = self.model.permitted(lba);
                return Err(format!("block {lba} of the undamaged volume holds {content:?}, not {permitted:?}"));
            }
            found.insert(lba, content);
        }
        Ok(found)
    }
}

fn system(kind: Kind) -> Box<dyn System> {
    match kind {
        Kind::Small | Kind::Large => Box::new(Volumes::default()),
        Kind::Shards => Box::new(ShardedVolumes::default()),
    }
}

/// How the last machine stops.
fn last_stop(state: State, random: &Random) -> State {
    if state == State::Resized { *random.pick(&State::ALL[..4]) } else { state }
}

fn draw_shape(random: &Random, kind: Kind) -> VolumeProfile {
    let large = kind == Kind::Large;
    let shapes = [(BlockSize::B512, 512), (BlockSize::B4096, 512), (BlockSize::B4096, 4096), (BlockSize::B4096, 4096)];
    let (block_size, sector_bytes) = if large { (BlockSize::B4096, 4096) } else { *random.pick(&shapes) };
    let capacity_blocks = match (large, block_size, sector_bytes) {
        (true, ..) => LARGE_BYTES >> block_size.shift(),
        // A page covers 256 blocks of either size with sectors of 512 bytes, and 2,048 with sectors of 4096.
        (_, BlockSize::B512, _) => random.between(2048, 6000),
        (_, _, 512) => random.between(256, 1024),
        _ => random.between(400, 2600),
    };
    let guards = [GuardKind::Crc16, GuardKind::Crc32c, GuardKind::Crc32c, GuardKind::Crc64];
    let protection = PiFormat::with_default_storage_tag(*random.pick(&guards), *random.pick(&ProtectionType::ALL));
    let mut uuid = [0; 16];
    uuid[..8].copy_from_slice(&random.word().to_le_bytes());
    VolumeProfile {
        block_size,
        sector_bytes,
        capacity_blocks,
        protection: Some(protection),
        cache_bytes: 1 << 20,
        uuid,
        idle_us: 100_000,
        seal_in_flight_bytes: 64 << 10,
        notes_half_bytes: 1 << 20,
    }
}

fn flatten(image: &Image) -> Vec<u8> {
    let mut bytes = vec![0; image.len_bytes() as usize];
    let sector_bytes = image.sector_bytes() as usize;
    for (sector, content) in image.visible() {
        bytes[sector as usize * sector_bytes..][..sector_bytes].copy_from_slice(content);
    }
    bytes
}

fn watched(model: &Model, large: bool, random: &Random) -> Vec<Extent> {
    const AT_ONCE: u64 = 64;
    let all = (0..model.blocks()).step_by(AT_ONCE as usize);
    let pieces = all.filter_map(|first| Extent::from_raw(first, AT_ONCE.min(model.blocks() - first)).ok());
    pieces.filter(|piece| !large || random.chance(2) || piece.iter().any(|lba| model.is_touched(lba))).collect()
}

/// A volume between two machines.
struct Life {
    kind: Kind,
    shape: VolumeProfile,
    patterns: Patterns,
    model: Rc<RefCell<Model>>,
    version: u64,
    image: Image,
    random: Random,
}

/// Two other volumes of the same shape: one that was used longer, and one that was never used. For a large volume both
/// are blank. Those of a volume in shards are dealt as it is, so that their shards are at the same places.
fn others(
    [created, shape]: [VolumeProfile; 2],
    layout: Layout,
    sizes: &[u64],
    kind: Kind,
    seed: u64,
) -> Result<[Vec<u8>; 2], String> {
    let (mut longest, mut images) = (layout.medium_bytes(), Vec::new());
    for uses in [LONGER, 0] {
        let (random, mut layout) = (Random::new(mix(seed ^ uses)), layout);
        let (mut uuid, word) = ([0xee; 16], random.word().to_le_bytes());
        if kind == Kind::Shards {
            uuid = shape.uuid;
            uuid[8..].copy_from_slice(&word);
        } else {
            uuid[..8].copy_from_slice(&word);
        }
        let [created, shape] = [created, shape].map(|shape| VolumeProfile { uuid, ..shape });
        let patterns = Patterns::new(seed ^ uses, shape.block_size, shape.protection);
        let mut life = Life::of(created, shape, (kind, layout), patterns, random);
        life.create(created)?;
        for &size in sizes {
            layout = life.resize(&layout, size)?;
        }
        longest = life.image.len_bytes();
        for machine in 0..if kind == Kind::Large { 0 } else { uses } {
            life.run_server(machine == 0, State::Clean)?;
        }
        images.push(flatten(&life.image));
    }
    images.iter_mut().for_each(|image| image.resize(longest as usize, 0));
    images.try_into().map_err(|_| "two volumes".to_owned())
}

impl Life {
    /// A volume that will be created with `created`, and finally have the shape `shape`.
    fn of(
        created: VolumeProfile,
        shape: VolumeProfile,
        (kind, layout): (Kind, Layout),
        patterns: Patterns,
        random: Random,
    ) -> Life {
        let medium_bytes =
            if kind == Kind::Shards { container_of(&shape).medium_bytes() } else { layout.medium_bytes() };
        let image = Image::blank(shape.sector_bytes, medium_bytes);
        let model = Rc::new(RefCell::new(Model::new(created.capacity_blocks)));
        Life { kind, shape, patterns, model, version: 1, image, random }
    }

    /// Runs one machine on the disk, which then loses power in the given way.
    fn on<T: 'static, F: Future<Output = Result<T, String>> + 'static>(
        &mut self,
        survival: Survival,
        work: impl FnOnce(SimDisk, Executor) -> F,
    ) -> Result<T, String> {
        let executor = Executor::new(self.random.fork("schedule"), Trace::default());
        let image = std::mem::replace(&mut self.image, Image::blank(512, 0));
        let disk = SimDisk::new(image, Behaviour::default(), &executor, self.random.fork("disk"), Trace::default());
        let ended = executor.run(LIMITS, work(disk.clone(), executor.clone()));
        self.image = disk.power_off(survival, &self.random.fork("survival"));
        match ended {
            RunEnd::Finished(result) => result,
            RunEnd::Halted => Err("the machine was halted".to_owned()),
            RunEnd::Stuck(stuck) => Err(stuck.to_string()),
        }
    }

    fn create(&mut self, shape: VolumeProfile) -> Result<(), String> {
        let system = system(self.kind);
        self.on(Survival::Everything, move |disk, _| system.create(disk, shape))
    }

    /// Resizes the volume; returns its new layout.
    fn resize(&mut self, before: &Layout, capacity_blocks: u64) -> Result<Layout, String> {
        let resize = move |disk, executor| Volumes::default().resize(disk, executor, capacity_blocks);
        match self.on(Survival::Nothing, resize)? {
            Resizing::Done => {
                self.model.borrow_mut().resize(capacity_blocks);
                before.with_capacity(capacity_blocks).map_err(|error| error.to_string())
            }
            other => Err(format!("the volume was not resized: {other:?}")),
        }
    }

    /// Runs all machines before the last one, and the resizes; returns the states that they left.
    fn before(&mut self, state: State, sizes: &[u64], layout: &mut Layout) -> Result<Vec<Vec<u8>>, String> {
        let mut earlier = Vec::new();
        if state == State::Resized {
            self.live_before(true, &mut earlier)?;
        }
        for &size in sizes {
            *layout = self.resize(layout, size)?;
        }
        for machine in 0..self.random.between(2, 4) {
            self.live_before(machine == 0 && earlier.is_empty(), &mut earlier)?;
        }
        // The bytes after the former end were blank or did not exist.
        earlier.iter_mut().for_each(|image| image.resize(self.image.len_bytes() as usize, 0));
        Ok(earlier)
    }

    /// Runs a machine before the last one; returns the state that it left.
    fn live_before(&mut self, is_first: bool, earlier: &mut Vec<Vec<u8>>) -> Result<(), String> {
        let ends = *self.random.pick(&[State::Clean, State::Clean, State::Crashed, State::Idle]);
        self.run_server(is_first, ends)?;
        earlier.push(flatten(&self.image));
        Ok(())
    }

    /// Runs one machine: opens the volume, changes blocks, and stops.
    fn run_server(&mut self, is_first: bool, ends: State) -> Result<(), String> {
        let survival = match ends {
            State::Clean | State::Idle | State::Crashed | State::Resized => Survival::Nothing,
            State::Torn => *self.random.pick(&[
                Survival::Coin { percent: 30 },
                Survival::Coin { percent: 70 },
                Survival::Everything,
                Survival::Prefix,
            ]),
        };
        let (shape, patterns, model) = (self.shape, self.patterns, Rc::clone(&self.model));
        let host = Host { patterns, model, version: self.version, random: self.random.fork("host") };
        let system = system(self.kind);
        self.version = self.on(survival, move |disk, executor| async move {
            let session = system.open(disk, executor.clone(), shape, false).await?;
            host.work(session, executor, is_first, ends).await
        })?;
        Ok(())
    }
}

/// The only user of a device.
pub struct Host {
    /// Makes contents.
    pub patterns: Patterns,
    /// The possible contents of its blocks.
    pub model: Rc<RefCell<Model>>,
    /// The last version that was written.
    pub version: u64,
    /// Random choices.
    pub random: Random,
}

impl Host {
    /// Uses a device, and leaves it in the requested state; returns the last version that was written.
    ///
    /// # Errors
    /// If a request is refused; the error has the reason.
    pub async fn work(
        mut self,
        session: Session,
        executor: Executor,
        is_first: bool,
        ends: State,
    ) -> Result<u64, String> {
        let Session { stack, close, .. } = session;
        self.learn(&stack).await?;
        if is_first {
            self.fill(&stack).await?;
        }
        for _ in 0..self.random.between(1, 6) {
            for _ in 0..self.random.between(1, 12) {
                self.change(&stack).await?;
            }
            self.flush(&stack).await?;
        }
        match ends {
            State::Clean | State::Resized => close.await?,
            State::Idle => executor.delay(IDLE).await,
            // Sometimes the device is idle for a moment, but too briefly for a checkpoint.
            State::Crashed => executor.delay(Duration::from_millis(self.random.below(2) * 1000)).await,
            State::Torn => {
                for _ in 0..self.random.between(1, 20) {
                    self.change(&stack).await?;
                }
                let flushed = stack.clone();
                drop(executor.spawn("flush", async move { flushed.execute(Request::flush()).await }));
                executor.delay(Duration::from_micros(self.random.below(600))).await;
            }
        }
        Ok(self.version)
    }

    /// Records the current content: a crash may have kept or dropped unflushed writes.
    async fn learn(&self, stack: &DynDevice) -> Result<(), String> {
        let blocks = self.model.borrow().blocks();
        for lba in (0..blocks).map(Lba::new) {
            if self.model.borrow().permitted(lba).len() > 1 {
                let extent = Extent::one(lba);
                let content = match crate::look::read(stack, extent).await {
                    Ok(data) => self.patterns.contents(extent, &data)?[0],
                    Err(_) => Content::Unreadable,
                };
                self.model.borrow_mut().found(lba, content);
            }
        }
        Ok(())
    }

    /// Writes most of the volume once, in order, as a copy does.
    async fn fill(&mut self, stack: &DynDevice) -> Result<(), String> {
        let blocks = self.model.borrow().blocks().min(8192);
        let end = blocks * self.random.between(30, 100) / 100;
        let mut at = self.random.below(blocks / 8);
        while at < end {
            let length = self.random.between(1, 4 * MOST_AT_ONCE).min(end - at);
            self.write(stack, extent(at, length)?).await?;
            // Some blocks are never written.
            at += length + if self.random.chance(20) { self.random.below(MOST_AT_ONCE) } else { 0 };
        }
        self.flush(stack).await
    }

    async fn change(&mut self, stack: &DynDevice) -> Result<(), String> {
        let blocks = self.model.borrow().blocks();
        let length = if self.random.chance(50) { 1 } else { self.random.between(1, MOST_AT_ONCE) };
        // Mostly near the other writes, sometimes far away.
        let near = if self.random.chance(5) { blocks } else { blocks.min(8192) };
        let extent = extent(self.random.below(near - length), length)?;
        match self.random.below(20) {
            0 => {
                let operation = Request::write_zeroes(extent, true, Durability::Volatile);
                stack.execute(operation).await.map_err(|error| error.to_string())?;
                self.model.borrow_mut().change(extent, Content::Zero);
            }
            1 if self.random.chance(20) => {
                let extent = Extent::one(extent.start());
                let operation = Request::write_uncorrectable(extent, Durability::Volatile);
                stack.execute(operation).await.map_err(|error| error.to_string())?;
                self.model.borrow_mut().change(extent, Content::Unreadable);
            }
            _ => self.write(stack, extent).await?,
        }
        Ok(())
    }

    async fn write(&mut self, stack: &DynDevice, extent: Extent) -> Result<(), String> {
        self.version += 1;
        let data = self.patterns.sealed(extent, self.version);
        // A write without a response may have been executed.
        self.model.borrow_mut().change(extent, Content::Version(self.version));
        let operation = Request::write(extent, data, Durability::Volatile);
        stack.execute(operation).await.map(drop).map_err(|error| error.to_string())
    }

    async fn flush(&self, stack: &DynDevice) -> Result<(), String> {
        stack.execute(Request::flush()).await.map_err(|error| error.to_string())?;
        self.model.borrow_mut().flushed();
        Ok(())
    }
}

fn extent(start: u64, blocks: u64) -> Result<Extent, String> {
    Extent::from_raw(start, blocks).map_err(|error| error.to_string())
}
