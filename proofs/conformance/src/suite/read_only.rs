//! A volume that is served read-only: the host reads it, every change is refused with the right status, and the
//! volume's file stays unchanged byte for byte.

use anyhow::{Result, bail};

use crate::context::TestContext;

pub fn run(context: &mut TestContext<'_>) -> Result<()> {
    context.sealblock.create("v", "64MiB", &[])?;
    let mut server = context.sealblock.serve(&["v"], &[])?;
    context.sh(&server, PREPARE)?;
    server.stop()?;
    let before = context.sealblock.content("v")?;
    let mut server = context.sealblock.serve(&["v"], &["--read-only"])?;
    context.sh(&server, USE)?;
    server.stop()?;
    if context.sealblock.content("v")? != before {
        bail!("the volume's file changed while it was served for reading");
    }
    // Without the option, the same host may write to the same volume: only the option caused the refusal.
    let mut server = context.sealblock.serve(&["v"], &[])?;
    context.sh(&server, WRITABLE)?;
    server.stop()?;
    context.sealblock.succeed(&["verify", "v"]).map(drop)
}

const PREPARE: &str = r#"
dev=$(attach v)
[ "$(cat /sys/block/$dev/ro)" = 0 ] || fail "the disk is read-only"
/usr/bin/mke2fs -q -F -t ext4 /dev/$dev
mkdir -p /mnt/v
mount -t ext4 /dev/$dev /mnt/v
cp /usr/bin/nvme /bin/busybox /mnt/v
(cd /mnt/v && md5sum nvme busybox) >/tmp/sums
umount /mnt/v
detach v
"#;

const USE: &str = r#"
dev=$(attach v)
[ "$(cat /sys/block/$dev/ro)" = 1 ] || fail "the disk is not read-only"
nvme id-ns /dev/$dev --output-format=json | tr -d ' ' >/tmp/id
grep -q '"nsattr":1,' /tmp/id || { cat /tmp/id; fail "NSATTR does not say write protected"; }
mount -t ext4 -o ro /dev/$dev /mnt/v
(cd /mnt/v && md5sum -c /tmp/sums >/tmp/compared) || { cat /tmp/compared; fail "files are not what they were"; }
refused "read-only file system" touch /mnt/v/new
# This mount falls back to reading when it may not write.
mount -t ext4 -o remount,rw /mnt/v 2>/tmp/remount || true
refused "read-only file system" touch /mnt/v/new
umount /mnt/v
refused "not permitted\|denied\|read-only" dd if=/dev/zero of=/dev/$dev bs=4096 count=1 oflag=direct conv=notrunc
ask() { command=$1; shift; nvme $command /dev/$dev --namespace-id=1 "$@"; }
protected() { refused "write protected" ask "$@"; }
dd if=/dev/urandom of=/tmp/a bs=4096 count=8 status=none
protected write --start-block=0 --block-count=0 --data-size=4096 --data=/tmp/a
protected write --start-block=0 --block-count=7 --data-size=32768 --data=/tmp/a --force-unit-access
protected write-zeroes --start-block=0 --block-count=7
protected write-zeroes --start-block=0 --block-count=7 --deac
protected dsm --ad --slbs=0 --blocks=8
protected copy --sdlba=0 --slbs=64 --blocks=7
refused "" ask write-uncor --start-block=0 --block-count=0
rm -f /tmp/back
ask read --start-block=0 --block-count=7 --data-size=32768 --data=/tmp/back
ask compare --start-block=0 --block-count=7 --data-size=32768 --data=/tmp/back
ask verify --start-block=0 --block-count=63
ask flush
detach v
"#;

const WRITABLE: &str = r#"
dev=$(attach v)
mount -t ext4 /dev/$dev /mnt/v
(cd /mnt/v && md5sum -c /tmp/sums >/tmp/compared) || { cat /tmp/compared; fail "files are not what they were"; }
touch /mnt/v/new
umount /mnt/v
nvme write-zeroes /dev/$dev --namespace-id=1 --start-block=0 --block-count=0
detach v
"#;
