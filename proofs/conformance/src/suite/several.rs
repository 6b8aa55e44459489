//! Several namespaces of several subsystems on one server, each with its own format, and hosts with access to some of
//! them.

use anyhow::{Context, Result};

use crate::context::{TestContext, expect};

/// Namespaces: subsystem, number, volume, size in MiB, block size, guard.
const NAMESPACES: [(&str, u32, &str, u64, &str, &str); 5] = [
    ("mixed", 1, "a", 2, "4096", "crc32c"),
    ("mixed", 2, "b", 3, "512", "crc16"),
    ("mixed", 9, "c", 4, "4096", "crc64"),
    ("other", 1, "d", 5, "512", "none"),
    ("other", 2, "e", 6, "4096", "crc16"),
];
const CONFIGURATION: &str = r#"
[[subsystems]]
name = "mixed"
serial = "MIXED0000000001"
model = "several formats"
namespaces = [{ nsid = 1, target = "a" }, { nsid = 2, target = "b" }, { nsid = 9, target = "c" }]

[[subsystems]]
name = "other"
hosts = ["nqn.2026-11.org.example:friend", "nqn.2026-11.org.example:second"]
namespaces = [{ target = "d" }, { target = "e" }]
"#;

pub fn run(context: &mut TestContext<'_>) -> Result<()> {
    for (_, _, volume, mib, block, guard) in NAMESPACES {
        context.sealblock.create(volume, &format!("{mib}MiB"), &["--block-size", block, "--guard", guard])?;
    }
    context.sealblock.configure(CONFIGURATION)?;
    let mut server = context.sealblock.serve_configured()?;
    context.sh(&server, HOSTS)?;
    let mut shapes = Vec::new();
    for (i, (subsystem, nsid, ..)) in NAMESPACES.iter().enumerate() {
        let script = format!(
            r#"
            dev=$(block {subsystem} {nsid})
            conformance guest fill /dev/$dev 4{i}
            echo $(cat /sys/block/$dev/size) $(cat /sys/block/$dev/queue/logical_block_size) $(cat /sys/block/$dev/wwid)
            "#
        );
        let said = context.sh(&server, &script).with_context(|| format!("namespace {nsid} of {subsystem}"))?;
        shapes.push(said.trim().to_owned());
    }
    for (i, (subsystem, nsid, _, mib, block, _)) in NAMESPACES.iter().enumerate() {
        context
            .sh(&server, &format!("conformance guest check /dev/$(block {subsystem} {nsid}) 4{i}"))
            .with_context(|| format!("namespace {nsid} of {subsystem} has something else"))?;
        let shape: Vec<&str> = shapes[i].split(' ').collect();
        expect("sectors and size of blocks", &shape[..2].join(" "), &format!("{} {block}", mib * 2048))?;
        expect("namespaces with this identity", &shapes.iter().filter(|other| other.ends_with(shape[2])).count(), &1)?;
    }
    context.sh(&server, LISTS)?;
    server.stop()?;
    alone(context)
}

/// Each volume has the data written to its namespace, whichever server serves it.
fn alone(context: &mut TestContext<'_>) -> Result<()> {
    let volumes = NAMESPACES.map(|(_, _, volume, ..)| volume);
    let mut server = context.sealblock.serve(&volumes, &[])?;
    for (i, volume) in volumes.iter().enumerate() {
        let script = format!("conformance guest check /dev/$(attach {volume}) 4{i}; detach {volume}");
        context.sh(&server, &script).with_context(|| format!("volume {volume} has something else"))?;
    }
    server.stop()?;
    volumes.iter().try_for_each(|volume| context.sealblock.succeed(&["verify", volume]).map(drop))
}

/// A host that is not allowed is refused; an allowed host connects, even beside another one.
const HOSTS: &str = r#"
options="-t tcp -a 10.0.2.2 -s $PORT"
host=nqn.2026-11.org.example
# A host has a name and an identifier; newer kernels refuse to use one of them with two of the other.
stranger="--hostnqn=$host:stranger --hostid=5f2b21a0-0e6e-4b7c-9d4a-0000000000a1"
friend="--hostnqn=$host:friend --hostid=5f2b21a0-0e6e-4b7c-9d4a-0000000000a2"
second="--hostnqn=$host:second --hostid=5f2b21a0-0e6e-4b7c-9d4a-0000000000a3"
dmesg -c >/dev/null
refused "" nvme connect $options -n $NQN:other $stranger
dmesg >/tmp/messages
grep -q "Connect for subsystem $NQN:other is not allowed, hostnqn: $host:stranger" /tmp/messages ||
  { cat /tmp/refused /tmp/messages; fail "a host that is not on the list was not refused"; }
refused "" nvme connect $options -n $NQN:absent $friend
dmesg >/tmp/messages
grep -q "Connect Invalid Data Parameter, subsysnqn \"$NQN:absent\"" /tmp/messages ||
  { cat /tmp/refused /tmp/messages; fail "no message says that the subsystem is absent"; }
nvme discover $options $stranger >/tmp/discovery
grep -q "subnqn: *$NQN:mixed" /tmp/discovery || { cat /tmp/discovery; fail "a host that is not on the list does not see what any host may use"; }
! grep -q "$NQN:other" /tmp/discovery || { cat /tmp/discovery; fail "a stranger sees what is not for it"; }
nvme discover $options $friend >/tmp/discovery
grep -q "subnqn: *$NQN:other" /tmp/discovery || { cat /tmp/discovery; fail "a friend does not see the subsystem"; }
attach other $second >/dev/null
detach other
attach other $friend >/dev/null
attach mixed $stranger >/dev/null
"#;

const LISTS: &str = r#"
ctrl=/dev/$(controller $(block mixed 1))
nvme list-ns $ctrl | sed 's/.*://' | tr -d '\n' >/tmp/list
[ "$(cat /tmp/list)" = "0x10x20x9" ] || { cat /tmp/list; fail "the list of namespaces"; }
nvme id-ctrl $ctrl --output-format=json | tr -d ' ' >/tmp/id
grep -q '"sn":"MIXED0000000001"' /tmp/id && grep -q '"mn":"severalformats"' /tmp/id || { cat /tmp/id; fail "serial or model"; }
grep -q '"nn":1024,' /tmp/id || { cat /tmp/id; fail "the room for namespaces"; }
nvme id-ns $ctrl --namespace-id=3 --output-format=json | tr -d ' ' >/tmp/id
grep -q '"nsze":0,' /tmp/id || { cat /tmp/id; fail "a namespace that is not there has a size"; }
refused "Invalid Namespace" nvme id-ns $ctrl --namespace-id=1025
nvme disconnect-all
"#;
