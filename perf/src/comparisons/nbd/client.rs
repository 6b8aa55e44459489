//! A load client on a plain blocking socket: it keeps a number of requests in flight, and sends a new one for each that
//! completes.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use fastrand::Rng;

use crate::load::Until;

const REQUEST_MAGIC: u32 = 0x2560_9513;
const REPLY_MAGIC: u32 = 0x6744_6698;
const REPLY_BYTES: usize = 16;
const READ: u16 = 0;
const WRITE: u16 = 1;
const FLUSH: u16 = 3;
/// The time limit for a reply.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);

/// The requests of a load.
#[derive(Clone, Copy)]
pub struct Load {
    /// Its name in tables.
    pub name: &'static str,
    /// True if it writes.
    pub write: bool,
    /// Bytes of one request.
    pub bytes: usize,
    /// True for random addresses, false for sequential ones.
    pub is_random: bool,
    /// Requests in flight.
    pub depth: u32,
}

/// A connection to an export.
pub struct Client {
    stream: TcpStream,
    size: u64,
    /// Bytes to send with the next write, and received bytes that were not processed.
    out: Vec<u8>,
    input: Vec<u8>,
    filled: usize,
    data: Vec<u8>,
}

impl Client {
    /// Chooses an export, for simple replies.
    pub fn connect(address: SocketAddr, export: &str) -> Result<Client> {
        let mut stream = connect_with_retries(address)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(CONNECT_TIMEOUT))?;
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting).context("the greeting")?;
        ensure!(&greeting[..16] == b"NBDMAGICIHAVEOPT", "this is no NBD server");
        // The handshake: fixed newstyle without zeroes, then EXPORT_NAME.
        let ask = [&[0, 0, 0, 3], &b"IHAVEOPT"[..], &1u32.to_be_bytes(), &(export.len() as u32).to_be_bytes()].concat();
        stream.write_all(&[&ask[..], export.as_bytes()].concat())?;
        let mut about = [0; 10];
        stream.read_exact(&mut about).context("the export")?;
        let size = about.first_chunk().map_or(0, |bytes| u64::from_be_bytes(*bytes));
        let data = (0..1 << 20).map(|i: u32| (i.wrapping_mul(0x9e37_79b1) >> 24) as u8).collect();
        Ok(Client { stream, size, out: Vec::new(), input: vec![0; 2 << 20], filled: 0, data })
    }

    /// Writes all blocks once, because reading memory that was never written costs nothing.
    pub fn fill(&mut self) -> Result<()> {
        let bytes = self.data.len();
        for offset in (0..self.size).step_by(bytes) {
            let length = bytes.min((self.size - offset) as usize);
            self.ask(WRITE, offset, length);
            self.flush()?;
            while self.receive(0)? == 0 {}
        }
        Ok(())
    }

    /// Keeps requests in flight until the turn ends, then waits for the last ones; returns their number and the
    /// duration.
    pub fn drive(&mut self, load: Load, until: Until, seed: u64) -> Result<(u64, Duration)> {
        let (kind, reply_bytes) = if load.write { (WRITE, 0) } else { (READ, load.bytes) };
        let (mut rng, mut next) = (Rng::with_seed(seed), 0);
        let places = self.size / load.bytes as u64;
        ensure!(places > 0, "the export is too small");
        let mut place = || {
            next = if load.is_random { rng.u64(..places) } else { (next + 1) % places };
            next * load.bytes as u64
        };
        let begun = Instant::now();
        let (time, mut left) = match until {
            Until::Passed(time) => (time, u64::MAX),
            Until::Asked(count) => (Duration::MAX, count),
        };
        let first = u64::from(load.depth).min(left);
        (0..first).for_each(|_| self.ask(kind, place(), load.bytes));
        self.flush()?;
        left -= first;
        let (mut in_flight, mut answered) = (first, 0);
        while in_flight > 0 {
            let ended = self.receive(reply_bytes)?;
            (in_flight, answered) = (in_flight - ended, answered + ended);
            if begun.elapsed() < time {
                let more = ended.min(left);
                (0..more).for_each(|_| self.ask(kind, place(), load.bytes));
                self.flush()?;
                (in_flight, left) = (in_flight + more, left - more);
            }
        }
        Ok((answered, begun.elapsed()))
    }

    /// Sends a flush.
    pub fn sync(&mut self) -> Result<()> {
        self.ask(FLUSH, 0, 0);
        self.flush()?;
        while self.receive(0)? == 0 {}
        Ok(())
    }

    fn ask(&mut self, kind: u16, offset: u64, length: usize) {
        self.out.extend(REQUEST_MAGIC.to_be_bytes());
        self.out.extend([0, 0]);
        self.out.extend(kind.to_be_bytes());
        self.out.extend(offset.to_be_bytes());
        self.out.extend(offset.to_be_bytes());
        self.out.extend((length as u32).to_be_bytes());
        if kind == WRITE {
            self.out.extend_from_slice(&self.data[..length]);
        }
    }

    fn flush(&mut self) -> Result<()> {
        self.stream.write_all(&self.out).context("asking")?;
        self.out.clear();
        Ok(())
    }

    /// Receives once; returns the number of completed requests. Data are not checked.
    fn receive(&mut self, data_bytes: usize) -> Result<u64> {
        let count = match self.stream.read(&mut self.input[self.filled..]) {
            Ok(0) => bail!("the server closed the connection"),
            Ok(count) => count,
            Err(error) if error.kind() == ErrorKind::Interrupted => 0,
            Err(error) => return Err(error).context("waiting for a reply"),
        };
        self.filled += count;
        let (mut at, mut ended) = (0, 0);
        while self.filled - at >= REPLY_BYTES + data_bytes {
            let word = |from: usize| self.input[from..].first_chunk().map_or(0, |bytes| u32::from_be_bytes(*bytes));
            ensure!((word(at), word(at + 4)) == (REPLY_MAGIC, 0), "the server refused a request");
            (at, ended) = (at + REPLY_BYTES + data_bytes, ended + 1);
        }
        self.input.copy_within(at..self.filled, 0);
        self.filled -= at;
        Ok(ended)
    }
}

/// Connects, with retries for a server that was just started.
fn connect_with_retries(address: SocketAddr) -> Result<TcpStream> {
    let begun = Instant::now();
    loop {
        match TcpStream::connect(address) {
            Ok(stream) => return Ok(stream),
            Err(error) if begun.elapsed() > CONNECT_TIMEOUT => return Err(error).context("connecting"),
            Err(_) => std::thread::sleep(Duration::from_millis(10)),
        }
    }
}
