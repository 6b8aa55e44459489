//! SCSI drives of the machine that runs sealblock: the program runs in a guest with drives that the kernel simulates
//! (`scsi_debug`).
//!
//! These drives complete every VERIFY without data with GOOD but read nothing, so their VERIFY cannot be trusted, and
//! blocks are read instead. A VERIFY with data does compare. Reads find unreadable blocks and wrong tags: the kernel's
//! own reads, or the program's reads with tags where the kernel transfers tags (the drives with DIX, from Linux 6.17
//! on).

use anyhow::{Context, Result};

use super::drives::TAGS;
use crate::context::{OwnGuestContext, quiet, succeed};
use crate::harness::Guest;

pub fn run(context: &OwnGuestContext<'_>) -> Result<()> {
    let mut guest = context.boot(Vec::new(), 1)?;
    // To older kernels these drives look the same, except that some have tags.
    let options = if context.version >= TAGS { &OPTIONS[..] } else { &OPTIONS[..2] };
    sh(&mut guest, SHARED).context("a disk that two initiators share")?;
    for options in options {
        let travel = context.version >= TAGS && options.contains("dix=1");
        sh(&mut guest, &format!("OPTIONS='{options}'\nTRAVEL={travel}\n{SENT}"))
            .with_context(|| format!("what the kernel sends to a drive with {options}"))?;
    }
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

/// Functions for the scripts in this file.
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
# sending COMMAND...: runs it; /tmp/sent has the commands that the kernel has sent to SCSI devices meanwhile, by their bytes.
sending() {
  [ -d /sys/kernel/tracing/events ] || mount -t tracefs none /sys/kernel/tracing
  echo 1 >/sys/kernel/tracing/events/scsi/scsi_dispatch_cmd_start/enable
  echo >/sys/kernel/tracing/trace
  status=0
  "$@" || status=$?
  sed -n 's/.*raw=\([0-9a-f ]*\)).*/\1/p' /sys/kernel/tracing/trace >/tmp/sent
  echo 0 >/sys/kernel/tracing/events/scsi/scsi_dispatch_cmd_start/enable
  [ -s /tmp/sent ] || fail "nothing was sent by $*"
  return $status
}
# sent PATTERN: there is such a command. changes: those that change blocks or make changes durable, by their first two bytes, in their order;
# changed: each of them once.
sent() { grep -q "^$1" /tmp/sent || { sort -u /tmp/sent | head -n 40; fail "no command $1 was sent"; }; }
changes() { grep '^2a\|^8a\|^35\|^91\|^41\|^93\|^42\|^89\|^7f 00 00 00 00 00 00 18 00 0[bd]' /tmp/sent | cut -c 1-5; }
changed() { changes | sort -u | tr '\n' ';'; }
"#;

fn sh(guest: &mut Guest, script: &str) -> Result<()> {
    succeed(guest, &format!("{FUNCTIONS}\n{script}")).map(drop)
}

/// The drive's properties, writes that are read back, comparisons by the drive, and zeroes.
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
random 8388608 >data
sealblock copy data $DEV
sealblock copy $DEV - | cmp - data
# A VERIFY that reads nothing is no check.
status=0
sealblock verify $DEV --json >json || status=$?
[ $status = 0 ] && grep -q '"offloaded": *false' json || { cat json; fail "verify ended with $status"; }
grep -q '"bytes_transferred": *8388608' json || { cat json; fail "not every block was read"; }
[ $TAGS != travel ] || grep -q '"checked": *"seals"' json || { cat json; fail "tags were not checked"; }
refused "does not support verification" sealblock verify $DEV --mode offload
sealblock compare $DEV data
# Never what is there: a byte is replaced by its complement.
byte=$(dd if=data bs=1 skip=5000000 count=1 status=none | od -A n -t u1)
printf "\\$(printf %03o $((255 - byte)))" | dd of=data bs=1 seek=5000000 conv=notrunc status=none
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

/// The kernel checks tags that this program made, and this program checks tags that the kernel made. The drive's own
/// zeroing leaves the old tags in place, which is detected; zeroing by this program writes right tags.
const TAGGED: &str = r#"
drive $OPTIONS
random 8388608 >data
sealblock copy data $DEV
dd if=$DEV bs=64k iflag=direct status=none | cmp - data
random 8388608 >data
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

/// A partition of 1024 sectors from sector 256 on, in a PC partition table. Its reference tags differ from those of the
/// whole disk.
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
random 524288 >data
sealblock copy data ${DEV}1
sealblock info ${DEV}1 --json >json
grep -q '"travel": *false' json && grep -q 'it is a partition' json || { cat json; fail "it does not say why there are no tags"; }
sealblock verify ${DEV}1 --json | grep -q '"checked": *"readability"' || fail "it claims to have checked tags"
sealblock verify $DEV --json | grep -q '"checked": *"seals"' || fail "tags of the disk were not checked"
sealblock copy offset:256..1279,$DEV - | cmp - data
rm data json table
"#;

/// The commands that the kernel sends for each operation, byte by byte (SBC-4). Zeroes: WRITE SAME (16), with the UNMAP
/// bit (byte 1, bit 3) unless that is disabled. Discards: the same, because hosts are told that discarded blocks read
/// as zeroes. If the program makes tags, it writes them afterwards. Flush: SYNCHRONIZE CACHE (10). Reads and writes of
/// drives with protection information have RDPROTECT and WRPROTECT set to 001b if the host adapter transfers tags; Type
/// 2 uses the 32-byte form.
const SENT: &str = r#"
drive $OPTIONS
random 1048576 >data
sending sealblock copy data offset:0..$((1048576 / $(cat /sys/block/${DEV#/dev/}/queue/logical_block_size) - 1)),$DEV
case $OPTIONS in
  dif=2*) write='7f 00 00 00 00 00 00 18 00 0b 20' read='7f 00 00 00 00 00 00 18 00 09 20' both='35 00;7f 00;' ;;
  dif=*) write='2a 20' read='28 20' both='2a 20;35 00;' ;;
  *) write='2a 00' read='28 00' both='2a 00;35 00;' ;;
esac
sent "$write"
sent '35 00'
[ "$(changed)" = "$both" ] || fail "a copy sent $(changed)"
[ "$(changes | tail -n 1)" = '35 00' ] || fail "no flush behind a copy, but $(changes | tail -n 1)"
sending sealblock verify $DEV --range 0..1023 --quiet
sent "$read"
# An opening flushes what others have written through the page cache.
[ "$(changed)" = '35 00;' ] && [ $(changes | wc -l) = 1 ] || fail "a verify sent $(changed)"
if [ $TRAVEL = false ]; then
  sending sealblock zero $DEV --range 8..1007
  sent '93 [02]8'
  [ "$(changed | sed 's/93 28/93 08/')" = '35 00;93 08;' ] || fail "zero sent $(changed)"
  sending sealblock zero $DEV --range 8..1007 --no-unmap
  [ "$(changed | sed 's/93 20/93 00/')" = '35 00;93 00;' ] || fail "zero --no-unmap sent $(changed)"
fi
sending sealblock discard $DEV --range 8..1007
sent '93 [02]8'
if [ $TRAVEL = false ]; then
  [ "$(changed | sed 's/93 28/93 08/')" = '35 00;93 08;' ] || fail "discard sent $(changed)"
fi
remove
rm data
"#;

/// A disk of the kernel's SCSI target at two adapters, as if two machines shared it. Both increment a number in one
/// block by Compare and Write: first directly, then through two servers, each with its own lock and one of the
/// adapters. No increment is lost, and the drive itself has done the comparisons.
const SHARED: &str = r#"
insmod /later/target_core_mod.ko
insmod /later/tcm_loop.ko
[ -d /sys/kernel/config/target ] || mount -t configfs none /sys/kernel/config
mkdir -p /sys/kernel/config/target/core/rd_mcp_0/shared
cd /sys/kernel/config/target/core/rd_mcp_0/shared
echo rd_pages=2048 >control
echo 1 >enable
# Without a serial number it lists no pages of vital product data.
echo shared-disk >wwn/vpd_unit_serial
disk=$(pwd)
cd /tmp
for number in 1 2; do
  portal=/sys/kernel/config/target/loopback/naa.500140500000000$number/tpgt_1
  mkdir -p $portal/lun/lun_0
  echo naa.600140500000000$number >$portal/nexus
  ln -s $disk $portal/lun/lun_0/disk
done
for try in $(seq 100); do
  disks=$(grep -l LIO-ORG /sys/block/sd*/device/vendor 2>/dev/null | cut -d / -f 4)
  [ $(echo $disks | wc -w) = 2 ] && break
  sleep 0.1
done
set -- $disks
[ $# = 2 ] || { dmesg | tail -n 20; fail "there are not two disks: $disks"; }
one=/dev/$1 two=/dev/$2
sealblock info $one --json >json
grep -q '"compare_and_write": *"native"' json && grep -q '"max_compare_and_write_blocks": *1\>' json || { cat json; fail "it does not compare and write"; }
conformance guest count-up $one 7 100 >late1 &
first=$!
conformance guest count-up $two 7 100 >late2
wait $first
number() { dd if=$one bs=512 skip=7 count=1 iflag=direct status=none | od -A n -t u8 -N 8 | tr -d ' '; }
[ $(number) = 200 ] || fail "counted to $(number) and not to 200"
sealblock serve $one --listen 127.0.0.1:4420 >serve1 2>&1 &
server1=$!
sealblock serve $two --listen 127.0.0.1:4421 >serve2 2>&1 &
server2=$!
for port in 4420 4421; do
  for try in $(seq 100); do
    sealblock discover 127.0.0.1:$port >nqn$port 2>/dev/null && [ -s nqn$port ] && break
    sleep 0.1
  done
done
sealblock info nvme+tcp://127.0.0.1:4420/$(cat nqn4420) --json | grep -q '"compare_and_write": *"native"' || fail "no fused pairs"
both() {
  conformance guest count-up nvme+tcp://127.0.0.1:4420/$(cat nqn4420) 7 100 >late1 &
  first=$!
  conformance guest count-up nvme+tcp://127.0.0.1:4421/$(cat nqn4421) 7 100 >late2 || return 1
  wait $first
}
sending both
sent '89 00'
swaps=$(grep -c '^89' /tmp/sent)
[ $swaps -ge 200 ] || fail "$swaps commands compared and wrote"
[ "$(changed)" = '89 00;' ] || fail "other commands changed blocks: $(changed)"
[ $(number) = 400 ] || fail "counted to $(number) and not to 400"
kill $server1 $server2
wait $server1 || fail "the server ended with $?: $(cat serve1)"
wait $server2 || fail "the server ended with $?: $(cat serve2)"
for number in 1 2; do
  portal=/sys/kernel/config/target/loopback/naa.500140500000000$number/tpgt_1
  rm $portal/lun/lun_0/disk
  rmdir $portal/lun/lun_0
done
rm json late1 late2 serve1 serve2 nqn4420 nqn4421
"#;

/// Ten blocks, from 4660 on, that the medium cannot read.
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
