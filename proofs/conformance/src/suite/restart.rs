//! A server that is killed or stopped under load, and a controller that is reset: the host waits, reconnects and
//! continues, and all flushed data are there.

use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::context::TestContext;
use crate::served::Server;

/// The host's retry options: it retries each second, for two minutes.
const OPTIONS: &str = "--reconnect-delay=1 --ctrl-loss-tmo=120";

/// The event under load.
#[derive(Clone, Copy, Debug)]
enum Event {
    /// The server is killed.
    Kill,
    /// The server is stopped.
    Stop,
    /// The host resets its controller.
    Reset,
}

fn happen(event: Event, context: &mut TestContext<'_>, server: &mut Server) -> Result<()> {
    match event {
        Event::Kill => server.kill()?,
        Event::Stop => server.stop()?,
        Event::Reset => return context.sh(server, "nvme reset /dev/$(controller $(attached v))").map(drop),
    }
    // Long enough for the host to notice the loss and to retry in vain.
    thread::sleep(Duration::from_millis(1200));
    server.start()
}

pub fn run(context: &mut TestContext<'_>) -> Result<()> {
    context.sealblock.create("v", "64MiB", &[])?;
    let mut server = context.sealblock.serve(&["v"], &[])?;
    context.sh(&server, &format!("attach v {OPTIONS}"))?;
    for event in [Event::Kill, Event::Stop, Event::Reset] {
        context.sh(&server, START)?;
        for _ in 0..2 {
            thread::sleep(Duration::from_millis(1500));
            happen(event, context, &mut server)?;
        }
        context.sh(&server, END).with_context(|| format!("after {event:?}"))?;
    }
    context.sh(&server, "detach v")?;
    server.stop()?;
    context.sealblock.succeed(&["verify", "v"]).map(drop)
}

/// Verified writes continue while the script runs; another file is flushed before the event.
///
/// SIGPIPE is ignored. Linux's host sends from within the writer's own system call, without MSG_NOSIGNAL, so a
/// connection that ends at that moment would kill the writing program ("failed to send request -32"), although the
/// request itself is repeated.
const START: &str = r#"
dev=$(attached v)
random 8388608 >/tmp/flushed
dd if=/tmp/flushed of=/dev/$dev bs=1M seek=48 oflag=direct conv=fsync,notrunc status=none
rm -f /tmp/fio.status
(
  trap '' PIPE
  fio --name=load --filename=/dev/$dev --direct=1 --ioengine=libaio --iodepth=16 --rw=randwrite --bs=4k --size=32m --fsync=64 \
    --rate_iops=400 --time_based --runtime=8 --output=/tmp/fio.load && fio --name=after --filename=/dev/$dev --direct=1 --ioengine=libaio \
    --iodepth=16 --rw=randwrite --bs=16k --size=16m --verify=crc32c --verify_fatal=1 --output=/tmp/fio.load
  echo $? >/tmp/fio.status
) >/tmp/fio.said 2>&1 &
"#;

const END: &str = r#"
for try in $(seq 100); do
  [ -e /tmp/fio.status ] && break
  sleep 1
done
[ "$(cat /tmp/fio.status)" = 0 ] || { cat /tmp/fio.said /tmp/fio.load; fail "the load did not survive"; }
dev=$(attached v)
[ "$(cat /sys/class/nvme/$(controller $dev)/state)" = live ] || fail "the controller is not live"
dd if=/dev/$dev of=/tmp/back bs=1M skip=48 count=8 iflag=direct status=none
cmp /tmp/flushed /tmp/back
"#;
