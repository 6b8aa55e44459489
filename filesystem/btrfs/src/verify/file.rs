//! Checking one file: every copy of what is stored of it, and every copy of the nodes that lead to it.

use sealblock_btrfs_format::items::file_extent::Compression;
use sealblock_btrfs_format::key::{ItemType, Key, objectid};

use super::data::{Pipeline, Run};
use super::leaves::Leaves;
use super::ranges::RangeList;
use super::report::{BadData, DataFault, Finding, Report, Uses, WhyUnchecked};
use super::session::{Session, Stopped, VerifyOptions, Watch, why_unchecked};
use super::trees::{Tree, root_items};
use super::uses;
use super::walk::{Seen, walk};
use crate::error::{BadCopy, CopyFault, FsError};
use crate::extents::Content;
use crate::filesystem::Filesystem;
use crate::inode::Inode;

/// Bytes of data whose checksums are looked up at once.
const STEP_BYTES: u64 = 16 << 20;

/// Checks a file: all that is stored of it, also behind its end, and the nodes that its items and its checksums are in.
///
/// What led to the inode, directories and the nodes of the chunk tree, was read before, from copies that passed; their other copies are not read.
///
/// # Errors
/// When devices are to compute the checksums and one cannot. Everything else is in the report.
pub async fn verify_file(
    fs: &Filesystem,
    inode: &Inode,
    options: VerifyOptions,
    watch: &dyn Watch,
) -> Result<Report, FsError> {
    let session = Session::new(fs, options, watch)?;
    // Those that were met on the way here.
    let met = fs.take_bad_copies();
    session.note_copies_below();
    if let Err(Stopped) = scan(&session, inode).await {
        session.unchecked(WhyUnchecked::Stopped, 0);
    }
    note_met(&session, met);
    Ok(session.finish())
}

/// Takes damaged copies of nodes that led to the file, but for those that were checked with it.
fn note_met(session: &Session<'_>, met: Vec<BadCopy>) {
    let findings = session.take_findings();
    let is_known = |copy: &BadCopy| {
        findings.iter().any(|finding| match finding {
            Finding::Node { copy: known, .. } => known.place == copy.place,
            Finding::LostNode(node) => node.lost.copies.iter().any(|known| known.place == copy.place),
            _ => false,
        })
    };
    let mut others: Vec<BadCopy> = Vec::new();
    for copy in met {
        if !is_known(&copy) && others.iter().all(|other| other.place != copy.place) {
            others.push(copy);
        }
    }
    session.put_findings(findings);
    for copy in others {
        if let CopyFault::Node(refusal) = &copy.fault {
            session.found(Finding::Node { tree: refusal.owner, level: None, copy });
        } else if let (Some(why), Some(_)) = (why_unchecked(&copy.fault), copy.logical) {
            session.unchecked(why, 0);
        }
    }
}

async fn scan(session: &Session<'_>, inode: &Inode) -> Result<(), Stopped> {
    let fs = session.fs;
    let ranges = match stored_ranges(session, inode).await {
        Ok(ranges) => ranges,
        Err(error) => {
            session.found(Finding::Tree { tree: inode.tree.id, error });
            RangeList::new(0)
        }
    };
    if ranges.is_cut() {
        session.unchecked(WhyUnchecked::TooManyRanges, 0);
    }
    let of_inode = Key::new(inode.ino, ItemType(0), 0)..=Key::new(inode.ino, ItemType(u8::MAX), u64::MAX);
    let mut trees = vec![
        Tree { root: fs.root_tree(), wanted: vec![root_items(inode.tree.id)] },
        Tree { root: inode.tree, wanted: vec![of_inode] },
    ];
    if !inode.has_no_sums()
        && let Ok(root) = fs.csum_tree().await
    {
        let key = |offset| Key::new(objectid::EXTENT_CSUM, ItemType::EXTENT_CSUM, offset);
        let wanted: Vec<_> = ranges.iter().map(|(start, end)| key(start)..=key(end - 1)).collect();
        trees.extend((!wanted.is_empty()).then_some(Tree { root, wanted }));
    }
    // What leaves say of data is of no use here, since they hold items of other files, too; but what is lost of the checksums is.
    let mut leaves = Leaves::new(session.options.most_ranges);
    for tree in trees {
        let mut seen = Seen::new(session.options.most_nodes);
        walk(session, &mut seen, vec![tree], &mut leaves).await?;
    }
    leaves.settle();
    let mut pipeline = Pipeline::new(session);
    for (start, end) in ranges.iter() {
        for (logical, end) in leaves.damaged_sums.within(start, end) {
            let (fault, uses) = (DataFault::SumsLost, Uses::default());
            session.found(Finding::Data(Box::new(BadData { logical, bytes: end - logical, fault, uses })));
        }
        for (mut at, end) in leaves.damaged_sums.gaps(start, end) {
            while at < end {
                let bytes = (end - at).min(STEP_BYTES);
                push(session, &mut pipeline, inode, at, bytes).await?;
                at += bytes;
            }
        }
    }
    pipeline.drain().await?;
    uses::attribute_to(session, inode).await
}

/// What is stored of a file.
async fn stored_ranges(session: &Session<'_>, inode: &Inode) -> Result<RangeList, FsError> {
    let mut ranges = RangeList::new(session.options.most_ranges);
    for part in session.fs.parts(inode, 0, u64::MAX).await? {
        let Content::Stored(stored) = part.content else { continue };
        let (start, bytes) = match stored.compression {
            Compression::None => (stored.logical.saturating_add(stored.offset), part.bytes),
            _ => (stored.logical, stored.stored_bytes),
        };
        ranges.add(start, start.saturating_add(bytes));
    }
    ranges.settle();
    Ok(ranges)
}

/// Begins to check a part of what is stored.
async fn push(
    session: &Session<'_>,
    pipeline: &mut Pipeline<'_, '_>,
    inode: &Inode,
    logical: u64,
    bytes: u64,
) -> Result<(), Stopped> {
    if inode.has_no_sums() {
        return pipeline.push(Run { logical, bytes, sums: None }).await;
    }
    let runs = match session.fs.sums(logical, bytes).await {
        Ok(runs) => runs,
        Err(_) => {
            session.unchecked(WhyUnchecked::ChecksumsLost, bytes);
            return Ok(());
        }
    };
    let geometry = session.fs.storage().geometry();
    let (sector, sum) = (u64::from(geometry.sector_bytes), geometry.checksum.bytes());
    let mut covered = RangeList::new(session.options.most_ranges);
    for run in runs {
        let bytes = (run.bytes.len() / sum) as u64 * sector;
        covered.add(run.logical, run.logical + bytes);
        pipeline.push(Run { logical: run.logical, bytes, sums: Some(run.bytes) }).await?;
    }
    covered.settle();
    for (start, end) in covered.gaps(logical, logical + bytes) {
        let (fault, uses) = (DataFault::NoSum, Uses::default());
        session.found(Finding::Data(Box::new(BadData { logical: start, bytes: end - start, fault, uses })));
    }
    Ok(())
}
