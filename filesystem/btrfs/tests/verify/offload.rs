//! Devices that compute checksums themselves: only metadata are transferred, and all damage is found.

use sealblock_integrity::ChecksumKind;
use std::cell::Cell;
use std::fs;
use std::path::Path;
use std::rc::Rc;

use sealblock_block::{
    Abilities, Ability, Device, Durability, DynDevice, ErrorKind, Geometry, Operation, Outcome, Request, Response,
};
use sealblock_btrfs::verify::{DataFault, Finding, Mode, Report, Unwatched, VerifyOptions, WhyUnchecked, verify};
use sealblock_btrfs::{CopyFault, Filesystem, Place};
use sealblock_media_memory::MemoryDevice;
use sealblock_units::Extent;

use crate::images::{Devices, SECTOR, SectorCopy, Setup, content, make, now};
use crate::{assert_clean, fill, name_of, sectors_of};

/// The transferred bytes of a device, and the number of checksums that it computed.
#[derive(Default)]
struct Counted {
    read_bytes: Cell<u64>,
    checksums: Cell<u64>,
}

/// A device that behaves like one on another machine.
struct Remote {
    device: Rc<MemoryDevice>,
    counted: Rc<Counted>,
    checksum: Ability,
}

impl Device for Remote {
    fn geometry(&self) -> &Geometry {
        Device::geometry(&self.device)
    }

    fn abilities(&self) -> Abilities {
        let mut abilities = Abilities { offloads: true, ..Device::abilities(&self.device) };
        abilities.set_checksum(ChecksumKind::Crc32c, self.checksum);
        abilities
    }

    async fn execute(&self, request: Request) -> Outcome {
        if matches!(request.operation, Operation::Checksum(..)) {
            self.counted.checksums.set(self.counted.checksums.get() + 1);
        }
        let outcome = Device::execute(&self.device, request).await;
        if let Ok(Response::Data(data)) = &outcome {
            self.counted.read_bytes.set(self.counted.read_bytes.get() + data.joined_data().len() as u64);
        }
        outcome
    }
}

fn open(devices: &Devices, counted: &Rc<Counted>, checksum: Ability) -> Filesystem {
    let remote = |device| Remote { device, counted: Rc::clone(counted), checksum };
    devices.open_as(&[], |device| DynDevice::new("remote", remote(device)))
}

fn checked(devices: &Devices, mode: Mode, counted: &Rc<Counted>) -> Report {
    let fs = open(devices, counted, Ability::Native);
    counted.read_bytes.take();
    let report = now(verify(&fs, VerifyOptions { mode, ..VerifyOptions::default() }, &Unwatched)).unwrap();
    assert_eq!(report.bytes_transferred, counted.read_bytes.get(), "what is reported is what crossed");
    report
}

fn fill_more(point: &Path) {
    fill(point);
    fs::write(point.join("larger"), content(5, 24 << 20)).unwrap();
}

#[test]
fn only_metadata_and_differing_data_are_transferred() {
    for setup in [
        Setup::SINGLE,
        Setup::MIRRORED,
        Setup { data: "raid0", devices: 3, ..Setup::MIRRORED },
        Setup { data: "raid10", metadata: "raid10", devices: 4, ..Setup::MIRRORED },
    ] {
        let folder = tempfile::tempdir().unwrap();
        let Some(images) = make(folder.path(), setup, fill_more) else { continue };
        let (devices, counted) = (Devices::load(&images, None), Rc::new(Counted::default()));
        let report = checked(&devices, Mode::Auto, &counted);
        assert_clean(&report, setup.data);
        assert!(report.is_offloaded);
        let nodes = report.nodes_verified * 2 * 16_384;
        assert!(report.bytes_transferred < 2 * nodes, "{} of {nodes}", report.bytes_transferred);
        assert!(report.bytes_verified > nodes + (24 << 20));
        // A device in memory accepts 1 MiB at a time; stripe by stripe (64 KiB) there would be several hundred
        // requests.
        assert!(counted.checksums.get() < 150, "{} requests for contiguous pieces", counted.checksums.get());

        let copies: Vec<SectorCopy> =
            devices.sectors.iter().filter(|copy| copy.file != 5).step_by(97).copied().collect();
        let two = [copies[0], copies[copies.len() / 2]];
        two.iter().for_each(|copy| devices.damage(copy.devid, copy.place + 77));
        let found = checked(&devices, Mode::Auto, &counted);
        let mut expected: Vec<_> =
            two.iter().map(|copy| (copy.devid, copy.place, name_of(copy.file).to_owned(), copy.offset)).collect();
        expected.sort();
        assert_eq!(sectors_of(&found).into_iter().collect::<Vec<_>>(), expected, "{}", setup.data);
        let more = found.bytes_transferred - report.bytes_transferred;
        assert!(more < 4 * 64 * 1024 + nodes * 2, "{}: {more} bytes for two sectors", setup.data);

        let read = checked(&devices, Mode::Emulate, &counted);
        assert_eq!(sectors_of(&read), sectors_of(&found));
        assert!(!read.is_offloaded && read.bytes_transferred > 24 << 20);
        assert_eq!(read.bytes_verified, found.bytes_verified);
    }
}

#[test]
fn sectors_that_cannot_be_read_are_named_whoever_checks() {
    let folder = tempfile::tempdir().unwrap();
    let Some(images) = make(folder.path(), Setup::MIRRORED, fill) else { return };
    let (devices, counted) = (Devices::load(&images, None), Rc::new(Counted::default()));
    let copy = *devices.sectors.iter().rfind(|copy| copy.file == 2).unwrap();
    let extent = Extent::from_raw(copy.place / SECTOR as u64, 1).unwrap();
    let request = Request::write_uncorrectable(extent, Durability::Volatile);
    now(Device::execute(&devices.all[copy.devid as usize - 1], request)).unwrap();
    for mode in [Mode::Auto, Mode::Emulate] {
        let report = checked(&devices, mode, &counted);
        let [Finding::Data(data)] = &report.findings[..] else { panic!("{:?}", report.findings) };
        let DataFault::Copy { copy: bad, is_lost: false, .. } = &data.fault else { panic!("{data}") };
        assert_eq!((bad.place, data.bytes), (Place { devid: copy.devid, offset: copy.place }, SECTOR as u64));
        assert!(matches!(bad.fault, CopyFault::Unreadable(_)), "{data}");
        assert_eq!((&data.uses.files[0].paths[..], data.uses.files[0].offset), (&[b"/odd".to_vec()][..], copy.offset));
    }
}

/// A device that becomes unreachable after it was opened.
struct Lost(Rc<MemoryDevice>, Rc<Cell<bool>>);

impl Device for Lost {
    fn geometry(&self) -> &Geometry {
        Device::geometry(&self.0)
    }

    fn abilities(&self) -> Abilities {
        Device::abilities(&self.0)
    }

    async fn execute(&self, request: Request) -> Outcome {
        match self.1.get() {
            true => Err(ErrorKind::Unreachable { reason: "the cable".into() }.into()),
            false => Device::execute(&self.0, request).await,
        }
    }
}

#[test]
fn a_device_that_is_lost_meanwhile_is_no_damage_and_nothing_is_clean() {
    let folder = tempfile::tempdir().unwrap();
    let Some(images) = make(folder.path(), Setup::MIRRORED, fill) else { return };
    let devices = Devices::load(&images, None);
    let (is_lost, count) = (Rc::new(Cell::new(false)), Cell::new(0));
    let fs = devices.open_as(&[], |device| {
        count.set(count.get() + 1);
        // The second device.
        let switch = if count.get() == 2 { Rc::clone(&is_lost) } else { Rc::default() };
        DynDevice::new("cable", Lost(device, switch))
    });
    assert_clean(&crate::checked(&fs), "it is there");
    is_lost.set(true);
    let report = crate::checked(&fs);
    assert!(report.findings.is_empty(), "{}", report.findings[0]);
    assert_eq!(report.unchecked.keys().collect::<Vec<_>>(), [&WhyUnchecked::Unreachable]);
    assert!(report.unchecked[&WhyUnchecked::Unreachable] > 4 << 20);
}

#[test]
fn a_device_that_cannot_is_refused_where_it_has_to() {
    let folder = tempfile::tempdir().unwrap();
    let Some(images) = make(folder.path(), Setup::SINGLE, fill) else { return };
    let (devices, counted) = (Devices::load(&images, None), Rc::new(Counted::default()));
    assert_clean(&checked(&devices, Mode::Offload, &counted), "it can");
    let options = VerifyOptions { mode: Mode::Offload, ..VerifyOptions::default() };
    let unable = open(&devices, &counted, Ability::Absent);
    let error = now(verify(&unable, options, &Unwatched)).unwrap_err().to_string();
    assert!(error.contains("device-1 cannot check data itself"), "{error}");
    let local = now(verify(&devices.open(), options, &Unwatched)).unwrap_err().to_string();
    assert!(local.contains("without the data crossing"), "{local}");

    let folder = tempfile::tempdir().unwrap();
    let Some(images) = make(folder.path(), Setup { checksum: "sha256", ..Setup::SINGLE }, fill) else { return };
    let devices = Devices::load(&images, None);
    let error = now(verify(&open(&devices, &counted, Ability::Native), options, &Unwatched)).unwrap_err().to_string();
    assert!(error.contains("no device computes the checksums"), "{error}");
    let report = checked(&devices, Mode::Auto, &counted);
    assert_clean(&report, "sha256");
    assert!(!report.is_offloaded && counted.checksums.get() < 10);
    assert!(report.bytes_verified > SECTOR as u64);
}
