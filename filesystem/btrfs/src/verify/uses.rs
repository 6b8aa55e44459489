//! Finds the files that use damaged or unattested data.
//!
//! It searches the trees of all subvolumes again, because references in the extent tree may be damaged themselves. A
//! leaf that several subvolumes share and that uses no damaged data is read only once.

use std::collections::{HashMap, HashSet};

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use sealblock_btrfs_format::checker::Expected;
use sealblock_btrfs_format::items::file_extent::FileExtent;
use sealblock_btrfs_format::key::{ItemType, Key, objectid};

use super::leaves::stored_range;
use super::report::{DataFault, FileUse, Finding, MAX_FILES_LISTED, Unattested, Uses};
use super::session::{Session, Stopped, check_of};
use super::trees::Tree;
use super::walk::NODES_IN_FLIGHT;
use crate::cursor::TreeRoot;
use crate::error::FsError;
use crate::filesystem::Filesystem;
use crate::tags::WrittenIn;

/// Data whose files are looked for, sorted, so that an extent finds what is within it.
struct Wanted {
    /// Logical address, bytes, and the index among the uses.
    ranges: Vec<(u64, u64, usize)>,
    longest: u64,
}

impl Wanted {
    fn of(ranges: impl Iterator<Item = (u64, u64)>) -> Wanted {
        let mut ranges: Vec<(u64, u64, usize)> =
            ranges.enumerate().map(|(index, (logical, bytes))| (logical, bytes, index)).collect();
        ranges.sort_unstable();
        let longest = ranges.iter().map(|range| range.1).max().unwrap_or_default();
        Wanted { ranges, longest }
    }

    /// The entries that overlap a range.
    fn within(&self, start: u64, end: u64) -> impl Iterator<Item = (u64, u64, usize)> + use<'_> {
        let first = self.ranges.partition_point(|range| range.0.saturating_add(self.longest) <= start);
        let near = self.ranges[first..].iter().take_while(move |range| range.0 < end).copied();
        near.filter(move |range| range.0.saturating_add(range.1) > start)
    }
}

/// Finds the files that use damaged and unattested data, in the key ranges of the trees of subvolumes, and whether damaged
/// data can be restored.
pub(super) async fn attribute(session: &Session<'_>, trees: impl Iterator<Item = Tree>) -> Result<(), Stopped> {
    let mut findings = session.take_findings();
    let (unattested, is_all) = session.unattested_ranges();
    let of_data = |finding: &Finding| match finding {
        Finding::Data(data) => Some((data.logical, data.bytes)),
        _ => None,
    };
    let damaged = findings.iter().filter_map(of_data);
    let wanted = Wanted::of(damaged.chain(unattested.iter().map(|(start, end)| (*start, end - start))));
    let mut uses = vec![Uses::default(); wanted.ranges.len()];
    let (mut harmless, mut roots) = (HashSet::new(), Vec::new());
    let mut ended = Ok(());
    for tree in trees {
        roots.push(tree.root);
        if !wanted.ranges.is_empty() && ended.is_ok() {
            ended = search(session, &tree, &wanted, &mut harmless, &mut uses).await;
        }
    }
    let mut names = Names::default();
    for files in uses.iter_mut().map(|uses| &mut uses.files) {
        for file in &mut *files {
            names.add_to(session.fs, &roots, file).await;
        }
        files.sort();
    }
    let mut uses = uses.into_iter();
    for finding in &mut findings {
        if let Finding::Data(data) = finding {
            data.uses = uses.next().unwrap_or_default();
        }
    }
    let tell = |((start, end), uses): ((u64, u64), Uses)| Unattested { logical: start, bytes: end - start, uses };
    session.tell_unattested(unattested.into_iter().zip(uses).map(tell).collect(), is_all);
    find_lost(session.fs, &mut findings).await;
    session.put_findings(findings);
    ended
}

/// Adds an extent of a file to what is within it; true if there is any.
fn take_extent(uses: &mut [Uses], wanted: &Wanted, subvolume: u64, key: Key, data: &[u8]) -> bool {
    let Ok(extent) = FileExtent::decode(data) else { return false };
    let mut has_some = false;
    for (logical, bytes, index) in stored_range(&extent).into_iter().flat_map(|(start, end)| wanted.within(start, end))
    {
        has_some = true;
        let (offset, bytes) = concerned(key.offset, &extent, logical, bytes);
        add_use(&mut uses[index], subvolume, key.objectid, offset, bytes);
    }
    has_some
}

/// Walks the key ranges of a tree, several nodes at once.
async fn search(
    session: &Session<'_>,
    tree: &Tree,
    wanted: &Wanted,
    harmless: &mut HashSet<u64>,
    uses: &mut [Uses],
) -> Result<(), Stopped> {
    let load = |(expected, before): (Expected, Option<Key>)| async move {
        (expected, before, session.fs.nodes().load(&expected).await)
    };
    let mut pending = vec![(tree.root.expected(), None)];
    let mut in_flight = FuturesUnordered::new();
    loop {
        while in_flight.len() < NODES_IN_FLIGHT
            && let Some(next) = pending.pop()
        {
            if !harmless.contains(&next.0.bytenr) {
                in_flight.push(load(next));
            }
        }
        let Some((expected, before, node)) = in_flight.next().await else { return Ok(()) };
        session.turn().await?;
        // Lost nodes were reported before.
        let Ok(node) = node else { continue };
        let view = node.view();
        if view.header().level > 0 {
            pending.extend(tree.children(&node, before));
            continue;
        }
        let mut is_harmless = true;
        for (key, data) in view.entries().filter(|(key, _)| key.item_type == ItemType::EXTENT_DATA) {
            if tree.wants(key, key.next()) {
                is_harmless &= !take_extent(uses, wanted, tree.root.id, key, data);
            }
        }
        // If only parts of one tree are wanted, another tree may want the rest of this node.
        if is_harmless && tree.is_whole() && harmless.len() < session.options.most_nodes {
            harmless.insert(expected.bytenr);
        }
    }
}

/// The bytes of a file that a damaged range affects; for a compressed extent all of it.
fn concerned(start: u64, extent: &FileExtent, logical: u64, bytes: u64) -> (u64, u64) {
    let (FileExtent::Regular(head, location), Some((first, end))) = (extent, stored_range(extent)) else {
        return (start, extent.file_bytes());
    };
    if head.compression != 0 {
        return (start, location.num_bytes.get());
    }
    let (from, to) = (logical.max(first), logical.saturating_add(bytes).min(end));
    (start.saturating_add(from - first), to - from)
}

fn add_use(uses: &mut Uses, subvolume: u64, ino: u64, offset: u64, bytes: u64) {
    if uses.files.len() < MAX_FILES_LISTED {
        let file = FileUse { subvolume, subvolume_path: None, ino, offset, bytes, paths: Vec::new() };
        uses.files.push(file);
    } else {
        uses.more += 1;
    }
}

/// A cache of paths, because consecutive damaged sectors are often in one file.
#[derive(Default)]
struct Names {
    subvolumes: HashMap<u64, Option<Vec<u8>>>,
    last: Option<(u64, u64, Vec<Vec<u8>>)>,
}

impl Names {
    async fn add_to(&mut self, fs: &Filesystem, trees: &[TreeRoot], file: &mut FileUse) {
        if !objectid::is_subvolume(file.subvolume) {
            return;
        }
        let Some(tree) = trees.iter().find(|tree| tree.id == file.subvolume) else { return };
        file.subvolume_path = match self.subvolumes.get(&file.subvolume) {
            Some(path) => path.clone(),
            None => {
                let path = fs.path_of_subvolume(file.subvolume).await.ok();
                self.subvolumes.insert(file.subvolume, path.clone());
                path
            }
        };
        let is_last = self.last.as_ref().is_some_and(|(id, ino, _)| (*id, *ino) == (file.subvolume, file.ino));
        if !is_last {
            let mut paths = fs.paths(*tree, file.ino).await.unwrap_or_default();
            paths.sort();
            self.last = Some((file.subvolume, file.ino, paths));
        }
        file.paths = self.last.as_ref().map_or_else(Vec::new, |(_, _, paths)| paths.clone());
    }
}

/// Determines which damaged data can be restored neither from a copy nor from parity.
async fn find_lost(fs: &Filesystem, findings: &mut [Finding]) {
    let mut last = None;
    for finding in findings {
        let Finding::Data(data) = finding else { continue };
        let (logical, bytes) = (data.logical, data.bytes);
        let DataFault::Copy { is_lost, written, .. } = &mut data.fault else { continue };
        *is_lost = match last {
            Some((known, is_lost)) if known == logical => is_lost,
            _ => is_lost_everywhere(fs, logical, bytes, *written).await,
        };
        last = Some((logical, *is_lost));
    }
}

async fn is_lost_everywhere(fs: &Filesystem, logical: u64, bytes: u64, written: Option<WrittenIn>) -> bool {
    let storage = fs.storage();
    let sums = fs.sums(logical, bytes).await.unwrap_or_default();
    let check = check_of(&sums, logical, written);
    matches!(storage.read_data(logical, bytes, check).await, Err(FsError::Lost(_) | FsError::Map(_)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_extent_finds_what_is_within_it_and_nothing_else() {
        let ranges = [(8192, 4096), (0, 4096), (100, 1 << 20), (8192, 4096)];
        let wanted = Wanted::of(ranges.into_iter());
        let within = |start, end| {
            let mut found: Vec<usize> = wanted.within(start, end).map(|(_, _, index)| index).collect();
            found.sort_unstable();
            found
        };
        assert_eq!(within(0, 100), [1]);
        assert_eq!(within(4096, 8192), [2]);
        assert_eq!(within(8192, 12_288), [0, 2, 3]);
        assert_eq!(within(2 << 20, 3 << 20), [0; 0]);
    }
}
