//! Small filesystems of every profile, filled once each by the kernel, and the places of their nodes and data: the
//! targets of the damage.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rustix::fs::{
    FallocateFlags, IFlags, SeekFrom, XattrFlags, fallocate, ioctl_ficlone, ioctl_getflags, ioctl_setflags, seek,
    setxattr,
};
use rustix::io::Errno;
use sealblock_btrfs::devices::uuid;
use sealblock_btrfs::subvolumes::Subvolume;
use sealblock_btrfs::{Filesystem, Located, OpenOptions as FilesystemOptions, Place, Role};
use sealblock_btrfs_format::checksum::ChecksumType;
use sealblock_proofs_btrfs_images::content::{noise, text};
use sealblock_proofs_btrfs_images::programs::{Loops, Mount, mkfs, run};
use sealblock_proofs_btrfs_images::scrub;
use sealblock_stack::filesystem::FilesystemName;
use sealblock_stack::on_reactor;
use tempfile::TempDir;

/// Bytes of a sector.
pub const SECTOR: u64 = 4096;
/// The prefix of the names of files without checksums. Damage to their data cannot be detected.
const UNSUMMED: &[u8] = b"unsummed";

/// How a filesystem is made: its name, number of devices, and options of `mkfs.btrfs`.
pub struct Setup {
    pub name: &'static str,
    devices: usize,
    options: &'static [&'static str],
}

const fn setup(name: &'static str, devices: usize, options: &'static [&'static str]) -> Setup {
    Setup { name, devices, options }
}

/// Every profile and every checksum, with small nodes, so that trees have several levels, and with larger ones.
pub const SETUPS: [Setup; 13] = [
    setup("single", 1, &["-d", "single", "-m", "single", "--csum", "crc32c", "-n", "4096"]),
    setup("single-dup", 1, &["-d", "single", "-m", "dup", "--csum", "crc32c"]),
    setup("dup", 1, &["-d", "dup", "-m", "dup", "--csum", "xxhash", "-n", "4096"]),
    setup("mixed", 1, &["--mixed", "-d", "dup", "-m", "dup"]),
    setup("large-nodes", 1, &["-d", "single", "-m", "dup", "--csum", "sha256", "-n", "65536"]),
    setup("raid0", 3, &["-d", "raid0", "-m", "raid1", "--csum", "crc32c", "-n", "4096"]),
    setup("raid1", 2, &["-d", "raid1", "-m", "raid1", "--csum", "sha256", "-n", "4096"]),
    setup("raid1c3", 3, &["-d", "raid1c3", "-m", "raid1c3", "--csum", "blake2", "-n", "4096"]),
    setup("raid1c4", 4, &["-d", "raid1c4", "-m", "raid1c4", "--csum", "xxhash"]),
    setup("raid10", 4, &["-d", "raid10", "-m", "raid10", "--csum", "crc32c", "-n", "4096"]),
    setup("raid5", 3, &["-d", "raid5", "-m", "raid1", "--csum", "crc32c", "-n", "4096"]),
    setup("raid6", 4, &["-d", "raid6", "-m", "raid1c3", "--csum", "crc32c", "-n", "4096"]),
    setup("raid5-nodes", 3, &["-d", "raid5", "-m", "raid5", "--csum", "crc32c"]),
];

/// The size of each device. The second copy of the superblock is at 64 MiB.
const MEBIBYTES: u64 = 240;

/// A node: a tree that contains it, and the places of its copies.
pub struct NodePlaces {
    pub tree: u64,
    pub copies: Vec<Place>,
}

/// A sector of data with a checksum: the places of its copies, and the parity of its row.
pub struct SectorPlaces {
    pub copies: Vec<Place>,
    pub parity: Vec<Place>,
}

/// A filesystem that is repeatedly damaged and restored.
pub struct Subject {
    pub setup: &'static Setup,
    /// The content of each file, by its path from the top subvolume.
    pub contents: BTreeMap<Vec<u8>, Vec<u8>>,
    pub nodes: Vec<NodePlaces>,
    pub data: Vec<SectorPlaces>,
    /// Subvolumes below the top one, by name.
    pub subvolumes: BTreeMap<Vec<u8>, u64>,
    /// With parity, the first piece of the row that contains a sector of data or a node, by device and byte.
    pub first_of_row: BTreeMap<(u64, u64), Place>,
    /// Sectors of the devices that are not all zero.
    pub written: Vec<Place>,
    pub node_bytes: u64,
    pub checksum: ChecksumType,
    /// The images, open for damage.
    pub images: Vec<File>,
    /// Loop devices over the images, which the kernel mounts.
    pub loops: Loops,
    /// The kernel's mount point.
    pub point: PathBuf,
    /// Its devices, as target names of this project.
    pub name: FilesystemName,
    uuid: String,
    _folder: TempDir,
}

impl Subject {
    /// Makes one.
    ///
    /// # Errors
    /// If this machine cannot make it.
    pub fn make(setup: &'static Setup) -> Result<Subject, String> {
        let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
        let paths: Vec<PathBuf> =
            (0..setup.devices).map(|number| folder.path().join(format!("device-{number}"))).collect();
        mkfs(&paths, MEBIBYTES, setup.options)?;
        let mount = Mount::new(&paths, "noatime")?;
        fill(&mount.path("")).map_err(|error| format!("filling it: {error}"))?;
        share(&mount)?;
        mount.unmount()?;
        let mount = Mount::read_only(&paths, Some(5))?;
        let mut contents = BTreeMap::new();
        read_all(&mount.path(""), &mut Vec::new(), &mut contents).map_err(|error| error.to_string())?;
        mount.unmount()?;
        let joined = paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join("+");
        let name = FilesystemName::parse(OsStr::new(&joined))?;
        let open = |path: &PathBuf| OpenOptions::new().read(true).write(true).open(path);
        let images = paths.iter().map(open).collect::<io::Result<Vec<File>>>().map_err(|error| error.to_string())?;
        let places = places(&name)?;
        let point = folder.path().join("point");
        fs::create_dir(&point).map_err(|error| error.to_string())?;
        Ok(Subject {
            setup,
            contents,
            written: written(&images).map_err(|error| error.to_string())?,
            loops: Loops::attach(&paths, true)?,
            nodes: places.nodes,
            data: places.data,
            subvolumes: places.subvolumes,
            first_of_row: places.first_of_row,
            node_bytes: places.node_bytes,
            checksum: places.checksum,
            uuid: places.uuid,
            images,
            point,
            name,
            _folder: folder,
        })
    }
}

impl Drop for Subject {
    fn drop(&mut self) {
        scrub::forget(&self.uuid);
    }
}

/// True if the file with this path has checksums.
pub fn is_summed(path: &[u8]) -> bool {
    !path.starts_with(UNSUMMED)
}

/// Fills a mounted filesystem with files in all forms of storage in which damage has different effects.
fn fill(point: &Path) -> io::Result<()> {
    let path = |name: &str| point.join(name);
    let create = |name: &str, content: &[u8]| -> io::Result<File> {
        fs::write(path(name), content)?;
        OpenOptions::new().read(true).write(true).open(path(name))
    };
    fs::create_dir_all(path("folder/deep"))?;
    create("large", &noise(1_200_000, 1))?;
    create("folder/odd", &noise(300_001, 2))?;
    create("folder/deep/sector", &noise(4096, 3))?;
    fs::hard_link(path("folder/deep/sector"), path("sector-too"))?;
    (0..120).try_for_each(|number| create(&format!("folder/inline-{number}"), &noise(700, 100 + number)).map(drop))?;
    (0..60).try_for_each(|number| create(&format!("small-{number}"), &noise(5000, 300 + number)).map(drop))?;
    for algorithm in ["zlib", "lzo", "zstd"] {
        let name = format!("packed-{algorithm}");
        create(&name, b"")?;
        setxattr(path(&name), "btrfs.compression", algorithm.as_bytes(), XattrFlags::empty())?;
        create(&name, &text(300_000))?;
    }
    // An extent of which only a part is used, with checksums for all of it.
    let bookend = create("bookend", &noise(400_000, 4))?;
    bookend.sync_all()?;
    bookend.write_all_at(&noise(300_000, 5), 40_960)?;
    let holes = create("holes", b"")?;
    (0..8).try_for_each(|number| holes.write_all_at(&noise(5000, 6 + number), number * 100_000))?;
    let prealloc = create("prealloc", b"")?;
    fallocate(&prealloc, FallocateFlags::empty(), 0, 200_000)?;
    prealloc.write_all_at(&noise(20_000, 20), 81_920)?;
    let unsummed = create("unsummed", b"")?;
    ioctl_setflags(&unsummed, ioctl_getflags(&unsummed)? | IFlags::NOCOW)?;
    unsummed.write_all_at(&noise(100_000, 21), 0)?;
    // Every second file is removed, so that checksums and free space are fragmented.
    (0..60).step_by(2).try_for_each(|number| fs::remove_file(path(&format!("small-{number}"))))
}

/// Adds files that share extents and nodes: a reflink, and a snapshot whose source changes later.
fn share(mount: &Mount) -> Result<(), String> {
    let subvolume = |words: &[&str], names: &[&str]| {
        let paths = names.iter().map(|name| mount.path(name).into_os_string());
        run("btrfs", ["subvolume"].iter().chain(words).map(Into::into).chain(paths)).map(drop)
    };
    let plain = |result: io::Result<()>| result.map_err(|error| error.to_string());
    subvolume(&["create"], &["sub"])?;
    plain(fs::write(mount.path("sub/shared"), noise(200_000, 22)))?;
    plain(
        (0..40).try_for_each(|number| fs::write(mount.path(&format!("sub/inline-{number}")), noise(600, 500 + number))),
    )?;
    mount.sync()?;
    let clone = || Ok(ioctl_ficlone(File::create(mount.path("sub/clone"))?, File::open(mount.path("sub/shared"))?)?);
    plain(clone())?;
    subvolume(&["snapshot"], &["sub", "snapshot"])?;
    let change =
        || OpenOptions::new().write(true).open(mount.path("sub/shared"))?.write_all_at(&noise(30_000, 23), 65_536);
    plain(change())
}

/// Reads all files below a folder.
fn read_all(folder: &Path, path: &mut Vec<u8>, contents: &mut BTreeMap<Vec<u8>, Vec<u8>>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let length = path.len();
        if !path.is_empty() {
            path.push(b'/');
        }
        path.extend_from_slice(entry.file_name().as_bytes());
        if entry.file_type()?.is_dir() {
            read_all(&entry.path(), path, contents)?;
        } else {
            contents.insert(path.clone(), fs::read(entry.path())?);
        }
        path.truncate(length);
    }
    Ok(())
}

/// The sectors of images that are not all zero. Ranges that were never written are holes in the image.
fn written(images: &[File]) -> io::Result<Vec<Place>> {
    let (mut written, mut chunk) = (Vec::new(), Vec::new());
    for (image, devid) in images.iter().zip(1..) {
        let mut at = 0;
        loop {
            let start = match seek(image, SeekFrom::Data(at)) {
                Ok(start) => start / SECTOR * SECTOR,
                Err(Errno::NXIO) => break,
                Err(error) => return Err(error.into()),
            };
            at = seek(image, SeekFrom::Hole(start))?.next_multiple_of(SECTOR);
            chunk.resize((at - start) as usize, 0);
            image.read_exact_at(&mut chunk, start)?;
            let sectors = chunk.chunks(SECTOR as usize).zip(0..);
            let used = sectors.filter(|(sector, _)| *sector != [0; SECTOR as usize]);
            written.extend(used.map(|(_, number)| Place { devid, offset: start + number * SECTOR }));
        }
    }
    Ok(written)
}

/// The places of all nodes and data.
struct Places {
    nodes: Vec<NodePlaces>,
    data: Vec<SectorPlaces>,
    subvolumes: BTreeMap<Vec<u8>, u64>,
    first_of_row: BTreeMap<(u64, u64), Place>,
    node_bytes: u64,
    checksum: ChecksumType,
    uuid: String,
}

/// Finds all nodes and data, before any damage.
fn places(name: &FilesystemName) -> Result<Places, String> {
    let found = on_reactor(async {
        let open = name.open(FilesystemOptions::default()).await?;
        open.close_after(async |open| Ok(find(&open.filesystem).await)).await
    });
    found.map_err(|error| error.to_string())
}

async fn find(fs: &Filesystem) -> Places {
    let (map, geometry) = (&fs.storage().map, fs.storage().geometry());
    let node_bytes = u64::from(geometry.node_bytes);
    let (trees, lost) = fs.trees().await;
    assert!(lost.is_empty(), "{lost:?}");
    let (mut nodes, mut seen) = (Vec::new(), BTreeSet::new());
    let mut first_of_row = BTreeMap::new();
    let mut note_row = |located: &Located| {
        if let Some(row) = &located.row {
            let place = located.copies[0];
            first_of_row.insert((place.devid, place.offset), row.pieces[0].1);
        }
    };
    for tree in trees {
        let mut pending = vec![tree.expected()];
        while let Some(expected) = pending.pop() {
            let node = fs.nodes().load(&expected).await.expect("nothing is damaged yet");
            pending.extend((0..node.view().pointers().len()).filter_map(|slot| node.child(slot, tree.id)));
            if seen.insert(expected.bytenr) {
                let located = map.locate(expected.bytenr, node_bytes).expect("a node has a place");
                note_row(&located);
                nodes.push(NodePlaces { tree: tree.id, copies: located.copies.to_vec() });
            }
        }
    }
    let mut data = Vec::new();
    for run in fs.sums(0, u64::MAX).await.expect("nothing is damaged yet") {
        for sector in 0..(run.bytes.len() / geometry.checksum.bytes()) as u64 {
            let located = map.locate(run.logical + sector * SECTOR, SECTOR).expect("data have a place");
            note_row(&located);
            let pieces = located.row.iter().flat_map(|row| &row.pieces);
            let parity = pieces.filter(|(role, _)| !matches!(role, Role::Data(_))).map(|(_, place)| *place);
            data.push(SectorPlaces { parity: parity.collect(), copies: located.copies.to_vec() });
        }
    }
    let named = |(id, subvolume): (u64, Subvolume)| Some((subvolume.parent?.name, id));
    let subvolumes = fs.subvolumes().await.0.into_iter().filter_map(named).collect();
    Places {
        nodes,
        data,
        subvolumes,
        first_of_row,
        node_bytes,
        checksum: geometry.checksum,
        uuid: uuid(&fs.superblock().fsid),
    }
}
