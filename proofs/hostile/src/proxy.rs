//! A broken target: a correct one behind a proxy that corrupts its PDUs.
//!
//! The seed leaves all other PDUs intact, so a host can receive a wrong PDU at every step, also at late ones. The proxy
//! changes whole PDUs: it changes a field of the header or bytes of the data; it drops, duplicates, truncates or delays
//! a PDU, or replaces it by random bytes; and sometimes it closes the connection or stops sending.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context, Result};

use fastrand::Rng;

/// A running proxy; stops when dropped.
pub struct Proxy {
    /// Where it listens.
    pub address: SocketAddr,
    state: Arc<ProxyState>,
    thread: Option<JoinHandle<()>>,
}

struct ProxyState {
    target: SocketAddr,
    seed: u64,
    /// One PDU in this many is corrupted.
    one_in: u64,
    is_stopping: AtomicBool,
    corrupted: AtomicU64,
}

impl Proxy {
    /// Starts in front of `target`, and corrupts one PDU in `one_in`.
    pub fn start(target: SocketAddr, seed: u64, one_in: u64) -> Result<Proxy> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("listening")?;
        let address = listener.local_addr()?;
        let (stops, corrupted) = (AtomicBool::new(false), AtomicU64::new(0));
        let shared = Arc::new(ProxyState { target, seed, one_in, is_stopping: stops, corrupted });
        let kept = Arc::clone(&shared);
        let thread = thread::spawn(move || serve(&listener, &shared));
        Ok(Proxy { address, state: kept, thread: Some(thread) })
    }

    /// Number of PDUs corrupted so far.
    pub fn corrupted(&self) -> u64 {
        self.state.corrupted.load(Ordering::Relaxed)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.state.is_stopping.store(true, Ordering::Relaxed);
        // Wakes the thread that accepts.
        drop(TcpStream::connect(self.address));
        if let Some(thread) = self.thread.take() {
            // A panic in the thread has been printed; it is not a finding about the host.
            let _ = thread.join();
        }
    }
}

fn serve(listener: &TcpListener, shared: &Arc<ProxyState>) {
    for (number, host) in (0_u64..).zip(listener.incoming()) {
        if shared.is_stopping.load(Ordering::Relaxed) {
            return;
        }
        let (Ok(host), Ok(target)) = (host, TcpStream::connect(shared.target)) else { continue };
        let shared = Arc::clone(shared);
        // Ends when either socket ends.
        thread::spawn(move || {
            let random = Rng::with_seed(shared.seed.wrapping_mul(1000).wrapping_add(number));
            let (Ok(from_host), Ok(to_target)) = (host.try_clone(), target.try_clone()) else { return };
            let there = thread::spawn(move || copy(from_host, to_target));
            relay_responses(&target, &host, random, &shared);
            let _ = (host.shutdown(Shutdown::Both), target.shutdown(Shutdown::Both), there.join());
        });
    }
}

fn copy(mut from: TcpStream, mut to: TcpStream) {
    let _ = (std::io::copy(&mut from, &mut to), to.shutdown(Shutdown::Both));
}

/// Relays PDUs until either side ends.
fn relay_responses(mut target: &TcpStream, mut host: &TcpStream, mut random: Rng, shared: &ProxyState) {
    let mut kept: Option<Vec<u8>> = None;
    while let Some(mut pdu) = pdu(&mut target) {
        let mut out = Vec::new();
        if random.u64(..shared.one_in) == 0 {
            shared.corrupted.fetch_add(1, Ordering::Relaxed);
            match random.u64(..10) {
                0 => return,
                1 => pdu.clear(),
                2 => pdu.extend_from_within(..),
                3 => pdu.truncate(random.usize(..pdu.len())),
                4 => kept = Some(std::mem::take(&mut pdu)),
                5 => pdu = (0..random.u64(..300)).map(|_| random.u8(..)).collect(),
                6 => silence(host),
                _ => change(&mut pdu, &mut random),
            }
        }
        out.extend(pdu);
        if !out.is_empty() {
            out.extend(kept.take().unwrap_or_default());
        }
        if host.write_all(&out).is_err() {
            return;
        }
    }
}

/// Receives from the host, without ever replying, until it closes.
fn silence(mut host: &TcpStream) {
    let _ = host.set_read_timeout(Some(Duration::from_secs(20)));
    let mut buffer = [0; 512];
    while matches!(host.read(&mut buffer), Ok(1..)) {}
}

/// Offsets in Identify and log pages of the values that a host computes with. Namespace: NSZE, NCAP, NLBAF, FLBAS, MC,
/// DPS, the limits of copies and ranges, LBAF 0 and 1, ELBAF 0. Controller: MDTS, CNTLID, VER, OACS, LPA, ELPE, SQES,
/// MAXCMD, NN, ONCS, VWC, SGLS, IOCCSZ, ICDOFF. Logs: the number of entries, LBA and identifiers.
const FIELDS: [usize; 36] = [
    0, 4, 8, 12, 16, 20, 24, 25, 26, 27, 28, 29, 30, 33, 64, 72, 76, 77, 78, 80, 128, 130, 131, 132, 256, 261, 262,
    512, 514, 516, 520, 525, 536, 1024, 1792, 1796,
];

fn change(pdu: &mut [u8], random: &mut Rng) {
    const C2H_DATA: u8 = 7;
    const ODD: [u32; 10] = [0, 1, 3, 4, 24, 4096, 0x7FFF_FFFF, 0x8000_0000, 0xFFFF_FFFC, u32::MAX];
    for _ in 0..1 + random.u64(..3) {
        // Mostly fields of the header, where the lengths and identifiers are.
        let most = if random.u64(..3) == 0 { pdu.len() } else { pdu.len().min(128) } as u64;
        let mut at = random.u64(..most) as usize;
        if pdu[0] == C2H_DATA && random.u64(..2) == 0 {
            at = (24 + FIELDS[random.usize(..FIELDS.len())]).min(pdu.len() - 1);
        }
        if random.u64(..2) == 0 {
            pdu[at] = random.u8(..);
        } else if let Some(field) = pdu.get_mut(at & !3..(at & !3) + 4) {
            field.copy_from_slice(&ODD[random.usize(..10)].to_le_bytes());
        }
    }
}

/// The next whole PDU of the correct target.
fn pdu(from: &mut impl Read) -> Option<Vec<u8>> {
    let mut pdu = vec![0; 8];
    from.read_exact(&mut pdu).ok()?;
    let plen = u32::from_le_bytes([pdu[4], pdu[5], pdu[6], pdu[7]]) as usize;
    pdu.resize(plen.max(8), 0);
    from.read_exact(&mut pdu[8..]).ok()?;
    Some(pdu)
}
