//! A volume in a known state, and all that is known of it: also what a damage may cost, the blocks of which it hit every place
//! of the map entry or of the generation, or the data.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::rc::Rc;
use std::time::Duration;

use sealblock_media_volume::format::{Layout, Region};
use sealblock_simulator::checker::{Content, Patterns};
use sealblock_simulator::system::VolumeProfile;
use sealblock_units::{Extent, Lba};

use crate::model::Model;

/// Time after which a volume that is left alone has written its block map by a checkpoint.
pub const IDLE: Duration = Duration::from_secs(60);
/// The state in which a volume is damaged.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum State {
    /// Closed.
    Clean,
    /// In use and left alone: the log is empty, the volume was not closed.
    Idle,
    /// The power went with flushed writes in the log, and no others.
    Crashed,
    /// The power went in the middle of writes and of a commit.
    Torn,
    /// Used, grown by an odd number of blocks, used again, and stopped in one of the other ways.
    Resized,
}

impl State {
    /// All of them.
    pub const ALL: [State; 5] = [State::Clean, State::Idle, State::Crashed, State::Torn, State::Resized];
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

/// A volume in a state, and all that is known of it.
pub struct Specimen {
    /// How it stopped.
    pub state: State,
    /// Its shape.
    pub shape: VolumeProfile,
    /// Where everything lies.
    pub layout: Layout,
    /// What makes and recognises contents.
    pub patterns: Patterns,
    /// What its blocks may hold.
    pub model: Model,
    /// Its bytes.
    pub image: Rc<Vec<u8>>,
    /// What it was before, oldest first.
    pub earlier: Vec<Vec<u8>>,
    /// Another volume of the same shape, with another identity, and used longer.
    pub foreign: Vec<u8>,
    /// Another volume of the same shape that nothing was ever written to.
    pub blank: Vec<u8>,
    /// What its blocks hold: as far as a crash left a choice, what came of it.
    pub found: BTreeMap<Lba, Content>,
    /// Where map entries and data lie.
    pub places: Places,
    /// The blocks that are looked at: all, or those of a large volume that were changed and some others.
    pub watched: Vec<Extent>,
}

impl fmt::Display for Specimen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {}", self.state, self.shape)
    }
}

/// Bytes of the medium: the first, and the one behind the last.
pub type Range = (u64, u64);

/// Where everything of the blocks lies.
#[derive(Default)]
pub struct Places {
    /// The places of a block's map entry: it is lost when all of them are hit.
    pub entries: BTreeMap<Lba, Vec<Range>>,
    /// The places of a block's generation. They alone say that a block was never written, and which map entry is the right one.
    pub generations: BTreeMap<Lba, Vec<Range>>,
    /// The data of a block.
    pub data: BTreeMap<Lba, Range>,
    /// Blocks written by the last commit before a crash: their map entries count only if their data are there, so damage to
    /// these data cannot be told from a write that never arrived.
    pub window: BTreeSet<Lba>,
    /// The physical blocks that such map entries name and that hold something else. One that cannot be read may be that of a
    /// write which was flushed, so its block is lost, whatever it held before.
    pub missing: Vec<(Lba, Range)>,
    /// Where map entries and data begin that are in use, in order.
    pub hot: Vec<u64>,
}

/// Whether two ranges share a byte.
fn meet(a: Range, b: Range) -> bool {
    a.0 < b.1 && b.0 < a.1
}

impl Places {
    /// The blocks that a damage to these bytes may cost, `gone` if they cannot be read any more.
    pub fn allowed(&self, hits: &[Range], gone: bool) -> BTreeSet<Lba> {
        let is_hit = |range: &Range| hits.iter().any(|hit| meet(*hit, *range));
        let all_hit = |(_, places): &(&Lba, &Vec<Range>)| places.iter().all(is_hit);
        let entries = self.entries.iter().filter(all_hit).map(|(lba, _)| *lba);
        let generations = self.generations.iter().filter(all_hit).map(|(lba, _)| *lba);
        let data = self.data.iter().filter(|(_, range)| is_hit(range)).map(|(lba, _)| *lba);
        let missing = self.missing.iter().filter(|(_, range)| gone && is_hit(range)).map(|(lba, _)| *lba);
        entries.chain(generations).chain(data).chain(missing).collect()
    }

    /// Where map entries and data begin that are in use and lie in this region.
    pub fn hot(&self, region: &Region) -> &[u64] {
        let first = self.hot.partition_point(|at| *at < region.start);
        let end = self.hot.partition_point(|at| *at < region.end);
        &self.hot[first..end]
    }
}
