//! The other direction: our host device against a broken target.
//!
//! Whatever the host receives, each of its calls must complete within the timeouts of its options, without a panic, and
//! without more memory than its queues need. The result is an error or a response; a response can be checked only if no
//! PDU was corrupted.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use sealblock_block::{Device, Durability, Expectations, Request};
use sealblock_integrity::{Sealed, Tags};
use sealblock_media_nvme_tcp::{NvmeTcpDevice, Options, Reconnect, discover};
use sealblock_runtime_memory::Slice;
use sealblock_runtime_reactor::{Config, Reactor, timeout};
use sealblock_units::Extent;

use crate::process::{PLAIN, PROTECTED};
use crate::proxy::Proxy;
use crate::wire::{HANG_TIMEOUT, SUBNQN};
use fastrand::Rng;

/// The counters of a host's calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Namespaces that were opened.
    pub opened: u64,
    /// Namespaces that failed to open.
    pub refused: u64,
    /// Requests that succeeded.
    pub succeeded: u64,
    /// Requests that failed.
    pub failed: u64,
    /// PDUs that were corrupted.
    pub corrupted: u64,
    /// Discovery logs that were read.
    pub discovered: u64,
}

/// Returns options with short timeouts, for a target that stops responding. A correct target behind a proxy that
/// corrupts nothing is slow only if the machine is, so it gets the longest timeouts.
fn options(random: &mut Rng, is_clean: bool) -> Options {
    let options = Options {
        queues: 1 + random.u16(..2),
        queue_depth: 8,
        header_digest: random.u64(..4) == 0,
        data_digest: random.u64(..4) == 0,
        transfer_bytes: 64 << 10,
        connect_timeout: Duration::from_millis(1000),
        request_timeout: Duration::from_millis(1000),
        keep_alive: Duration::from_millis(2000),
        shutdown_timeout: Duration::from_millis(500),
        retries: 1,
        max_connection_losses: 1,
        reconnect: Reconnect {
            attempts: 2,
            total: Duration::from_millis(1500),
            first_delay: Duration::from_millis(10),
            max_delay: Duration::from_millis(50),
        },
        ..Options::default()
    };
    if is_clean {
        let (connect_timeout, request_timeout, keep_alive) = (HANG_TIMEOUT, HANG_TIMEOUT, 4 * HANG_TIMEOUT);
        return Options { connect_timeout, request_timeout, keep_alive, shutdown_timeout: HANG_TIMEOUT, ..options };
    }
    options
}

/// Runs sessions with these seeds, the first behind a proxy that corrupts nothing.
///
/// # Errors
/// As for [`session`]; the error has the seed.
pub fn sessions(target: SocketAddr, seed: u64, count: u64) -> Result<Summary> {
    let clean = session(target, seed, 0).context("nothing was corrupted")?;
    ensure!(clean.opened == 1 && clean.failed == 0 && clean.corrupted == 0, "nothing was corrupted: {clean:?}");
    let mut all = Summary::default();
    for seed in seed..seed + count {
        // With rare corruption sessions reach late steps; with frequent corruption the first steps are tested.
        let one_in = [3, 8, 20, 60][seed as usize % 4];
        let one = session(target, seed, one_in).with_context(|| format!("seed {seed}"))?;
        all.opened += one.opened;
        all.refused += one.refused;
        all.succeeded += one.succeeded;
        all.failed += one.failed;
        all.corrupted += one.corrupted;
        all.discovered += one.discovered;
    }
    Ok(all)
}

/// Peak resident memory of this process, in MiB.
///
/// # Errors
/// If the system does not report it.
pub fn peak_mib() -> Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status").context("reading the status of this process")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).context("VmHWM")?;
    Ok(line.trim().trim_end_matches(" kB").parse::<u64>()? >> 10)
}

/// Opens a namespace behind a proxy that corrupts one PDU in `one_in` (0: none), and uses it.
///
/// # Errors
/// If a call does not complete, or if any error occurs although no PDU was corrupted.
pub fn session(target: SocketAddr, seed: u64, one_in: u64) -> Result<Summary> {
    let proxy = Proxy::start(target, seed, if one_in == 0 { u64::MAX } else { one_in })?;
    let mut random = Rng::with_seed(seed);
    let reactor = Reactor::new(Config { pool_arena_bytes: 4 << 20, ..Config::default() })?;
    let mut summary = reactor.block_on(host(proxy.address, &mut random, one_in == 0))?;
    drop(reactor);
    summary.corrupted = proxy.corrupted();
    Ok(summary)
}

async fn host(address: SocketAddr, random: &mut Rng, is_clean: bool) -> Result<Summary> {
    let mut summary = Summary::default();
    let options = options(random, is_clean);
    let log = timeout(HANG_TIMEOUT, discover(address.into(), options.clone()))
        .await
        .context("a discovery that never ends")?;
    ensure!(!is_clean || log.is_ok(), "a discovery of a good target: {log:?}");
    summary.discovered += u64::from(log.is_ok());
    let nsid = [PLAIN, PROTECTED][random.usize(..2)];
    let open = NvmeTcpDevice::connect(address.into(), SUBNQN.parse()?, Some(nsid), options);
    let device = match timeout(HANG_TIMEOUT, open).await.context("opening that never ends")? {
        Ok(device) => device,
        Err(error) if is_clean => return Err(error).context("opening a namespace of a good target"),
        Err(_) => return Ok(Summary { refused: 1, ..summary }),
    };
    summary.opened = 1;
    for _ in 0..24 {
        let operation = random_request(&device, random)?;
        let kind = operation.kind();
        let outcome = timeout(HANG_TIMEOUT, device.execute(operation)).await;
        let outcome = outcome.with_context(|| format!("{kind:?} never ends"))?;
        match outcome {
            Ok(_) => summary.succeeded += 1,
            Err(error) if is_clean => return Err(error).with_context(|| format!("{kind:?} at a good target")),
            Err(_) => summary.failed += 1,
        }
    }
    timeout(HANG_TIMEOUT, device.close()).await.context("closing that never ends")?;
    Ok(summary)
}

/// Returns a random request.
fn random_request(device: &NvmeTcpDevice, random: &mut Rng) -> Result<Request> {
    let geometry = device.geometry();
    let capacity = geometry.capacity_blocks;
    let count = (1 + random.u64(..12)).min(capacity);
    let extent = Extent::from_raw(random.u64(..capacity - count + 1), count)?;
    let bytes = vec![random.u8(..); count as usize * geometry.block_size.bytes()];
    let tags = Tags { app_tag: 0, storage_tag: 0, initial_ref_tag: extent.start().get() };
    let durability = Durability::Volatile;
    Ok(match random.u64(..6) {
        0 | 1 => Request::read(extent, Expectations::NONE),
        2 => {
            let data = Sealed::seal(Slice::copy_from(&bytes), geometry.block_size, geometry.protection, &tags);
            Request::write(extent, data, durability)
        }
        3 => Request::verify(extent, Expectations::NONE),
        4 => Request::write_zeroes(extent, true, durability),
        _ => Request::flush(),
    })
}
