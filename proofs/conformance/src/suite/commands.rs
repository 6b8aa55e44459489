//! NVM commands by nvme-cli's passthrough, on plain namespaces.

use anyhow::Result;

use crate::context::TestContext;

pub fn run(bench: &mut TestContext<'_>) -> Result<()> {
    bench.sealblock.create("small", "16MiB", &["--block-size", "512"])?;
    bench.sealblock.create("large", "16MiB", &[])?;
    let mut server = bench.sealblock.serve(&["small", "large"], &[])?;
    for name in ["small", "large"] {
        bench.sh(&server, &SCRIPT.replace("@NAME@", name))?;
    }
    server.stop()?;
    for volume in ["small", "large"] {
        bench.sealblock.succeed(&["verify", volume])?;
    }
    Ok(())
}

const SCRIPT: &str = r#"
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
