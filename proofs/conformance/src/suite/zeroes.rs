//! Zeroing: blocks read as zeroes at once, and space goes back to the file under the volume where the host lets it.

use anyhow::{Result, bail};

use crate::bench::Bench;
use crate::served::Server;

const MIB: u64 = 1 << 20;

pub fn run(bench: &mut Bench<'_>) -> Result<()> {
    bench.sealblock.create("v", "64MiB", &[])?;
    let mut server = bench.sealblock.serve(&["v"], &[])?;
    let unmaps = bench.version >= (6, 17);
    bench.sh(&server, "dev=$(attach v); conformance guest fill /dev/$dev 1")?;
    let full = bench.sealblock.allocated_bytes("v")?;
    if full < 64 * MIB {
        bail!("a full volume of 64 MiB takes {full} bytes");
    }
    let modes = if unmaps { &["punch-hole", "zero-range", "write-zeroes"][..] } else { &["punch-hole", "zero-range"] };
    for (i, mode) in modes.iter().enumerate() {
        zero(bench, &server, mode, (8 + 16 * i as u64) * MIB)?;
    }
    bench.sh(&server, "blkdiscard -o $((56 * 1048576)) -l $((8 * 1048576)) /dev/$(attached v); sync")?;
    let left = bench.sealblock.allocated_bytes("v")?;
    if unmaps {
        // Both ways that let the device unmap have given up most of their 8 MiB each, and so has the discard.
        if left + 20 * MIB > full {
            bail!("of {full} bytes {left} are left after 24 MiB were given up");
        }
        bench.sh(&server, LIMITS)?;
    }
    bench.sh(&server, "conformance guest check /dev/$(attached v) 1 >/tmp/different || true; detach v")?;
    server.stop()?;
    bench.sealblock.succeed(&["verify", "v"]).map(drop)
}

/// Zeroes 8 MiB, and looks at them and at what is around them.
fn zero(bench: &mut Bench<'_>, server: &Server, mode: &str, offset: u64) -> Result<()> {
    let before = bench.sealblock.allocated_bytes("v")?;
    let length = 8 * MIB;
    let script = format!(
        r#"
        dev=$(attached v)
        conformance guest fallocate /dev/$dev {mode} {offset} {length}
        sync
        conformance guest check /dev/$dev 1 >/tmp/different 2>/dev/null && fail "nothing was zeroed"
        grep -qx $(({offset} / 4096)) /tmp/different && grep -qx $((({offset} + {length}) / 4096 - 1)) /tmp/different
        ! grep -qx $(({offset} / 4096 - 1)) /tmp/different && ! grep -qx $((({offset} + {length}) / 4096)) /tmp/different
        dd if=/dev/$dev bs=1M skip=$(({offset} / 1048576)) count=8 iflag=direct status=none | tr -d '\0' | wc -c >/tmp/count
        [ "$(cat /tmp/count)" = 0 ] || fail "$(cat /tmp/count) bytes are not zero"
        "#
    );
    bench.sh(server, &script).map_err(|error| error.context(format!("fallocate {mode}")))?;
    let after = bench.sealblock.allocated_bytes("v")?;
    let gives_back = bench.version >= (6, 17) && mode != "zero-range";
    if gives_back && after + 7 * MIB > before {
        bail!("{mode} of 8 MiB left {after} of {before} bytes");
    }
    Ok(())
}

const LIMITS: &str = r#"
queue=/sys/block/$(attached v)/queue
for name in write_zeroes_unmap_max_hw_bytes write_zeroes_unmap_max_bytes; do
  [ -e $queue/$name ] || fail "there is no $name"
  [ "$(cat $queue/$name)" -gt 0 ] || fail "$name is $(cat $queue/$name)"
done
"#;
