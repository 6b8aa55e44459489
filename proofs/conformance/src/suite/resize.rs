//! A volume that is resized while hosts use it: NVMe hosts see the new size by themselves, under load and without an
//! error; NBD clients see it when they reconnect.

use anyhow::Result;

use crate::context::{TestContext, expect};

/// The sizes that the volume gets, in this order, as arguments of the command and in bytes.
const SIZES: [(&str, u64); 3] = [("96MiB", 96 << 20), ("256MiB", 256 << 20), ("48MiB", 48 << 20)];

pub fn run(context: &mut TestContext<'_>) -> Result<()> {
    context.sealblock.create("v", "32MiB", &[])?;
    let control = context.sealblock.folder.join("control");
    let control = control.to_string_lossy().into_owned();
    let options = ["--nbd", "127.0.0.1:0", "--control", &control];
    let mut server = context.sealblock.serve(&["v"], &options)?;
    context.sh(&server, BEFORE)?;
    for (size, bytes) in SIZES {
        let said = context.sealblock.succeed(&["resize", "v", "--size", size, "--control", &control, "--json"])?;
        let report: serde_json::Value = serde_json::from_str(&said)?;
        expect("bytes after resizing", &report["size_bytes"].as_u64(), &Some(bytes))?;
        eprintln!("  resized to {size}: requests waited for {} us", report["pause_us"]);
        context.sh(&server, &format!("BYTES={bytes}\n{SEEN}"))?;
    }
    // A size below the used space is refused, and nothing changes.
    let refused = context.sealblock.run(&["resize", "v", "--size", "4MiB", "--control", &control])?;
    expect("the status of a refused command", &refused.status.code(), &Some(3))?;
    context.sh(&server, AFTER)?;
    server.stop()?;
    context.sealblock.succeed(&["verify", "v"]).map(drop)
}

/// A load on the first 16 MiB that verifies its data, and an NBD client that reads at the same time.
const BEFORE: &str = r#"
# What other tests have met is not of interest.
dmesg -c >/dev/null
dev=$(attach v)
echo $dev >/tmp/disk
[ "$(blockdev --getsize64 /dev/$dev)" = 33554432 ] || fail "$dev has $(blockdev --getsize64 /dev/$dev) bytes"
rm -f /tmp/load.*
(
  while [ ! -e /tmp/load.stop ]; do
    fio --name=load --filename=/dev/$dev --direct=1 --ioengine=libaio --iodepth=8 --rw=randwrite --bs=4k --size=16m --io_size=2m \
      --rate_iops=400 --fsync=64 --verify=crc32c --verify_fatal=1 --output=/tmp/load || { echo badly >/tmp/load.status; exit; }
  done
  echo well >/tmp/load.status
) >/tmp/load.said 2>&1 &
"#;

/// The host learns of the new size without a rescan.
const SEEN: &str = r#"
dev=$(cat /tmp/disk)
for try in $(seq 200); do
  [ "$(blockdev --getsize64 /dev/$dev)" = $BYTES ] && break
  sleep 0.1
done
[ "$(blockdev --getsize64 /dev/$dev)" = $BYTES ] || { dmesg | tail -n 5; fail "$dev has $(blockdev --getsize64 /dev/$dev) bytes, not $BYTES"; }
load_works
# The last block is there, reads as zeroes until it is written, and gives its space back so that the volume may shrink again.
last=$((BYTES / 4096 - 1))
dd if=/dev/$dev of=/tmp/last bs=4096 skip=$last count=1 iflag=direct status=none
dd if=/dev/zero of=/tmp/zero bs=4096 count=1 status=none
cmp /tmp/last /tmp/zero || fail "the last block is not zeroes"
dd if=/dev/urandom of=/tmp/data bs=4096 count=1 status=none
dd if=/tmp/data of=/dev/$dev bs=4096 seek=$last count=1 oflag=direct conv=notrunc status=none
dd if=/dev/$dev of=/tmp/last bs=4096 skip=$last count=1 iflag=direct status=none
cmp /tmp/last /tmp/data || fail "the last block is not what was written"
blkdiscard -o $((last * 4096)) -l 4096 /dev/$dev
# Past the end there is nothing.
refused "range" nvme read /dev/$dev --namespace-id=1 --start-block=$((last + 1)) --block-count=0 --data-size=4096 --data=/tmp/beyond
nbd_attach v nbd0 4096
[ "$(blockdev --getsize64 /dev/nbd0)" = $BYTES ] || fail "nbd0 has $(blockdev --getsize64 /dev/nbd0) bytes"
dd if=/dev/nbd0 of=/dev/null bs=4096 skip=$last count=1 iflag=direct status=none
nbd_detach nbd0
sleep 1
load_works
"#;

const AFTER: &str = r#"
dev=$(cat /tmp/disk)
load_ends
if dmesg | grep -i "I/O error\|critical\|blk_update_request" >/tmp/errors; then cat /tmp/errors; fail "the kernel met errors"; fi
flush $dev
detach v
"#;
