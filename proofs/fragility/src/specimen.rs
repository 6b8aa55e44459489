//! A volume in a known state, and all that is known of it.

use std::collections::BTreeMap;
use std::fmt;
use std::rc::Rc;
use std::time::Duration;

use sealblock_media_volume::format::Layout;
use sealblock_simulator::checker::{Content, Patterns};
use sealblock_simulator::system::VolumeProfile;
use sealblock_units::{Extent, Lba};

use crate::model::Model;
use crate::places::Places;

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
