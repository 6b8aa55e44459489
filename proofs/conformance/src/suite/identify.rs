//! Discovery and Identify, as nvme-cli requests them.

use anyhow::Result;

use crate::context::{TestContext, expect};

/// The size of every namespace in bytes.
const SIZE_BYTES: u64 = 64 << 20;

pub fn run(context: &mut TestContext<'_>) -> Result<()> {
    context.sealblock.create("small", "64MiB", &["--block-size", "512"])?;
    context.sealblock.create("large", "64MiB", &[])?;
    let mut server = context.sealblock.serve(&["small", "large"], &[])?;
    context.sh(
        &server,
        r#"
        nvme discover -t tcp -a 10.0.2.2 -s $PORT >/tmp/discovery
        for name in small large; do grep -q "subnqn: *$NQN:$name" /tmp/discovery || fail "$name is not discovered"; done
        refused "" nvme connect -t tcp -a 10.0.2.2 -s $PORT -n $NQN:absent
        small=$(attach small)
        large=$(attach large)
        nvme list >/tmp/list; grep -q "$small" /tmp/list; grep -q "$large" /tmp/list
        for dev in $small $large; do
          nvme id-ctrl /dev/$dev -H; nvme id-ns /dev/$dev -H; nvme list-ns /dev/$dev; nvme ns-descs /dev/$dev
          nvme nvm-id-ctrl /dev/$dev; nvme nvm-id-ns /dev/$dev
          nvme list-ctrl /dev/$dev || true
          nvme smart-log /dev/$dev; nvme error-log /dev/$dev; nvme fw-log /dev/$dev; nvme effects-log /dev/$(controller $dev)
          nvme supported-log-pages /dev/$dev
          nvme get-feature /dev/$dev -f 6 -H; nvme get-feature /dev/$dev -f 7 -H; nvme get-feature /dev/$dev -f 0xb -H
          nvme show-regs /dev/$(controller $dev)
        done >/tmp/asked
        "#,
    )?;
    sizes(context, &server)?;
    pages(context, &server)?;
    queues(context, &server)?;
    context.sh(&server, "nvme disconnect-all")?;
    server.stop()?;
    hosts(context)
}

/// Only allowed hosts see the subsystems.
fn hosts(context: &mut TestContext<'_>) -> Result<()> {
    let friend = "nqn.2026-11.org.example:friend";
    let mut server = context.sealblock.serve(&["small"], &["--allow-host", friend])?;
    let script = r#"
        options="-t tcp -a 10.0.2.2 -s $PORT"
        refused "" nvme connect $options -n $NQN:small --hostnqn=nqn.2026-11.org.example:stranger
        nvme discover $options --hostnqn=nqn.2026-11.org.example:stranger >/tmp/discovery || true
        ! grep -q "$NQN:small" /tmp/discovery || fail "a stranger sees the subsystem"
        dev=$(attach small --hostnqn=@FRIEND@)
        conformance guest fill /dev/$dev 8
        detach small
        "#;
    context.sh(&server, &script.replace("@FRIEND@", friend))?;
    server.stop()
}

/// The kernel reports the sizes of the volumes.
fn sizes(context: &mut TestContext<'_>, server: &crate::served::Server) -> Result<()> {
    let said = context.sh(
        server,
        r#"
        for name in small large; do
          queue=/sys/block/$(attached $name)
          echo $name $(cat $queue/size) $(cat $queue/queue/logical_block_size)
        done
        "#,
    )?;
    let sectors = SIZE_BYTES / 512;
    expect("sizes of devices", &said, &format!("small {sectors} 512\nlarge {sectors} 4096\n"))
}

/// The Identify pages match the volumes and the target's features.
fn pages(context: &mut TestContext<'_>, server: &crate::served::Server) -> Result<()> {
    for (name, block_bytes) in [("small", 512_u64), ("large", 4096)] {
        let script = PAGES
            .replace("@NAME@", name)
            .replace("@BLOCKS@", &(SIZE_BYTES / block_bytes).to_string())
            .replace("@SHIFT@", &block_bytes.trailing_zeros().to_string());
        context.sh(server, &script)?;
    }
    Ok(())
}

const PAGES: &str = r#"
dev=$(attached @NAME@)
ctrl=/dev/$(controller $dev)
has() { grep -q "$1" /tmp/page || { cat /tmp/page; fail "@NAME@ does not say $1"; }; }
nvme id-ns /dev/$dev --output-format=json | tr -d ' \n' >/tmp/page
for word in '"nsze":@BLOCKS@,' '"ncap":@BLOCKS@,' '"dlfeat":9,' '"dps":0,' '"nsattr":0,' '"ms":0,"ds":@SHIFT@,'; do has "$word"; done
nvme id-ctrl $ctrl --output-format=json | tr -d ' \n' >/tmp/page
for word in "\"subnqn\":\"$NQN:@NAME@\"" '"cntrltype":1,' '"vwc":7,' '"fuses":1,' '"nn":1024,'; do has "$word"; done
oncs=$(sed -n 's/.*"oncs":\([0-9]*\).*/\1/p' /tmp/page)
# Compare, Dataset Management, Write Zeroes, Verify, Copy.
[ $((oncs & 397)) = 397 ] || fail "ONCS is $oncs"
nvme effects-log $ctrl >/tmp/page
for word in Flush Write Read Compare 'Write Zeroes' 'Dataset Management' Verify Copy; do has "$word"; done
nvme supported-log-pages $ctrl >/tmp/page
for word in 'LID 0x1 ' 'LID 0x2 ' 'LID 0x4 ' 'LID 0x5 ' 'LID 0xe '; do has "$word"; done
nvme smart-log $ctrl --output-format=json | tr -d ' \n' >/tmp/page
for word in '"critical_warning":0,' '"media_errors":0,'; do has "$word"; done
"#;

/// Each processor gets an I/O queue, and invalid commands are refused without harm.
fn queues(context: &mut TestContext<'_>, server: &crate::served::Server) -> Result<()> {
    context.sh(
        server,
        r#"
        dev=$(attached large)
        count=$(cat /sys/class/nvme/$(controller $dev)/queue_count)
        [ "$count" = $((1 + $(nproc))) ] || fail "$count queues, that of administration among them"
        conformance guest fill /dev/$dev 7
        refused "" nvme format /dev/$dev --force --lbaf=0
        nvme reset /dev/$(controller $dev)
        conformance guest check /dev/$dev 7
        refused "" nvme admin-passthru /dev/$(controller $dev) --opcode=0xc9
        refused "" nvme io-passthru /dev/$dev --opcode=0x91 --namespace-id=1
        conformance guest check /dev/$dev 7
        "#,
    )?;
    Ok(())
}
