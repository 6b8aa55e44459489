//! Copy, and commands that the kernel of a stock host does not send.
//!
//! Linux has no Copy command of its own, so nvme-cli sends it. Linux never sends fused commands, and the kernel refuses
//! passthrough commands with flags. The test fails when a kernel accepts them.

use anyhow::Result;

use crate::context::TestContext;

pub fn run(context: &mut TestContext<'_>) -> Result<()> {
    context.sealblock.create("small", "16MiB", &["--block-size", "512", "--guard", "crc16"])?;
    context.sealblock.create("large", "16MiB", &["--guard", "crc64"])?;
    let mut server = context.sealblock.serve(&["small", "large"], &[])?;
    for name in ["small", "large"] {
        context.sh(&server, &COPY.replace("@NAME@", name))?;
    }
    server.stop()?;
    for name in ["small", "large"] {
        context.sealblock.succeed(&["verify", name])?;
        context.sealblock.succeed(&["corrupt", name, "--lba", "66", "--kind", "data"])?;
    }
    server.start()?;
    for name in ["small", "large"] {
        context.sh(&server, &DAMAGED.replace("@NAME@", name))?;
    }
    server.stop()
}

const COPY: &str = r#"
dev=$(attach @NAME@)
bs=$(cat /sys/block/$dev/queue/logical_block_size)
conformance guest fill /dev/$dev 21
ask() { command=$1; shift; nvme $command /dev/$dev --namespace-id=1 "$@"; }
image() { dd if=/dev/$dev of=$1 bs=1M count=$((2048 * bs / 1048576)) iflag=direct status=none; }
move() { dd if=/tmp/before of=/tmp/wanted bs=$bs skip=$1 count=$2 seek=$3 conv=notrunc status=none; }
nvme id-ctrl /dev/$dev --output-format=json | tr -d ' ' >/tmp/id
oncs=$(sed -n 's/.*"oncs":\([0-9]*\).*/\1/p' /tmp/id)
[ $((oncs & 256)) != 0 ] || fail "ONCS $oncs has no Copy"
# One range, then three, which lie one behind the other at the destination, and nothing else changes.
image /tmp/before
ask copy --sdlba=1024 --slbs=16 --blocks=15
ask copy --sdlba=1100 --slbs=300,5,77 --blocks=9,0,4 --force-unit-access
cp /tmp/before /tmp/wanted
move 16 16 1024
move 300 10 1100
move 5 1 1110
move 77 5 1111
image /tmp/back
cmp /tmp/wanted /tmp/back || fail "other blocks than those that were to be copied"
ask verify --start-block=1024 --block-count=127
# What is refused leaves the destination alone.
last=$(($(cat /sys/block/$dev/size) * 512 / bs))
refused "overlap" ask copy --sdlba=1200 --slbs=1195 --blocks=7
refused "range" ask copy --sdlba=$((last - 1)) --slbs=0 --blocks=1
refused "range" ask copy --sdlba=1200 --slbs=$((last - 1)) --blocks=1
image /tmp/back
cmp /tmp/wanted /tmp/back || fail "a Copy that was refused changed blocks"
# Compare and Write as a fused pair: the kernel takes no flags.
dd if=/dev/zero of=/tmp/zero bs=$bs count=1 status=none
for half in "5 1" "1 2"; do
  set -- $half
  refused "invalid argument" nvme io-passthru /dev/$dev --opcode=$1 --flags=$2 --namespace-id=1 --cdw10=8 --data-len=$bs \
    --input-file=/tmp/zero --write
done
detach @NAME@
"#;

/// A copy does not hide damage in its source: the command fails, and the destination stays unchanged.
const DAMAGED: &str = r#"
dev=$(attach @NAME@)
bs=$(cat /sys/block/$dev/queue/logical_block_size)
ask() { command=$1; shift; nvme $command /dev/$dev --namespace-id=1 "$@"; }
dd if=/dev/$dev of=/tmp/before bs=$bs skip=1300 count=8 iflag=direct status=none
refused "Guard Check Error" ask copy --sdlba=1300 --slbs=64 --blocks=7
dd if=/dev/$dev of=/tmp/back bs=$bs skip=1300 count=8 iflag=direct status=none
cmp /tmp/before /tmp/back || fail "damage was copied"
ask copy --sdlba=1300 --slbs=67 --blocks=7
ask verify --start-block=1300 --block-count=7
refused "Guard Check Error" ask verify --start-block=64 --block-count=7
# A copy over the damaged block mends it.
ask copy --sdlba=66 --slbs=200 --blocks=0
ask verify --start-block=64 --block-count=7
detach @NAME@
"#;
