//! Measures the waits of neighbours during floods of one kind of command on many queues, on a server with its usual
//! limits.
//!
//! For each I/O command, kind of device and number in flight, neighbours read and write one block after another, and
//! flush after a write. They do so on the flooded device and on another one of its kind. No flood uses the neighbours'
//! blocks, so no wait is for a lock on the same blocks. The waits are printed, and marked if they exceed the limit; the
//! test does not fail.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle, sleep};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use fastrand::Rng;
use sealblock_protocols_nvme::nvm::{BlockCommand, IoCommand};
use sealblock_units::Extent;

use crate::floods::{self, Effort, FLOODS, Flood, Kind, QUEUES, Queues, Set, nvme};
use crate::served::Program;
use crate::wire::{Data, Peer, SUBNQN};

/// The minimum limit for 999 in 1,000 waits.
const MAX_WAIT: Duration = Duration::from_millis(100);
/// The limit for 999 in 1,000 waits, as a multiple of the median wait without a flood.
const MAX_RATIO: u32 = 20;
/// The start of the neighbours' blocks, after all blocks that floods use.
const START_BYTES: u64 = 72 << 30;
/// Bytes that a neighbour uses.
const AREA_BYTES: u64 = 16 << 20;
/// Bytes of each of its requests.
const REQUEST_BYTES: u64 = 4096;
/// The pause between two requests.
const REST: Duration = Duration::from_micros(500);
/// How long a flood runs before neighbours are measured.
const RAMP: Duration = Duration::from_millis(500);
/// Commands outstanding on each of the [`QUEUES`] queues: 64 and 256 in flight.
const DEPTHS: [u16; 2] = [8, 32];

/// The request of a neighbour.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Neighbour {
    Read,
    Write,
    /// A flush after a write. The time of the write is not included: [`Neighbour::Write`] measures it.
    Flush,
}

const NEIGHBOURS: [Neighbour; 3] = [Neighbour::Read, Neighbour::Write, Neighbour::Flush];

/// The waits of a neighbour.
#[derive(Clone, Copy, Debug)]
struct Waits {
    requests: usize,
    median: Duration,
    /// The wait that at most one in 1,000 exceeds; with fewer waits, the longest.
    high: Duration,
    worst: Duration,
}

impl Waits {
    fn of(mut waits: Vec<Duration>) -> Waits {
        waits.sort_unstable();
        let high = waits.len() - 1 - waits.len() / 1000;
        Waits {
            requests: waits.len(),
            median: waits[waits.len() / 2],
            high: waits[high],
            worst: waits[waits.len() - 1],
        }
    }

    fn limit(&self) -> Duration {
        MAX_WAIT.max(self.median * MAX_RATIO)
    }
}

impl fmt::Display for Waits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        write!(f, "{:.1} / {:.0} / {:.0}", ms(self.median), ms(self.high), ms(self.worst))
    }
}

/// The table: every I/O flood on every kind of device, each on a server of its own.
///
/// # Errors
/// If a server fails or refuses a neighbour.
pub fn table(program: &Program, effort: &Effort, wanted: impl Fn(&str) -> bool) -> Result<()> {
    println!(
        "{QUEUES} queues for {:.1} s beside each; a neighbour's wait in ms: the median, what at most one in 1,000 exceeds, the worst\n",
        effort.time.as_secs_f64()
    );
    println!("| flood | device | in flight | completed | read | write | flush | elsewhere: read | write | flush |");
    println!("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |");
    let (mut cells, mut missed, mut fewest) = (0, 0, usize::MAX);
    for kind in Kind::ALL {
        let (quiet, _) = row(program, None, kind, effort)?;
        println!("| nothing | {} | 0 | | {} |", kind.name(), joined(&quiet, &quiet, &mut 0));
        for flood in FLOODS.iter().filter(|flood| flood.set == Set::Io && wanted(flood.name)) {
            for outstanding in DEPTHS {
                let effort = Effort { outstanding, ..effort.clone() };
                let (waits, completed) = row(program, Some(flood), kind, &effort)
                    .with_context(|| format!("{}, {}", flood.name, kind.name()))?;
                let in_flight = usize::from(outstanding) * QUEUES;
                let text = joined(&waits, &quiet, &mut missed);
                println!("| {} | {} | {in_flight} | {completed} | {text} |", flood.name, kind.name());
                cells += waits.len();
                fewest = waits.iter().map(|waits| waits.requests).fold(fewest, usize::min);
            }
        }
    }
    println!("\n{missed} of {cells} above {MAX_WAIT:?} and {MAX_RATIO} quiet medians; at least {fewest} requests each");
    Ok(())
}

fn joined(waits: &[Waits], quiet: &[Waits], missed: &mut usize) -> String {
    let cell = |(waits, quiet): (&Waits, &Waits)| {
        let is_missed = waits.high > quiet.limit();
        *missed += usize::from(is_missed);
        if is_missed { format!("**{waits}**") } else { waits.to_string() }
    };
    waits.iter().zip(quiet).map(cell).collect::<Vec<_>>().join(" | ")
}

/// The waits of the neighbours on the flooded device, and of those on the other device; and the number of completed
/// commands of the flood.
fn row(program: &Program, flood: Option<&'static Flood>, kind: Kind, effort: &Effort) -> Result<(Vec<Waits>, u64)> {
    // Each row has its own server and files, so that one flood does not affect the next.
    let folder = tempfile::tempdir().context("making a folder")?;
    let mut process = floods::serve(program, folder.path(), &effort.limits)?;
    for nsid in [kind.nsid(), kind.other_nsid()] {
        fill(process.address, nsid, kind)?;
    }
    let queues = flood.map(|flood| nvme::start(process.address, flood, kind, effort)).transpose()?;
    sleep(RAMP);
    let is_over = Arc::new(AtomicBool::new(false));
    let mut running = Vec::new();
    for nsid in [kind.nsid(), kind.other_nsid()] {
        for neighbour in NEIGHBOURS {
            running.push(start(process.address, nsid, kind, neighbour, &is_over)?);
        }
    }
    sleep(effort.time);
    is_over.store(true, Ordering::Relaxed);
    let joined = running.into_iter().map(|thread| thread.join().map_err(|_| anyhow!("a neighbour panicked"))?);
    let waits = joined.map(|waits| Ok(Waits::of(waits?))).collect::<Result<Vec<_>>>();
    let completed = queues.as_ref().map_or(0, Queues::completed);
    if let Some(queues) = queues {
        queues.cut();
    }
    process.check_alive()?;
    // The server is killed, because nothing needs the remaining writes of the flood, which would take a while.
    process.kill()?;
    Ok((waits?, completed))
}

/// Writes the blocks of the neighbours.
fn fill(address: SocketAddr, nsid: u32, kind: Kind) -> Result<()> {
    const CHUNK_BYTES: u64 = 128 << 10;
    let (_admin, mut io) = queue(address)?;
    let data = vec![0x5A; CHUNK_BYTES as usize];
    for at in 0..AREA_BYTES / CHUNK_BYTES {
        let command = IoCommand::Write(blocks(kind, at * CHUNK_BYTES, CHUNK_BYTES)?).encode(nsid)?;
        let answer = io.call(command, Data::Write(&data))?;
        ensure!(answer.status == 0, "Write: {:#x}", answer.status);
    }
    Ok(())
}

fn queue(address: SocketAddr) -> Result<(Peer, Peer)> {
    let (admin, cntlid) = Peer::admin(address, SUBNQN, 0)?;
    Ok((admin, Peer::io(address, SUBNQN, 1, cntlid)?))
}

fn blocks(kind: Kind, at_bytes: u64, bytes: u64) -> Result<BlockCommand> {
    let block = kind.block_bytes();
    Ok(BlockCommand::new(Extent::from_raw((START_BYTES + at_bytes) / block, bytes / block)?))
}

fn start(
    address: SocketAddr,
    nsid: u32,
    kind: Kind,
    neighbour: Neighbour,
    is_over: &Arc<AtomicBool>,
) -> Result<JoinHandle<Result<Vec<Duration>>>> {
    let (admin, mut io) = queue(address)?;
    let is_over = Arc::clone(is_over);
    Ok(thread::spawn(move || {
        let _admin = admin;
        let (mut waits, mut rng) = (Vec::new(), Rng::with_seed(nsid.into()));
        while waits.is_empty() || !is_over.load(Ordering::Relaxed) {
            let one = blocks(kind, rng.u64(..AREA_BYTES / REQUEST_BYTES) * REQUEST_BYTES, REQUEST_BYTES)?;
            waits.push(wait(neighbour, one, |command, data| {
                let answer = io.call(command.encode(nsid)?, data)?;
                ensure!(answer.status == 0, "{neighbour:?}: {:#x}", answer.status);
                Ok(())
            })?);
            sleep(REST);
        }
        Ok(waits)
    }))
}

/// The duration of one request of the neighbour, without the requests before it.
fn wait(
    neighbour: Neighbour,
    blocks: BlockCommand,
    mut call: impl FnMut(IoCommand, Data<'_>) -> Result<()>,
) -> Result<Duration> {
    let data = [0xA5; REQUEST_BYTES as usize];
    if neighbour == Neighbour::Flush {
        // Only a flush after a write has work to do.
        call(IoCommand::Write(blocks), Data::Write(&data))?;
    }
    let start = Instant::now();
    match neighbour {
        Neighbour::Read => call(IoCommand::Read(blocks), Data::Read(REQUEST_BYTES as usize))?,
        Neighbour::Write => call(IoCommand::Write(blocks), Data::Write(&data))?,
        Neighbour::Flush => call(IoCommand::Flush, Data::None)?,
    }
    Ok(start.elapsed())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wait_for_a_flush_is_without_the_write_before_it() {
        const SLOW: Duration = Duration::from_millis(50);
        let (mut asked, one) = (Vec::new(), BlockCommand::new(Extent::from_raw(0, 1).unwrap()));
        let waited = wait(Neighbour::Flush, one, |command, _| {
            asked.push(matches!(command, IoCommand::Flush));
            sleep(if matches!(command, IoCommand::Flush) { Duration::ZERO } else { SLOW });
            Ok(())
        });
        assert!(waited.unwrap() < SLOW);
        assert_eq!(asked, [false, true], "a write, then a flush");
    }

    #[test]
    fn one_in_a_thousand_may_exceed_the_high_value() {
        let ms = Duration::from_millis;
        let waits = Waits::of((1..=2000).rev().map(ms).collect());
        assert_eq!((waits.high, waits.worst, waits.requests), (ms(1998), ms(2000), 2000));
        assert_eq!(Waits::of(vec![ms(7)]).high, ms(7));
        assert_eq!(Waits::of((1..=999).map(ms).collect()).high, ms(999));
    }
}
