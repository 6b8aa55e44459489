//! A server that dies under load, and one that is stopped: the host waits, comes back and goes on, and what it flushed is
//! there.

use std::thread;
use std::time::Duration;

use anyhow::Result;

use crate::bench::Bench;
use crate::served::Server;

/// The host's patience: it tries again each second, for two minutes.
const OPTIONS: &str = "--reconnect-delay=1 --ctrl-loss-tmo=120";

pub fn run(bench: &mut Bench<'_>) -> Result<()> {
    bench.sealblock.create("v", "64MiB", &[])?;
    let mut server = bench.sealblock.serve(&["v"], &[])?;
    bench.sh(&server, &format!("attach v {OPTIONS}"))?;
    for kill in [true, false] {
        let restart = |server: &mut Server| -> Result<()> {
            if kill {
                server.kill()?
            } else {
                server.stop()?
            }
            // Long enough for the host to notice, on either side of its first try.
            thread::sleep(Duration::from_millis(1200));
            server.start()
        };
        bench.sh(&server, START)?;
        for _ in 0..2 {
            thread::sleep(Duration::from_millis(1500));
            restart(&mut server)?;
        }
        bench.sh(&server, END)?;
    }
    bench.sh(&server, "detach v")?;
    server.stop()?;
    bench.sealblock.succeed(&["verify", "v"]).map(drop)
}

/// Writes with checks go on behind the script; another file is flushed before anything happens.
const START: &str = r#"
dev=$(attached v)
dd if=/dev/urandom of=/tmp/flushed bs=1M count=8 status=none
dd if=/tmp/flushed of=/dev/$dev bs=1M seek=48 oflag=direct conv=fsync,notrunc status=none
rm -f /tmp/fio.status
(
  fio --name=load --filename=/dev/$dev --direct=1 --ioengine=libaio --iodepth=16 --rw=randwrite --bs=4k --size=32m --fsync=64 \
    --time_based --runtime=8 --output=/tmp/fio.load && fio --name=after --filename=/dev/$dev --direct=1 --ioengine=libaio \
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
