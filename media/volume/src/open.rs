//! Opening a volume.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use sealblock_block::{Clock, Event, Geometry, Limits, Medium};
use sealblock_units::BlockCount;

use crate::annex::Annex;
use crate::commit::{Commits, Log};
use crate::error::VolumeError;
use crate::format::Superblock;
use crate::overlay::Overlay;
use crate::recovery::{self, Recovered};
use crate::slots::Slots;
use crate::superblocks::{self, Found};
use crate::table::Table;
use crate::volume::{Description, State, Volume, transfer_blocks};
use crate::worker::Worker;

/// Memory for pages of the tables unless told otherwise: the tables of 30 GiB of 4 KiB blocks. Taken as it is needed.
const CACHE_BYTES: usize = 256 << 20;
/// Blocks of one Verify at most, in transfers.
const VERIFY_TRANSFERS: u32 = 16;

/// How a volume is opened.
#[derive(Clone, Copy, Debug)]
pub struct OpenOptions {
    /// Write nothing: what a crash left is taken over in memory only.
    pub read_only: bool,
    /// Memory for pages of the tables, in bytes. Pages that differ from the medium may need more for a while.
    pub cache_bytes: usize,
    /// A fault put in on purpose, to show that tests notice it.
    pub mutation: Mutation,
}

impl Default for OpenOptions {
    fn default() -> OpenOptions {
        OpenOptions { read_only: false, cache_bytes: CACHE_BYTES, mutation: Mutation::None }
    }
}

/// A fault in the volume's own work, put in on purpose: each breaks one rule that crash consistency stands on.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Mutation {
    /// No fault.
    #[default]
    None,
    /// Commits do not wait for the medium.
    SkipSync,
    /// Flushes are answered when the data are durable and the tags are not.
    LateTags,
    /// Slots are used again before the record that gives them up is durable.
    ReuseEarly,
    /// Recovery takes records over without looking at their data.
    TrustLog,
}

/// A volume and the worker that must run beside it.
pub struct Opened<M, C> {
    /// The volume.
    pub volume: Rc<Volume<M, C>>,
    /// Its background work; spawn [`Worker::run`].
    pub worker: Worker<M, C>,
    /// What was found.
    pub description: Description,
}

/// Reads a volume's superblock.
///
/// # Errors
/// When there is no volume, or none that can be used.
pub async fn probe<M: Medium>(medium: &M) -> Result<Superblock, VolumeError> {
    Ok(superblocks::read(medium).await?.superblock)
}

/// Opens a volume, taking over what a crash left in its log.
///
/// # Errors
/// See [`VolumeError`]. A volume that cannot be opened is left as it is.
pub async fn open<M: Medium, C: Clock>(
    medium: M,
    clock: C,
    options: &OpenOptions,
) -> Result<Opened<M, C>, VolumeError> {
    let Found { superblock, copies, all_serve } = superblocks::read(&medium).await?;
    let layout = superblock.layout;
    if medium.sector_bytes() > layout.sector_bytes() {
        return Err(VolumeError::Sector { volume_bytes: layout.sector_bytes(), medium_bytes: medium.sector_bytes() });
    }
    if medium.len_bytes() < layout.medium_bytes() {
        return Err(VolumeError::Truncated { medium_bytes: medium.len_bytes(), needed_bytes: layout.medium_bytes() });
    }
    if medium.read_only() && !options.read_only {
        return Err(VolumeError::ReadOnly);
    }
    if !options.read_only {
        // Whoever died here before may have left writes that can be read and are not durable; what is decided from them
        // must not outlive them.
        medium.sync().await?;
    }
    let recovered = recovery::scan(&medium, &superblock, options).await?;
    let description = Description {
        uuid: superblock.uuid,
        clean: superblock.clean && recovered.records.len() == 0 && recovered.discarded == 0,
        layout,
        recovered: recovered.records.len() as u64,
        discarded: recovered.discarded,
        superblocks: copies,
    };
    let records = recovered.records.in_order();
    let settled = all_serve && recovered.next == superblock.log_tail;
    let volume = Rc::new(assemble(medium, clock, superblock, options, recovered));
    if !options.read_only && !settled {
        // What recovery decided must be durable before anything builds on it: a second crash must decide the same.
        volume.apply(&volume.encode(&records), false).await?;
        volume.settle(false).await.map_err(|error| VolumeError::Recovery(error.to_string()))?;
    }
    Ok(Opened { worker: Worker { volume: volume.clone() }, volume, description })
}

/// The shape of the device, with limits that the volume can always meet.
fn geometry(superblock: &Superblock, most_open: usize) -> Geometry {
    let layout = &superblock.layout;
    let transfer = transfer_blocks(layout);
    let count = |blocks: u32| BlockCount::new(blocks).unwrap_or(BlockCount::ONE);
    let limits = Limits {
        transfer,
        verify: count(transfer.get().saturating_mul(VERIFY_TRANSFERS)),
        zero: count((most_open / 2) as u32),
    };
    Geometry {
        block_size: layout.block_size(),
        capacity_blocks: layout.capacity_blocks(),
        protection: superblock.protection,
        limits,
    }
}

fn assemble<M: Medium, C: Clock>(
    medium: M,
    clock: C,
    superblock: Superblock,
    options: &OpenOptions,
    recovered: Recovered,
) -> Volume<M, C> {
    let layout = superblock.layout;
    let wanted = Rc::new(Event::default());
    let commits = Commits::new(&layout, wanted.clone());
    let geometry = geometry(&superblock, commits.most_open);
    let (next, tail) = (recovered.next, superblock.log_tail);
    Volume {
        medium,
        clock,
        geometry,
        layout,
        spare: layout.zone_spare() as u32,
        seed: superblock.seed(),
        read_only: options.read_only,
        mutation: options.mutation,
        table: Table::new(layout, options.cache_bytes),
        slots: Slots::new(wanted),
        overlay: if options.read_only { Overlay::recovered(recovered.records) } else { Overlay::default() },
        log: Log { next: Cell::new(next), durable: Cell::new(next), tail: Cell::new(tail) },
        commits,
        annex: Annex::default(),
        superblock: Cell::new(superblock),
        blank_zones: RefCell::default(),
        zones_loading: RefCell::default(),
        zone_loaded: Event::default(),
        state: Cell::new(State::Open),
        changes: Cell::new(0),
        changed: Event::default(),
    }
}
