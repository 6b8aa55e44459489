//! File systems: what was written is there after the host has gone and come back.

use anyhow::Result;

use crate::context::TestContext;

pub fn run(bench: &mut TestContext<'_>) -> Result<()> {
    bench.sealblock.create("small", "384MiB", &["--block-size", "512"])?;
    bench.sealblock.create("large", "384MiB", &[])?;
    let mut server = bench.sealblock.serve(&["small", "large"], &[])?;
    // Both file systems on both sizes of blocks, with digests on and off.
    for (small, large, digests) in [("ext4", "btrfs", "--hdr-digest --data-digest"), ("btrfs", "ext4", "")] {
        let script = SCRIPT.replace("@SMALL@", small).replace("@LARGE@", large).replace("@DIGESTS@", digests);
        bench.sh(&server, &script)?;
    }
    server.stop()?;
    for volume in ["small", "large"] {
        bench.sealblock.succeed(&["verify", volume])?;
    }
    Ok(())
}

const SCRIPT: &str = r#"
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
