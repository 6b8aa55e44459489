//! A configuration that changes while hosts are connected: namespaces and subsystems are removed and added, and hosts
//! lose access.
//!
//! The host rescans nothing: it learns of namespaces by asynchronous events, and of the rest by closed connections.
//! Unchanged devices continue under load. Requests to removed ones end with errors, and no host hangs.

use anyhow::{Context, Result, bail};

use crate::context::TestContext;

/// How long hosts try to reconnect to a removed subsystem.
const OPTIONS: &str = "--reconnect-delay=1 --ctrl-loss-tmo=3";
const FRIENDS: &str = "\"nqn.2026-11.org.example:friend\"";
const OTHERS: &str = "\"nqn.2026-11.org.example:other\"";

/// A subsystem of the configuration, with its namespaces by number and target.
fn subsystem(name: &str, hosts: &str, namespaces: &[(u32, &str)]) -> String {
    let hosts = if hosts.is_empty() { String::new() } else { format!("hosts = [{hosts}]\n") };
    let namespaces: String = namespaces
        .iter()
        .map(|(nsid, target)| format!("[[subsystems.namespaces]]\nnsid = {nsid}\ntarget = \"{target}\"\n"))
        .collect();
    format!("[[subsystems]]\nname = \"{name}\"\n{hosts}{namespaces}\n")
}

pub fn run(context: &mut TestContext<'_>) -> Result<()> {
    for name in ["a", "b", "c"] {
        context.sealblock.create(name, "4MiB", &[])?;
    }
    let memory = subsystem("memory", "", &[(1, "mem:4MiB")]);
    let first = [
        subsystem("stays", "", &[(1, "a"), (2, "b")]),
        subsystem("goes", "", &[(1, "mem:4MiB")]),
        subsystem("closes", FRIENDS, &[(1, "mem:4MiB")]),
        memory.clone(),
    ];
    let second = [
        subsystem("stays", "", &[(1, "a"), (3, "c")]),
        subsystem("closes", OTHERS, &[(1, "mem:4MiB")]),
        memory.clone(),
        subsystem("comes", "", &[(1, "b")]),
    ];
    context.sealblock.configure(&first.concat())?;
    let mut server = context.sealblock.serve_configured()?;
    context.sh(&server, &BEFORE.replace("@OPTIONS@", OPTIONS))?;
    // An invalid configuration changes nothing.
    context.sealblock.configure(&[&second.concat(), &subsystem("broken", "", &[(1, "absent")])[..]].concat())?;
    let reason = server.reload_refused()?;
    if !reason.contains("absent") {
        bail!("the reason does not name the target: {reason}");
    }
    context.sh(&server, UNCHANGED).context("after a configuration that was refused")?;
    context.sealblock.configure(&second.concat())?;
    server.reload()?;
    context.sh(&server, AFTER)?;
    // The first configuration returns, and with it the namespace and its content.
    context.sealblock.configure(&first.concat())?;
    context.sh(&server, "detach comes")?;
    server.reload()?;
    context.sh(&server, BACK)?;
    server.stop()?;
    ["a", "b", "c"].iter().try_for_each(|name| context.sealblock.succeed(&["verify", name]).map(drop))
}

/// Each of four disks gets its content; one is under a load that verifies its data, two are read until a read fails.
const BEFORE: &str = r#"
FRIEND="--hostnqn=nqn.2026-11.org.example:friend --hostid=5f2b21a0-0e6e-4b7c-9d4a-0000000000a2"
attach stays @OPTIONS@ >/dev/null
attach goes @OPTIONS@ >/dev/null
attach closes @OPTIONS@ $FRIEND >/dev/null
attach memory @OPTIONS@ >/dev/null
stays=$(block stays 1) leaves=$(block stays 2) goes=$(attached goes) closes=$(attached closes)
conformance guest fill /dev/$leaves 31
conformance guest fill /dev/$(attached memory) 32
echo $stays $leaves $goes $closes >/tmp/disks
nvme discover -t tcp -a 10.0.2.2 -s $PORT --output-format=json | tr -d ' ' >/tmp/discovery.before
rm -f /tmp/load.* /tmp/reads.*
(
  while [ ! -e /tmp/load.stop ]; do
    fio --name=load --filename=/dev/$stays --direct=1 --ioengine=libaio --iodepth=8 --rw=randwrite --bs=4k --size=2m --rate_iops=400 \
      --verify=crc32c --verify_fatal=1 --output=/tmp/load || { echo badly >/tmp/load.status; exit; }
  done
  echo well >/tmp/load.status
) >/tmp/load.said 2>&1 &
for disk in $leaves $goes $closes; do
  (
    while dd if=/dev/$disk of=/dev/null bs=4096 count=16 iflag=direct; do sleep 0.05; done
    echo ended >/tmp/reads.$disk
  ) >/tmp/reads.said.$disk 2>&1 &
done
"#;

const UNCHANGED: &str = r#"
set -- $(cat /tmp/disks)
for disk in $1 $2 $3 $4; do
  [ -e /dev/$disk ] && [ ! -e /tmp/reads.$disk ] || { cat /tmp/reads.said.$disk; fail "$disk is gone"; }
done
nvme discover -t tcp -a 10.0.2.2 -s $PORT --output-format=json | tr -d ' ' >/tmp/discovery
cmp /tmp/discovery.before /tmp/discovery || fail "another discovery log"
"#;

const AFTER: &str = r#"
FRIEND="--hostnqn=nqn.2026-11.org.example:friend --hostid=5f2b21a0-0e6e-4b7c-9d4a-0000000000a2"
set -- $(cat /tmp/disks)
leaves=$2 goes=$3 closes=$4
# The host hears that namespace 3 came and that namespace 2 went.
comes=$(block stays 3)
[ "$(cat /sys/block/$comes/size)" = 8192 ] || fail "namespace 3 has $(cat /sys/block/$comes/size) sectors"
conformance guest fill /dev/$comes 33
gone /sys/block/$leaves
# The users of what was removed got an error by now, or get one when the host stops retrying.
for disk in $leaves $goes $closes; do
  for try in $(seq 300); do
    [ -e /tmp/reads.$disk ] && break
    sleep 0.1
  done
  [ -e /tmp/reads.$disk ] || { cat /tmp/reads.said.$disk; fail "reads of $disk do not end"; }
done
for name in goes closes; do
  for try in $(seq 300); do
    subsystem $name >/dev/null || break
    sleep 0.1
  done
  ! subsystem $name >/dev/null || fail "the host keeps $name"
done
refused "" nvme connect -t tcp -a 10.0.2.2 -s $PORT -n $NQN:goes
refused "" nvme connect -t tcp -a 10.0.2.2 -s $PORT -n $NQN:closes $FRIEND
nvme list-ns /dev/$(controller $comes) >/tmp/list
grep -q ":0x3$" /tmp/list && ! grep -q ":0x2$" /tmp/list || { cat /tmp/list; fail "the list of namespaces"; }
# Discovery names what is there now; its generation is another one.
nvme discover -t tcp -a 10.0.2.2 -s $PORT --output-format=json | tr -d ' ' >/tmp/discovery
grep -q "$NQN:comes" /tmp/discovery && ! grep -q "$NQN:goes" /tmp/discovery || { cat /tmp/discovery; fail "discovery"; }
generation() { sed -n 's/.*"genctr":\([0-9]*\).*/\1/p' $1; }
[ "$(generation /tmp/discovery)" -gt "$(generation /tmp/discovery.before)" ] || fail "the generation did not change"
# The volume that moved has its content.
conformance guest check /dev/$(attach comes) 31
conformance guest check /dev/$(attached memory) 32
load_works
load_ends
"#;

const BACK: &str = r#"
FRIEND="--hostnqn=nqn.2026-11.org.example:friend --hostid=5f2b21a0-0e6e-4b7c-9d4a-0000000000a2"
conformance guest check /dev/$(block stays 2) 31
set -- $(ls -d /sys/block/nvme*)
for folder in "$@"; do
  [ "$(cat $folder/nsid)" != 3 ] || gone $folder
done
conformance guest check /dev/$(attached memory) 32
attach goes >/dev/null
attach closes $FRIEND >/dev/null
nvme disconnect-all
"#;
