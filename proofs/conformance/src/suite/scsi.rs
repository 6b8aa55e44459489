//! SCSI drives of the machine that sealblock runs on: the program is in a guest with the kernel's simulated drives (`scsi_debug`).
//!
//! These answer every VERIFY without data with GOOD and read nothing, so they are a drive that must not be believed: blocks are read. A VERIFY
//! with data compares, and what the medium cannot read and what tags say is found by the kernel's reads.

use anyhow::Result;

use crate::context::{TestContext, quiet, succeed};
use crate::harness::{Extras, Guest};

pub fn run(context: &mut TestContext<'_>) -> Result<()> {
    let folder = context.sealblock.folder.clone();
    let extras = Extras { programs: vec![("sealblock", context.sealblock.program.clone())], ..Extras::default() };
    let mut guest = Guest::boot_with(context.parts, context.kernel, &folder.join("guest"), &extras)?;
    for options in ["sector_size=512", "sector_size=4096", "dif=1 dix=1", "dif=2 dix=1", "dif=3 dix=1", "dif=1"] {
        sh(&mut guest, &format!("OPTIONS='{options}'\n{DRIVE}"))?;
    }
    sh(&mut guest, ERRORS)?;
    quiet(&mut guest)
}

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
head -c 8388608 /dev/urandom >data
sealblock copy data $DEV
sealblock copy $DEV - | cmp - data
# A VERIFY that reads nothing is no check.
status=0
sealblock verify $DEV --json >json || status=$?
[ $status = 0 ] && grep -q '"offloaded": *false' json || { cat json; fail "verify ended with $status"; }
grep -q '"bytes_transferred": *8388608' json || { cat json; fail "not every block was read"; }
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
grep -q '^0-7,1008-' $map || { cat $map; fail "zeroes are not unmapped"; }
sealblock copy $DEV back --force
sealblock copy data $DEV
dd if=/dev/zero of=data bs=$block seek=8 count=1000 conv=notrunc status=none
dd if=back of=part bs=$block skip=8 count=1000 status=none
dd if=/dev/zero bs=$block count=1000 status=none | cmp - part
sealblock discard $DEV --range 8..15
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
