//! Kernel block devices on top of drives: partitions, device-mapper tables and md arrays over emulated NVMe drives,
//! whose backing files are damaged from outside. The drives verify, and damage is reported with block addresses of the
//! device that was named.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::context::{OwnGuestContext, expect, quiet, succeed};
use crate::harness::{Drive, Guest};

/// The number of blocks of each drive, and the bytes of a block. Each block has 8 bytes of metadata, which follow all
/// blocks in the backing file.
const BLOCKS: u64 = 2048;
const BLOCK_BYTES: u64 = 4096;
const DRIVES: [&str; 2] = ["a", "b"];
const PROPERTIES: &str = "logical_block_size=4096,physical_block_size=4096,ms=8,mset=0,pi=1";

/// A block of a drive: the drive, and the block's address.
type On = (usize, u64);

/// A guest with the drives, and their backing files.
struct Laid {
    guest: Guest,
    files: [PathBuf; 2],
}

pub fn run(context: &OwnGuestContext<'_>) -> Result<()> {
    let folder = context.sealblock.folder.clone();
    let mut drives = Vec::new();
    let files = DRIVES.map(|name| folder.join(name));
    for (name, file) in DRIVES.iter().zip(&files) {
        fs::File::create(file)?.set_len(BLOCKS * (BLOCK_BYTES + 8)).context("making a backing file")?;
        drives.push(Drive { file: file.clone(), serial: (*name).to_owned(), namespace: PROPERTIES.to_owned() });
    }
    let guest = context.boot(drives, 1)?;
    let mut laid = Laid { guest, files };
    laid.sh(PREPARED)?;
    laid.case("partition", PARTITION, &[(0, 255), (0, 256), (0, 1279), (0, 1280)], &[(0, 0), (1023, 0)])?;
    let outside = (0, 1536);
    laid.case(
        "linear",
        LINEAR,
        &[(0, 1024), (0, 1535), outside, (1, 1), (1, 512)],
        &[(0, 0), (511, 0), (512, 1), (1023, 1)],
    )?;
    laid.case("striped", STRIPED, &[(0, 3), (0, 511), (1, 1024), (1, 1535)], &[(3, 0), (8, 1), (1015, 0), (1023, 1)])?;
    laid.array()?;
    laid.sh(READ_INSTEAD)?;
    quiet(&mut laid.guest)
}

/// Functions for the scripts in this file. Each device is filled after it is made.
const FUNCTIONS: &str = r#"
set -e
A=$(drive a) B=$(drive b)
# made NODE: it is there; it gets content, and is the device from now on.
made() {
  for try in $(seq 100); do
    [ -b "$1" ] && [ "$(cat /sys/class/block/${1##*/}/size)" != 0 ] && break
    sleep 0.05
  done
  echo $1 >/tmp/device
  random $(($(cat /sys/class/block/${1##*/}/size) * 512)) >/tmp/data
  sealblock copy /tmp/data $1 --force
}
# table: a device of device-mapper with the table on standard input.
table() {
  dmsetup create --noudevsync it
  made /dev/$(basename "$(ls -d /sys/block/dm-* | head -n 1)")
}
"#;

const PREPARED: &str = r#"
for module in dm_mod md_mod raid1; do
  [ ! -e /later/$module.ko ] || insmod /later/$module.ko
done
for disk in $A $B; do
  random 8388608 >/tmp/data
  sealblock copy /tmp/data $disk
done
"#;

/// A partition of 1024 blocks from block 256 on, in a PC partition table.
const PARTITION: &str = r#"
sealblock zero $A --range 0..0
printf '\0\0\0\0\203\0\0\0\0\001\0\0\0\004\0\0' | dd of=/tmp/table bs=1 seek=446 status=none
printf '\125\252' | dd of=/tmp/table bs=1 seek=510 status=none
truncate -s 4096 /tmp/table
sealblock copy /tmp/table $A --force 2>/dev/null || dd if=/tmp/table of=$A bs=4096 oflag=direct status=none
blockdev --rereadpt $A
made ${A}p1
"#;

/// The damage avoids the first block of a drive: Verify of QEMU 7.2 does not detect damage there.
const LINEAR: &str = r#"
{ echo 0 4096 linear $A 8192; echo 4096 4096 linear $B 8; } | table
"#;

const STRIPED: &str = r#"
echo 0 8192 striped 2 64 $A 0 $B 8192 | table
"#;

const ARRAY: &str = r#"
MDADM_NO_UDEV=1 mdadm --create /dev/md0 --level=1 --raid-devices=2 --metadata=1.2 --assume-clean --run $A $B >/tmp/said 2>&1 ||
  { cat /tmp/said; fail "no array"; }
made /dev/md0
"#;

/// Parts that no drive can verify are read instead, and the reason is reported.
const READ_INSTEAD: &str = r#"
{ echo 0 4096 linear $A 8192; echo 4096 64 error; } | dmsetup create --noudevsync it
device=/dev/$(basename "$(ls -d /sys/block/dm-* | head -n 1)")
status=0
sealblock verify $device --json >/tmp/json || status=$?
[ $status = 1 ] && grep -q '"offloaded": *false' /tmp/json || { cat /tmp/json; fail "verify ended with $status"; }
grep -q '"lba": *512' /tmp/json && ! grep -q '"lba": *511' /tmp/json || { cat /tmp/json; fail "other blocks"; }
sealblock info $device >/tmp/said
grep -q 'not offloaded.*are on no drive' /tmp/said || { cat /tmp/said; fail "it does not say why"; }
refused "does not support verification" sealblock verify $device --mode offload
dmsetup remove --noudevsync it
"#;

impl Laid {
    fn sh(&mut self, script: &str) -> Result<String> {
        succeed(&mut self.guest, &format!("{FUNCTIONS}\n{script}"))
    }

    /// `sealblock verify` of the device in JSON, and its exit status.
    fn verify(&mut self) -> Result<(Value, i64)> {
        let said = self.sh(
            "status=0; sealblock verify $(cat /tmp/device) --mode offload --json >/tmp/json 2>/tmp/complaint || status=$?\n\
             [ $status != 3 ] || { cat /tmp/complaint; sealblock info $(cat /tmp/device); fail 'no verify'; }\n\
             echo $status; cat /tmp/json",
        )?;
        let (status, json) = said.split_once('\n').context("no status")?;
        let json = serde_json::from_str(json).with_context(|| format!("reading what verify said: {said}"))?;
        Ok((json, status.parse()?))
    }

    fn flip(&self, blocks: &[On]) -> Result<()> {
        for (drive, lba) in blocks {
            let file =
                OpenOptions::new().read(true).write(true).open(&self.files[*drive]).context("opening a drive")?;
            let (mut byte, at) = ([0], lba * BLOCK_BYTES + lba % BLOCK_BYTES);
            file.read_exact_at(&mut byte, at)?;
            file.write_all_at(&[byte[0] ^ 1], at)?;
        }
        Ok(())
    }

    /// The blocks that verify reports, each with its drive.
    fn named(&mut self, what: &str, status: i64) -> Result<Vec<(u64, usize)>> {
        let (said, ended) = self.verify()?;
        expect(&format!("exit status ({what})"), &ended, &status)?;
        expect("offloaded", &said["offloaded"].as_bool(), &Some(true))?;
        expect("bytes transferred", &said["bytes_transferred"].as_u64(), &Some(0))?;
        let paths = self.sh("echo $A; echo $B")?;
        let paths: Vec<&str> = paths.lines().collect();
        let errors = said["errors"].as_array().context("verify lists no errors")?;
        let each = errors.iter().map(|error| {
            let member = error["member"].as_str().context("no member")?;
            let drive = paths.iter().position(|path| *path == member).with_context(|| format!("member {member}"))?;
            expect("field", &error["field"].as_str(), &Some("guard"))?;
            Ok((error["lba"].as_u64().context("no address")?, drive))
        });
        each.collect()
    }

    /// Makes a device, damages these blocks of its drives, and expects exactly the corresponding blocks of the device
    /// in the report.
    fn damaged(&mut self, what: &str, bad: &[On], wanted: &[(u64, usize)]) -> Result<()> {
        expect(&format!("blocks of a good device ({what})"), &self.named(what, 0)?, &Vec::new())?;
        self.flip(bad)?;
        expect(&format!("damaged blocks ({what})"), &self.named(what, 1)?, &wanted.to_vec())?;
        self.flip(bad)?;
        expect(&format!("blocks that are whole again ({what})"), &self.named(what, 0)?, &Vec::new())
    }

    fn case(&mut self, what: &str, make: &str, bad: &[On], wanted: &[(u64, usize)]) -> Result<()> {
        self.sh(make)?;
        self.damaged(what, bad, wanted)?;
        self.sh("[ ! -e /sys/block/dm-0 ] || dmsetup remove --noudevsync it").map(drop)
    }

    /// Each copy of an array is verified; a missing one is reported as unchecked.
    ///
    /// The kernel rewrites a bad copy that it reads, and opening a device reads the places where parts of a volume
    /// would be; so the damage is elsewhere. All reads go to the second drive, because any read of a damaged block
    /// would repair it.
    fn array(&mut self) -> Result<()> {
        self.sh(ARRAY)?;
        self.sh("echo writemostly >/sys/block/md0/md/dev-${A#/dev/}/state")?;
        let offsets = self.sh("for disk in $A $B; do cat /sys/block/md0/md/dev-${disk#/dev/}/offset; done")?;
        let first: Vec<u64> = offsets.lines().map(|line| Ok(line.trim().parse::<u64>()? / 8)).collect::<Result<_>>()?;
        let bad = [(0, first[0] + 705), (1, first[1] + 705), (1, first[1] + 709)];
        self.damaged("array", &bad, &[(705, 0), (705, 1), (709, 1)])?;
        self.sh("echo faulty >/sys/block/md0/md/dev-${B#/dev/}/state")?;
        expect("blocks of an array without a copy", &self.named("degraded array", 4)?, &Vec::new())?;
        self.flip(&bad)?;
        expect("damaged blocks of the copy that is left", &self.named("degraded array", 1)?, &vec![(705, 0)])?;
        self.flip(&bad)?;
        self.sh("MDADM_NO_UDEV=1 mdadm --stop /dev/md0 2>/dev/null").map(drop)
    }
}
