//! The kernel's NBD client: a file system that was written over four connections is intact after the client reconnects,
//! zeroed blocks are zeroes, and reads fail for exactly the damaged blocks. Data written over NBD can be read over
//! NVMe/TCP. A client without a block size reads and writes parts of blocks.

use anyhow::Result;

use crate::context::{TestContext, expect};

/// The damage to each block.
const HARMS: [(u64, &str); 5] = [(3, "data"), (4, "guard"), (100, "ref-tag"), (1000, "misdirected"), (2047, "data")];

pub fn run(context: &mut TestContext<'_>) -> Result<()> {
    context.sealblock.create("large", "384MiB", &[])?;
    context.sealblock.create("small", "1MiB", &["--block-size", "512"])?;
    context.sealblock.create("d", "8MiB", &[])?;
    let mut server = context.sealblock.serve(&["large", "small", "d"], &["--nbd", "127.0.0.1:0"])?;
    context.sh(&server, FILES)?;
    context.sh(&server, ZEROES)?;
    context.sh(&server, DEFAULTS)?;
    context.sh(&server, "nbd_attach d nbd0 4096; conformance guest fill /dev/nbd0 3; nbd_detach nbd0")?;
    server.stop()?;
    for volume in ["large", "small", "d"] {
        context.sealblock.succeed(&["verify", volume])?;
    }
    for (lba, kind) in HARMS {
        context.sealblock.succeed(&["corrupt", "d", "--lba", &lba.to_string(), "--kind", kind])?;
    }
    server.start()?;
    let scanned = context
        .sh(&server, "nbd_attach d nbd0 4096 >&2; conformance guest scan /dev/nbd0 4096; nbd_detach nbd0 >&2")?;
    // NBD has no other error for a damaged block.
    let mut wanted: Vec<String> = HARMS.iter().map(|(lba, _)| format!("{lba} 5")).collect();
    wanted.push("blocks 2048".to_owned());
    expect("blocks that the client cannot read", &scanned.lines().map(str::to_owned).collect(), &wanted)?;
    server.stop()
}

const FILES: &str = r#"
tree=/tmp/nbd-tree
mkdir -p $tree/deep/er
cp /usr/bin/nvme /usr/bin/mke2fs /bin/busybox $tree
for i in $(seq 60); do dd if=/dev/urandom of=$tree/deep/er/$i bs=1023 count=$i status=none; done
(cd $tree && find . -type f | sort | xargs md5sum) >/tmp/sums
nbd_attach large nbd0 4096 4
lines=$(netstat -tn | grep -c "10.0.2.2:$NBD_PORT .*ESTABLISHED")
[ "$lines" = 4 ] || { netstat -tn; fail "$lines connections instead of 4"; }
[ "$(cat /sys/block/nbd0/size)" = 786432 ] || fail "nbd0 has $(cat /sys/block/nbd0/size) sectors"
[ "$(cat /sys/block/nbd0/ro)" = 0 ] || fail "nbd0 is read-only"
/usr/bin/mke2fs -q -F -t ext4 /dev/nbd0
mkdir -p /mnt/nbd
mount -t ext4 /dev/nbd0 /mnt/nbd
cp -r $tree/. /mnt/nbd/
sync
umount /mnt/nbd
nbd_detach nbd0
nbd_attach large nbd0 4096
e2fsck -f -n /dev/nbd0 >/tmp/fsck 2>&1 || { cat /tmp/fsck; fail "ext4 is damaged"; }
mount -t ext4 -o ro /dev/nbd0 /mnt/nbd
(cd /mnt/nbd && md5sum -c /tmp/sums >/tmp/compared) || { grep -v OK$ /tmp/compared; fail "files were lost"; }
umount /mnt/nbd
nbd_detach nbd0
# The same blocks over NVMe/TCP.
dev=$(attach large)
mount -t ext4 -o ro /dev/$dev /mnt/nbd
(cd /mnt/nbd && md5sum -c /tmp/sums >/tmp/compared) || { grep -v OK$ /tmp/compared; fail "NVMe/TCP reads something else"; }
umount /mnt/nbd
detach large
"#;

/// Attached without `-b`. Data beside the written part of a block stay unchanged.
const DEFAULTS: &str = r#"
nbd_attach large nbd0 default
dd if=/dev/urandom of=/tmp/before bs=4k count=16 status=none
dd if=/tmp/before of=/dev/nbd0 bs=64k oflag=direct status=none
dd if=/dev/urandom of=/tmp/part bs=512 count=3 status=none
for at in 1 7 15 30; do
  dd if=/tmp/part of=/tmp/before bs=512 seek=$at conv=notrunc status=none
  dd if=/tmp/part of=/dev/nbd0 bs=512 seek=$at oflag=direct conv=notrunc status=none
done
dd if=/dev/nbd0 of=/tmp/after bs=64k count=1 iflag=direct status=none
cmp /tmp/before /tmp/after || fail "writes of sectors changed something else"
/usr/bin/mke2fs -q -F -t ext4 /dev/nbd0
mount -t ext4 /dev/nbd0 /mnt/nbd
cp -r /tmp/nbd-tree/. /mnt/nbd/
sync
umount /mnt/nbd
nbd_detach nbd0
nbd_attach large nbd0 default
e2fsck -f -n /dev/nbd0 >/tmp/fsck 2>&1 || { cat /tmp/fsck; fail "ext4 is damaged"; }
mount -t ext4 -o ro /dev/nbd0 /mnt/nbd
(cd /mnt/nbd && md5sum -c /tmp/sums >/tmp/compared) || { grep -v OK$ /tmp/compared; fail "files were lost"; }
umount /mnt/nbd
nbd_detach nbd0
"#;

const ZEROES: &str = r#"
nbd_attach small nbd1 512
dd if=/dev/urandom of=/dev/nbd1 bs=64k count=16 oflag=direct status=none
dd if=/dev/nbd1 of=/tmp/before bs=64k iflag=direct status=none
conformance guest fallocate /dev/nbd1 zero-range 131072 65536
blkdiscard -o 262144 -l 65536 /dev/nbd1
dd if=/dev/nbd1 of=/tmp/after bs=64k iflag=direct status=none
for part in 0 1 3 5 15; do
  for file in before after; do dd if=/tmp/$file of=/tmp/$file.part bs=64k skip=$part count=1 status=none; done
  cmp /tmp/before.part /tmp/after.part || fail "part $part changed"
done
dd if=/tmp/after of=/tmp/part bs=64k skip=2 count=1 status=none
dd if=/dev/zero of=/tmp/zero bs=64k count=1 status=none
cmp /tmp/part /tmp/zero || fail "zeroed blocks are not zeroes"
nbd_detach nbd1
"#;
