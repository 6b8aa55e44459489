//! The inode numbers of a mount.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;

use sealblock_fuse::FsError;

/// The number of bits for an inode's own number.
const INO_BITS: u32 = 48;
/// In place of a subvolume number: marks the empty directories that a snapshot has where its source had a subvolume.
const PLACEHOLDER_SUBVOLUME: u64 = 0xffff;
/// The maximum number of subvolumes in a mount.
pub const MAX_SUBVOLUMES: usize = 0xfffe;

/// What has a number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Numbered<S> {
    /// An inode of a subvolume.
    Inode(S, u64),
    /// The empty directory in place of a subvolume.
    Placeholder,
}

/// The numbers that were given so far, and for each subvolume an `S`.
pub(crate) struct InodeNumbers<S> {
    /// Subvolumes, in the order in which they were first seen.
    subvolumes: RefCell<Vec<S>>,
    /// Their positions, by their own numbers.
    positions: RefCell<HashMap<u64, usize>>,
    placeholders: RefCell<Placeholders>,
    next_placeholder: Cell<u64>,
}

/// Empty directories by their parent directory and name, and the other way round.
#[derive(Default)]
struct Placeholders {
    numbers: HashMap<(u64, Vec<u8>), u64>,
    places: HashMap<u64, (u64, Vec<u8>)>,
}

impl<S> Default for InodeNumbers<S> {
    fn default() -> Self {
        InodeNumbers {
            subvolumes: RefCell::default(),
            positions: RefCell::default(),
            placeholders: RefCell::default(),
            // 0 and 1 have a meaning of their own in the protocol.
            next_placeholder: Cell::new(2),
        }
    }
}

impl<S: Copy> InodeNumbers<S> {
    /// The number of an inode of a subvolume, which is given by its own number and what is remembered of it.
    ///
    /// # Errors
    /// If a number does not fit.
    pub fn of_inode(&self, (id, subvolume): (u64, S), ino: u64) -> Result<u64, FsError> {
        if ino >> INO_BITS != 0 {
            return Err(FsError::Damaged(format!(
                "inode {ino} in subvolume {id}: its number has more than {INO_BITS} bits"
            )));
        }
        let mut positions = self.positions.borrow_mut();
        let position = match positions.get(&id) {
            Some(position) => *position,
            None => {
                let mut subvolumes = self.subvolumes.borrow_mut();
                if subvolumes.len() == MAX_SUBVOLUMES {
                    return Err(FsError::TooLarge);
                }
                subvolumes.push(subvolume);
                positions.insert(id, subvolumes.len() - 1);
                subvolumes.len() - 1
            }
        };
        Ok((position as u64) << INO_BITS | ino)
    }

    /// What has a number.
    ///
    /// # Errors
    /// [`FsError::NotFound`] if it was not given.
    pub fn find(&self, number: u64) -> Result<Numbered<S>, FsError> {
        let (position, ino) = (number >> INO_BITS, number & ((1 << INO_BITS) - 1));
        if position == PLACEHOLDER_SUBVOLUME {
            return Ok(Numbered::Placeholder);
        }
        let found = self.subvolumes.borrow().get(position as usize).copied();
        found.map(|subvolume| Numbered::Inode(subvolume, ino)).ok_or(FsError::NotFound)
    }

    /// The numbers that inodes of a subvolume can have; `None` if none was given.
    pub fn of_subvolume(&self, id: u64) -> Option<std::ops::RangeInclusive<u64>> {
        let position = *self.positions.borrow().get(&id)? as u64;
        Some(position << INO_BITS..=position << INO_BITS | ((1 << INO_BITS) - 1))
    }

    /// The number of an empty directory, where the source of a snapshot had a subvolume.
    pub fn of_placeholder(&self, directory: u64, name: &[u8]) -> u64 {
        let Placeholders { numbers, places } = &mut *self.placeholders.borrow_mut();
        let place = (directory, name.to_vec());
        *numbers.entry(place.clone()).or_insert_with(|| {
            let next = self.next_placeholder.get();
            self.next_placeholder.set(next + 1);
            let number = PLACEHOLDER_SUBVOLUME << INO_BITS | next & ((1 << INO_BITS) - 1);
            places.insert(number, place);
            number
        })
    }

    /// The parent directory and the name of an empty directory.
    pub fn placeholder(&self, number: u64) -> Option<(u64, Vec<u8>)> {
        self.placeholders.borrow().places.get(&number).cloned()
    }

    /// An empty directory is gone: what is there later has another number.
    pub fn remove_placeholder(&self, directory: u64, name: &[u8]) {
        let placeholders = &mut *self.placeholders.borrow_mut();
        if let Some(number) = placeholders.numbers.remove(&(directory, name.to_vec())) {
            placeholders.places.remove(&number);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_the_position_of_the_subvolume_and_lead_back() {
        let numbers = InodeNumbers::default();
        assert_eq!(numbers.find(256), Err(FsError::NotFound));
        let (first, second) = (numbers.of_inode((300, 'a'), 256).unwrap(), numbers.of_inode((5, 'b'), 256).unwrap());
        assert_eq!((first, second), (256, 1 << 48 | 256));
        assert_eq!(numbers.of_inode((300, 'a'), 257), Ok(257));
        assert_eq!(numbers.find(second), Ok(Numbered::Inode('b', 256)));
        assert_eq!(numbers.of_subvolume(5), Some(1 << 48..=(2 << 48) - 1));
        assert_eq!(numbers.of_subvolume(6), None);
        assert!(matches!(numbers.of_inode((5, 'b'), 1 << 48), Err(FsError::Damaged(_))));
        for id in 1000..1000 + MAX_SUBVOLUMES as u64 - 2 {
            numbers.of_inode((id, 'c'), 256).unwrap();
        }
        assert_eq!(numbers.of_inode((7, 'd'), 256), Err(FsError::TooLarge));
        assert_eq!(numbers.of_inode((5, 'b'), 9), Ok(1 << 48 | 9));
    }

    #[test]
    fn an_empty_directory_keeps_its_number_until_it_is_gone() {
        let numbers = InodeNumbers::<u64>::default();
        let (a, b) = (numbers.of_placeholder(256, b"a"), numbers.of_placeholder(256, b"b"));
        assert_eq!((numbers.of_placeholder(256, b"a"), a == b), (a, false));
        assert_eq!((numbers.find(a), numbers.placeholder(a)), (Ok(Numbered::Placeholder), Some((256, b"a".to_vec()))));
        numbers.remove_placeholder(256, b"a");
        assert_eq!(numbers.placeholder(a), None);
        let again = numbers.of_placeholder(256, b"a");
        assert!(again != a && again != b);
    }
}
