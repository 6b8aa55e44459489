//! Floods over NBD, on a Unix socket: every command of transmission, at its maximum length.

use std::io::{BufReader, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use sealblock_exports_nvme_tcp::Limits;
use sealblock_protocols_nbd::wire::{self, chunk, command, flag, option, rep};

use super::commands::{AREA_BYTES, Kind};
use super::queues::{Busy, Effort, OVERHEAD_BYTES, QUEUES, Queues};
use crate::wire::HANG_TIMEOUT;

/// The longest data of a read or write.
const PAYLOAD_BYTES: u32 = 32 << 20;
/// Bytes reserved for each connection.
const ASIDE_BYTES: u64 = 512 << 10;
/// The longest request without data, in whole blocks.
const LONG_BYTES: u32 = u32::MAX - 4095;

/// A flood of one command.
pub struct NbdFlood {
    /// Its name.
    pub name: &'static str,
    command: u16,
    flags: u16,
    bytes: u32,
}

const fn flood(name: &'static str, command: u16, flags: u16, bytes: u32) -> NbdFlood {
    NbdFlood { name, command, flags, bytes }
}

/// All floods.
pub static NBD_FLOODS: &[NbdFlood] = &[
    flood("nbd-read-4k", command::READ, 0, 4096),
    flood("nbd-read", command::READ, 0, PAYLOAD_BYTES),
    flood("nbd-write-4k", command::WRITE, 0, 4096),
    flood("nbd-write-odd", command::WRITE, 0, 1000),
    flood("nbd-write", command::WRITE, 0, PAYLOAD_BYTES),
    flood("nbd-flush", command::FLUSH, 0, 0),
    flood("nbd-trim", command::TRIM, 0, LONG_BYTES),
    flood("nbd-zeroes", command::WRITE_ZEROES, 0, LONG_BYTES),
    flood("nbd-zeroes-kept", command::WRITE_ZEROES, flag::NO_HOLE, AREA_BYTES as u32),
    flood("nbd-cache", command::CACHE, 0, AREA_BYTES as u32),
    flood("nbd-block-status", command::BLOCK_STATUS, 0, LONG_BYTES),
    flood("nbd-unknown", 0x4242, 0, 4096),
];

impl NbdFlood {
    /// The bytes of one request.
    fn request(&self, turn: u64, outstanding: u64) -> Vec<u8> {
        // Requests that fit in the area begin at multiples of their length, and requests that are not whole blocks at
        // unaligned offsets.
        let places = (AREA_BYTES / u64::from(self.bytes.max(1))).max(1);
        let offset = (turn ^ turn >> 32).wrapping_mul(0x9E37_79B9) % places * u64::from(self.bytes);
        self.request_at(if self.command == command::FLUSH { 0 } else { offset }, turn % outstanding.max(1))
    }

    fn request_at(&self, offset: u64, cookie: u64) -> Vec<u8> {
        let mut bytes = wire::REQUEST_MAGIC.to_be_bytes().to_vec();
        bytes.extend(self.flags.to_be_bytes());
        bytes.extend(self.command.to_be_bytes());
        bytes.extend(cookie.to_be_bytes());
        bytes.extend(offset.to_be_bytes());
        bytes.extend(self.bytes.to_be_bytes());
        if self.command == command::WRITE {
            bytes.resize(bytes.len() + self.bytes as usize, 0);
        }
        bytes
    }
}

/// A connection in transmission, with structured replies and the context of allocation.
fn connect(socket: &Path, export: &str) -> Result<UnixStream> {
    let mut stream = UnixStream::connect(socket).with_context(|| format!("connecting to {}", socket.display()))?;
    stream.set_read_timeout(Some(HANG_TIMEOUT))?;
    stream.read_exact(&mut [0; wire::GREETING_BYTES])?;
    stream.write_all(&3u32.to_be_bytes())?;
    let string = |text: &str| [&(text.len() as u32).to_be_bytes()[..], text.as_bytes()].concat();
    let context = [string(export), 1u32.to_be_bytes().to_vec(), string(wire::BASE_ALLOCATION)].concat();
    let go = [string(export), vec![0, 0]].concat();
    for (option, data) in
        [(option::STRUCTURED_REPLY, Vec::new()), (option::SET_META_CONTEXT, context), (option::GO, go)]
    {
        let mut bytes = wire::OPTION_MAGIC.to_be_bytes().to_vec();
        bytes.extend(option.to_be_bytes());
        bytes.extend((data.len() as u32).to_be_bytes());
        bytes.extend(data);
        stream.write_all(&bytes)?;
        loop {
            let mut head = [0; wire::OPTION_REPLY_BYTES];
            stream.read_exact(&mut head)?;
            let (kind, length) = (dword(&head, 12), dword(&head, 16));
            ensure!(kind < 1 << 31 && length < 1 << 16, "option {option} of {export:?} is answered by {kind:#x}");
            stream.read_exact(&mut vec![0; length as usize])?;
            if kind == rep::ACK {
                break;
            }
        }
    }
    Ok(stream)
}

fn dword(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// Opens the connections of a flood and starts it.
///
/// # Errors
/// If the server refuses a connection.
pub fn start(socket: &Path, flood: &'static NbdFlood, kind: Kind, effort: &Effort) -> Result<Queues> {
    let mut queues = Queues::default();
    for number in 0..QUEUES as u64 {
        let stream = connect(socket, kind.name())?;
        let end = stream.try_clone()?;
        let outstanding = u64::from(effort.outstanding);
        let cut = move || {
            // Fails only if the connection has ended.
            let _ = end.shutdown(Shutdown::Both);
        };
        queues.add(cut, move |busy| keep_busy(&stream, number, flood, outstanding, busy));
    }
    Ok(queues)
}

/// Keeps requests outstanding until told to stop.
fn keep_busy(stream: &UnixStream, number: u64, flood: &'static NbdFlood, outstanding: u64, busy: &Busy) -> Result<()> {
    let mut sender = stream.try_clone()?;
    let (send, sends) = std::sync::mpsc::channel::<u64>();
    // In a separate thread, because a server that waits for room to send receives nothing. Requests are made one by
    // one, so that few are in memory.
    std::thread::spawn(move || {
        for turn in sends {
            if sender.write_all(&flood.request(turn, outstanding)).is_err() {
                return;
            }
        }
    });
    let mut turns = (number << 32)..;
    let mut submit = |count: u64| turns.by_ref().take(count as usize).all(|turn| send.send(turn).is_ok());
    let mut replies = BufReader::new(stream);
    ensure!(submit(outstanding), "the connection ended");
    while !busy.is_stopping.load(Ordering::Relaxed) {
        let error = reply(&mut replies)?;
        busy.completed.fetch_add(1, Ordering::Relaxed);
        if error != 0 {
            busy.failed.store(error.into(), Ordering::Relaxed);
        }
        ensure!(submit(1), "the connection ended");
    }
    Ok(())
}

/// Receives one reply with all its chunks; returns its last error, or 0.
fn reply(from: &mut impl Read) -> Result<u32> {
    let mut error = 0;
    loop {
        let mut head = [0; wire::SIMPLE_REPLY_BYTES];
        from.read_exact(&mut head)?;
        if dword(&head, 0) == wire::SIMPLE_REPLY_MAGIC {
            return Ok(dword(&head, 4));
        }
        ensure!(dword(&head, 0) == wire::STRUCTURED_REPLY_MAGIC, "a reply begins with {:#x}", dword(&head, 0));
        let mut length = [0; 4];
        from.read_exact(&mut length)?;
        let (flags, kind) = (u16::from_be_bytes([head[4], head[5]]), u16::from_be_bytes([head[6], head[7]]));
        let mut data = vec![0; u32::from_be_bytes(length) as usize];
        from.read_exact(&mut data)?;
        if matches!(kind, chunk::ERROR | chunk::ERROR_OFFSET) && data.len() >= 4 {
            error = dword(&data, 0);
        }
        if flags & chunk::DONE != 0 {
            return Ok(error);
        }
    }
}

/// The growth of memory that the limits allow for NBD clients: at least the reserve of each connection and the longest
/// request, plus one request beyond the limit.
pub fn allowed_bytes(limits: &Limits) -> u64 {
    let aside = limits.connections as u64 * ASIDE_BYTES + u64::from(PAYLOAD_BYTES);
    let data = aside.max(limits.total_bytes_in_flight as u64);
    data + data / 8 + u64::from(PAYLOAD_BYTES) + OVERHEAD_BYTES
}

/// The time until a new client has read a block.
///
/// # Errors
/// If it does not within [`HANG_TIMEOUT`].
pub fn ready_again(socket: &Path, kind: Kind) -> Result<Duration> {
    let start = Instant::now();
    let mut stream = connect(socket, kind.name())?;
    // Beyond the blocks that floods may have made unreadable.
    let read = NbdFlood { name: "", command: command::READ, flags: 0, bytes: 4096 };
    stream.write_all(&read.request_at(AREA_BYTES, 0))?;
    let error = reply(&mut stream)?;
    ensure!(error == 0, "a read fails with {error}");
    Ok(start.elapsed())
}
