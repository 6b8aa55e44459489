//! The target's replies to commands that no stock host sends: it refuses them with the right status. The features that
//! it advertises work, and the host's kernel logs nothing about any of it.

use anyhow::Result;

use crate::context::TestContext;

pub fn run(context: &mut TestContext<'_>) -> Result<()> {
    context.sealblock.create("v", "16MiB", &[])?;
    let mut server = context.sealblock.serve(&["v"], &[])?;
    context.sh(&server, &[CONTROLLER, FEATURES, IDENTIFY, LOGS, EFFECTS, END].concat())?;
    server.stop()
}

const CONTROLLER: &str = r#"
mark
dev=$(attach v --nr-io-queues=2)
name=$(controller $dev)
ctrl=/dev/$name
cntlid=$(cat /sys/class/nvme/$name/cntlid)
nvme id-ctrl $ctrl --output-format=json | tr -d ' \n' >/tmp/id
value() { sed -n "s/.*\"$1\":\([0-9]*\).*/\1/p" /tmp/id; }
# Room for namespaces is a ceiling and not a count; keep alive timeouts are in units of 100 ms.
for pair in nn:1024 mnan:1024 kas:1; do
  [ "$(value ${pair%:*})" = ${pair#*:} ] || { cat /tmp/id; fail "${pair%:*} is $(value ${pair%:*})"; }
done
# CAP.CSS offers all command sets (bit 6) and the first, and the host has chosen the former: formats with wide guards are there then.
nvme get-property $ctrl --offset=0 >/tmp/cap
nvme get-property $ctrl --offset=0x14 >/tmp/cc
register() { sed -n 's/.*value: *\(0x\)\{0,1\}\([0-9a-f]*\).*/\2/p' $1; }
[ $((0x$(register /tmp/cap) >> 37 & 255)) = 65 ] || { cat /tmp/cap; fail "CAP.CSS"; }
[ $((0x$(register /tmp/cc) >> 4 & 7)) = 6 ] || { cat /tmp/cc; fail "CC.CSS"; }
"#;

const FEATURES: &str = r#"
feature() { nvme get-feature $ctrl --feature-id=$1 | sed -n 's/.*alue: *\(0x\)\{0,1\}\([0-9a-f]*\).*/\2/p'; }
# The number of queues is settled when there are some; asking again changes nothing. Newer kernels do not even pass it on.
queues=$(feature 7)
refused "Command Sequence Error\|Permission denied" nvme set-feature $ctrl --feature-id=7 --value=0x30003
[ $((0x$(feature 7))) = $((0x$queues)) ] || fail "$(feature 7) queues, not $queues"
# Nor are there events that were not offered, or features that do not exist.
refused "Invalid Field" nvme set-feature $ctrl --feature-id=0xb --value=0x40000000
refused "Invalid Field" nvme get-feature $ctrl --feature-id=0x7f
# What the host said in Connect is kept, and what is between two units counts as the longer one.
[ $((0x$(feature 0xf))) = 5000 ] || fail "a keep alive timeout of $((0x$(feature 0xf))) ms"
for pair in 7000:7000 7001:7100 7099:7100 5000:5000; do
  nvme set-feature $ctrl --feature-id=0xf --value=${pair%:*} >/tmp/set
  [ $((0x$(feature 0xf))) = ${pair#*:} ] || fail "${pair%:*} ms are kept as $((0x$(feature 0xf)))"
done
"#;

/// Linux itself refuses passthrough commands with flags, so for fused admin commands the test can only see that
/// refusal.
const IDENTIFY: &str = r#"
identify() { nvme admin-passthru $ctrl --opcode=6 --cdw10=$1 --namespace-id=$2 --data-len=4096 --read --raw-binary; }
# Active namespaces after one that cannot be followed by any, with and without a command set.
for cns in 2 7; do
  for nsid in 0xfffffffe 0xffffffff; do refused "Invalid Namespace" identify $cns $nsid; done
  identify $cns 0xfffffffd | tr -d '\000' >/tmp/list
  [ ! -s /tmp/list ] || { od -An -tx1 /tmp/list; fail "there is something after the last namespace"; }
  [ "$(identify $cns 0 | od -An -v -tu4 -w4 | head -n 2 | tr -s ' \n' ,)" = ,1,0, ] || fail "the list of namespaces"
done
for nsid in 0 1025 0xffffffff; do refused "Invalid Namespace" identify 0 $nsid; done
refused "Invalid Field" identify 0x7f 0
nvme admin-passthru $ctrl --opcode=0x18
for flags in 1 2; do refused "Invalid argument" nvme admin-passthru $ctrl --opcode=0x18 --flags=$flags; done
refused "opcode" nvme admin-passthru $ctrl --opcode=0x80
"#;

/// The LPA field matches the supported log pages, in both directions.
const LOGS: &str = r#"
lpa=$(value lpa)
page() { nvme get-log $ctrl --log-id=$1 --log-len=512 --raw-binary; }
# Bit and page: effects, telemetry, persistent events, and what says which pages and features there are.
for pair in 1:5 3:7 3:8 4:13 5:0 5:18 5:19; do
  if [ $((lpa >> ${pair%:*} & 1)) = 1 ]; then
    page ${pair#*:} >/tmp/page || fail "LPA $lpa promises page ${pair#*:}"
  else
    refused "Invalid Log Page" page ${pair#*:}
  fi
done
# Bit 0: health for a namespace by itself.
if [ $((lpa & 1)) = 1 ]; then
  nvme get-log $ctrl --log-id=2 --log-len=512 --namespace-id=1 >/tmp/page
else
  refused "Invalid Field" nvme get-log $ctrl --log-id=2 --log-len=512 --namespace-id=1
fi
# Bit 2: long pages, from anywhere.
[ $((lpa >> 2 & 1)) = 1 ] || fail "LPA is $lpa"
nvme get-log $ctrl --log-id=5 --log-len=4096 --raw-binary >/tmp/whole
nvme get-log $ctrl --log-id=5 --log-len=1024 --lpo=1024 --raw-binary >/tmp/part
dd if=/tmp/whole bs=1024 skip=1 count=1 status=none | cmp - /tmp/part || fail "a part of a page"
# Page 0 lists the pages that are there, and these only.
page 0 >/tmp/pages; nvme get-log $ctrl --log-id=0 --log-len=1024 --raw-binary >/tmp/pages
for id in 1 2 3 4 5 6 7 8 9 13 14 18 19 112; do
  listed=$(($(dd if=/tmp/pages bs=4 skip=$id count=1 status=none | od -An -tu4) & 1))
  if [ $listed = 1 ]; then page $id >/tmp/page || fail "page $id"; else refused "Invalid Log Page" page $id; fi
done
"#;

/// The kernel checks the effects of a passthrough command, and warns once if they are unexpected.
const EFFECTS: &str = r#"
nvme effects-log $ctrl >/tmp/effects
for opcode in 0 1 2; do
  nvme io-passthru /dev/$dev --opcode=$opcode --namespace-id=1 $(case $opcode in
    1) echo --write --data-len=4096 --input-file=/dev/zero ;;
    2) echo --read --data-len=4096 ;;
  esac) >/tmp/passed
done
nvme write-zeroes /dev/$dev --namespace-id=1 --start-block=0 --block-count=0
nvme dsm /dev/$dev --namespace-id=1 --ad --slbs=0 --blocks=1
"#;

/// All of it was completed by the same controller.
const END: &str = r#"
[ "$(cat /sys/class/nvme/$name/cntlid)" = $cntlid ] || fail "the host has connected anew"
calm
detach v
"#;
