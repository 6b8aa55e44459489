//! NVMe drives of the machine that runs sealblock: the program runs in a guest with emulated drives, and the test
//! damages their backing files from outside.
//!
//! QEMU's drives make and check tags, and support Verify, Compare and Copy. A backing file has all blocks first,
//! followed by all metadata.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::context::{OwnGuestContext, expect, quiet, succeed};
use crate::harness::{Drive, Guest};

/// The first kernels that report the tags of a block device and transfer them with reads and writes.
pub(super) const TAGS: (u32, u32) = (6, 17);
/// Blocks of each drive.
const BLOCKS: u64 = 2048;
/// A format of namespaces.
struct Format {
    name: &'static str,
    block_bytes: u64,
    metadata_bytes: u64,
    /// Bytes of metadata before the tuple.
    tuple_at: u64,
    guard_bytes: u64,
    /// Protection type, 0 for none.
    kind: u8,
    /// Its options for QEMU.
    properties: &'static str,
}

const fn format(
    name: &'static str,
    block_bytes: u64,
    metadata_bytes: u64,
    kind: u8,
    properties: &'static str,
) -> Format {
    Format { name, block_bytes, metadata_bytes, tuple_at: 0, guard_bytes: 2, kind, properties }
}

const FORMATS: [Format; 9] = [
    format("plain512", 512, 0, 0, ""),
    format("plain4k", 4096, 0, 0, ""),
    format("t1-512", 512, 8, 1, ",ms=8,mset=0,pi=1"),
    format("t1-4k-ext", 4096, 8, 1, ",ms=8,mset=1,pi=1"),
    format("t2-4k", 4096, 8, 2, ",ms=8,mset=0,pi=2"),
    format("t3-512-ext", 512, 8, 3, ",ms=8,mset=1,pi=3"),
    Format { tuple_at: 8, ..format("t1-last", 4096, 16, 1, ",ms=16,mset=0,pi=1,pil=0") },
    format("t1-first-ext", 512, 16, 1, ",ms=16,mset=1,pi=1,pil=1"),
    Format { guard_bytes: 8, ..format("g64", 4096, 16, 1, ",ms=16,mset=0,pi=1,pif=2") },
];

/// Formats for older kernels, which have fewer ways to access a drive: separate metadata, metadata after each block,
/// and none.
const ON_OLDER: [&str; 5] = ["plain512", "plain4k", "t1-512", "t1-4k-ext", "t1-first-ext"];

impl Format {
    fn file_bytes(&self) -> u64 {
        BLOCKS * (self.block_bytes + self.metadata_bytes)
    }

    /// The offset of a block's tuple in the backing file.
    fn tuple(&self, lba: u64) -> u64 {
        BLOCKS * self.block_bytes + lba * self.metadata_bytes + self.tuple_at
    }

    /// The damage: the block, a byte of the backing file, and the field whose check then fails.
    fn harms(&self) -> Vec<(u64, u64, &'static str)> {
        let data = |lba: u64, byte| (lba, lba * self.block_bytes + byte, "guard");
        let mut harms = vec![data(3, 0), data(4, 511), data(100, 17), data(BLOCKS - 1, 300)];
        let tag = |lba, byte, field| (lba, self.tuple(lba) + byte, field);
        harms.push(tag(777, 0, "guard"));
        // A host chooses the reference tags of Type 2, and those of Type 3 are not checked.
        if self.kind == 1 {
            harms.push(tag(1000, if self.guard_bytes == 8 { 15 } else { 7 }, "ref_tag"));
        }
        harms.sort_unstable();
        harms
    }
}

pub fn run(context: &OwnGuestContext<'_>) -> Result<()> {
    let folder = context.sealblock.folder.clone();
    let mut drives = Vec::new();
    let formats = || FORMATS.iter().filter(|format| context.version >= TAGS || ON_OLDER.contains(&format.name));
    for format in formats() {
        let file = folder.join(format.name);
        fs::File::create(&file)?.set_len(format.file_bytes()).context("making a backing file")?;
        let namespace =
            format!("logical_block_size={0},physical_block_size={0}{1}", format.block_bytes, format.properties);
        drives.push(Drive { file, serial: format.name.to_owned(), namespace });
    }
    let mut guest = context.boot(drives, 1)?;
    for format in formats() {
        checked(&mut guest, format, &folder).with_context(|| format!("drive {}", format.name))?;
    }
    if context.version >= TAGS {
        for format in formats().filter(|format| format.kind > 0 && !format.properties.contains("mset=1")) {
            by_reads(&mut guest, format, &folder)
                .with_context(|| format!("drive {} by ordinary reads", format.name))?;
        }
    }
    in_use(&mut guest)?;
    without_privilege(&mut guest, context.version)?;
    quiet(&mut guest)
}

/// Functions for the scripts in this file.
const FUNCTIONS: &str = r#"
set -e
# read_by COMMAND...: sectors that the kernel reads from DEV meanwhile, as it counts.
read_by() {
  before=$(awk '{print $3}' "/sys/block/${DEV##*/}/stat")
  "$@" >/tmp/said 2>/tmp/complaint || status=$?
  echo $(($(awk '{print $3}' "/sys/block/${DEV##*/}/stat") - before))
}
# serve_drive TARGET: serves it to this machine itself; DISK is its block device there.
serve_drive() {
  name=${DEV#/dev/}
  sealblock serve "$1" --listen 127.0.0.1:4420 >/tmp/serve 2>&1 &
  server=$!
  for try in $(seq 100); do
    nvme connect --transport tcp --traddr 127.0.0.1 --trsvcid 4420 --nqn $NQN:$name >/tmp/connect 2>&1 && break
    sleep 0.1
  done
  DISK=/dev/$(attached $name)
}
# end_serving: ends that.
end_serving() {
  detach $name
  kill $server
  wait $server || fail "the server ended with $?: $(cat /tmp/serve)"
}
"#;

fn sh(guest: &mut Guest, name: &str, script: &str) -> Result<String> {
    succeed(guest, &format!("{FUNCTIONS}\nDEV=$(drive {name})\n{script}"))
}

/// `sealblock verify` in JSON, and its exit status.
fn verify(guest: &mut Guest, name: &str, mode: &str) -> Result<(Value, i64)> {
    let script = format!(
        "status=0; sealblock verify $DEV --mode {mode} --json >/tmp/json 2>/tmp/complaint || status=$?\n\
         cat /tmp/json /tmp/complaint >&2; echo $status; cat /tmp/json"
    );
    let said = sh(guest, name, &script)?;
    let (status, json) = said.split_once('\n').context("no status")?;
    let json = serde_json::from_str(json).with_context(|| format!("reading what verify said: {said}"))?;
    Ok((json, status.parse()?))
}

fn expect_offloaded(said: &Value) -> Result<()> {
    expect("offloaded", &said["offloaded"].as_bool(), &Some(true))?;
    expect("bytes transferred", &said["bytes_transferred"].as_u64(), &Some(0))?;
    expect("blocks verified", &said["blocks_verified"].as_u64(), &Some(BLOCKS))
}

/// All tests of one drive.
fn checked(guest: &mut Guest, format: &Format, folder: &Path) -> Result<()> {
    let name = format.name;
    let info: Value = serde_json::from_str(&sh(guest, name, "sealblock info $DEV --json")?).context("reading info")?;
    expect("passthrough", &info["drive"]["passthrough"].as_bool(), &Some(true))?;
    expect("serial", &info["drive"]["serial"].as_str(), &Some(name))?;
    expect("verify", &info["abilities"]["verify"].as_str(), &Some("native"))?;
    expect("blocks", &info["blocks"].as_u64(), &Some(BLOCKS))?;
    expect("type", &info["protection"]["type"].as_u64().unwrap_or(0), &u64::from(format.kind))?;
    expect("metadata", &info["drive"]["metadata_bytes"].as_u64(), &Some(format.metadata_bytes))?;
    filled(guest, format)?;
    let (said, status) = verify(guest, name, "offload")?;
    expect_offloaded(&said)?;
    expect("exit status", &status, &0)?;
    // Without tags, the drive can only check that blocks are readable.
    expect("checked", &said["checked"].as_str(), &Some(if format.kind > 0 { "seals" } else { "readability" }))?;
    sh(guest, name, COUNTED)?;
    if format.kind > 0 {
        damaged(guest, format, folder)?;
    }
    if format.kind > 0 {
        by_the_drive(guest, format)?;
    }
    if format.metadata_bytes <= 8 {
        compared(guest, format)?;
    }
    copied(guest, format, folder)?;
    zeroed(guest, format)
}

/// The drive makes the same tags for the same data as this host, and checks them. It cannot if the metadata contains
/// more than tags.
fn by_the_drive(guest: &mut Guest, format: &Format) -> Result<()> {
    let tuple_bytes = if format.guard_bytes == 8 { 16 } else { 8 };
    if format.metadata_bytes != tuple_bytes {
        return sh(guest, format.name, "refused 'only if they are all metadata' sealblock info $DEV?pract=1").map(drop);
    }
    let script = r#"
        sealblock copy /tmp/data "$DEV?pract=1" --force
        sealblock info "$DEV?pract=1" --json | grep -q '"tags_made_by": *"drive"' || fail "the drive makes no tags"
        sealblock copy "$DEV?pract=1" - | cmp - /tmp/data
        sealblock verify "$DEV?pract=1" --mode offload
        sealblock verify $DEV --mode emulate
        "#;
    sh(guest, format.name, script).map(drop)
}

/// Written data are read back with this host's checks, and the drive's own Compare finds them equal.
fn filled(guest: &mut Guest, format: &Format) -> Result<()> {
    let bytes = BLOCKS * format.block_bytes;
    let script = format!(
        r#"
        random {bytes} >/tmp/data
        sealblock copy /tmp/data $DEV
        sealblock copy $DEV - | cmp - /tmp/data
        sealblock compare $DEV /tmp/data
        "#
    );
    sh(guest, format.name, &script).map(drop)
}

/// Apart from opening the drive, a verify reads nothing.
const COUNTED: &str = r#"
status=0
opening=$(read_by sealblock info $DEV)
verifying=$(read_by sealblock verify $DEV --mode offload)
[ "$opening" = "$verifying" ] || fail "the kernel counts $verifying sectors read by a verify, $opening by an opening"
"#;

/// The drive and this host report exactly the damaged blocks; the host also reports the values.
fn damaged(guest: &mut Guest, format: &Format, folder: &Path) -> Result<()> {
    let file = OpenOptions::new().read(true).write(true).open(folder.join(format.name)).context("opening a drive")?;
    let flip = |at: u64| -> Result<()> {
        let mut byte = [0];
        file.read_exact_at(&mut byte, at)?;
        Ok(file.write_all_at(&[byte[0] ^ 1], at)?)
    };
    let harms = format.harms();
    for (_, at, _) in &harms {
        flip(*at)?;
    }
    let wanted: Vec<(u64, &str)> = harms.iter().map(|(lba, _, field)| (*lba, *field)).collect();
    for mode in ["offload", "emulate"] {
        let (said, status) = verify(guest, format.name, mode)?;
        expect("exit status", &status, &1)?;
        let list = said["errors"].as_array().context("verify lists no errors")?;
        let named: Vec<(u64, &str)> =
            list.iter().filter_map(|error| Some((error["lba"].as_u64()?, error["field"].as_str()?))).collect();
        expect(&format!("blocks that verify names ({mode})"), &named, &wanted)?;
        match mode {
            "offload" => expect_offloaded(&said)?,
            _ => expect(
                "values",
                &list.iter().all(|error| error["expected"].is_u64() || error["expected"].is_string()),
                &true,
            )?,
        }
    }
    let script = "status=0; sealblock copy $DEV - >/tmp/back 2>/tmp/complaint || status=$?; [ $status = 3 ] || fail \"a copy of damaged blocks ended with $status\"";
    sh(guest, format.name, script)?;
    for (_, at, _) in &harms {
        flip(*at)?;
    }
    let (_, status) = verify(guest, format.name, "offload")?;
    expect("exit status of what is whole again", &status, &0)
}

/// A served drive executes a host's Compare itself: once with equal data, once with a difference in the last of eight
/// blocks.
fn compared(guest: &mut Guest, format: &Format) -> Result<()> {
    let script = format!(
        r#"
        serve_drive $DEV
        bytes=$((8 * {block}))
        dd if=/tmp/data of=/tmp/part bs={block} skip=8 count=8 status=none
        compare() {{ nvme compare $DISK --namespace-id=1 --start-block=8 --block-count=7 --data-size=$bytes --data=/tmp/part; }}
        compare
        # Never what is there: a byte is replaced by its complement.
        byte=$(tail -c 1 /tmp/part | od -A n -t u1)
        printf "\\$(printf %03o $((255 - byte)))" | dd of=/tmp/part bs=1 seek=$((bytes - 1)) conv=notrunc status=none
        refused "Compar" compare
        end_serving
        "#,
        block = format.block_bytes,
    );
    sh(guest, format.name, &script).map(drop)
}

/// A drive executes a copy if tags can stay unchanged: if it makes them itself, for Type 3, and without tags. Otherwise
/// the server reads and writes; one format tests that.
fn copied(guest: &mut Guest, format: &Format, folder: &Path) -> Result<()> {
    let tuple_bytes = if format.guard_bytes == 8 { 16 } else { 8 };
    for query in ["", "?pract=1"] {
        let drive_makes_tags = !query.is_empty();
        if drive_makes_tags && (format.kind == 0 || format.metadata_bytes != tuple_bytes) {
            continue;
        }
        let stays = drive_makes_tags || matches!(format.kind, 0 | 3);
        let info = sh(guest, format.name, &format!("sealblock info \"$DEV{query}\" --json"))?;
        let info: Value = serde_json::from_str(&info).context("reading info")?;
        let way = if stays { "native" } else { "absent" };
        expect("copy", &info["abilities"]["copy"].as_str(), &Some(way))?;
        if stays || format.name == "t1-512" {
            copied_by(guest, format, query, stays).with_context(|| format!("copying{query}"))?;
            if format.kind > 0 {
                not_copied(guest, format, query, folder).with_context(|| format!("copying damage{query}"))?;
            }
        }
    }
    if format.kind == 3 {
        let file = fs::File::open(folder.join(format.name)).context("opening a drive")?;
        for (from, to) in COPIED.into_iter().flat_map(|(from, blocks, to)| (0..blocks).map(move |i| (from + i, to + i)))
        {
            let mut tuples = [[0; 8]; 2];
            file.read_exact_at(&mut tuples[0], format.tuple(from))?;
            file.read_exact_at(&mut tuples[1], format.tuple(to))?;
            expect(&format!("the tuple of block {to}, which is a copy of {from}"), &tuples[1], &tuples[0])?;
        }
    }
    Ok(())
}

/// Source, blocks and destination of each range of one Copy: more than one Copy command of QEMU's drives supports.
const COPIED: [(u64, u64, u64); 3] = [(16, 300, 1024), (700, 10, 1324), (5, 1, 1334)];

/// A served drive executes a host's Copy itself: the server neither reads nor writes, and all blocks are right.
fn copied_by(guest: &mut Guest, format: &Format, query: &str, by_drive: bool) -> Result<()> {
    let list = |of: fn(&(u64, u64, u64)) -> u64| {
        COPIED.iter().map(|range| of(range).to_string()).collect::<Vec<String>>().join(",")
    };
    let wanted: String = COPIED.iter().map(|(from, blocks, to)| format!("move {from} {blocks} {to}\n")).collect();
    let script = format!(
        r#"
        serve_drive "$DEV{query}"
        cp /tmp/data /tmp/before
        move() {{ dd if=/tmp/before of=/tmp/data bs={block} skip=$1 count=$2 seek=$3 conv=notrunc status=none; }}
        sectors() {{ awk '{{print $3 + $7}}' "/sys/block/${{DEV##*/}}/stat"; }}
        before=$(sectors)
        nvme copy $DISK --namespace-id=1 --sdlba={to} --slbs={from} --blocks={blocks} >&2
        moved=$(($(sectors) - before))
        {wanted}
        rm /tmp/before
        sealblock status --json >/tmp/json
        end_serving
        sealblock compare "$DEV{query}" /tmp/data >&2
        sealblock verify "$DEV{query}" --quiet
        sealblock verify $DEV --mode emulate --quiet
        echo $moved
        cat /tmp/json
        "#,
        block = format.block_bytes,
        to = COPIED[0].2,
        from = list(|(from, ..)| *from),
        blocks = list(|(_, blocks, _)| blocks - 1),
    );
    let said = sh(guest, format.name, &script)?;
    let (moved, status) = said.split_once('\n').context("no sectors")?;
    let status: Value = serde_json::from_str(status).with_context(|| format!("reading the status: {said}"))?;
    let io = &status["servers"][0]["devices"][0]["io"];
    let bytes = |operation: &str| io[operation]["bytes"].as_u64();
    let all = COPIED.iter().map(|(_, blocks, _)| blocks).sum::<u64>() * format.block_bytes;
    expect("bytes copied by the drive", &bytes("copy"), &Some(if by_drive { all } else { 0 }))?;
    expect("bytes written", &bytes("write"), &Some(if by_drive { 0 } else { all }))?;
    // Linux has read the blocks of a possible partition table.
    let read = bytes("read").context("no reads in the status")?;
    expect("fewer bytes read than copied", &(read < all), &by_drive)?;
    let moved: u64 = moved.parse()?;
    expect(&format!("{moved} sectors moved by the kernel are few"), &(moved < 64), &true)
}

/// A copy of a damaged source is refused, the block is reported, and the destination stays unchanged.
fn not_copied(guest: &mut Guest, format: &Format, query: &str, folder: &Path) -> Result<()> {
    let file = OpenOptions::new().read(true).write(true).open(folder.join(format.name)).context("opening a drive")?;
    let flip = |lba: u64| -> Result<()> {
        let (mut byte, at) = ([0], lba * format.block_bytes + 17);
        file.read_exact_at(&mut byte, at)?;
        Ok(file.write_all_at(&[byte[0] ^ 1], at)?)
    };
    let script = format!(
        r#"
        serve_drive "$DEV{query}"
        refused "Guard Check Error" nvme copy $DISK --namespace-id=1 --sdlba=1500 --slbs=96 --blocks=7
        sealblock status --json >/tmp/json || true
        dd if=$DISK bs={block} skip=1500 count=8 iflag=direct status=none >/tmp/back
        dd if=/tmp/data bs={block} skip=1500 count=8 status=none | cmp - /tmp/back
        end_serving
        cat /tmp/json
        "#,
        block = format.block_bytes
    );
    flip(100)?;
    let said = sh(guest, format.name, &script)?;
    flip(100)?;
    let status: Value = serde_json::from_str(&said).with_context(|| format!("reading the status: {said}"))?;
    let damage = &status["servers"][0]["devices"][0]["damage"];
    let named = (damage["runs"][0]["first"].as_u64(), damage["blocks"].as_u64());
    expect("the damage that the server knows", &named, &(Some(100), Some(1)))
}

/// Zeroed blocks read as zeroes, the others are unchanged, and all blocks verify.
fn zeroed(guest: &mut Guest, format: &Format) -> Result<()> {
    let (block, first, blocks) = (format.block_bytes, 8, 1000);
    let script = format!(
        r#"
        sealblock zero $DEV --range {first}..{last}
        sealblock copy $DEV /tmp/back --force
        dd if=/dev/zero of=/tmp/data bs={block} seek={first} count={blocks} conv=notrunc status=none
        cmp /tmp/back /tmp/data
        sealblock zero $DEV --range {first}..{last} --no-unmap
        sealblock copy $DEV - | cmp - /tmp/data
        sealblock verify $DEV --quiet
        rm /tmp/back /tmp/data
        "#,
        last = first + blocks - 1,
    );
    sh(guest, format.name, &script).map(drop)
}

/// Reads and writes tags with ordinary reads and writes, as a user without privileges. The drive's Verify accepts such
/// writes, and damage is reported with its values.
fn by_reads(guest: &mut Guest, format: &Format, folder: &Path) -> Result<()> {
    let file = OpenOptions::new().read(true).write(true).open(folder.join(format.name)).context("opening a drive")?;
    let flip = |at: u64| -> Result<()> {
        let mut byte = [0];
        file.read_exact_at(&mut byte, at)?;
        Ok(file.write_all_at(&[byte[0] ^ 1], at)?)
    };
    let script = format!(
        r#"
        grep -q nobody /etc/passwd || echo nobody:x:65534:65534:nobody:/:/bin/sh >>/etc/passwd
        as_nobody() {{ su -s /bin/sh -c "$*" nobody; }}
        chmod 666 $DEV
        as_nobody sealblock info file:$DEV --json >/tmp/json
        grep -q '"travel": *true' /tmp/json || {{ cat /tmp/json; fail "tags do not travel"; }}
        grep -q '"metadata_bytes": *{metadata}\>' /tmp/json || {{ cat /tmp/json; fail "other metadata"; }}
        random {bytes} >/tmp/data
        as_nobody sealblock copy /tmp/data file:$DEV
        as_nobody sealblock copy file:$DEV - | cmp - /tmp/data
        sealblock verify $DEV --mode offload
        as_nobody sealblock verify file:$DEV --json | grep -q '"checked": *"seals"' || fail "tags were not checked"
        sealblock copy /tmp/data $DEV
        as_nobody sealblock compare file:$DEV /tmp/data
        as_nobody sealblock zero file:$DEV --range 8..99
        as_nobody sealblock verify file:$DEV --quiet
        as_nobody sealblock copy /tmp/data file:$DEV
        rm /tmp/data
        "#,
        metadata = format.metadata_bytes,
        bytes = BLOCKS * format.block_bytes,
    );
    sh(guest, format.name, &script)?;
    // In this mode a drive of Type 2 is treated like Type 1: reference tags are block addresses.
    let harms = format.harms();
    for (_, at, _) in &harms {
        flip(*at)?;
    }
    let script = "status=0; sealblock verify file:$DEV --json >/tmp/json || status=$?; [ $status = 1 ] || fail $status; cat /tmp/json";
    let said: Value = serde_json::from_str(&sh(guest, format.name, script)?).context("reading what verify said")?;
    let list = said["errors"].as_array().context("verify lists no errors")?;
    let named: Vec<(u64, &str)> =
        list.iter().filter_map(|error| Some((error["lba"].as_u64()?, error["field"].as_str()?))).collect();
    let wanted: Vec<(u64, &str)> = harms.iter().map(|(lba, _, field)| (*lba, *field)).collect();
    expect("blocks that verify names", &named, &wanted)?;
    for (_, at, _) in &harms {
        flip(*at)?;
    }
    sh(guest, format.name, "sealblock verify file:$DEV --quiet").map(drop)
}

/// A mounted drive can be verified but not written.
fn in_use(guest: &mut Guest) -> Result<()> {
    let script = r#"
        /usr/bin/mke2fs -q -F -t ext4 $DEV
        mkdir -p /mnt/drive
        mount $DEV /mnt/drive
        for node in $DEV /dev/ng${DEV#/dev/nvme}; do
          refused "in use" sealblock zero $node
          sealblock verify $node --mode offload --json >/tmp/json
          grep -q '"offloaded": *true' /tmp/json || { cat /tmp/json; fail "it was not offloaded"; }
        done
        umount /mnt/drive
        "#;
    sh(guest, "plain4k", script).map(drop)
}

/// Without CAP_SYS_ADMIN, a drive without metadata is used as an ordinary block device, with a note; for a format that
/// the kernel does not support, the error names the missing capability. From Linux 6.2 on, any user may send commands
/// that only read.
fn without_privilege(guest: &mut Guest, version: (u32, u32)) -> Result<()> {
    let prepared = r#"
        grep -q nobody /etc/passwd || echo nobody:x:65534:65534:nobody:/:/bin/sh >>/etc/passwd
        chmod 666 $DEV
        as_nobody() { su -s /bin/sh -c "$*" nobody; }
        "#;
    let plain = r#"
        as_nobody sealblock info $DEV --json >/tmp/json
        grep -q '"passthrough": *false' /tmp/json || { cat /tmp/json; fail "passthrough without a privilege"; }
        grep -q CAP_SYS_ADMIN /tmp/json || { cat /tmp/json; fail "it does not say what is missing"; }
        as_nobody sealblock verify $DEV --json >/tmp/json
        grep -q '"offloaded": *false' /tmp/json || { cat /tmp/json; fail "it claims to be offloaded"; }
        refused "does not support verification" as_nobody sealblock verify $DEV --mode offload
        "#;
    let newer = "as_nobody sealblock verify $DEV --json >/tmp/json";
    let shown = if version < (6, 2) { plain } else { newer };
    sh(guest, "plain512", &format!("{prepared}{shown}"))?;
    if version < (6, 2) {
        sh(guest, "t1-first-ext", &format!("{prepared}refused CAP_SYS_ADMIN as_nobody sealblock verify $DEV"))?;
    }
    Ok(())
}
