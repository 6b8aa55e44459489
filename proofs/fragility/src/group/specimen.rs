//! A group in a known state, with everything known about it. Everything follows from one seed.
//!
//! A group is used by several machines in turn. Each opens the state that the previous one left, and after each the
//! bytes of all members are saved as an earlier state. The last machine stops in the requested state.

use std::cell::RefCell;
use std::fmt;
use std::rc::Rc;

use sealblock_block::Device;
use sealblock_media_volume::CreateOptions;
use sealblock_simulator::checker::Patterns;
use sealblock_simulator::random::{Random, mix};
use sealblock_simulator::system::Session;

use crate::group::open::{Media, open_group};
use crate::group::shape::{Kind, Shape, on_machine, pieces};
use crate::life::Host;
use crate::look::{BlockChecker, Seen};
use crate::medium::Overlay;
use crate::model::Model;
use crate::specimen::State as Stop;

/// The state in which a group is damaged.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum State {
    /// Closed.
    Clean,
    /// Killed after a flush.
    Crashed,
    /// Killed while writes were in flight.
    Torn,
    /// A replica was offline in the last machine; a stripe was closed instead.
    Degraded,
    /// A replica was offline and was killed during its resync; a stripe was killed instead.
    Returned,
}

impl State {
    /// All of them.
    pub const ALL: [State; 5] = [State::Clean, State::Crashed, State::Torn, State::Degraded, State::Returned];

    /// How its last machine stops.
    fn stop(self, random: &Random) -> Stop {
        match self {
            State::Clean => Stop::Clean,
            State::Crashed | State::Returned => Stop::Crashed,
            State::Torn => Stop::Torn,
            State::Degraded => *random.pick(&[Stop::Clean, Stop::Crashed]),
        }
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            State::Clean => "clean",
            State::Crashed => "crashed",
            State::Torn => "torn",
            State::Degraded => "degraded",
            State::Returned => "returned",
        })
    }
}

/// The bytes of all members.
pub type Images = Vec<Rc<Vec<u8>>>;

/// A group in a state, with everything known about it.
pub struct GroupSpecimen {
    /// Its state.
    pub state: State,
    /// Its shape.
    pub shape: Shape,
    /// Makes and recognises contents.
    pub patterns: Patterns,
    /// The possible contents of its blocks.
    pub model: Model,
    /// The bytes of its members.
    pub images: Images,
    /// The earlier states of its members, oldest first.
    pub earlier: Vec<Images>,
    /// The members of another group of the same shape that was used.
    pub foreign: Images,
    /// Volumes of the same shape that were never written and are in no group.
    pub blank: Images,
    /// The replicas that an open of the undamaged group reports as in sync.
    pub in_sync: Vec<usize>,
    /// The replicas that were online when it was used last.
    pub last_present: Vec<bool>,
}

impl fmt::Display for GroupSpecimen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Shape { kind, block_size, sector_bytes, capacity_blocks, .. } = self.shape;
        let (away, in_sync) = (self.last_present.iter().position(|present| !present), &self.in_sync);
        write!(f, "{kind}, {}, {capacity_blocks} blocks of {block_size}, sectors of {sector_bytes}", self.state)?;
        write!(f, ", in sync {in_sync:?}, away {away:?}")
    }
}

/// A group between two machines.
struct Life {
    shape: Shape,
    patterns: Patterns,
    model: Rc<RefCell<Model>>,
    version: u64,
    images: Images,
    random: Random,
}

impl Life {
    fn create(shape: Shape, seed: u64) -> Result<Life, String> {
        let random = Random::new(seed);
        let images = (0..shape.kind.volumes()).map(|volume| create_volume(&shape, volume, &random));
        let images = images.collect::<Result<Images, String>>()?;
        let patterns = Patterns::new(seed, shape.block_size, Some(shape.protection));
        let model = Rc::new(RefCell::new(Model::new(shape.capacity_blocks)));
        Ok(Life { shape, patterns, model, version: 1, images, random })
    }

    /// Runs one machine: opens the present replicas, uses the group, and stops.
    fn run_server(&mut self, present: &[bool], is_first: bool, settles: bool, ends: Stop) -> Result<(), String> {
        let media: Media =
            self.images.iter().map(|image| Overlay::new(image, self.shape.sector_bytes, false)).collect();
        let (shape, used, present) = (self.shape, media.clone(), present.to_vec());
        let (patterns, model, version) = (self.patterns, Rc::clone(&self.model), self.version);
        let host = Host { patterns, model, version, random: self.random.fork("host") };
        self.version = on_machine(&self.random, false, |machine| async move {
            let executor = machine.executor.clone();
            let group = open_group(&shape, &used, &present, &machine).await?;
            if settles {
                group.wait_for_resync(&executor).await;
            }
            let session = Session { stack: group.stack.clone(), close: Box::pin(group.close()), lost: None };
            host.work(session, executor, is_first, ends).await
        })?;
        self.images = media.iter().map(|overlay| Rc::new(overlay.flatten())).collect();
        Ok(())
    }
}

/// A new volume on an empty medium.
fn create_volume(shape: &Shape, volume: usize, random: &Random) -> Result<Rc<Vec<u8>>, String> {
    let layout = shape.layout(volume);
    let mut uuid = [0xab; 16];
    uuid[..8].copy_from_slice(&random.word().to_le_bytes());
    let options = CreateOptions {
        block_size: shape.block_size,
        capacity_blocks: layout.capacity_blocks(),
        protection: Some(shape.protection),
        uuid,
        preallocate: false,
    };
    let medium = Overlay::new(&Rc::new(vec![0; layout.medium_bytes() as usize]), shape.sector_bytes, false);
    let created = medium.clone();
    on_machine(random, false, |_| async move {
        sealblock_media_volume::create(&created, &options).await.map_err(|error| error.to_string())
    })?;
    Ok(Rc::new(medium.flatten()))
}

impl GroupSpecimen {
    /// Makes the group of this seed.
    ///
    /// # Errors
    /// If the undamaged group has a fault.
    pub fn make(seed: u64, kind: Kind, state: State) -> Result<GroupSpecimen, String> {
        let shape = Shape::draw(kind, &Random::new(seed));
        let blank = Life::create(shape, mix(seed ^ 1))?.images;
        let mut other = Life::create(shape, mix(seed ^ 2))?;
        let all = vec![true; kind.replicas().len()];
        other.run_server(&all, true, true, Stop::Clean)?;
        other.run_server(&all, false, true, Stop::Clean)?;
        let (mut life, mut earlier) = (Life::create(shape, seed)?, Vec::new());
        for machine in 0..life.random.between(2, 3) {
            let ends = *life.random.pick(&[Stop::Clean, Stop::Clean, Stop::Crashed]);
            life.run_server(&all, machine == 0, true, ends)?;
            earlier.push(life.images.clone());
        }
        let mut last_present = all.clone();
        if kind.is_mirror() && matches!(state, State::Degraded | State::Returned) {
            last_present[life.random.below(all.len() as u64) as usize] = false;
        }
        if state == State::Returned {
            life.run_server(&last_present, false, true, Stop::Clean)?;
            earlier.push(life.images.clone());
            last_present = all;
        }
        let stop = state.stop(&life.random);
        life.run_server(&last_present, false, state != State::Returned, stop)?;
        let model = life.model.borrow().clone();
        let Life { patterns, images, .. } = life;
        let foreign = other.images;
        let mut specimen = GroupSpecimen {
            state,
            shape,
            patterns,
            model,
            images,
            earlier,
            foreign,
            blank,
            in_sync: Vec::new(),
            last_present,
        };
        specimen.in_sync = specimen.control()?;
        Ok(specimen)
    }

    /// Opens the undamaged group and checks that the model permits every block. Returns the replicas in sync.
    fn control(&self) -> Result<Vec<usize>, String> {
        let media: Media = self.images.iter().map(|image| Overlay::new(image, self.shape.sector_bytes, true)).collect();
        let (shape, present) = (self.shape, vec![true; self.last_present.len()]);
        let (checker, watched) = (self.checker(), pieces(self.shape.capacity_blocks));
        let (blocks, in_sync) = on_machine(&Random::new(1), true, |machine| async move {
            let group = open_group(&shape, &media, &present, &machine).await?;
            if group.stack.geometry().capacity_blocks != shape.capacity_blocks {
                return Err(format!("{} blocks", group.stack.geometry().capacity_blocks));
            }
            Ok((checker.look(&group.stack, &watched).await.blocks, group.in_sync()))
        })?;
        let is_wrong = |(lba, seen): &&(_, Seen)| !self.is_permitted(*lba, seen);
        match blocks.iter().find(is_wrong) {
            Some((lba, seen)) => Err(format!("block {lba} of the undamaged group is {seen:?}")),
            None => Ok(in_sync),
        }
    }

    /// True if the model permits this content in an undamaged group.
    pub fn is_permitted(&self, lba: sealblock_units::Lba, seen: &Seen) -> bool {
        use sealblock_simulator::checker::Content;
        match seen {
            Seen::Content(content) => self.model.permits(lba, *content),
            Seen::Lost(_) => self.model.permits(lba, Content::Unreadable),
            Seen::Collision => true,
            Seen::Foreign(_) => false,
        }
    }

    /// Recognises the contents of its blocks.
    pub fn checker(&self) -> BlockChecker {
        BlockChecker::new(self.patterns, &self.model, Some(self.shape.protection))
    }
}
