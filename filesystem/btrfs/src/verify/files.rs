//! Checks a file, or all files below a directory: every copy of their data, and every copy of the nodes that lead to
//! them.
//!
//! First it collects the inodes and their data; then it walks the parts of trees with these inodes and their checksums;
//! then it checks the data, each only once, even if several files share them.

use std::collections::BTreeMap;

use sealblock_btrfs_format::items::file_extent::Compression;
use sealblock_btrfs_format::key::{ItemType, Key, objectid};

use super::data::{Pipeline, Proof, Run, check_unsummed};
use super::leaves::Leaves;
use super::ranges::RangeList;
use super::report::{BadData, DataFault, Finding, Report, Uses, WhyUnchecked};
use super::session::{Session, Stopped, VerifyOptions, Watch, why_unchecked};
use super::trees::{Tree, root_items};
use super::uses;
use super::walk::{Seen, walk};
use crate::cursor::TreeRoot;
use crate::error::{BadCopy, CopyFault, FsError};
use crate::extents::Content;
use crate::filesystem::Filesystem;
use crate::inode::{FileKind, Inode};
use crate::tags::WrittenIn;
use crate::walk::{Met, Walk};

/// The bytes of data whose checksums are looked up at once.
const STEP_BYTES: u64 = 16 << 20;

/// Checks a file, or a directory with everything below it, including other subvolumes: all stored data of each file,
/// also beyond its end, and the nodes with the inodes' items and the checksums.
///
/// The path to `start`, its directories and the nodes of the chunk tree were read before, from copies that passed;
/// their other copies are not read. A device whose end is cut off is damage, wherever the file is.
///
/// # Errors
/// If devices must compute the checksums and one cannot. Everything else is in the report.
pub async fn verify_files(
    fs: &Filesystem,
    start: Inode,
    options: VerifyOptions,
    watch: &dyn Watch,
) -> Result<Report, FsError> {
    let session = Session::new(fs, options, watch)?;
    // Bad copies of nodes that were read to find the file.
    let mut met = fs.take_bad_copies();
    session.note_sizes();
    session.note_copies_below();
    if let Err(Stopped) = scan(&session, start).await {
        session.unchecked(WhyUnchecked::Stopped, 0);
    }
    // Bad copies of nodes of directories.
    met.extend(fs.take_bad_copies());
    note_met(&session, met);
    Ok(session.finish())
}

/// Reports damaged copies of nodes on the path to the file, except those that were checked as part of it.
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
            session.found(Finding::Node { tree: refusal.owner, level: None, copy, expected: None });
        } else if let (Some(why), Some(_)) = (why_unchecked(&copy.fault), copy.logical) {
            session.unchecked(why, 0);
        }
    }
}

/// The inodes to check, and their data.
struct Files {
    /// The numbers of inodes in each subvolume.
    inodes: BTreeMap<u64, (TreeRoot, RangeList)>,
    /// Data that should have checksums.
    summed: RangeList,
    /// Data that have none, with what their tags must show.
    unsummed: RangeList<Option<WrittenIn>>,
}

impl Files {
    /// Collects an inode, or everything below a directory.
    async fn below(session: &Session<'_>, start: Inode) -> Result<Files, Stopped> {
        let list = || RangeList::new(session.options.most_ranges);
        let unsummed = RangeList::new(session.options.most_ranges);
        let mut files = Files { inodes: BTreeMap::new(), summed: list(), unsummed };
        let tree = start.tree.id;
        let mut walk = Walk::new(session.fs, start, true);
        while let Some(visit) = walk.next().await {
            let error = match visit.met {
                Met::Inode(inode) => files.add(session, &inode).await.err(),
                Met::EmptyDirectory { .. } => None,
                Met::Lost(error) => Some(error),
                Met::BadName(why) => {
                    let what = "an entry of a directory".into();
                    Some(FsError::Contradiction { what, why: why.to_string() })
                }
            };
            if let Some(error) = error {
                session.found(Finding::Tree { tree, error });
            }
            session.turn().await?;
        }
        let Files { inodes, summed, unsummed } = &mut files;
        let inodes = inodes.values_mut().map(|(_, inodes)| inodes);
        unsummed.sort_and_merge();
        let mut is_cut = unsummed.is_cut();
        for list in inodes.chain([summed]) {
            list.sort_and_merge();
            is_cut |= list.is_cut();
        }
        if is_cut {
            session.unchecked(WhyUnchecked::TooManyRanges, 0);
        }
        Ok(files)
    }

    async fn add(&mut self, session: &Session<'_>, inode: &Inode) -> Result<(), FsError> {
        let list = || (inode.tree, RangeList::new(session.options.most_ranges));
        let (_, inodes) = self.inodes.entry(inode.tree.id).or_insert_with(list);
        inodes.add(inode.ino, inode.ino + 1);
        if !matches!(inode.kind, FileKind::Regular | FileKind::Symlink) {
            return Ok(());
        }
        for part in session.fs.parts(inode, 0, u64::MAX).await? {
            let Content::Stored(stored) = part.content else { continue };
            let (start, bytes) = match stored.compression {
                Compression::None => (stored.logical.saturating_add(stored.offset), part.bytes),
                _ => (stored.logical, stored.stored_bytes),
            };
            let end = start.saturating_add(bytes);
            if inode.has_no_sums() {
                let written = WrittenIn { generation: part.generation, is_in_place: inode.is_written_in_place() };
                self.unsummed.add_with(session.provable(written), start, end);
            } else {
                self.summed.add(start, end);
            }
        }
        Ok(())
    }

    /// The parts of the trees of subvolumes with the items of the inodes.
    fn trees(&self) -> impl Iterator<Item = Tree> + use<'_> {
        self.inodes.values().map(|(root, inodes)| {
            let first = |ino| Key::new(ino, ItemType(0), 0);
            let last = |ino| Key::new(ino, ItemType(u8::MAX), u64::MAX);
            Tree { root: *root, wanted: inodes.iter().map(|(ino, end)| first(ino)..=last(end - 1)).collect() }
        })
    }
}

async fn scan(session: &Session<'_>, start: Inode) -> Result<(), Stopped> {
    let fs = session.fs;
    let files = Files::below(session, start).await?;
    let roots = Tree { root: fs.root_tree(), wanted: files.inodes.keys().map(|id| root_items(*id)).collect() };
    // The references in these leaves are not used, because the leaves also contain items of other files; lost checksums
    // are.
    let (mut seen, mut leaves) = (Seen::new(session.options.most_nodes), Leaves::new(session.options.most_ranges));
    walk(session, &mut seen, [roots].into_iter().chain(files.trees()).collect(), &mut leaves).await?;
    let key = |offset| Key::new(objectid::EXTENT_CSUM, ItemType::EXTENT_CSUM, offset);
    let wanted: Vec<_> = files.summed.iter().map(|(start, end)| key(start)..=key(end - 1)).collect();
    if !wanted.is_empty()
        && let Ok(root) = fs.csum_tree().await
    {
        walk(session, &mut seen, vec![Tree { root, wanted }], &mut leaves).await?;
    }
    leaves.sort_and_merge();
    let mut pipeline = Pipeline::new(session);
    for (start, end) in files.summed.iter() {
        for (logical, end) in leaves.damaged_sums.within(start, end) {
            let (fault, uses) = (DataFault::SumsLost, Uses::default());
            session.found(Finding::Data(Box::new(BadData { logical, bytes: end - logical, fault, uses })));
        }
        for (mut at, end) in leaves.damaged_sums.gaps(start, end) {
            while at < end {
                let bytes = (end - at).min(STEP_BYTES);
                push(session, &mut pipeline, at, bytes).await?;
                at += bytes;
            }
        }
    }
    pipeline.drain().await?;
    check_unsummed(session, files.unsummed.with_values()).await?;
    uses::attribute(session, files.trees()).await
}

/// Starts to check data that should have checksums.
async fn push(session: &Session<'_>, pipeline: &mut Pipeline<'_, '_>, logical: u64, bytes: u64) -> Result<(), Stopped> {
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
        pipeline.push(Run { logical: run.logical, bytes, proof: Proof::Sums(run.bytes) }).await?;
    }
    covered.sort_and_merge();
    for (start, end) in covered.gaps(logical, logical + bytes) {
        let (fault, uses) = (DataFault::NoSum, Uses::default());
        session.found(Finding::Data(Box::new(BadData { logical: start, bytes: end - start, fault, uses })));
    }
    Ok(())
}
