//! What a target is, whatever it is called: servers and commands compare targets by this, and never by their names.
//!
//! A file or block device is its bytes ([`crate::leaves`]); its place, a path whose folder is resolved, counts only where one side has
//! nothing at it. A remote target is its address and name. Memory has no identity but its name. A group is the set of its members; where
//! no labels tell the order of a stripe and its chunk size, these as well.
//! Identities that a peer sends are untrusted: they are compared and printed, and name nothing that is opened.

use std::fmt;
use std::path::{Path, PathBuf};
use std::slice::from_ref;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sealblock_layers_stripe::CHUNK;
use serde::{Deserialize, Serialize};

use crate::kernel::leaves::{Leaf, leaves_at};
use crate::target::{GroupKind, NVME_TCP_PORT, NbdAddress, TargetName};

/// How the kind of a group ends whose members have no labels.
const NO_LABEL: &str = "-nolabel";
/// Max. compositions of an open group that are remembered, the first and the present one among them.
const MAX_COMPOSITIONS: usize = 16;

/// What a target is.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TargetIdentity {
    /// One that is made of no others.
    Device {
        /// Its name, for messages.
        name: String,
        /// Where it is: an absolute path, or an address with a name; nothing for memory.
        place: Option<String>,
        /// Its bytes; none where it is not there, or not of this machine.
        leaves: Vec<Leaf>,
    },
    /// Several as one.
    Group {
        /// How: `mirror`, `stripe` or `multipath`; `stripe-65536-nolabel` where the order of members and the bytes of a chunk count.
        kind: String,
        /// Its members.
        members: Vec<TargetIdentity>,
    },
    /// Some blocks of another target.
    Part {
        /// Which blocks.
        range: String,
        /// The named target.
        of: Box<TargetIdentity>,
    },
}

/// How an identity compares with another one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Sameness {
    /// The same target.
    Same,
    /// Another file or device, in the place of the other one.
    Replaced,
    /// Another target, which has some of the same bytes: those of the device of this name.
    Shares(String),
    /// Another target.
    Different,
}

impl TargetIdentity {
    /// What the target is now. Relative paths begin at the working folder of this process.
    pub fn of(target: &TargetName) -> TargetIdentity {
        TargetIdentity::with(target, &|path| leaves_at(path).unwrap_or_default())
    }

    /// The same with the bytes of each path as `leaves` has them.
    pub(crate) fn with(target: &TargetName, leaves: &dyn Fn(&Path) -> Vec<Leaf>) -> TargetIdentity {
        let device = |place, leaves| TargetIdentity::Device { name: target.to_string(), place, leaves };
        match target {
            TargetName::File(path) | TargetName::Raw(path) | TargetName::Linux { path, .. } => {
                device(Some(place_of(path)), leaves(path))
            }
            TargetName::Memory { .. } | TargetName::Null(_) => device(None, Vec::new()),
            TargetName::NvmeTcp { address, nqn, nsid, .. } => {
                let port = address.port.map_or(NVME_TCP_PORT, Into::into);
                let nsid = nsid.map_or(String::new(), |nsid| format!("/{nsid}"));
                device(Some(format!("nvme+tcp://{}:{port}/{nqn}{nsid}", address.host_name())), Vec::new())
            }
            TargetName::Nbd { address: NbdAddress::Unix(path), export, .. } => {
                device(Some(NbdAddress::Unix(PathBuf::from(place_of(path))).uri(export)), Vec::new())
            }
            TargetName::Nbd { address, export, .. } => device(Some(address.uri(export)), Vec::new()),
            TargetName::Group { kind, members } => TargetIdentity::Group {
                kind: kind_of(*kind),
                members: members.iter().map(|member| TargetIdentity::with(member, leaves)).collect(),
            },
            TargetName::Offset { range, target } => {
                let of = Box::new(TargetIdentity::with(target, leaves));
                TargetIdentity::Part { range: range.to_string(), of }
            }
            // Faults change no identity: it is the same device.
            TargetName::Fault { target, .. } => TargetIdentity::with(target, leaves),
        }
    }

    /// How this compares with `other`. The order of members counts only in an unlabelled stripe.
    pub fn compare(&self, other: &TargetIdentity) -> Sameness {
        use TargetIdentity::{Device, Group, Part};
        let fits = match (self, other) {
            (Device { .. }, Device { .. }) => self.compare_devices(other),
            // In another order, the blocks of an unlabelled stripe are others.
            (Group { kind, members }, Group { kind: other_kind, members: others }) if kind == other_kind => {
                let are_in_order = || members.iter().zip(others).all(|(a, b)| are_same(from_ref(a), from_ref(b)));
                let fit = are_same(members, others) && (!kind.ends_with(NO_LABEL) || are_in_order());
                if fit { Sameness::Same } else { Sameness::Different }
            }
            (Part { range, of }, Part { range: other_range, of: other_of }) if range == other_range => {
                of.compare(other_of)
            }
            _ => Sameness::Different,
        };
        match fits {
            Sameness::Different => self.shared_with(other).map_or(Sameness::Different, Sameness::Shares),
            fits => fits,
        }
    }

    fn compare_devices(&self, other: &TargetIdentity) -> Sameness {
        use TargetIdentity::Device;
        let (Device { name, place, leaves }, Device { name: other_name, place: other_place, leaves: others }) =
            (self, other)
        else {
            return Sameness::Different;
        };
        let are_same =
            leaves.len() == others.len() && leaves.iter().zip(others).all(|(leaf, other)| leaf.is_same(other));
        match (place, other_place) {
            (None, None) if name == other_name => Sameness::Same,
            (None, _) | (_, None) => Sameness::Different,
            _ if !leaves.is_empty() && !others.is_empty() => match are_same {
                true => Sameness::Same,
                false if place == other_place => Sameness::Replaced,
                false => Sameness::Different,
            },
            // Nothing is there, for one side: then the place is all that is known.
            _ if place == other_place => Sameness::Same,
            _ => Sameness::Different,
        }
    }

    /// True if it is, or has a member, at another server.
    pub fn is_remote(&self) -> bool {
        let is_address = |device: &&TargetIdentity| matches!(device, TargetIdentity::Device { place: Some(place), .. } if place.contains("://"));
        self.devices().iter().any(is_address)
    }

    /// True if it is some blocks of another target.
    pub(crate) fn is_part(&self) -> bool {
        matches!(self, TargetIdentity::Part { .. })
    }

    /// The name of the first device here that is, or has bytes of, one of `other`.
    pub fn shared_with(&self, other: &TargetIdentity) -> Option<String> {
        let others = other.devices();
        let shares = |device: &&TargetIdentity| {
            others.iter().any(|other| {
                let is_memory = matches!(other, TargetIdentity::Device { place: None, .. });
                (device.compare_devices(other) == Sameness::Same && !is_memory)
                    || device.leaves().iter().any(|leaf| other.leaves().iter().any(|other| leaf.overlaps(other)))
            })
        };
        self.devices().into_iter().find(shares).map(TargetIdentity::to_string)
    }

    /// The devices that it is made of.
    pub fn devices(&self) -> Vec<&TargetIdentity> {
        match self {
            TargetIdentity::Device { .. } => vec![self],
            TargetIdentity::Group { members, .. } => members.iter().flat_map(TargetIdentity::devices).collect(),
            TargetIdentity::Part { of, .. } => of.devices(),
        }
    }

    /// The bytes of this machine that it is made of.
    pub fn leaves(&self) -> Vec<Leaf> {
        match self {
            TargetIdentity::Device { leaves, .. } => leaves.clone(),
            TargetIdentity::Group { members, .. } => members.iter().flat_map(TargetIdentity::leaves).collect(),
            TargetIdentity::Part { of, .. } => of.leaves(),
        }
    }
}

impl fmt::Display for TargetIdentity {
    /// By the names of its devices.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TargetIdentity::Device { name, .. } => f.write_str(name),
            TargetIdentity::Group { kind, members } => {
                let names: Vec<String> = members.iter().map(TargetIdentity::to_string).collect();
                write!(f, "{kind}:{}", names.join(","))
            }
            TargetIdentity::Part { range, of } => write!(f, "offset:{range},{of}"),
        }
    }
}

/// The numbers of these targets in an order that all processes have for the same devices, whatever they call them and in whatever order
/// they name them. Of two processes that open the same devices to write to them, one after the other in this order, the one that gets the
/// first gets all; in the order of their names, each could keep what the other one needs.
pub(crate) fn opening_order<'a>(targets: impl IntoIterator<Item = &'a TargetName>) -> Vec<usize> {
    let key = |target: &TargetName| {
        let identity = TargetIdentity::of(target);
        let places = identity.devices().into_iter().map(|device| match device {
            TargetIdentity::Device { place, .. } => place.clone(),
            TargetIdentity::Group { .. } | TargetIdentity::Part { .. } => None,
        });
        (identity.leaves().into_iter().min(), places.min())
    };
    let mut keyed: Vec<_> = targets.into_iter().map(key).enumerate().collect();
    keyed.sort_by(|(_, a), (_, b)| a.cmp(b));
    keyed.into_iter().map(|(number, _)| number).collect()
}

/// True if both are the same members, one of which at least is the same and not only in the same place.
fn are_same(members: &[TargetIdentity], others: &[TargetIdentity]) -> bool {
    if members.len() != others.len() {
        return false;
    }
    let mut free: Vec<&TargetIdentity> = others.iter().collect();
    let mut left: Vec<&TargetIdentity> = members.iter().collect();
    for wanted in [Sameness::Same, Sameness::Replaced] {
        left.retain(|member| match free.iter().position(|other| member.compare(other) == wanted) {
            Some(at) => {
                free.swap_remove(at);
                false
            }
            None => true,
        });
        if left.len() == members.len() {
            return false;
        }
    }
    left.is_empty()
}

fn kind_of(kind: GroupKind) -> String {
    match kind {
        GroupKind::Stripe { chunk, labelled: false } => {
            format!("{}-{}{NO_LABEL}", kind.name(), chunk.unwrap_or(CHUNK).get())
        }
        GroupKind::Mirror | GroupKind::Stripe { .. } | GroupKind::Multipath => kind.name().to_owned(),
    }
}

/// An absolute path in the folder where the path is, whatever that is called.
fn place_of(path: &Path) -> String {
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let resolved = match (absolute.parent().and_then(|folder| folder.canonicalize().ok()), absolute.file_name()) {
        (Some(folder), Some(name)) => folder.join(name),
        _ => absolute,
    };
    resolved.to_string_lossy().into_owned()
}

/// The name of an open target, and what it is: shared by all clones, on any core.
#[derive(Clone, Debug)]
pub struct TargetLabel(Arc<Mutex<Known>>);

#[derive(Debug)]
struct Known {
    name: TargetName,
    /// What it was when it was opened, and after each change of its members: at least one, the present one last.
    compositions: Vec<TargetIdentity>,
    /// The members that a command may name, by the names that the mirror has for them.
    members: Vec<(String, TargetIdentity)>,
}

impl TargetLabel {
    /// The name of a target that was opened by this name, and what it was then.
    pub fn new(target: &TargetName, identity: TargetIdentity) -> TargetLabel {
        let known = Known { name: target.clone(), compositions: vec![identity], members: Vec::new() };
        TargetLabel(Arc::new(Mutex::new(known)))
    }

    /// The name of a target, and what it is by that.
    pub fn of(target: &TargetName) -> TargetLabel {
        TargetLabel::new(target, TargetIdentity::of(target))
    }

    /// The name that it has now.
    pub fn now(&self) -> TargetName {
        self.lock().name.clone()
    }

    /// Changes the name.
    pub fn set(&self, target: &TargetName) {
        self.lock().name.clone_from(target);
    }

    /// Has these be the members from now on. What it was made of before is still understood.
    pub fn set_members(&self, kind: GroupKind, members: Vec<(String, TargetIdentity)>) {
        let mut known = self.lock();
        let identities = members.iter().map(|(_, identity)| identity.clone()).collect();
        known.compositions.push(TargetIdentity::Group { kind: kind_of(kind), members: identities });
        if known.compositions.len() > MAX_COMPOSITIONS {
            known.compositions.remove(1);
        }
        known.members = members;
    }

    /// The members that a command may name.
    pub fn members(&self) -> Vec<(String, TargetIdentity)> {
        self.lock().members.clone()
    }

    /// How what is asked for compares with this target, as it is or was since it was opened.
    pub fn compare(&self, asked: &TargetIdentity) -> Sameness {
        let known = self.lock();
        let (now, before) = known.compositions.split_last().unwrap_or((asked, &[]));
        match asked.compare(now) {
            Sameness::Same => Sameness::Same,
            _ if before.iter().any(|other| asked.compare(other) == Sameness::Same) => Sameness::Same,
            other => other,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Display for TargetLabel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.now().fmt(f)
    }
}

/// The member that is meant by a name, whatever the mirror calls it: what the name is now, or else what is in its place.
pub fn member_of<'a>(members: &'a [(String, TargetIdentity)], named: &TargetName) -> Option<&'a str> {
    let asked = TargetIdentity::of(named);
    let is = |wanted: Sameness| members.iter().rev().find(move |(_, member)| asked.compare(member) == wanted);
    is.clone()(Sameness::Same).or_else(|| is(Sameness::Replaced)).map(|(name, _)| name.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    struct Folders {
        root: tempfile::TempDir,
    }

    impl Folders {
        /// Two folders with files of equal names.
        fn new() -> Folders {
            let root = tempfile::tempdir().unwrap();
            for folder in ["x1", "x2"] {
                fs::create_dir(root.path().join(folder)).unwrap();
                for name in ["a", "b", "c"] {
                    fs::write(root.path().join(folder).join(name), folder).unwrap();
                }
            }
            Folders { root }
        }

        fn name(&self, folder: &str, text: &str) -> TargetName {
            text.parse::<TargetName>().unwrap().relative_to(&self.root.path().join(folder))
        }

        fn of(&self, folder: &str, text: &str) -> TargetIdentity {
            TargetIdentity::of(&self.name(folder, text))
        }
    }

    #[test]
    fn equal_names_in_two_folders_are_two_targets() {
        let folders = Folders::new();
        for text in ["a", "mirror:a,b", "stripe:a,b", "offset:0..7,a", "mirror:[stripe:a,b],c", "fault:[read=1],a"] {
            let [first, second] = ["x1", "x2"].map(|folder| folders.of(folder, text));
            assert_eq!(first.compare(&second), Sameness::Different, "{text}");
            assert_eq!(first.compare(&folders.of("x1", text)), Sameness::Same, "{text}");
        }
    }

    #[test]
    fn a_group_is_the_set_of_its_members_and_a_part_of_it_is_named() {
        let folders = Folders::new();
        let at = |text: &str| folders.of("x1", text);
        assert_eq!(at("mirror:a,b").compare(&at("mirror:b,./a")), Sameness::Same);
        assert_eq!(at("raw:a").compare(&at("a")), Sameness::Same);
        for (asked, served) in
            [("mirror:a,b", "mirror:a,c"), ("mirror:a,b", "a"), ("a", "mirror:a,b"), ("mirror:a,b", "stripe:a,b")]
        {
            let name = folders.name("x1", "a").to_string();
            assert_eq!(at(asked).compare(&at(served)), Sameness::Shares(name), "{asked} {served}");
        }
        assert_eq!(
            at("mirror:a,b,c").compare(&at("mirror:a,b")),
            Sameness::Shares(folders.name("x1", "a").to_string())
        );
        assert_eq!(at("mem:1MiB").compare(&at("mem:1MiB")), Sameness::Same);
        assert_eq!(
            at("mirror:mem:1MiB,a").compare(&at("mirror:mem:1MiB,b")),
            Sameness::Different,
            "memory is nobody's"
        );
        assert_eq!(at("nvme+tcp://h/nqn.x/1").compare(&at("nvme+tcp://h:4420/nqn.x/1?queues=2")), Sameness::Same);
        assert_eq!(at("nvme+tcp://h/nqn.x/1").compare(&at("nvme+tcp://h/nqn.x/2")), Sameness::Different);
    }

    #[test]
    fn a_stripe_without_labels_is_its_members_in_their_order_with_their_chunks() {
        let folders = Folders::new();
        let at = |text: &str| folders.of("x1", text);
        assert_eq!(at("stripe:a,b").compare(&at("stripe:b,a")), Sameness::Same, "labels tell the order");
        assert_eq!(at("stripe-nolabel:a,b").compare(&at("stripe-64KiB-nolabel:a,./b")), Sameness::Same);
        let shares = Sameness::Shares(folders.name("x1", "a").to_string());
        for other in ["stripe:a,b", "stripe-4KiB:a,b", "stripe-4KiB-nolabel:a,b"] {
            assert_eq!(at(other).compare(&at("stripe-nolabel:a,b")), shares, "{other}");
        }
        let shares = Sameness::Shares(folders.name("x1", "b").to_string());
        assert_eq!(at("stripe-nolabel:b,a").compare(&at("stripe-nolabel:a,b")), shares);
    }

    #[test]
    fn a_file_that_took_the_place_of_another_is_not_that_one() {
        let folders = Folders::new();
        let (whole, mirror) = (folders.of("x1", "a"), folders.of("x1", "mirror:a,b"));
        let path = folders.root.path().join("x1/a");
        fs::rename(&path, folders.root.path().join("x1/moved")).unwrap();
        assert_eq!(folders.of("x1", "a").compare(&whole), Sameness::Same, "nothing is there: the place is meant");
        assert_eq!(folders.of("x1", "moved").compare(&whole), Sameness::Same);
        fs::write(&path, "another").unwrap();
        assert_eq!(folders.of("x1", "a").compare(&whole), Sameness::Replaced);
        assert_eq!(folders.of("x1", "mirror:b,a").compare(&mirror), Sameness::Same, "the other member tells");
        fs::rename(folders.root.path().join("x1/b"), folders.root.path().join("x1/gone")).unwrap();
        fs::write(folders.root.path().join("x1/b"), "another").unwrap();
        assert_eq!(folders.of("x1", "mirror:a,b").compare(&mirror), Sameness::Different, "no member is left of it");
    }

    #[test]
    fn all_clones_have_one_name() {
        let [old, new] = ["mirror:a,b", "mirror:a,c"].map(|text| text.parse::<TargetName>().unwrap());
        let label = TargetLabel::of(&old);
        let elsewhere = label.clone();
        assert_eq!(elsewhere.now(), old);
        label.set(&new);
        assert_eq!((elsewhere.to_string().as_str(), elsewhere.now()), ("mirror:a,c", new));
    }

    #[test]
    fn a_mirror_is_known_by_the_members_that_it_has_and_had() {
        let folders = Folders::new();
        let member = |name: &str| (name.to_owned(), folders.of("x1", name));
        let label = TargetLabel::new(&folders.name("x1", "mirror:a,b"), folders.of("x1", "mirror:a,b"));
        label.set_members(GroupKind::Mirror, vec![member("a"), member("c")]);
        for name in ["mirror:a,b", "mirror:a,c"] {
            assert_eq!(label.compare(&folders.of("x1", name)), Sameness::Same, "{name}");
            assert_eq!(label.compare(&folders.of("x2", name)), Sameness::Different, "{name}");
        }
        assert!(matches!(label.compare(&folders.of("x1", "mirror:a,b,c")), Sameness::Shares(_)));
        let members = label.members();
        assert_eq!(member_of(&members, &folders.name("x1", "./c")), Some("c"));
        assert_eq!(member_of(&members, &folders.name("x2", "c")), None, "an equal name elsewhere is another file");
        for _ in 0..40 {
            label.set_members(GroupKind::Mirror, vec![member("a"), member("c")]);
        }
        assert_eq!(label.compare(&folders.of("x1", "mirror:a,b")), Sameness::Same, "the first name stays");
        assert!(label.lock().compositions.len() <= MAX_COMPOSITIONS);
    }

    #[test]
    fn devices_are_opened_in_one_order_whatever_they_are_called() {
        let folders = Folders::new();
        let link = folders.root.path().join("x2").join("z");
        fs::hard_link(folders.root.path().join("x1").join("a"), &link).unwrap();
        let names = |texts: &[&str]| -> Vec<TargetName> {
            texts.iter().map(|text| folders.name(if *text == "z" { "x2" } else { "x1" }, text)).collect()
        };
        let in_order = |texts: &[&str]| -> Vec<TargetIdentity> {
            let names = names(texts);
            opening_order(&names).into_iter().map(|at| TargetIdentity::of(&names[at])).collect()
        };
        let expected = in_order(&["a", "b", "c", "nbd://host/x"]);
        for other in [["nbd://host/x", "c", "b", "a"], ["b", "z", "nbd://host/x", "c"], ["c", "nbd://host/x", "z", "b"]]
        {
            let found = in_order(&other);
            assert!(found.iter().zip(&expected).all(|(a, b)| a.compare(b) == Sameness::Same), "{other:?}: {found:?}");
        }
    }
}
