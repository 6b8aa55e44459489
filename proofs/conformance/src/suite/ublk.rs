//! Block devices of the guest's own kernel, over ublk: the program runs in the guest and serves its volumes to the
//! guest's kernel.

use anyhow::Result;

use crate::context::{OwnGuestContext, quiet, succeed};
use crate::harness::Guest;

pub fn run(context: &OwnGuestContext<'_>) -> Result<()> {
    // Each ublk queue needs its own processor.
    let mut guest = context.boot(Vec::new(), 2)?;
    for script in [BLOCKS, OPEN, FILE_SYSTEMS, DAMAGE, RECOVERY, SERVED, REFUSALS] {
        sh(&mut guest, script)?;
    }
    match context.version >= PROTECTION {
        true => {
            for (guard, profile) in
                [("ip", "T10-DIF-TYPE1-IP"), ("crc16", "T10-DIF-TYPE1-CRC"), ("crc64", "EXT-DIF-TYPE1-CRC64")]
            {
                sh(&mut guest, &format!("guard={guard}\nprofile={profile}\n{PROTECTED}"))?;
                sh(&mut guest, &format!("guard={guard}\n{TAMPERED}"))?;
                sh(&mut guest, &format!("guard={guard}\nprofile={profile}\n{TAGGED}"))?;
            }
        }
        false => {
            sh(&mut guest, "sealblock create v --size 8MiB --force\nrefused 'Linux 7.0' sealblock attach v --pi crc16")?
        }
    }
    quiet(&mut guest)
}

/// The first kernels whose ublk carries protection information.
pub(super) const PROTECTION: (u32, u32) = (7, 0);

/// Functions for scripts that attach targets.
pub(super) const FUNCTIONS: &str = r#"
set -e
cd /tmp
# attach TARGET [OPTION...]: serves it in the background, as $server, and waits for the block device, $disk.
attach() {
  serving sealblock attach "$@" --json
}
# serving COMMAND...: the same with any server that says the path of its block device.
serving() {
  : >/tmp/attached
  "$@" >/tmp/attached 2>/tmp/complaint &
  server=$!
  for try in $(seq 200); do
    disk=$(sed -n 's/.*"path": *"\([^"]*\)".*/\1/p' /tmp/attached | head -n 1)
    [ -n "$disk" ] && [ -b "$disk" ] && return 0
    kill -0 $server 2>/dev/null || break
    sleep 0.05
  done
  cat /tmp/attached /tmp/complaint
  fail "$*"
}
# ends [STATUS]: the server has to end by itself.
ends() {
  status=0
  wait $server || status=$?
  [ $status = "${1:-0}" ] || { cat /tmp/attached /tmp/complaint; fail "the server ended with $status"; }
}
"#;

fn sh(guest: &mut Guest, script: &str) -> Result<()> {
    succeed(guest, &format!("{FUNCTIONS}\n{script}")).map(drop)
}

/// The kernel's view of the device, writes that are read back, discards and zeroes, and the removal by a signal and by
/// `detach`.
const BLOCKS: &str = r#"
sealblock create v --size 64MiB
attach v --queues 2 --depth 16
queue=/sys/block/${disk#/dev/}/queue
[ "$(cat /sys/block/${disk#/dev/}/size)" = 131072 ] || fail "another size"
[ "$(cat $queue/logical_block_size)" = 4096 ] || fail "other blocks"
[ "$(cat $queue/write_cache)" = "write through" ] || fail "a volume has a cache that a killed server would lose"
random 16777216 >data
dd if=data of=$disk bs=1M oflag=direct conv=fsync status=none
dd if=$disk bs=512k count=32 iflag=direct status=none | cmp - data
dd if=$disk bs=4k count=4096 status=none | cmp - data
/bin/busybox blkdiscard -o 0 -l 1048576 $disk
conformance guest fallocate $disk punch-hole 2097152 1048576
conformance guest fallocate $disk zero-range 4194304 1048576
# The driver of these kernels has no zeroes that the device may make by unmapping (FALLOC_FL_WRITE_ZEROES); one that has gets them.
case $(cat $queue/write_zeroes_unmap_max_bytes 2>/dev/null) in
  "" | 0) refused "not supported" conformance guest fallocate $disk write-zeroes 6291456 1048576 ;;
  *) conformance guest fallocate $disk write-zeroes 6291456 1048576 ;;
esac
conformance guest fallocate $disk punch-hole 6291456 1048576
kill -TERM $server
ends
[ ! -e $disk ] || fail "the block device stays"
sealblock verify v --quiet
dd if=/dev/zero of=data bs=1M seek=2 count=1 conv=notrunc status=none
dd if=/dev/zero of=data bs=1M seek=4 count=1 conv=notrunc status=none
dd if=/dev/zero of=data bs=1M seek=6 count=1 conv=notrunc status=none
sealblock copy v back --force
cmp -n 15728640 back data 1048576 1048576
truncate -s 64M plain
attach raw:plain
[ "$(cat /sys/block/${disk#/dev/}/queue/write_cache)" = "write back" ] || fail "a plain file has no cache"
dd if=data of=$disk bs=1M count=1 oflag=direct conv=fsync,notrunc status=none
cmp -n 1048576 plain data
sealblock detach $disk
ends
grep -q '"event": *"detached"' /tmp/attached || fail "it does not say that it was detached"
rm back data plain
"#;

/// A block device that a process still has open stays, and data written to it are there, however it is detached.
const OPEN: &str = r#"
random 4194304 >data
truncate -s 64M plain
for how in detach force signal; do
  attach raw:plain --device 9
  exec 7<>$disk
  # Into the page cache of the block device, and not yet to its server.
  dd if=data bs=1M status=none >&7
  case $how in
    detach)
      refused "has it open" sealblock detach 9
      [ -b $disk ] || fail "a device that is open was taken away"
      exec 7>&-
      sealblock detach 9
      ends
      ;;
    force)
      sealblock detach 9 --force
      ends
      exec 7>&-
      ;;
    signal)
      kill -TERM $server
      ends
      grep -q '"event": *"left"' /tmp/attached || { cat /tmp/attached; fail "an open device was not left"; }
      # A server must not have the block device open that it serves: it would wait for itself when it ends.
      attach raw:plain --device 9 7>&-
      exec 7>&-
      kill -TERM $server
      ends
      ;;
  esac
  [ ! -e $disk ] || fail "the block device stays"
  cmp -n 4194304 plain data || fail "$how dropped what was written"
  dd if=/dev/zero of=plain bs=1M count=4 conv=notrunc status=none
done
rm plain data
"#;

/// File systems, and a load that verifies every block.
const FILE_SYSTEMS: &str = r#"
mkdir -p /mnt/d
for kind in ext4 btrfs xfs; do
  sealblock create v --size 400MiB --force
  attach v
  case $kind in
    ext4) /usr/bin/mke2fs -q -F -t ext4 $disk ;;
    btrfs) mkfs.btrfs -q -f $disk ;;
    xfs) mkfs.xfs -q -f $disk ;;
  esac
  mount -t $kind $disk /mnt/d
  random 8000000 >/mnt/d/a
  cp /mnt/d/a /tmp/a
  sync
  umount /mnt/d
  kill -TERM $server
  ends
  sealblock verify v --quiet
  attach v
  mount -t $kind $disk /mnt/d
  cmp /mnt/d/a /tmp/a
  umount /mnt/d
  kill -TERM $server
  ends
done
sealblock create v --size 64MiB --block-size 512 --force
attach v
fio --name=v --filename=$disk --rw=randrw --bsrange=512-64k --size=32M --io_size=24M --direct=1 --ioengine=libaio --iodepth=16 \
  --verify=crc32c --verify_fatal=1 --fsync=64 >/tmp/fio 2>&1 || { cat /tmp/fio; fail "fio"; }
kill -TERM $server
ends
sealblock verify v --quiet
rm /tmp/a
"#;

/// Exactly the damaged blocks cannot be read.
const DAMAGE: &str = r#"
sealblock create v --size 8MiB --force
random 8388608 >data
sealblock copy data v
sealblock corrupt v --lba 100 --kind data
sealblock corrupt v --lba 101 --kind ref-tag
attach v
conformance guest scan $disk 4096 >scanned
printf '100 84\n101 84\nblocks 2048\n' | cmp - scanned || { cat scanned; fail "other blocks than the damaged ones"; }
refused "multibyte" dd if=$disk bs=64k skip=6 count=1 iflag=direct of=/dev/null
dd if=data of=$disk bs=4k skip=100 seek=100 count=2 oflag=direct status=none
dd if=$disk bs=64k iflag=direct status=none | cmp - data
kill -TERM $server
ends
sealblock verify v --quiet
rm data scanned
"#;

/// A killed server loses nothing: requests wait for the next one, which must serve the same target.
const RECOVERY: &str = r#"
sealblock create v --size 64MiB --force
mkdir -p /mnt/d
sealblock create w --size 64MiB --force
attach v --device 5
/usr/bin/mke2fs -q -F -t ext4 $disk
mount -t ext4 $disk /mnt/d
(i=0; while [ ! -e /tmp/stop ]; do i=$((i + 1)); head -c 65536 /dev/urandom >/mnt/d/f$((i % 40)); sync; done; echo $i >/tmp/rounds) &
load=$!
sleep 1
for round in 1 2 3; do
  kill -KILL $server
  wait $server || true
  refused "another target" sealblock attach w --device 5
  attach v --device 5
  grep -q '"taken_over": *true' /tmp/attached || { cat /tmp/attached; fail "it was not taken over"; }
  refused "is served by process" sealblock attach w --device 5
  sleep 0.5
done
touch /tmp/stop
wait $load || fail "the load failed"
[ "$(cat /tmp/rounds)" -gt 3 ] || fail "nothing was written"
# In use: a signal leaves it, and the next server takes it over.
refused "in use" sealblock detach 5
kill -TERM $server
ends
grep -q '"event": *"left"' /tmp/attached || { cat /tmp/attached; fail "it was not left"; }
attach v --device 5
md5sum /mnt/d/f* >/tmp/sums
umount /mnt/d
mount -t ext4 $disk /mnt/d
md5sum -c /tmp/sums >/dev/null
umount /mnt/d
kill -TERM $server
ends
[ ! -e $disk ] || fail "the block device stays"
sealblock verify v --quiet
"#;

/// A block device beside a host's namespace: created together with it, with the same content, taken over after a kill,
/// and removed by a reload.
const SERVED: &str = r#"
sealblock create v --size 32MiB --force
sealblock create w --size 8MiB --force
namespace() { printf '[[subsystems]]\nname = "%s"\n[[subsystems.namespaces]]\ntarget = "%s"\n' $1 $1; }
ublk() { printf '[[ublk]]\ntarget = "%s"\ndevice = %s\n' $1 $2; }
{ namespace v; ublk v 4; } >c.toml
serve() {
  serving sealblock serve --config c.toml --json
  disk=/dev/ublkb4
  [ -b $disk ] || { cat /tmp/attached; fail "another device"; }
}
said() {
  for try in $(seq 200); do
    [ "$(grep -c "\"event\": *\"$1\"" /tmp/attached)" -ge "${2:-1}" ] && return 0
    sleep 0.05
  done
  cat /tmp/attached /tmp/complaint
  fail "it does not say $1"
}
serve
said ready
random 1048576 >data
dd if=data of=$disk bs=64k oflag=direct conv=fsync status=none
sealblock copy offset:0..255,nvme+tcp://127.0.0.1:4420/$NQN:v - | cmp - data
sealblock status | grep -q /dev/ublkb4 || { sealblock status; fail "status does not have it"; }
sectors() { [ "$(cat /sys/block/${disk#/dev/}/size)" = $1 ] || fail "$(cat /sys/block/${disk#/dev/}/size) sectors, not $1"; }
case $(uname -r) in
  6.12*) refused "before Linux 6.16" sealblock resize v --size 64MiB ;;
  *)
    sealblock resize v --size 64MiB
    sectors 131072
    dd if=data of=$disk bs=64k seek=700 oflag=direct conv=fsync status=none
    dd if=$disk bs=64k skip=700 count=16 iflag=direct status=none | cmp - data
    /bin/busybox blkdiscard -o 16777216 $disk
    sealblock resize v --size 16MiB
    sectors 32768
    dd if=$disk bs=64k count=16 iflag=direct status=none | cmp - data
    [ -z "$(dd if=$disk bs=64k skip=256 count=1 iflag=direct 2>/dev/null | head -c 1)" ] || fail "blocks behind the end"
    # Killed, and another size before the next server.
    kill -KILL $server
    wait $server || true
    sealblock resize v --size 32MiB
    serve
    grep -q '"taken_over": *true' /tmp/attached || { cat /tmp/attached; fail "it was not taken over"; }
    said ready
    sectors 65536
    dd if=data of=$disk bs=64k seek=400 oflag=direct conv=fsync status=none
    dd if=$disk bs=64k skip=400 count=16 iflag=direct status=none | cmp - data
    ;;
esac
mkdir -p /mnt/d
/usr/bin/mke2fs -q -F -t ext4 $disk
mount -t ext4 $disk /mnt/d
# In use: a configuration without it, or with other options, is refused, and everything stays.
namespace v >c.toml
kill -HUP $server
said reload_failed
grep -q 'in use' /tmp/attached || { cat /tmp/attached; fail "it does not say why"; }
{ namespace v; ublk v 4; echo 'depth = 7'; } >c.toml
kill -HUP $server
said reload_failed 2
cp data /mnt/d/a
sync
kill -KILL $server
wait $server || true
{ namespace v; ublk v 4; namespace w; ublk w 5; } >c.toml
serve
grep -q '"taken_over": *true' /tmp/attached || { cat /tmp/attached; fail "it was not taken over"; }
said ready
cmp data /mnt/d/a
[ -b /dev/ublkb5 ] || fail "no second device"
umount /mnt/d
{ namespace v; namespace w; ublk w 5; } >c.toml
kill -HUP $server
said reloaded
[ ! -e $disk ] && [ -b /dev/ublkb5 ] || fail "the wrong one is gone"
kill -TERM $server
ends
[ ! -e /dev/ublkb5 ] || fail "the block device stays"
sealblock verify v --quiet
# What cannot be made keeps everything from being served.
attach w --device 7
{ namespace v; ublk v 7; } >c.toml
refused "is served by process" sealblock serve --config c.toml
kill -TERM $server
ends
rm c.toml data
"#;

/// A target that cannot be attached is refused with a reason.
const REFUSALS: &str = r#"
refused "there is no /dev/ublkb9" sealblock detach 9
refused "1..=64" sealblock attach v --queues 65
grep -q nobody /etc/passwd || echo nobody:x:65534:65534:nobody:/:/bin/sh >>/etc/passwd
chmod 666 v
refused "root" su -s /bin/sh -c "sealblock attach /tmp/v" nobody
"#;

/// The kernel's block layer makes tags for its writes and checks those of its reads; sealblock finds all of them right.
/// With CRC-16, the guard of drives, these are 106,496 tags.
const PROTECTED: &str = r#"
bytes=8388608
[ $guard != crc16 ] || bytes=54525952
random $((bytes + 8388608)) >data
for target in "crc32c 512 $bytes" "crc16 4096 8388608" "crc64 4096 8388608" "none 4096 8388608"; do
  set -- $target
  sealblock create v --size $3 --block-size $2 --guard $1 --force
  attach v --pi $guard
  integrity=/sys/block/${disk#/dev/}/integrity
  [ "$(cat $integrity/format)" = "$profile" ] || fail "the kernel's profile is $(cat $integrity/format), not $profile"
  [ "$(cat $integrity/write_generate)" = 1 ] && [ "$(cat $integrity/read_verify)" = 1 ] || fail "the kernel makes no tags"
  [ "$(cat $integrity/protection_interval_bytes)" = $2 ] || fail "another interval"
  head -c $3 data | dd of=$disk bs=256k iflag=fullblock oflag=direct conv=fsync status=none
  dd if=$disk bs=256k iflag=direct status=none | cmp -n $3 - data
  kill -TERM $server
  ends
  sealblock verify v --quiet
  sealblock copy v - | cmp -n $3 - data
done
sealblock create v --size 64MiB --force
attach v --pi $guard
/usr/bin/mke2fs -q -F -t ext4 $disk
mount -t ext4 $disk /mnt/d
head -c 4000000 data >/mnt/d/a
umount /mnt/d
mount -t ext4 $disk /mnt/d
cmp -n 4000000 /mnt/d/a data
umount /mnt/d
kill -TERM $server
ends
"#;

/// A bit that changes between the kernel and the server is detected: by the kernel in reads, and by the server in
/// writes, which then write nothing.
const TAMPERED: &str = r#"
sealblock create v --size 8MiB --force
head -c 8388608 data >eight
sealblock copy eight v
serving conformance guest tamper v $guard reads
refused multibyte dd if=$disk bs=4k count=1 skip=7 iflag=direct of=/dev/null
dmesg | tail -n 5 | grep -q "guard tag error" || fail "the kernel does not say what it found"
kill -TERM $server
ends
serving conformance guest tamper v $guard writes
refused multibyte dd if=/dev/zero of=$disk bs=4k count=4 seek=8 oflag=direct conv=notrunc
kill -TERM $server
ends
sealblock verify v --quiet
sealblock copy v - | cmp - eight
"#;

/// Another program passes its own tags to the block device. They go to the server, which checks them, and come back for
/// the program to check; any user who may open the device node can do this.
const TAGGED: &str = r#"
grep -q nobody /etc/passwd || echo nobody:x:65534:65534:nobody:/:/bin/sh >>/etc/passwd
for target in "crc32c 512" "crc16 4096" "none 4096"; do
  set -- $target
  sealblock create v --size 8MiB --block-size $2 --guard $1 --force
  attach v --pi $guard
  sealblock info $disk --json >json
  grep -q '"travel": *true' json && grep -q "\"profile\": *\"$profile\"" json || { cat json; fail "tags do not travel"; }
  sealblock info $disk | grep -q 'on this host, with ordinary reads and writes' || fail "it does not say that tags travel"
  sealblock copy eight $disk
  sealblock verify $disk --json >json
  grep -q '"checked": *"seals"' json && grep -q '"offloaded": *false' json || { cat json; fail "tags were not checked"; }
  sealblock copy $disk - | cmp - eight
  dd if=$disk bs=256k iflag=direct status=none | cmp - eight
  chmod 666 $disk
  su -s /bin/sh -c "sealblock verify $disk --json" nobody | grep -q '"checked": *"seals"' || fail "tags were not checked without a privilege"
  sealblock zero $disk --range 8..99
  /bin/busybox blkdiscard -o 131072 -l 131072 $disk
  conformance guest fallocate $disk punch-hole 524288 131072
  conformance guest fallocate $disk zero-range 1048576 131072
  sealblock verify $disk --quiet
  dd if=eight of=$disk bs=256k oflag=direct conv=fsync status=none
  sealblock verify $disk --quiet
  sealblock compare $disk eight
  kill -TERM $server
  ends
  sealblock verify v --quiet
  sealblock copy v - | cmp - eight
done
sealblock create v --size 8MiB --force
sealblock copy eight v
sealblock corrupt v --lba 7 --kind data
sealblock corrupt v --lba 1999 --kind data
attach v --pi $guard
status=0
sealblock verify $disk --json >json || status=$?
[ $status = 1 ] && grep -q '"lba": *7\>' json && grep -q '"lba": *1999\>' json || { cat json; fail "verify ended with $status"; }
! grep -q '"lba": *6\>\|"lba": *8\>' json || { cat json; fail "a good block is named"; }
kill -TERM $server
ends
sealblock copy eight v
serving conformance guest tamper v $guard reads
status=0
sealblock verify $disk --json >json || status=$?
[ $status = 1 ] && grep -q '"field": *"guard"' json || { cat json; fail "a bit that flipped is not found: $status"; }
kill -TERM $server
ends
serving conformance guest tamper v $guard writes
refused "no longer matched" sealblock copy eight $disk
kill -TERM $server
ends
sealblock verify v --quiet
sealblock copy v - | cmp - eight
rm json
"#;
