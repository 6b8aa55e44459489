//! Writes and reads of hosts: single commands, file systems, and many requests at once.

use anyhow::Result;

use crate::context::TestContext;

/// Sends NVM commands through nvme-cli's passthrough to namespaces without metadata.
pub fn commands(context: &mut TestContext<'_>) -> Result<()> {
    context.sealblock.create("small", "16MiB", &["--block-size", "512"])?;
    context.sealblock.create("large", "16MiB", &[])?;
    let mut server = context.sealblock.serve(&["small", "large"], &[])?;
    for name in ["small", "large"] {
        context.sh(&server, &COMMANDS.replace("@NAME@", name))?;
    }
    server.stop()?;
    for volume in ["small", "large"] {
        context.sealblock.succeed(&["verify", volume])?;
    }
    Ok(())
}

const COMMANDS: &str = r#"
dev=$(attach @NAME@)
bs=$(cat /sys/block/$dev/queue/logical_block_size)
ask() { command=$1; shift; nvme $command /dev/$dev --namespace-id=1 "$@"; }
dd if=/dev/urandom of=/tmp/a bs=$bs count=8 status=none
dd if=/dev/urandom of=/tmp/b bs=$bs count=8 status=none
dd if=/dev/zero of=/tmp/zero bs=$bs count=8 status=none
ask write --start-block=16 --block-count=7 --data-size=$((8 * bs)) --data=/tmp/a
ask read --start-block=16 --block-count=7 --data-size=$((8 * bs)) --data=/tmp/back
cmp /tmp/a /tmp/back
ask write --start-block=32 --block-count=7 --data-size=$((8 * bs)) --data=/tmp/b --force-unit-access
ask flush
ask compare --start-block=16 --block-count=7 --data-size=$((8 * bs)) --data=/tmp/a
refused "compare" ask compare --start-block=16 --block-count=7 --data-size=$((8 * bs)) --data=/tmp/b
ask verify --start-block=0 --block-count=63
ask write-zeroes --start-block=16 --block-count=3
ask read --start-block=16 --block-count=7 --data-size=$((8 * bs)) --data=/tmp/back
head -c $((4 * bs)) /tmp/zero >/tmp/wanted; tail -c $((4 * bs)) /tmp/a >>/tmp/wanted
cmp /tmp/wanted /tmp/back
ask write-zeroes --start-block=20 --block-count=3 --deac
ask compare --start-block=16 --block-count=7 --data-size=$((8 * bs)) --data=/tmp/zero
ask verify --start-block=16 --block-count=7
ask dsm --ad --slbs=32 --blocks=8
ask dsm --idr --slbs=0 --blocks=64
ask verify --start-block=32 --block-count=7
last=$(($(cat /sys/block/$dev/size) * 512 / bs))
refused "range" ask read --start-block=$last --block-count=0 --data-size=$bs --data=/tmp/back
refused "range" ask verify --start-block=$((last - 1)) --block-count=1
refused "range" ask write-zeroes --start-block=$last --block-count=0
# The last command that failed is the first entry, with its status and the address that it began at.
nvme error-log /dev/$dev --log-entries=1 --output-format=json | tr -d ' \n' >/tmp/errors
grep -q '"nsid":1,' /tmp/errors && grep -q "\"lba\":$last," /tmp/errors || { cat /tmp/errors; fail "the error log"; }
nvme smart-log /dev/$dev --output-format=json | tr -d ' \n' >/tmp/smart
count() { sed -n "s/.*\"$1\":\([0-9]*\).*/\1/p" /tmp/smart; }
for name in host_read_commands host_write_commands data_units_read data_units_written num_err_log_entries; do
  [ "$(count $name)" -gt 0 ] || { cat /tmp/smart; fail "$name is $(count $name)"; }
done
nvme id-ctrl /dev/$dev --output-format=json | tr -d ' ' >/tmp/id
oncs=$(sed -n 's/.*"oncs":\([0-9]*\).*/\1/p' /tmp/id)
oacs=$(sed -n 's/.*"oacs":\([0-9]*\).*/\1/p' /tmp/id)
if [ $((oncs & 2)) = 0 ]; then
  refused "opcode" ask write-uncor --start-block=40 --block-count=1
else
  ask write-uncor --start-block=40 --block-count=1
  refused "read error" ask read --start-block=40 --block-count=0 --data-size=$bs --data=/tmp/back
  refused "read error" ask verify --start-block=36 --block-count=7
  ask verify --start-block=42 --block-count=7
  dd if=/tmp/a of=/dev/$dev bs=$bs seek=40 count=2 oflag=direct conv=notrunc status=none
  ask verify --start-block=36 --block-count=7
fi
if [ $((oacs & 512)) = 0 ]; then
  refused "opcode" ask get-lba-status --start-lba=0 --max-dw=64 --action=0x11 --range-len=64
else
  ask get-lba-status --start-lba=0 --max-dw=64 --action=0x11 --range-len=64 >/tmp/status
  grep -q "(NLSD): 0" /tmp/status || { cat /tmp/status; fail "sound blocks are listed"; }
fi
detach @NAME@
"#;

/// File systems: written data are there after the host disconnected and reconnected.
pub fn files(context: &mut TestContext<'_>) -> Result<()> {
    context.sealblock.create("small", "384MiB", &["--block-size", "512"])?;
    context.sealblock.create("large", "384MiB", &[])?;
    let mut server = context.sealblock.serve(&["small", "large"], &[])?;
    // Both file systems on both block sizes, with digests on and off.
    for (small, large, digests) in [("ext4", "btrfs", "--hdr-digest --data-digest"), ("btrfs", "ext4", "")] {
        let script = FILES.replace("@SMALL@", small).replace("@LARGE@", large).replace("@DIGESTS@", digests);
        context.sh(&server, &script)?;
    }
    server.stop()?;
    for volume in ["small", "large"] {
        context.sealblock.succeed(&["verify", volume])?;
    }
    Ok(())
}

const FILES: &str = r#"
sums() {
  (cd $1 && find . -type f | sort | xargs md5sum)
}
make() {
  case $1 in
    ext4) /usr/bin/mke2fs -q -F -t ext4 /dev/$2 ;;
    btrfs) mkfs.btrfs -q -f /dev/$2 ;;
  esac
}
check() {
  case $1 in
    ext4) e2fsck -f -n /dev/$2 ;;
    btrfs) btrfs check -p /dev/$2 ;;
  esac >/tmp/fsck 2>&1 || { cat /tmp/fsck; fail "$1 on $2 is damaged"; }
}
tree=/tmp/tree
if [ ! -e $tree ]; then
  mkdir -p $tree/deep/er
  cp /usr/bin/nvme /usr/bin/mke2fs /bin/busybox $tree
  for i in $(seq 60); do dd if=/dev/urandom of=$tree/deep/er/$i bs=1023 count=$i status=none; done
fi
sums $tree >/tmp/sums
small=$(attach small @DIGESTS@) large=$(attach large @DIGESTS@)
for pair in @SMALL@:$small @LARGE@:$large; do
  kind=${pair%:*} dev=${pair#*:}
  make $kind $dev
  mkdir -p /mnt/$dev
  mount -t $kind /dev/$dev /mnt/$dev
  cp -r $tree/. /mnt/$dev/
  sync
  umount /mnt/$dev
done
detach small
detach large
small=$(attach small @DIGESTS@) large=$(attach large @DIGESTS@)
for pair in @SMALL@:$small @LARGE@:$large; do
  kind=${pair%:*} dev=${pair#*:}
  check $kind $dev
  mkdir -p /mnt/$dev
  mount -t $kind -o ro /dev/$dev /mnt/$dev
  (cd /mnt/$dev && md5sum -c /tmp/sums >/tmp/compared) || { grep -v OK$ /tmp/compared; fail "$kind lost files"; }
  umount /mnt/$dev
done
detach small
detach large
"#;

/// Many requests in flight, with every block checked by the host, for several block sizes, digests and numbers of
/// queues.
pub fn traffic(context: &mut TestContext<'_>) -> Result<()> {
    context.sealblock.create("small", "64MiB", &["--block-size", "512", "--guard", "crc16"])?;
    context.sealblock.create("large", "64MiB", &["--guard", "crc64"])?;
    context.sealblock.create("bare", "64MiB", &["--guard", "none"])?;
    let mut server = context.sealblock.serve(&["small", "large", "bare"], &[])?;
    for (name, digests) in
        [("small", ""), ("large", "--hdr-digest --data-digest"), ("bare", "--hdr-digest"), ("bare", "--data-digest")]
    {
        context.sh(&server, &TRAFFIC.replace("@NAME@", name).replace("@DIGESTS@", digests))?;
    }
    server.stop()?;
    for volume in ["small", "large", "bare"] {
        context.sealblock.succeed(&["verify", volume])?;
    }
    Ok(())
}

const TRAFFIC: &str = r#"
dev=$(attach @NAME@ --verbose --verbose @DIGESTS@)
# The options that the kernel got; it refuses a connection whose target does not agree.
for digest in @DIGESTS@; do
  grep -q "$(echo ${digest#--} | sed 's/header/hdr/; s/-/_/')" /tmp/connect || { cat /tmp/connect; fail " was not requested"; }
done
bs=$(cat /sys/block/$dev/queue/logical_block_size)
fio --name=random --filename=/dev/$dev --direct=1 --ioengine=libaio --iodepth=32 --rw=randwrite --bs=4k --size=2m \
  --numjobs=2 --thread --offset_increment=2m --verify=crc32c --verify_fatal=1 --group_reporting --output=/tmp/fio ||
  { cat /tmp/fio; fail "random writes of 4 KiB on @NAME@ @DIGESTS@"; }
fio --name=sizes --filename=/dev/$dev --direct=1 --ioengine=io_uring --iodepth=8 --rw=randrw --bsrange=$bs-1m \
  --blockalign=$bs --offset=32m --size=8m --verify=crc32c --verify_fatal=1 --output=/tmp/fio ||
  { cat /tmp/fio; fail "accesses of all sizes on @NAME@ @DIGESTS@"; }
detach @NAME@
"#;
