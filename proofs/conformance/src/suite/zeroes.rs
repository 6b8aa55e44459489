//! Zeroing: blocks read as zeroes at once, and the volume's file shrinks where the host permits it.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use crate::context::TestContext;
use crate::served::{Sealblock, Server};

const MIB: u64 = 1 << 20;

pub fn run(context: &mut TestContext<'_>) -> Result<()> {
    context.sealblock.create("v", "64MiB", &[])?;
    let mut server = context.sealblock.serve(&["v"], &[])?;
    let unmaps = context.version >= (6, 17);
    context.sh(&server, "dev=$(attach v); conformance guest fill /dev/$dev 1")?;
    let full = context.sealblock.allocated_bytes("v")?;
    if full < 64 * MIB {
        bail!("a full volume of 64 MiB takes {full} bytes");
    }
    let modes = if unmaps { &["punch-hole", "zero-range", "write-zeroes"][..] } else { &["punch-hole", "zero-range"] };
    for (i, mode) in modes.iter().enumerate() {
        zero(context, &server, mode, (8 + 16 * i as u64) * MIB)?;
    }
    let before = context.sealblock.allocated_bytes("v")?;
    context
        .sh(&server, "dev=$(attached v); blkdiscard -o $((56 * 1048576)) -l $((8 * 1048576)) /dev/$dev; flush $dev")?;
    gives_back(&context.sealblock, "discard", before)?;
    if unmaps {
        context.sh(&server, LIMITS)?;
    }
    context.sh(&server, "conformance guest check /dev/$(attached v) 1 >/tmp/different || true; detach v")?;
    server.stop()?;
    context.sealblock.succeed(&["verify", "v"]).map(drop)
}

/// Zeroes 8 MiB, and checks them and the data around them.
fn zero(context: &mut TestContext<'_>, server: &Server, mode: &str, offset: u64) -> Result<()> {
    let before = context.sealblock.allocated_bytes("v")?;
    let length = 8 * MIB;
    let script = format!(
        r#"
        dev=$(attached v)
        conformance guest fallocate /dev/$dev {mode} {offset} {length}
        flush $dev
        conformance guest check /dev/$dev 1 >/tmp/different 2>/dev/null && fail "nothing was zeroed"
        grep -qx $(({offset} / 4096)) /tmp/different && grep -qx $((({offset} + {length}) / 4096 - 1)) /tmp/different
        ! grep -qx $(({offset} / 4096 - 1)) /tmp/different && ! grep -qx $((({offset} + {length}) / 4096)) /tmp/different
        dd if=/dev/$dev bs=1M skip=$(({offset} / 1048576)) count=8 iflag=direct status=none | tr -d '\0' | wc -c >/tmp/count
        [ "$(cat /tmp/count)" = 0 ] || fail "$(cat /tmp/count) bytes are not zero"
        "#
    );
    context.sh(server, &script).map_err(|error| error.context(format!("fallocate {mode}")))?;
    // Linux 6.1 writes zeroes itself, and zeroing a range keeps the space.
    if context.version >= (6, 17) && mode != "zero-range" {
        gives_back(&context.sealblock, mode, before)
    } else {
        Ok(())
    }
}

/// Waits until the volume's file has shrunk by most of 8 MiB. A volume frees space in the background, after a flush.
pub(super) fn gives_back(sealblock: &Sealblock, what: &str, before: u64) -> Result<()> {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        let after = sealblock.allocated_bytes("v")?;
        if after + 7 * MIB <= before {
            return Ok(());
        }
        if Instant::now() > deadline {
            bail!("{what} of 8 MiB left {after} of {before} bytes");
        }
        thread::sleep(Duration::from_millis(50));
    }
}

const LIMITS: &str = r#"
queue=/sys/block/$(attached v)/queue
for name in write_zeroes_unmap_max_hw_bytes write_zeroes_unmap_max_bytes; do
  [ -e $queue/$name ] || fail "there is no $name"
  [ "$(cat $queue/$name)" -gt 0 ] || fail "$name is $(cat $queue/$name)"
done
"#;
