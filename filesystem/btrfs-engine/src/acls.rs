//! POSIX access control lists: extended attributes that belong to the mode of an inode.
//!
//! Rules, which are those of Linux:
//! - The owner's entry, the entry of others, and the mask (or the group's entry without a mask) are the nine lowest bits
//!   of the mode. A change of one is a change of the other.
//! - A list that has no other entries says nothing that the mode does not say, and is not stored.
//! - A new inode gets its list from the default list of its directory, limited by the mode that was asked for; a new
//!   directory gets the default list, too. Only where the directory has none does the umask apply. A symbolic link gets
//!   nothing.
//!
//! Who may do something is not decided here.

use sealblock_btrfs_format::items::directory::FileType;
use sealblock_btrfs_format::items::inode::InodeItem;
use sealblock_btrfs_format::key::{ItemType, Key};

use crate::inode::{Ownership, kind_of};
use crate::names::{NewFile, Place};
use crate::plan::{Plan, PlanError};
use crate::view::Items;

/// The attribute with the list of an inode.
pub const ACCESS: &[u8] = b"system.posix_acl_access";
/// The attribute with the list that new inodes of a directory get.
pub const DEFAULT: &[u8] = b"system.posix_acl_default";

/// The version of the attribute's form.
const VERSION: u32 = 2;
/// Bytes of the version, and of an entry: tag, permissions and number.
const HEAD_BYTES: usize = 4;
const ENTRY_BYTES: usize = 8;
/// The set-group-ID bit of a mode.
const SET_GROUP_ID: u32 = 0o2000;
const PERMISSIONS: u32 = 0o777;

const INVALID: PlanError = PlanError::InvalidArgument("not an access control list");

/// Whose permissions an entry has, in the order of entries.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Tag {
    Owner,
    User,
    Group,
    OtherGroup,
    Mask,
    Other,
}

impl Tag {
    const ALL: [(u16, Tag); 6] = [
        (0x01, Tag::Owner),
        (0x02, Tag::User),
        (0x04, Tag::Group),
        (0x08, Tag::OtherGroup),
        (0x10, Tag::Mask),
        (0x20, Tag::Other),
    ];

    fn is_named(self) -> bool {
        matches!(self, Tag::User | Tag::OtherGroup)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Entry {
    tag: Tag,
    permissions: u16,
    id: u32,
}

/// A list.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Acl(Vec<Entry>);

impl Acl {
    /// Reads the value of an attribute. `None` if it is not a valid list.
    fn decode(value: &[u8]) -> Option<Acl> {
        let (version, entries) = value.split_first_chunk::<HEAD_BYTES>()?;
        if u32::from_le_bytes(*version) != VERSION || !entries.len().is_multiple_of(ENTRY_BYTES) {
            return None;
        }
        let entries = entries.chunks_exact(ENTRY_BYTES).map(|bytes| {
            let number = u16::from_le_bytes([bytes[0], bytes[1]]);
            let permissions = u16::from_le_bytes([bytes[2], bytes[3]]);
            let id = u32::from_le_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]);
            let (_, tag) = Tag::ALL.into_iter().find(|(known, _)| *known == number)?;
            (permissions <= 7).then_some(Entry { tag, permissions, id })
        });
        let acl = Acl(entries.collect::<Option<Vec<_>>>()?);
        acl.is_valid().then_some(acl)
    }

    /// Entries are in their order; there is one for the owner, the group and others, and a mask beside named ones.
    fn is_valid(&self) -> bool {
        let count = |tag| self.0.iter().filter(|entry| entry.tag == tag).count();
        let has_named = self.0.iter().any(|entry| entry.tag.is_named());
        self.0.is_sorted_by_key(|entry| entry.tag)
            && [Tag::Owner, Tag::Group, Tag::Other].into_iter().all(|tag| count(tag) == 1)
            && count(Tag::Mask) <= 1
            && (!has_named || count(Tag::Mask) == 1)
    }

    fn encode(&self) -> Vec<u8> {
        let mut value = VERSION.to_le_bytes().to_vec();
        for entry in &self.0 {
            let number = Tag::ALL.into_iter().find(|(_, tag)| *tag == entry.tag).map_or(0, |(number, _)| number);
            value.extend(number.to_le_bytes());
            value.extend(entry.permissions.to_le_bytes());
            value.extend(entry.id.to_le_bytes());
        }
        value
    }

    /// The entries that are bits of the mode, with the number of places by which these bits are shifted.
    fn mode_entries(&mut self) -> impl Iterator<Item = (&mut Entry, u32)> {
        let group = if self.0.iter().any(|entry| entry.tag == Tag::Mask) { Tag::Mask } else { Tag::Group };
        self.0.iter_mut().filter_map(move |entry| {
            let shift = match entry.tag {
                Tag::Owner => 6,
                Tag::Other => 0,
                tag if tag == group => 3,
                _ => return None,
            };
            Some((entry, shift))
        })
    }

    /// The nine lowest bits of the mode.
    fn mode(&mut self) -> u32 {
        self.mode_entries().map(|(entry, shift)| u32::from(entry.permissions & 7) << shift).sum()
    }

    /// The mode changes.
    fn set_mode(&mut self, mode: u32) {
        self.mode_entries().for_each(|(entry, shift)| entry.permissions = (mode >> shift & 7) as u16);
    }

    /// True if it says nothing that the mode does not say.
    fn is_mode(&self) -> bool {
        self.0.iter().all(|entry| matches!(entry.tag, Tag::Owner | Tag::Group | Tag::Other))
    }
}

impl<V: Items> Plan<'_, V> {
    /// The list in an attribute of an inode, if it has it.
    fn acl(&self, ino: u64, name: &[u8]) -> Result<Option<Acl>, PlanError> {
        let Some(value) = self.xattr(ino, name)? else { return Ok(None) };
        let key = Key::new(ino, ItemType::XATTR_ITEM, 0);
        let damaged = PlanError::Damaged { key, why: "it has no valid access control list" };
        Acl::decode(value).map(Some).ok_or(damaged)
    }

    /// As [`Plan::create`], where the permissions of `owner` are those that were asked for, before the umask: it, or the
    /// default list of the directory, limits them.
    ///
    /// # Errors
    /// Those of [`Plan::create`]; if the list is damaged, or does not fit into a leaf.
    pub fn create_masked(
        &mut self,
        place: Place<'_>,
        file: NewFile<'_>,
        owner: &Ownership,
        umask: u32,
    ) -> Result<u64, PlanError> {
        self.attempt(|plan| {
            let ino = plan.create(place, file, owner)?;
            plan.inherit_acl(place.directory, ino, umask)?;
            Ok(ino)
        })
    }

    /// Limits the mode of a new inode, and gives it its lists.
    fn inherit_acl(&mut self, directory: u64, ino: u64, umask: u32) -> Result<(), PlanError> {
        let inode = self.inode(ino)?;
        let kind = kind_of(&inode);
        if kind == FileType::Symlink {
            return Ok(());
        }
        let asked = inode.mode.get();
        let Some(default) = self.acl(directory, DEFAULT)? else {
            return self.set_mode_bits(ino, asked & !(umask & PERMISSIONS));
        };
        let mut access = default.clone();
        let allowed = access.mode() & asked & PERMISSIONS;
        access.set_mode(allowed);
        self.set_mode_bits(ino, asked & !PERMISSIONS | allowed)?;
        if !access.is_mode() {
            self.store_xattr(ino, ACCESS, &access.encode())?;
        }
        if kind == FileType::Directory {
            self.store_xattr(ino, DEFAULT, &default.encode())?;
        }
        Ok(())
    }

    /// Gives a new inode this mode.
    fn set_mode_bits(&mut self, ino: u64, mode: u32) -> Result<(), PlanError> {
        let changed = self.edit_inode(ino, |inode: &mut InodeItem| {
            inode.mode = mode.into();
            Ok(())
        });
        changed.map(drop)
    }

    /// Sets the list of an inode, and with it its mode; also removes the set-group-ID bit if the user is not in the group.
    ///
    /// # Errors
    /// [`PlanError::InvalidArgument`] if it is not a valid list; those of [`Plan::set_xattr`].
    pub fn set_access_acl(&mut self, ino: u64, value: &[u8], kills_set_group_id: bool) -> Result<(), PlanError> {
        let mut acl = Acl::decode(value).ok_or(INVALID)?;
        let inode = self.inode(ino)?;
        self.check_protection(ino, &inode, true)?;
        if kind_of(&inode) == FileType::Symlink {
            return Err(PlanError::InvalidArgument("a symbolic link has no access control list"));
        }
        self.attempt(|plan| {
            match (acl.is_mode(), plan.xattr(ino, ACCESS)?.is_some()) {
                (true, true) => plan.delete_xattr(ino, ACCESS)?,
                (true, false) => {}
                (false, _) => plan.store_xattr(ino, ACCESS, &acl.encode())?,
            }
            let removed = PERMISSIONS | if kills_set_group_id { SET_GROUP_ID } else { 0 };
            let now = plan.context.now;
            plan.edit_inode(ino, |inode| {
                (inode.mode, inode.ctime) = ((inode.mode.get() & !removed | acl.mode()).into(), now);
                Ok(())
            })?;
            Ok(())
        })
    }

    /// Refuses what cannot be the default list of an inode.
    pub(crate) fn check_default_acl(&self, ino: u64, value: &[u8]) -> Result<(), PlanError> {
        let is_directory = kind_of(&self.inode(ino)?) == FileType::Directory;
        match is_directory && Acl::decode(value).is_some() {
            true => Ok(()),
            false => Err(INVALID),
        }
    }

    /// The mode of an inode changed: so does its list. One that is damaged stays.
    pub(crate) fn mode_changed(&mut self, ino: u64, mode: u32) -> Result<(), PlanError> {
        let Some(mut acl) = self.xattr(ino, ACCESS)?.and_then(Acl::decode) else { return Ok(()) };
        acl.set_mode(mode);
        self.store_xattr(ino, ACCESS, &acl.encode())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inode::AttributeChanges;
    use crate::names::model::{OWNER, TOP, change, check, context, geometry, new_tree};
    use crate::xattrs::XattrMode;

    /// A list: tags, permissions and numbers.
    fn list(entries: &[(u16, u16, u32)]) -> Vec<u8> {
        let mut value = 2_u32.to_le_bytes().to_vec();
        for (tag, permissions, id) in entries {
            value.extend([tag.to_le_bytes(), permissions.to_le_bytes()].concat());
            value.extend(id.to_le_bytes());
        }
        value
    }

    const NOBODY: u32 = u32::MAX;
    const NAMED: [(u16, u16, u32); 5] =
        [(1, 7, NOBODY), (2, 6, 1000), (4, 5, NOBODY), (0x10, 6, NOBODY), (0x20, 4, NOBODY)];

    #[test]
    fn lists_are_read_and_written_and_others_are_refused() {
        let mut acl = Acl::decode(&list(&NAMED)).unwrap();
        assert_eq!((acl.mode(), acl.is_mode(), acl.encode()), (0o764, false, list(&NAMED)));
        acl.set_mode(0o4310);
        assert_eq!((acl.mode(), acl.0[2].permissions), (0o310, 5), "the group's entry stays beside a mask");
        let plain = [(1, 7, NOBODY), (4, 5, NOBODY), (0x20, 0, NOBODY)];
        let mut acl = Acl::decode(&list(&plain)).unwrap();
        assert_eq!((acl.mode(), acl.is_mode()), (0o750, true));
        let without = |at: usize| [&NAMED[..at], &NAMED[at + 1..]].concat();
        let long = [list(&plain), vec![0]].concat();
        let turned: Vec<_> = NAMED.iter().rev().copied().collect();
        let mut high = NAMED;
        high[0].1 = 8;
        let mut unknown = NAMED;
        unknown[1].0 = 3;
        for bad in [
            Vec::new(),
            vec![2, 0, 0],
            [vec![1], list(&plain)[1..].to_vec()].concat(),
            long,
            list(&[]),
            list(&without(0)),
            list(&without(2)),
            list(&without(3)),
            list(&without(4)),
            list(&turned),
            list(&high),
            list(&unknown),
            list(&[&NAMED[..4], &NAMED[3..]].concat()),
        ] {
            assert_eq!(Acl::decode(&bad), None, "{bad:?}");
        }
    }

    #[test]
    fn a_new_inode_gets_its_mode_by_the_umask_or_by_the_list_of_its_directory() {
        let mut tree = new_tree();
        let owner = Ownership { permissions: 0o2777, ..OWNER };
        let place = |name| Place { directory: TOP, name };
        let modes: Vec<u32> = [NewFile::Regular, NewFile::Directory, NewFile::Symlink(b"x")]
            .into_iter()
            .zip([b"a", b"b", b"c"])
            .map(|(file, name)| {
                change(&mut tree, |plan| {
                    let ino = plan.create_masked(place(name), file, &owner, 0o027)?;
                    Ok(plan.inode(ino)?.mode.get() & 0o7777)
                })
                .unwrap()
            })
            .collect();
        assert_eq!(modes, [0o2750, 0o2750, 0o2777]);
        change(&mut tree, |plan| {
            plan.set_xattr(TOP, DEFAULT, &list(&NAMED), XattrMode::Set)?;
            let owner = Ownership { permissions: 0o4620, ..OWNER };
            let file = plan.create_masked(place(b"file"), NewFile::Regular, &owner, 0o077)?;
            assert_eq!(plan.inode(file)?.mode.get() & 0o7777, 0o4620, "the umask does not apply");
            let mut expected = NAMED;
            (expected[0].1, expected[3].1, expected[4].1) = (6, 2, 0);
            assert_eq!(plan.xattr(file, ACCESS)?, Some(&list(&expected)[..]));
            assert_eq!(plan.xattr(file, DEFAULT)?, None);
            let directory = plan.create_masked(place(b"directory"), NewFile::Directory, &owner, 0o077)?;
            assert_eq!(plan.xattr(directory, DEFAULT)?, Some(&list(&NAMED)[..]));
            let link = plan.create_masked(place(b"link"), NewFile::Symlink(b"x"), &owner, 0o077)?;
            assert_eq!(plan.xattr_names(link)?, Vec::<Vec<u8>>::new());
            Ok(())
        })
        .unwrap();
        check(&tree, &geometry());
    }

    #[test]
    fn the_mode_and_the_list_of_an_inode_change_together() {
        let mut tree = new_tree();
        let ino =
            change(&mut tree, |plan| plan.create(Place { directory: TOP, name: b"file" }, NewFile::Regular, &OWNER))
                .unwrap();
        let mode = |plan: &Plan<'_, _>| plan.inode(ino).unwrap().mode.get() & 0o7777;
        change(&mut tree, |plan| {
            let to = |bits| AttributeChanges { permissions: Some(bits), ..AttributeChanges::default() };
            plan.set_attributes(ino, &to(0o2644))?;
            plan.set_xattr(ino, ACCESS, &list(&NAMED), XattrMode::Create)?;
            assert_eq!(mode(plan), 0o2764);
            plan.set_access_acl(ino, &list(&NAMED), true)?;
            assert_eq!(mode(plan), 0o764);
            plan.set_attributes(ino, &to(0o611))?;
            let mut expected = NAMED;
            (expected[0].1, expected[3].1, expected[4].1) = (6, 1, 1);
            assert_eq!(plan.xattr(ino, ACCESS)?, Some(&list(&expected)[..]));
            let plain = [(1, 4, NOBODY), (4, 4, NOBODY), (0x20, 0, NOBODY)];
            plan.set_access_acl(ino, &list(&plain), false)?;
            assert_eq!((mode(plan), plan.xattr(ino, ACCESS)?), (0o440, None), "the mode says all of it");
            assert_eq!(plan.set_access_acl(ino, b"\x02", false), Err(INVALID));
            assert_eq!(plan.set_xattr(ino, DEFAULT, &list(&NAMED), XattrMode::Set), Err(INVALID), "not a directory");
            assert_eq!(plan.set_xattr(TOP, DEFAULT, b"", XattrMode::Set), Err(INVALID));
            Ok(())
        })
        .unwrap();
        let geometry = geometry();
        let plan = Plan::new(&tree, context(&geometry));
        assert_eq!(plan.inode(ino).unwrap().ctime, plan.context.now);
    }
}
