//! The subvolumes of a filesystem and the directories that they are in: what must be known before a directory is
//! removed.

use std::collections::{BTreeMap, BTreeSet};

use sealblock_btrfs::subvolumes::Subvolume;
use sealblock_btrfs::{Filesystem, FsError};

/// The most directories above a subvolume.
const MAX_DEPTH: usize = 4096;

/// A subvolume that has a place.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Placed {
    /// Its number.
    pub id: u64,
    /// The subvolume that it is in.
    pub parent: u64,
    /// The directory in that.
    pub directory: u64,
    /// The name in the directory.
    pub name: Vec<u8>,
    /// The directory and those above it.
    above: Vec<u64>,
}

/// The places of all subvolumes.
#[derive(Clone, Default, Debug)]
pub(super) struct Nested(Vec<Placed>);

impl Nested {
    /// Reads the places.
    ///
    /// # Errors
    /// If they cannot be read: a subvolume could be in any directory then.
    pub async fn read(filesystem: &Filesystem) -> Result<Nested, FsError> {
        let (subvolumes, lost) = filesystem.subvolumes().await;
        if let Some(lost) = lost.into_iter().next() {
            return Err(lost);
        }
        let mut all = Vec::new();
        for (id, one) in subvolumes.iter().filter(|(_, one)| !one.is_dead) {
            let Some(place) = &one.parent else { continue };
            let above = above(filesystem, &subvolumes, place.id, place.dirid).await?;
            all.push(Placed { id: *id, parent: place.id, directory: place.dirid, name: place.name.clone(), above });
        }
        Ok(Nested(all))
    }

    /// All subvolumes below a directory of a subvolume, each after those that are below it.
    pub fn below(&self, root: u64, directory: u64) -> Vec<&Placed> {
        let mut found: Vec<&Placed> = Vec::new();
        let mut seen = BTreeSet::new();
        let mut wanted: Vec<&Placed> = self.0.iter().filter(|one| one.is_below(root, directory)).collect();
        while let Some(one) = wanted.pop() {
            // Whatever the items say, each is visited once.
            if seen.insert(one.id) {
                found.push(one);
                wanted.extend(self.inside(one.id));
            }
        }
        found.reverse();
        found
    }

    /// All subvolumes below another one.
    pub fn below_subvolume(&self, id: u64) -> Vec<&Placed> {
        let top = sealblock_btrfs_format::key::objectid::FIRST_FREE;
        self.below(id, top).into_iter().filter(|one| one.id != id).collect()
    }

    fn inside(&self, id: u64) -> impl Iterator<Item = &Placed> {
        self.0.iter().filter(move |one| one.parent == id)
    }
}

impl Placed {
    fn is_below(&self, root: u64, directory: u64) -> bool {
        self.parent == root && self.above.contains(&directory)
    }
}

/// A directory and those above it, up to the top of its subvolume.
async fn above(
    filesystem: &Filesystem,
    subvolumes: &BTreeMap<u64, Subvolume>,
    root: u64,
    directory: u64,
) -> Result<Vec<u64>, FsError> {
    let outer = subvolumes.get(&root).ok_or_else(|| FsError::Absent(format!("subvolume {root}")))?;
    let mut above = vec![directory];
    let mut at = directory;
    while at != outer.root_dirid {
        let names = filesystem.names(outer.root, at).await?;
        let name = names.first().ok_or_else(|| FsError::Absent(format!("name of directory {at}")))?;
        at = name.parent;
        above.push(at);
        if above.len() > MAX_DEPTH {
            let (what, why) = (format!("directory {directory}"), format!("more than {MAX_DEPTH} are above it"));
            return Err(FsError::Contradiction { what, why });
        }
    }
    Ok(above)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn placed(id: u64, parent: u64, above: &[u64]) -> Placed {
        Placed { id, parent, directory: above[0], name: id.to_string().into_bytes(), above: above.to_vec() }
    }

    fn ids(found: Vec<&Placed>) -> Vec<u64> {
        found.iter().map(|one| one.id).collect()
    }

    #[test]
    fn those_below_come_first() {
        let all = Nested(vec![
            placed(257, 5, &[300, 256]),
            placed(258, 257, &[256]),
            placed(259, 258, &[400, 256]),
            placed(260, 5, &[256]),
        ]);
        assert_eq!(ids(all.below(5, 300)), [259, 258, 257]);
        assert_eq!(ids(all.below(5, 301)), Vec::<u64>::new());
        assert_eq!(ids(all.below(5, 256)).len(), 4);
        assert_eq!(ids(all.below(258, 400)), [259]);
        assert_eq!(ids(all.below_subvolume(257)), [259, 258]);
        // Two that claim to be in each other end, too.
        let circle = Nested(vec![placed(257, 258, &[256]), placed(258, 257, &[256])]);
        assert_eq!(ids(circle.below_subvolume(257)), [258]);
    }
}
