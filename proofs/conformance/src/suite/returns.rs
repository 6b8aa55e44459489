//! A subsystem that is removed while a host uses it, and returns before the host stops retrying. It is removed from the
//! configuration, or missing after a restart of the server.
//!
//! The host retries, gets the status that the subsystem does not exist, and keeps retrying, because Do Not Retry is
//! clear. When the subsystem returns, the same controller and the same disk continue, and requests in flight get no
//! error. A host with a shorter time limit stops retrying when that expires, and not earlier.

use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::context::TestContext;
use crate::served::Server;

/// Three subsystems: one that returns, one that does not, and one that stays.
const RETURNS: &str = "[[subsystems]]\nname = \"returns\"\nnamespaces = [{ target = \"a\" }]\n";
const LOST: &str = "[[subsystems]]\nname = \"lost\"\nnamespaces = [{ target = \"mem:4MiB\" }]\n";
const STAYS: &str = "[[subsystems]]\nname = \"stays\"\nnamespaces = [{ target = \"b\" }]\n";

/// How a subsystem is removed, and how it returns.
#[derive(Clone, Copy, Debug)]
enum Event {
    /// A running server reloads its configuration, both times.
    Reload,
    /// The server is killed; the next one has the subsystem only after a reload.
    Kill,
    /// The server is killed; the next one does not have the subsystem, and is killed too.
    KillTwice,
}

pub fn run(context: &mut TestContext<'_>) -> Result<()> {
    for name in ["a", "b"] {
        context.sealblock.create(name, "8MiB", &[])?;
    }
    context.sealblock.configure(&[RETURNS, LOST, STAYS].concat())?;
    let mut server = context.sealblock.serve_configured()?;
    context.sh(&server, &[FUNCTIONS, START].concat())?;
    for event in [Event::Reload, Event::Kill, Event::KillTwice] {
        context.sh(&server, &[FUNCTIONS, BEFORE].concat())?;
        goes(event, context, &mut server).with_context(|| format!("{event:?}"))?;
        context.sh(&server, &[FUNCTIONS, AWAY].concat()).with_context(|| format!("gone by {event:?}"))?;
        comes(event, context, &mut server).with_context(|| format!("{event:?}"))?;
        context.sh(&server, &[FUNCTIONS, BACK].concat()).with_context(|| format!("back after {event:?}"))?;
    }
    context.sh(&server, &[FUNCTIONS, END].concat())?;
    server.stop()?;
    ["a", "b"].iter().try_for_each(|name| context.sealblock.succeed(&["verify", name]).map(drop))
}

fn goes(event: Event, context: &TestContext<'_>, server: &mut Server) -> Result<()> {
    context.sealblock.configure(STAYS)?;
    match event {
        Event::Reload => server.reload(),
        Event::Kill | Event::KillTwice => {
            server.kill()?;
            // Long enough for the host to have retried without a server.
            thread::sleep(Duration::from_millis(1500));
            server.start()
        }
    }
}

fn comes(event: Event, context: &TestContext<'_>, server: &mut Server) -> Result<()> {
    context.sealblock.configure(&[RETURNS, STAYS].concat())?;
    match event {
        Event::Reload | Event::Kill => server.reload(),
        Event::KillTwice => {
            server.kill()?;
            server.start()
        }
    }
}

const FUNCTIONS: &str = r#"
# state NAME: what a subsystem's controller does, as Linux has it.
state() { cat /sys/class/nvme/$(cat /tmp/controller.$1)/state 2>/dev/null || echo gone; }
# identity NAME: what has to stay the same.
identity() {
  name=$(cat /tmp/controller.$1) disk=$(cat /tmp/disk.$1)
  echo $name $(cat /sys/class/nvme/$name/dev) $disk $(cat /sys/block/$disk/dev) $(cat /sys/block/$disk/diskseq) $(cat /sys/block/$disk/wwid)
}
# refusals NAME: how often a Connect was refused since the mark because there is no such subsystem.
refusals() {
  said | grep -c "nvme $(cat /tmp/controller.$1): Connect Invalid Data Parameter, subsysnqn \"$NQN:$1\"" || true
}
# becomes NAME STATE: waits for it. What is gone does not come back.
becomes() {
  for try in $(seq 300); do
    state=$(state $1)
    [ "$state" != $2 ] || return 0
    [ "$state" != gone ] || break
    sleep 0.1
  done
  said
  fail "the controller of $1 is $state, not $2"
}
# written NAME: writes that the disk's path has done; 6.1 does not count those of the disk.
written() { disk=$(cat /tmp/disk.$1); set -- $(cat /sys/block/${disk%n*}c*n${disk##*n}/stat); echo $5; }
# writes NAME MORE TRIES: waits, a tenth of a second at a time, until more than so many further writes are done.
writes() {
  before=$(written $1)
  for try in $(seq $3); do
    [ "$(written $1)" -le $((before + $2)) ] || return 0
    sleep 0.1
  done
  [ "$(written $1)" -gt $((before + $2)) ] || fail "$(($(written $1) - before)) writes to $1, and not more than $2"
}
"#;

/// A checked load writes all the time. Each write is durable when it completes, so a killed server keeps it.
///
/// SIGPIPE is ignored, as in `restart.rs`.
const START: &str = r#"
mark
rm -f /tmp/load* /tmp/refusals*
for name in returns lost stays; do
  limit=120; [ $name != lost ] || limit=8
  attach $name --reconnect-delay=1 --ctrl-loss-tmo=$limit >/tmp/disk.$name
  controller $(cat /tmp/disk.$name) >/tmp/controller.$name
  identity $name >/tmp/identity.$name
done
for name in returns stays; do
  (
    trap '' PIPE
    while [ ! -e /tmp/load.stop ]; do
      fio --name=load --filename=/dev/$(cat /tmp/disk.$name) --direct=1 --sync=1 --ioengine=libaio --iodepth=8 --rw=randwrite --bs=4k \
        --size=1m --io_size=1m --rate_iops=200 --verify=crc32c --verify_fatal=1 --output=/tmp/load.$name ||
        { echo badly >/tmp/load.status.$name; exit; }
    done
    echo well >/tmp/load.status.$name
  ) >/tmp/load.said.$name 2>&1 &
done
(
  trap '' PIPE
  while dd if=/dev/$(cat /tmp/disk.lost) of=/dev/null bs=4096 count=16 iflag=direct; do sleep 0.05; done
  echo ended >/tmp/load.status.lost
) >/tmp/load.said.lost 2>&1 &
"#;

const BEFORE: &str = r#"
for name in returns stays; do
  writes $name 20 100
  load_works $name
done
mark
"#;

const AWAY: &str = r#"
becomes returns connecting
for try in $(seq 200); do
  [ "$(refusals returns)" -lt 3 ] || break
  sleep 0.1
done
[ "$(refusals returns)" -ge 3 ] || { said; fail "the host was refused $(refusals returns) times"; }
[ "$(state returns)" = connecting ] || fail "the controller is $(state returns)"
[ -e /sys/block/$(cat /tmp/disk.returns) ] || fail "the disk is gone"
becomes stays live
for name in returns stays; do load_works $name; done
"#;

const BACK: &str = r#"
becomes returns live
for name in returns stays; do
  writes $name 50 300
  load_works $name
  [ "$(identity $name)" = "$(cat /tmp/identity.$name)" ] || fail "$name was $(cat /tmp/identity.$name) and is $(identity $name)"
done
# The host retried the one with the shorter time until that was over.
if [ ! -e /tmp/refusals.lost ]; then
  becomes lost gone
  refusals lost >/tmp/refusals.lost
  [ "$(cat /tmp/refusals.lost)" -ge 6 ] || { said; fail "the host was refused $(refusals lost) times in eight seconds"; }
  for try in $(seq 100); do
    [ ! -e /tmp/load.status.lost ] || break
    sleep 0.1
  done
  [ -e /tmp/load.status.lost ] || { cat /tmp/load.said.lost; fail "reads of what is lost do not end"; }
fi
"#;

const END: &str = r#"
for name in returns stays; do load_ends $name; done
nvme disconnect-all
"#;
