//! What a guard of the host costs that changes to another one at the boundary, as `attach --pi` and a host with DIX do it.
//!
//! Claim: none; it is the price of a way that no bit goes without a check. The host makes tags of its own guard for what it writes; at the boundary they are
//! checked while those of the namespace are made in the same pass, and what is read goes the other way round and is checked by the host's guard again.
//! The namespace has CRC-64 in any case, and the target checks it. Both are on one core, whose CPU time is printed for each GiB of data: a kernel that makes
//! tags before a server sees the data pays the first half, and the server the other. A host that makes the tags of the wire itself has no boundary; the
//! others are compared with it.

use anyhow::Context;
use sealblock_integrity::{GuardKind, PiFormat, ProtectionType};

use crate::load::Load;
use crate::nvme_tcp::{self, Contender};
use crate::options::{Protection, RemoteOptions};
use crate::remote::{self, Serving};
use crate::report::Spread;

const GIB: f64 = (1_u64 << 30) as f64;
/// The guards of the host; the first one is that of the namespace.
pub const HOSTS: [GuardKind; 4] = [GuardKind::Crc64, GuardKind::IpChecksum, GuardKind::Crc16, GuardKind::Crc32c];

const fn load(name: &'static str, write: bool, blocks: u64, depth: u64) -> Load {
    Load { name, write, blocks, random: false, depth, flush_every: 0 }
}

/// Reads and writes of 8 and 256 KiB, one and 32 at a time.
pub const LOADS: [Load; 8] = [
    load("read 8 KiB, QD 1", false, 2, 1),
    load("read 8 KiB, QD 32", false, 2, 32),
    load("read 256 KiB, QD 1", false, 64, 1),
    load("read 256 KiB, QD 32", false, 64, 32),
    load("write 8 KiB, QD 1", true, 2, 1),
    load("write 8 KiB, QD 32", true, 2, 32),
    load("write 256 KiB, QD 1", true, 64, 1),
    load("write 256 KiB, QD 32", true, 64, 32),
];

/// Tags with a guard of this kind, as all of this has them.
pub const fn format(guard: GuardKind) -> PiFormat {
    PiFormat::with_default_storage_tag(guard, ProtectionType::Type1)
}

/// Measures everything and prints it.
pub fn run(options: RemoteOptions) -> anyhow::Result<()> {
    let options = RemoteOptions { guards: vec![Protection(Some(format(HOSTS[0])))], ..options };
    for device in options.devices.clone() {
        let (served, _scratch) = nvme_tcp::served(&options, &device)?;
        let (_target, serving) = remote::start(&options, options.spin_us, &served)?;
        let (_cores, host) = remote::core(options.host_cpu, options.spin_us)?;
        println!("{device}, tags of the namespace: crc64");
        let (options, serving) = (options.clone(), serving.clone());
        let bench = remote::wait(host.call(move || bench(options, serving)))?;
        bench.context("the host's core is gone")??;
    }
    Ok(())
}

/// A host with this guard. That of the namespace goes through no boundary.
pub async fn host(guard: GuardKind, serving: &Serving) -> anyhow::Result<Contender> {
    let own = (guard != HOSTS[0]).then(|| format(guard));
    Contender::tagged(guard.to_string(), serving, own).await
}

async fn bench(options: RemoteOptions, serving: Serving) -> anyhow::Result<()> {
    let mut contenders = Vec::new();
    for guard in HOSTS {
        contenders.push(host(guard, &serving).await?);
    }
    for load in LOADS.iter().filter(|load| load.name.contains(&options.only)) {
        let rounds = nvme_tcp::rounds(&options, &contenders, *load).await?;
        println!("{}", load.name);
        for (index, contender) in contenders.iter().enumerate() {
            let cpu = |m: &nvme_tcp::Measured| m.host_cpu * 1e3 * GIB / m.turn.bytes as f64;
            let ratio = |of: fn(&nvme_tcp::Measured) -> f64| {
                Spread::of(rounds.iter().map(|round| of(&round[index]) / of(&round[0]))).median * 100.0
            };
            let spread = Spread::of(rounds.iter().map(|round| cpu(&round[index]) / cpu(&round[0])));
            println!(
                "  host {:10} {:8.0} /s ({:5.1} %)   CPU of the host {:7.1} ms/GiB   {:5.1} % [{:5.1} .. {:5.1}]",
                contender.name,
                nvme_tcp::median(&rounds, index, |m| m.turn.rate()),
                ratio(|m| m.turn.rate()),
                nvme_tcp::median(&rounds, index, cpu),
                spread.median * 100.0,
                spread.least * 100.0,
                spread.most * 100.0,
            );
        }
    }
    Ok(())
}
