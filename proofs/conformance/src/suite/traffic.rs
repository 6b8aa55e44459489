//! Many commands at once, with every block checked by the host: sizes of blocks, digests, several queues.

use anyhow::Result;

use crate::context::TestContext;

pub fn run(bench: &mut TestContext<'_>) -> Result<()> {
    bench.sealblock.create("small", "64MiB", &["--block-size", "512", "--guard", "crc16"])?;
    bench.sealblock.create("large", "64MiB", &["--guard", "crc64"])?;
    bench.sealblock.create("bare", "64MiB", &["--guard", "none"])?;
    let mut server = bench.sealblock.serve(&["small", "large", "bare"], &[])?;
    for (name, digests) in
        [("small", ""), ("large", "--hdr-digest --data-digest"), ("bare", "--hdr-digest"), ("bare", "--data-digest")]
    {
        bench.sh(&server, &SCRIPT.replace("@NAME@", name).replace("@DIGESTS@", digests))?;
    }
    server.stop()?;
    for volume in ["small", "large", "bare"] {
        bench.sealblock.succeed(&["verify", volume])?;
    }
    Ok(())
}

const SCRIPT: &str = r#"
dev=$(attach @NAME@ --verbose --verbose @DIGESTS@)
# What the kernel was asked for; it refuses a connection whose target does not agree.
for digest in @DIGESTS@; do
  grep -q "$(echo ${digest#--} | sed 's/header/hdr/; s/-/_/')" /tmp/connect || { cat /tmp/connect; fail "$digest was not asked for"; }
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
