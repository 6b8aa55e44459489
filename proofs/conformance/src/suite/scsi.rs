//! SCSI drives of the machine that sealblock runs on: the program is in a guest with the kernel's simulated drives (`scsi_debug`).
//!
//! These answer every VERIFY without data with GOOD and read nothing, so they are a drive that must not be believed: blocks are read. A VERIFY
//! with data compares, and what the medium cannot read and what tags say is found by reads: of the kernel, or with tags of the program where the
//! kernel carries these (the drives with DIX, from Linux 6.17 on).

use anyhow::Result;

use super::drives::TAGS;
use crate::context::{OwnGuestContext, quiet, succeed};
use crate::harness::Guest;

pub fn run(context: &OwnGuestContext<'_>) -> Result<()> {
    let mut guest = context.boot(Vec::new())?;
    // All of them are alike to older kernels, but that some have tags.
    let options = if context.version >= TAGS { &OPTIONS[..] } else { &OPTIONS[..2] };
    for options in options {
        let has_tags = options.contains("dix=1");
        let tags = match (has_tags, context.version >= TAGS) {
            (true, true) => "travel",
            (true, false) => "stay",
            (false, _) => "none",
        };
        sh(&mut guest, &format!("OPTIONS='{options}'\nTAGS={tags}\n{DRIVE}"))?;
        if tags == "travel" {
            sh(&mut guest, &format!("OPTIONS='{options}'\n{TAGGED}"))?;
        }
    }
    if context.version >= TAGS {
        sh(&mut guest, PARTITION)?;
    }
    sh(&mut guest, ERRORS)?;
    quiet(&mut guest)
}

/// Options of drives.
const OPTIONS: [&str; 6] =
    ["sector_size=512", "dif=1 dix=1", "sector_size=4096", "dif=2 dix=1", "dif=3 dix=1", "dif=1"];

/// Functions of the scripts here.
const FUNCTIONS: &str = r#"
set -e
cd /tmp
# remove: no drive any more. Linux 6.1 closes files of a ring's table up to a second after their process has ended.
remove() {
  for try in $(seq 50); do
    grep -q '^scsi_debug ' /proc/modules || return 0
    rmmod scsi_debug 2>/dev/null || sleep 0.1
  done
  fail "the drive stays in use"
}
# drive OPTION...: a new drive, $DEV and $SG.
drive() {
  remove
  insmod /later/scsi_debug.ko dev_size_mb=8 lbpu=1 lbpws=1 lbprz=1 delay=0 "$@"
  for try in $(seq 100); do
    DEV=$(ls -d /sys/bus/pseudo/drivers/scsi_debug/adapter*/host*/target*/*/block/* 2>/dev/null | head -n 1)
    DEV=/dev/${DEV##*/}
    [ -b "$DEV" ] && break
    sleep 0.05
  done
  [ -b "$DEV" ] || fail "no drive"
  SG=/dev/$(ls /sys/block/${DEV#/dev/}/device/scsi_generic)
  [ -c "$SG" ] || fail "no generic node"
}
"#;

fn sh(guest: &mut Guest, script: &str) -> Result<()> {
    succeed(guest, &format!("{FUNCTIONS}\n{script}")).map(drop)
}

/// What the drive says, data there and back, comparisons by it, and zeroes.
const DRIVE: &str = r#"
drive $OPTIONS
sealblock info $DEV --json >json
grep -q '"kind": *"SCSI drive"' json && grep -q '"model": *"scsi_debug"' json || { cat json; fail "it is no SCSI drive"; }
grep -q 'does not look at blocks\|VERIFY' json || { cat json; fail "it does not say why blocks are read"; }
sealblock info $SG >/dev/null
case $TAGS in
  travel) grep -q '"travel": *true' json && grep -q '"tags_made_by": *"host"' json ;;
  stay) grep -q '"travel": *false' json && grep -q 'Linux 6.17' json && grep -q '"tags_made_by": *"kernel"' json ;;
  none) grep -q '"ordinary_tags": *null' json ;;
esac || { cat json; fail "other tags than these that $TAGS"; }
head -c 8388608 /dev/urandom >data
sealblock copy data $DEV
sealblock copy $DEV - | cmp - data
# A VERIFY that reads nothing is no check.
status=0
sealblock verify $DEV --json >json || status=$?
[ $status = 0 ] && grep -q '"offloaded": *false' json || { cat json; fail "verify ended with $status"; }
grep -q '"bytes_transferred": *8388608' json || { cat json; fail "not every block was read"; }
[ $TAGS != travel ] || grep -q '"checked": *"seals"' json || { cat json; fail "tags were not checked"; }
refused "cannot verify by itself" sealblock verify $DEV --mode offload
sealblock compare $DEV data
printf 'x' | dd of=data bs=1 seek=5000000 conv=notrunc status=none
status=0
sealblock compare $DEV data --json >json || status=$?
[ $status = 1 ] || { cat json; fail "a byte that differs is not found: $status"; }
block=$(cat /sys/block/${DEV#/dev/}/queue/logical_block_size)
grep -q "$((5000000 / block))" json || { cat json; fail "another block than $((5000000 / block))"; }
# The drive lists runs of blocks that are mapped. (Its WRITE SAME leaves the tags of other data where it unmaps nothing.)
map=/sys/bus/pseudo/drivers/scsi_debug/map
case $OPTIONS in
  dif=*) ;;
  *)
    sealblock zero $DEV --range 8..1007 --no-unmap
    ! grep -q , $map || { cat $map; fail "zeroes that were to stay allocated are not"; }
    ;;
esac
sealblock zero $DEV --range 8..1007
# With tags zeroes are written, so that these match.
[ $TAGS = travel ] || grep -q '^0-7,1008-' $map || { cat $map; fail "zeroes are not unmapped"; }
sealblock copy $DEV back --force
sealblock copy data $DEV
dd if=/dev/zero of=data bs=$block seek=8 count=1000 conv=notrunc status=none
dd if=back of=part bs=$block skip=8 count=1000 status=none
dd if=/dev/zero bs=$block count=1000 status=none | cmp - part
sealblock discard $DEV --range 8..15
[ $TAGS != travel ] || grep -q '^0-7,16-' $map || { cat $map; fail "nothing is unmapped"; }
sealblock verify $DEV --quiet
# See `remove`.
for try in $(seq 50); do
  /usr/bin/mke2fs -q -F -t ext4 $DEV 2>/dev/null && break
  [ $try -lt 50 ] || fail "the drive stays in use"
  sleep 0.1
done
mkdir -p /mnt/d
mount $DEV /mnt/d
refused "in use" sealblock zero $DEV
refused "in use" sealblock zero $SG
sealblock verify $DEV --quiet
umount /mnt/d
rm data back part json
"#;

/// Tags of this program are those that the kernel checks, and those that the kernel makes are checked here. What the drive's own zeroes leave is
/// found, since it zeroes blocks and leaves the tags of what was there; zeroes of this program repair it.
const TAGGED: &str = r#"
drive $OPTIONS
head -c 8388608 /dev/urandom >data
sealblock copy data $DEV
dd if=$DEV bs=64k iflag=direct status=none | cmp - data
head -c 8388608 /dev/urandom >data
dd if=data of=$DEV bs=64k oflag=direct conv=fsync status=none
sealblock copy $DEV - | cmp - data
sealblock verify $DEV --json | grep -q '"checked": *"seals"' || fail "tags were not checked"
grep -q nobody /etc/passwd || echo nobody:x:65534:65534:nobody:/:/bin/sh >>/etc/passwd
chmod 666 $DEV
su -s /bin/sh -c "sealblock verify $DEV --json" nobody | grep -q '"checked": *"seals"' || fail "tags were not checked without a privilege"
conformance guest fallocate $DEV zero-range 40960 4096
status=0
sealblock verify $DEV --json >json || status=$?
[ $status = 1 ] || { cat json; fail "zeroes with tags of something else are not found: $status"; }
for block in 80 83 87; do
  grep -q '"lba": *'$block'\>' json || { cat json; fail "block $block is not named"; }
done
! grep -q '"lba": *79\>\|"lba": *88\>' json || { cat json; fail "a good block is named"; }
sealblock zero $DEV --range 80..87
sealblock verify $DEV --quiet
dd if=$DEV bs=4096 skip=10 count=1 iflag=direct status=none | cmp -n 4096 - /dev/zero
rm data json
"#;

/// A partition of 1024 sectors from sector 256 on, in the table that every PC has. Its reference tags are not its disk's.
const PARTITION: &str = r#"
drive dif=1 dix=1
printf '\0\0\0\0\203\0\0\0\0\001\0\0\0\004\0\0' | dd of=table bs=1 seek=446 status=none
printf '\125\252' | dd of=table bs=1 seek=510 status=none
dd if=table of=$DEV bs=512 count=1 oflag=direct conv=notrunc status=none
blockdev --rereadpt $DEV
for try in $(seq 100); do
  [ -b ${DEV}1 ] && break
  sleep 0.05
done
head -c 524288 /dev/urandom >data
sealblock copy data ${DEV}1
sealblock info ${DEV}1 --json >json
grep -q '"travel": *false' json && grep -q 'it is a partition' json || { cat json; fail "it does not say why there are no tags"; }
sealblock verify ${DEV}1 --json | grep -q '"checked": *"readability"' || fail "it claims to have checked tags"
sealblock verify $DEV --json | grep -q '"checked": *"seals"' || fail "tags of the disk were not checked"
sealblock copy offset:256..1279,$DEV - | cmp - data
rm data json table
"#;

/// Blocks that the medium cannot read: ten of them, from 4660 on.
const ERRORS: &str = r#"
drive opts=2
for node in $DEV $SG; do
  status=0
  sealblock verify $node --json >json 2>/dev/null || status=$?
  [ $status = 1 ] || { cat json; fail "verify of $node ended with $status"; }
  for block in 4660 4664 4669; do
    grep -q "$block" json || { cat json; fail "block $block is not named"; }
  done
  ! grep -q '"lba": *4659\|"lba": *4670' json || { cat json; fail "a good block is named"; }
done
grep -q nobody /etc/passwd || echo nobody:x:65534:65534:nobody:/:/bin/sh >>/etc/passwd
chmod 666 $DEV
su -s /bin/sh -c "sealblock info $DEV" nobody >said
remove
rm json said
"#;
