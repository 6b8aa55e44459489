//! A volume in a known state, with everything known about it. This includes the blocks that damage may cost: those for
//! which it covers every place of the map entry or of the generation, or the data.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::rc::Rc;
use std::time::Duration;

use sealblock_media_volume::format::{Container, Region};
use sealblock_simulator::checker::{Content, Patterns};
use sealblock_simulator::system::VolumeProfile;
use sealblock_units::{Extent, Lba};

use crate::model::Model;
use crate::parts::{Part, Range};

/// An idle volume has written its block map by a checkpoint after this time.
pub const IDLE: Duration = Duration::from_secs(60);
/// The state in which a volume is damaged.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum State {
    /// Closed.
    Clean,
    /// In use and idle: the log is empty, but the volume was not closed.
    Idle,
    /// A power cut with only flushed writes in the log.
    Crashed,
    /// A power cut in the middle of writes and of a commit.
    Torn,
    /// Used, grown by an odd number of blocks, used again, and stopped in one of the other ways.
    Resized,
}

impl State {
    /// All of them.
    pub const ALL: [State; 5] = [State::Clean, State::Idle, State::Crashed, State::Torn, State::Resized];
}

/// What is made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// A volume of version 2.
    Small,
    /// One that is large enough to have bitmap pages; only its written parts are read.
    Large,
    /// A volume in shards. It keeps its size.
    Shards,
}

impl Kind {
    /// The states that it can be in.
    pub fn states(self) -> &'static [State] {
        if self == Kind::Shards { &State::ALL[..4] } else { &State::ALL }
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            State::Clean => "clean",
            State::Idle => "idle",
            State::Crashed => "crashed",
            State::Torn => "torn",
            State::Resized => "resized",
        })
    }
}

/// A volume in a state, with everything known about it.
pub struct Specimen {
    /// Its state.
    pub state: State,
    /// Its shape.
    pub shape: VolumeProfile,
    /// What deals its blocks to shards, if it has some.
    pub container: Option<Container>,
    /// The volume itself, or its shards.
    pub parts: Vec<Part>,
    /// Makes and recognises contents.
    pub patterns: Patterns,
    /// The possible contents of its blocks.
    pub model: Model,
    /// Its bytes.
    pub image: Rc<Vec<u8>>,
    /// Its earlier states, oldest first.
    pub earlier: Vec<Vec<u8>>,
    /// Another volume of the same shape and another identity that was used longer.
    pub foreign: Vec<u8>,
    /// Another volume of the same shape that was never written.
    pub blank: Vec<u8>,
    /// The contents of its blocks; where a crash left several possible ones, the actual one.
    pub found: BTreeMap<Lba, Content>,
    /// The places of map entries and data.
    pub places: Places,
    /// The tested blocks: all of them, or, for a large volume, those that were changed and some others.
    pub watched: Vec<Extent>,
}

impl fmt::Display for Specimen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {}", self.state, self.shape)?;
        match &self.container {
            Some(container) => write!(f, ", {} shards, units of {}", container.shards(), container.unit_blocks()),
            None => Ok(()),
        }
    }
}

impl Specimen {
    /// All regions, in order and without gaps.
    pub fn regions(&self) -> Vec<Region> {
        let alone = || self.parts[0].layout.regions();
        self.container.map_or_else(alone, |container| container.regions())
    }
}

/// The places of the blocks' records and data.
#[derive(Default)]
pub struct Places {
    /// The places of a block's map entry: it is lost if the damage covers all of them.
    pub entries: BTreeMap<Lba, Vec<Range>>,
    /// The places of a block's generation. Only these show whether a block was ever written, and which map entry is the
    /// right one.
    pub generations: BTreeMap<Lba, Vec<Range>>,
    /// The data of a block.
    pub data: BTreeMap<Lba, Range>,
    /// Blocks written by the last commit before a crash. Their map entries count only if their data are there, so
    /// damage to these data looks like a write that never arrived.
    pub window: BTreeSet<Lba>,
    /// Physical blocks that such map entries name and that have another content. If one becomes unreadable, it may be
    /// that of a flushed write, so its block is lost, whatever it held before.
    pub missing: Vec<(Lba, Range)>,
    /// The starts of map entries and data in use, in order.
    pub hot: Vec<u64>,
}

/// True if two ranges share a byte.
fn meet(a: Range, b: Range) -> bool {
    a.0 < b.1 && b.0 < a.1
}

impl Places {
    /// The blocks that damage to these bytes may cost; `gone` if they become unreadable.
    pub fn allowed(&self, hits: &[Range], gone: bool) -> BTreeSet<Lba> {
        let is_hit = |range: &Range| hits.iter().any(|hit| meet(*hit, *range));
        let all_hit = |(_, places): &(&Lba, &Vec<Range>)| places.iter().all(is_hit);
        let entries = self.entries.iter().filter(all_hit).map(|(lba, _)| *lba);
        let generations = self.generations.iter().filter(all_hit).map(|(lba, _)| *lba);
        let data = self.data.iter().filter(|(_, range)| is_hit(range)).map(|(lba, _)| *lba);
        let missing = self.missing.iter().filter(|(_, range)| gone && is_hit(range)).map(|(lba, _)| *lba);
        entries.chain(generations).chain(data).chain(missing).collect()
    }

    /// The starts of map entries and data in use in this region.
    pub fn hot(&self, region: &Region) -> &[u64] {
        let first = self.hot.partition_point(|at| *at < region.start);
        let end = self.hot.partition_point(|at| *at < region.end);
        &self.hot[first..end]
    }
}
