//! The cost of tags that the guest's kernel makes and checks, over ublk: CPU time of the whole guest, including the
//! server.
//!
//! This measurement supports no claim: in an emulator, checksum instructions cost more than on any real processor.

use std::collections::BTreeMap;

use anyhow::{Context, Result};

use super::ublk::FUNCTIONS;
use crate::context::{OwnGuestContext, quiet, succeed};

/// Guards that the kernel supports; the first is a block device without tags.
const GUARDS: [&str; 4] = ["none", "ip", "crc16", "crc64"];
const ROUNDS: usize = 5;
const MIB: usize = 48;

pub fn run(context: &OwnGuestContext<'_>) -> Result<()> {
    let mut guest = context.boot(Vec::new(), 2)?;
    succeed(&mut guest, &format!("{FUNCTIONS}\nMIB={MIB}\n{VOLUME}"))?;
    let mut costs: BTreeMap<&str, Vec<[u64; 2]>> = BTreeMap::new();
    for _ in 0..ROUNDS {
        for guard in GUARDS {
            let said = succeed(&mut guest, &format!("{FUNCTIONS}\nMIB={MIB}\nguard={guard}\n{ROUND}"))?;
            let ticks: Vec<u64> = said.split_whitespace().map(str::parse).collect::<Result<_, _>>()?;
            costs.entry(guard).or_default().push(ticks[..].try_into().context("a write and a read")?);
        }
    }
    let median = |guard: &str, way: usize| {
        let mut ticks: Vec<u64> = costs[guard].iter().map(|cost| cost[way]).collect();
        ticks.sort_unstable();
        ticks[ROUNDS / 2] as f64
    };
    for guard in GUARDS {
        let [write, read] = [0, 1].map(|way| {
            let (with, without) = (median(guard, way), median(GUARDS[0], way));
            // A tick is 10 ms.
            format!("{:.1} s ({:.0} %)", with / 100.0 * 1024.0 / MIB as f64, with / without * 100.0)
        });
        eprintln!(
            "  CPU of the guest for a GiB in 256 KiB, its kernel's guard {guard}: {write} to write, {read} to read"
        );
    }
    quiet(&mut guest)
}

/// A volume with CRC-64 tags, and a file with data for all of it.
const VOLUME: &str = r#"
sealblock create v --size ${MIB}MiB --guard crc64
random $((MIB * 1048576)) >data
"#;

/// Writes and reads the whole volume through its block device, and prints the guest's busy clock ticks for each.
const ROUND: &str = r#"
busy() {
  read -r _ user nice system _ _ irq softirq _ </proc/stat
  echo $((user + nice + system + irq + softirq))
}
case $guard in
  none) attach v ;;
  *) attach v --pi $guard ;;
esac
first=$(busy)
dd if=data of=$disk bs=256k oflag=direct conv=fsync status=none
second=$(busy)
dd if=$disk of=/dev/null bs=256k iflag=direct status=none
echo $((second - first)) $(($(busy) - second))
kill -TERM $server
ends
"#;
