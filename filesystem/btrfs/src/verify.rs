//! Checks a filesystem, or files of it: every copy of every node, every copy of all data, and parity.
//!
//! The order: superblocks and devices; the nodes of all trees (subvolumes last, because their leaves show which data
//! should have checksums); data with checksums, in the order of the checksum tree; data without; parity. At the end it
//! searches the trees of subvolumes for the files that use damaged data.
//!
//! Invariants:
//! - The verdict is "clean" only if every copy of everything in use was checked against a checksum or protection
//!   information. Data that could not be checked are counted by reason ([`WhyUnchecked`]). Data without a checksum
//!   never count as clean merely because they could be read, nor because a device finds them intact: that they are those
//!   that were written last is shown by their tags only ([`crate::tags`]).
//! - Nothing is written.
//! - Memory is limited ([`VerifyOptions`]); what does not fit counts as unchecked.

mod copies;
mod data;
mod files;
mod leaves;
pub(crate) mod ranges;
mod repair;
mod report;
mod rows;
mod seals;
mod session;
mod strips;
mod trees;
mod uses;
mod walk;

pub use files::verify_files;
pub use ranges::MAX_RANGES;
pub use repair::{Repaired, repair};
pub use report::{
    BadData, DataFault, FileUse, Finding, LostNode, MAX_FILES_LISTED, Report, Unattested, Uses, Verdict, WhyUnchecked,
};
pub use session::{
    MAX_LISTED, MAX_NODES, Mode, Progress, Unwatched, VerifyOptions, Watch, expected_bytes, why_unchecked,
};

use futures_util::future::LocalBoxFuture;
use sealblock_btrfs_format::key::objectid;
use sealblock_btrfs_format::superblock::COPY_OFFSETS;

use crate::chunk_map::Place;
use crate::cursor::TreeRoot;
use crate::error::{BadCopy, CopyFault, FsError};
use crate::filesystem::Filesystem;
use crate::tags::WrittenIn;
use leaves::Leaves;
use session::{Session, Stopped};
use trees::{Tree, Trees};
use walk::{Seen, find_sharers, walk};

/// Checks a whole filesystem.
///
/// # Errors
/// If devices must compute the checksums ([`Mode::Offload`]) and one cannot. Everything else is in the report.
pub fn verify<'a>(
    fs: &'a Filesystem,
    options: VerifyOptions,
    watch: &'a dyn Watch,
) -> LocalBoxFuture<'a, Result<Report, FsError>> {
    Box::pin(async move {
        let session = Session::new(fs, options, watch)?;
        if let Err(Stopped) = scan(&session).await {
            session.unchecked(WhyUnchecked::Stopped, 0);
        }
        Ok(session.finish())
    })
}

/// Data without checksums: ranges of logical addresses, with what the items of their files say of when they were written.
pub type Unsummed = Vec<(WrittenIn, u64, u64)>;

/// Finds all data without checksums. The report has what was found while the nodes were read: the list is whole only if
/// that is nothing. It may name data twice, if items of different transactions have them.
///
/// # Errors
/// None: [`Mode::Auto`] asks nothing of devices.
pub async fn find_unsummed(
    fs: &Filesystem,
    options: VerifyOptions,
    watch: &dyn Watch,
) -> Result<(Report, Unsummed), FsError> {
    let session = Session::listing(fs, options, watch)?;
    note_devices(&session);
    let mut found = Unsummed::new();
    match walk_all(&session).await {
        Ok(Walked { leaves, .. }) => {
            leaves.count_unchecked(&session);
            found
                .extend(leaves.unsummed.with_values().filter_map(|(written, start, end)| Some((written?, start, end))));
        }
        Err(Stopped) => session.unchecked(WhyUnchecked::Stopped, 0),
    }
    Ok((session.finish(), found))
}

/// What the nodes of all trees show.
struct Walked {
    seen: Seen,
    leaves: Leaves,
    sums: Option<TreeRoot>,
    subvolumes: Vec<TreeRoot>,
}

async fn walk_all(session: &Session<'_>) -> Result<Walked, Stopped> {
    let Trees { of_storage, of_files } = Trees::of(session).await;
    let of = |id| of_storage.iter().find(|tree| tree.root.id == id).map(|tree| tree.root);
    let sums = of(objectid::CSUM_TREE);
    let subvolumes: Vec<TreeRoot> = of_files.iter().map(|tree| tree.root).collect();
    let (mut seen, mut leaves) = (Seen::new(session.options.most_nodes), Leaves::new(session.options.most_ranges));
    if sums.is_none() {
        // The item of the checksum tree is in the root tree, so that tree is damaged.
        leaves.lost_sums.add(0, u64::MAX);
    }
    // The checksum tree comes before all trees with files, and the root tree is one of those.
    let (sum_trees, others): (Vec<_>, Vec<_>) =
        of_storage.into_iter().partition(|tree| tree.root.id == objectid::CSUM_TREE);
    walk(session, &mut seen, sum_trees, &mut leaves).await?;
    leaves.sort_and_merge();
    walk(session, &mut seen, others, &mut leaves).await?;
    walk(session, &mut seen, of_files, &mut leaves).await?;
    leaves.sort_and_merge();
    Ok(Walked { seen, leaves, sums, subvolumes })
}

async fn scan(session: &Session<'_>) -> Result<(), Stopped> {
    note_devices(session);
    let Walked { seen, leaves, sums, mut subvolumes } = walk_all(session).await?;
    leaves.count_unchecked(session);
    for (list, fault) in [(&leaves.holes, DataFault::NoSum), (&leaves.unreadable, DataFault::SumsLost)] {
        for (logical, end) in list.iter() {
            let (fault, uses) = (fault.clone(), Uses::default());
            session.found(Finding::Data(Box::new(BadData { logical, bytes: end - logical, fault, uses })));
        }
    }
    if let Some(tree) = sums {
        data::check_sums(session, tree).await?;
    }
    data::check_unsummed(session, leaves.unsummed.with_values()).await?;
    rows::check_parity(session, &seen, &leaves).await?;
    subvolumes.push(session.fs.root_tree());
    finish(session, &subvolumes).await
}

/// Reports the faults of superblocks and devices that were found while opening, and what is not checked.
fn note_devices(session: &Session<'_>) {
    let fs = session.fs;
    let devices = &fs.storage().devices;
    let newest = devices.geometry().generation;
    for copy in devices.bad_superblocks() {
        session.found(Finding::Superblock(copy.clone()));
    }
    for (devid, device) in devices.iter().filter(|(_, device)| device.is_stale) {
        let place = Place { devid, offset: COPY_OFFSETS[0] };
        let fault = CopyFault::Old { found: device.generation, newest };
        session.found(Finding::Superblock(BadCopy { logical: None, place, mirror: 1, fault }));
    }
    session.note_sizes();
    for error in fs.size_contradictions() {
        session.found(Finding::Tree { tree: objectid::CHUNK_TREE, error });
    }
    session.note_copies_below();
    if devices.unproven().next().is_some() {
        session.unchecked(WhyUnchecked::NodeTags, 0);
    }
    if fs.known_devices().values().any(|device| device.is_missing) {
        session.unchecked(WhyUnchecked::MissingDevice, 0);
    }
    if fs.has_log() {
        session.unchecked(WhyUnchecked::LogTree, 0);
    }
}

/// Adds the affected trees and files to the findings.
async fn finish(session: &Session<'_>, trees: &[TreeRoot]) -> Result<(), Stopped> {
    let mut findings = session.take_findings();
    for finding in &mut findings {
        if let Finding::LostNode(node) = finding {
            find_sharers(session, node, trees).await;
        }
    }
    session.put_findings(findings);
    uses::attribute(session, trees.iter().copied().map(Tree::whole)).await
}
