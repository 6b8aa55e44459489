//! Namespaces that are added and removed while a host uses another one of the same subsystem, round after round.
//!
//! The host learns of it by an asynchronous event, without a rescan. Its controllers stay, its I/O continues, and its
//! kernel logs no warning. This also holds when the first namespace is removed.

use anyhow::{Context, Result, bail};

use crate::context::TestContext;

/// The namespaces that are added and removed, by number; one has the highest number that the target supports. Sizes
/// differ, so that they can be told apart.
const OTHERS: [(u32, &str); 4] = [(2, "mem:1MiB"), (3, "b"), (4, "mem:2MiB"), (1024, "mem:3MiB")];
const ROUNDS: u32 = 3;
/// The longest permitted time of a request of the load. A host that had to reconnect would wait ten seconds first.
const PAUSE_MS: u64 = 5000;

fn configure(context: &TestContext<'_>, namespaces: &[(u32, &str)]) -> Result<()> {
    let namespaces = namespaces.iter().map(|(nsid, target)| format!("{{ nsid = {nsid}, target = \"{target}\" }}"));
    let namespaces: Vec<String> = namespaces.collect();
    context.sealblock.configure(&format!("[[subsystems]]\nname = \"s\"\nnamespaces = [{}]\n", namespaces.join(", ")))
}

pub fn run(context: &mut TestContext<'_>) -> Result<()> {
    context.sealblock.create("a", "4MiB", &[])?;
    context.sealblock.create("b", "1536KiB", &["--block-size", "512"])?;
    other_replicas_come_and_go(context)?;
    the_first_comes_and_goes(context)?;
    ["a", "b"].iter().try_for_each(|name| context.sealblock.succeed(&["verify", name]).map(drop))
}

fn other_replicas_come_and_go(context: &mut TestContext<'_>) -> Result<()> {
    let alone = [(1, "a")];
    let all = [&alone[..], &OTHERS].concat();
    let numbers: Vec<String> = OTHERS.iter().map(|(nsid, _)| nsid.to_string()).collect();
    let script = |text: &str| [FUNCTIONS, text].concat().replace("@OTHERS@", &numbers.join(" "));
    configure(context, &alone)?;
    let mut server = context.sealblock.serve_configured()?;
    context.sh(&server, &[FUNCTIONS, ATTACH, LOAD].concat().replace("@LOAD@", "1"))?;
    for round in 0..ROUNDS {
        configure(context, &all)?;
        server.reload()?;
        context.sh(&server, &script(CAME)).with_context(|| format!("added, round {round}"))?;
        configure(context, &alone)?;
        server.reload()?;
        context.sh(&server, &script(WENT)).with_context(|| format!("removed, round {round}"))?;
    }
    // A number above the highest is refused, and nothing changes.
    configure(context, &[(1, "a"), (1025, "b")])?;
    let reason = server.reload_refused()?;
    if !reason.contains("1025") || !reason.contains("1024") {
        bail!("the reason names neither the number nor the limit: {reason}");
    }
    said_of_pauses(&context.sh(&server, &[FUNCTIONS, END].concat())?)?;
    server.stop()
}

fn the_first_comes_and_goes(context: &mut TestContext<'_>) -> Result<()> {
    configure(context, &[(1, "a"), (2, "b")])?;
    let mut server = context.sealblock.serve_configured()?;
    context.sh(&server, &[FUNCTIONS, ATTACH, FILL, LOAD].concat().replace("@LOAD@", "2"))?;
    for round in 0..ROUNDS {
        configure(context, &[(2, "b")])?;
        server.reload()?;
        context
            .sh(&server, &[FUNCTIONS, FIRST_WENT].concat())
            .with_context(|| format!("the first removed, round {round}"))?;
        configure(context, &[(1, "a"), (2, "b")])?;
        server.reload()?;
        context
            .sh(&server, &[FUNCTIONS, FIRST_CAME].concat())
            .with_context(|| format!("the first added, round {round}"))?;
    }
    said_of_pauses(&context.sh(&server, &[FUNCTIONS, END].concat())?)?;
    server.stop()
}

/// The last line of the load's output has the longest wait in ms.
fn said_of_pauses(said: &str) -> Result<()> {
    let longest: u64 = said.lines().last().unwrap_or_default().trim().parse().context("reading the longest wait")?;
    eprintln!("  requests waited for {longest} ms at most while namespaces came and went");
    if longest > PAUSE_MS {
        bail!("a request waited for {longest} ms");
    }
    Ok(())
}

/// Checks what must not change: the controller, its serial number, the disk under load, and the load.
const FUNCTIONS: &str = r#"
serial() { nvme id-ctrl /dev/$(cat /tmp/controller) --output-format=json | sed -n 's/.*"sn" *: *"\(.*\)".*/\1/p'; }
identity() { echo "$(cat /sys/class/nvme/$(cat /tmp/controller)/cntlid) $(serial) $(cat /sys/block/$(cat /tmp/disk)/diskseq)"; }
goes_on() {
  load_works
  [ "$(identity)" = "$(cat /tmp/identity)" ] || fail "controller, serial and disk were $(cat /tmp/identity) and are $(identity)"
}
vanishes() {
  for try in $(seq 200); do
    disk=$(there $1) && [ -n "$disk" ] || return 0
    sleep 0.1
  done
  fail "namespace $1 stays as $disk"
}
there() {
  for folder in /sys/block/nvme*; do
    [ "$(cat "$folder/nsid" 2>/dev/null)" != "$1" ] || echo ${folder##*/}
  done
}
"#;

const ATTACH: &str = r#"
mark
attach s >/dev/null
block s @LOAD@ >/tmp/disk
controller $(cat /tmp/disk) >/tmp/controller
identity >/tmp/identity
"#;

/// The content of the first namespace, which is removed and added again.
const FILL: &str = r#"
conformance guest fill /dev/$(block s 1) 51
"#;

/// The load writes and reads back in rounds of some seconds, and records the longest wait of each round.
const LOAD: &str = r#"
dev=$(cat /tmp/disk)
rm -f /tmp/load /tmp/load.*
(
  while [ ! -e /tmp/load.stop ]; do
    fio --name=load --filename=/dev/$dev --direct=1 --ioengine=libaio --iodepth=8 --rw=randwrite --bs=4k --size=1m --io_size=1m \
      --rate_iops=200 --verify=crc32c --verify_fatal=1 --output-format=json --output=/tmp/load || { echo badly >/tmp/load.status; exit; }
    sed -n '/"clat_ns"/,/}/s/.*"max" : \([0-9]*\).*/\1/p' /tmp/load >>/tmp/load.waits
  done
  echo well >/tmp/load.status
) >/tmp/load.said 2>&1 &
"#;

/// The namespaces are there, each with its own content; only the volume still has data from the previous round.
const CAME: &str = r#"
[ -e /tmp/round ] || echo 60 >/tmp/round
round=$(cat /tmp/round)
for nsid in @OTHERS@; do
  dev=$(block s $nsid)
  echo $dev $(blockdev --getsize64 /dev/$dev)
  conformance guest fill /dev/$dev $((round + nsid % 7))
done
for nsid in @OTHERS@; do
  conformance guest check /dev/$(block s $nsid) $((round + nsid % 7))
done
echo $((round + 10)) >/tmp/round
goes_on
"#;

const WENT: &str = r#"
for nsid in @OTHERS@; do vanishes $nsid; done
goes_on
"#;

const FIRST_WENT: &str = r#"
vanishes 1
goes_on
"#;

const FIRST_CAME: &str = r#"
conformance guest check /dev/$(block s 1) 51
goes_on
"#;

/// Stops the load and prints the longest wait in ms.
const END: &str = r#"
goes_on
load_ends
calm
if said | grep -iE 'reconnect|resetting|timeout'; then fail "the host has lost its controller"; fi
detach s
[ -s /tmp/load.waits ] || fail "no record of how long requests waited"
echo $(($(sort -n /tmp/load.waits | tail -n 1) / 1000000))
"#;
