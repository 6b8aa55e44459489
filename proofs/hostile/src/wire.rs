//! A host on a blocking socket, which sends any bytes, right or wrong.
//!
//! It shares only the layouts of structures with the target under attack: it frames PDUs itself, keeps no state that
//! could prevent a wrong step, and detects malformed PDUs from the target.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::net::{AddressFamily, SocketType};
use sealblock_integrity::guard::crc32c;
use sealblock_protocols_nvme::fabrics::{
    CNTLID_DYNAMIC, Connect, ConnectAttributes, ConnectData, FabricsCommand, PropertyGet, PropertySet,
};
use sealblock_protocols_nvme::{Command, Completion, DataPointer};
use zerocopy::IntoBytes;

/// The subsystem that attacks use by default.
pub const SUBNQN: &str = "nqn.2026-11.org.example:hostile";
/// The time limit of every wait. Only a hang reaches it, however slow the machine is.
pub const HANG_TIMEOUT: Duration = Duration::from_secs(30);

pub const ICREQ: u8 = 0;
pub const ICRESP: u8 = 1;
pub const C2H_TERM: u8 = 3;
pub const CAPSULE: u8 = 4;
pub const RESPONSE: u8 = 5;
pub const H2C_DATA: u8 = 6;
pub const C2H_DATA: u8 = 7;
pub const R2T: u8 = 9;
const LAST: u8 = 4;
const SUCCESS: u8 = 8;

/// A received PDU.
#[derive(Debug)]
pub struct Pdu {
    pub kind: u8,
    pub flags: u8,
    pub header: Vec<u8>,
    pub data: Vec<u8>,
}

impl Pdu {
    pub fn short(&self, at: usize) -> u16 {
        u16::from_le_bytes([self.header[at], self.header[at + 1]])
    }

    pub fn dword(&self, at: usize) -> u32 {
        u32::from(self.short(at)) | u32::from(self.short(at + 2)) << 16
    }
}

/// Data of a command.
pub enum Data<'a> {
    None,
    Write(&'a [u8]),
    Read(usize),
}

/// The completion of a command.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub result: u64,
    pub data: Vec<u8>,
}

/// A connection of the hostile host.
pub struct Peer {
    pub stream: TcpStream,
    header_digest: bool,
    data_digest: bool,
    next_cid: u16,
}

/// An ICReq with these digests.
pub fn icreq(digests: u8) -> Vec<u8> {
    let mut pdu = vec![0; 128];
    pdu[..8].copy_from_slice(&[ICREQ, 0, 128, 0, 128, 0, 0, 0]);
    pdu[11] = digests;
    pdu
}

/// A header of 24 bytes with four fields, as H2CData has it, and data; no digests.
pub fn h2c(last: bool, cccid: u16, ttag: u16, offset: u32, data: &[u8]) -> Vec<u8> {
    let mut pdu = vec![H2C_DATA, if last { LAST } else { 0 }, 24, 24];
    pdu.extend((24 + data.len() as u32).to_le_bytes());
    pdu.extend(cccid.to_le_bytes());
    pdu.extend(ttag.to_le_bytes());
    pdu.extend(offset.to_le_bytes());
    pdu.extend((data.len() as u32).to_le_bytes());
    pdu.extend([0; 4]);
    pdu.extend(data);
    pdu
}

/// A capsule without digests, with the data after the command.
pub fn capsule(command: &Command, data: &[u8]) -> Vec<u8> {
    let pdo = if data.is_empty() { 0 } else { 72 };
    let mut pdu = vec![CAPSULE, 0, 72, pdo];
    pdu.extend((72 + data.len() as u32).to_le_bytes());
    pdu.extend(command.as_bytes());
    pdu.extend(data);
    pdu
}

/// Connect of a queue, and its data.
pub fn connect(subnqn: &str, queue: u16, entries: u32, cntlid: u16, keep_alive_ms: u32) -> (Command, Vec<u8>) {
    let command = Connect { queue, entries, attributes: ConnectAttributes::NONE, keep_alive_ms }.encode();
    let data = ConnectData {
        hostid: [7; 16],
        cntlid,
        subnqn: subnqn.parse().expect("the name in the call is a good one"),
        hostnqn: "nqn.2026-11.org.example:attacker".parse().ok(),
    };
    (command, data.encode().to_vec())
}

/// A command with its data in the capsule.
pub fn in_capsule(command: Command, data: &[u8]) -> Command {
    command.with_data(DataPointer::InCapsule { offset_bytes: 0, length_bytes: data.len() as u32 })
}

/// A command with data of this length, transferred by the transport.
pub fn transport(command: Command, length_bytes: usize) -> Command {
    command.with_data(DataPointer::Transport { length_bytes: length_bytes as u32 })
}

impl Peer {
    /// Opens a connection, and sends nothing.
    pub fn open(address: SocketAddr) -> Result<Peer> {
        Peer::over(TcpStream::connect_timeout(&address, HANG_TIMEOUT).context("connecting")?)
    }

    /// The same from this source address, for a target at an IPv4 address.
    pub fn open_from(source: Ipv4Addr, address: SocketAddr) -> Result<Peer> {
        let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).context("a socket")?;
        rustix::net::bind(&socket, &SocketAddr::from((source, 0))).with_context(|| format!("a port of {source}"))?;
        rustix::net::connect(&socket, &address).context("connecting")?;
        Peer::over(socket.into())
    }

    fn over(stream: TcpStream) -> Result<Peer> {
        stream.set_read_timeout(Some(HANG_TIMEOUT))?;
        stream.set_write_timeout(Some(HANG_TIMEOUT))?;
        stream.set_nodelay(true)?;
        Ok(Peer { stream, header_digest: false, data_digest: false, next_cid: 1 })
    }

    /// Opens a connection and exchanges ICReq and ICResp.
    pub fn ready(address: SocketAddr, digests: u8) -> Result<Peer> {
        Peer::open(address)?.set_up(digests)
    }

    /// The same from this source address, without digests.
    pub fn ready_from(source: Ipv4Addr, address: SocketAddr) -> Result<Peer> {
        Peer::open_from(source, address)?.set_up(0)
    }

    fn set_up(self, digests: u8) -> Result<Peer> {
        let mut peer = self;
        peer.send(&icreq(digests))?;
        let pdu = peer.receive()?;
        ensure!(pdu.kind == ICRESP && pdu.header[11] == digests, "ICReq is answered by {pdu:?}");
        (peer.header_digest, peer.data_digest) = (digests & 1 != 0, digests & 2 != 0);
        Ok(peer)
    }

    /// Connects a queue, and returns the completion of Connect.
    pub fn connecting(address: SocketAddr, digests: u8, (command, data): (Command, Vec<u8>)) -> Result<(Peer, Answer)> {
        let mut peer = Peer::ready(address, digests)?;
        let answer = peer.call(command, Data::Write(&data))?;
        Ok((peer, answer))
    }

    /// An admin queue whose controller is ready, and the controller's identifier.
    pub fn admin(address: SocketAddr, subnqn: &str, keep_alive_ms: u32) -> Result<(Peer, u16)> {
        Peer::admin_of(address, subnqn, 32, keep_alive_ms)
    }

    /// The same with this number of queue entries.
    pub fn admin_of(address: SocketAddr, subnqn: &str, entries: u32, keep_alive_ms: u32) -> Result<(Peer, u16)> {
        let connect = connect(subnqn, 0, entries, CNTLID_DYNAMIC, keep_alive_ms);
        let (mut peer, answer) = Peer::connecting(address, 0, connect)?;
        ensure!(answer.status == 0, "Connect: {answer:?}");
        peer.property(0x14, 4, 0x0046_0001)?;
        // It is not ready while commands of an earlier controller of this host are in flight.
        let deadline = Instant::now() + HANG_TIMEOUT;
        while peer.property_get(0x1C, 4)?.result & 1 == 0 {
            ensure!(Instant::now() < deadline, "CSTS.RDY stays 0");
            thread::sleep(Duration::from_millis(1));
        }
        Ok((peer, answer.result as u16))
    }

    /// An I/O queue of this controller.
    pub fn io(address: SocketAddr, subnqn: &str, queue: u16, cntlid: u16) -> Result<Peer> {
        let (peer, answer) = Peer::connecting(address, 0, connect(subnqn, queue, 32, cntlid, 0))?;
        ensure!(answer.status == 0, "Connect of queue {queue}: {answer:?}");
        Ok(peer)
    }

    /// Property Set, which must succeed.
    pub fn property(&mut self, offset: u32, bytes: usize, value: u64) -> Result<()> {
        let set = FabricsCommand::PropertySet(PropertySet { offset, bytes, value });
        let answer = self.call(set.encode(), Data::None)?;
        ensure!(answer.status == 0, "Property Set {offset:#x}: {answer:?}");
        Ok(())
    }

    /// Property Get, valid or not.
    pub fn property_get(&mut self, offset: u32, bytes: usize) -> Result<Answer> {
        self.call(FabricsCommand::PropertyGet(PropertyGet { offset, bytes }).encode(), Data::None)
    }

    pub fn send(&mut self, bytes: &[u8]) -> Result<()> {
        self.stream.write_all(bytes).context("sending")
    }

    /// Sends, and ignores the error if the connection has ended.
    pub fn try_send(&mut self, bytes: &[u8]) -> bool {
        self.stream.write_all(bytes).is_ok()
    }

    pub fn cid(&mut self) -> u16 {
        self.next_cid = self.next_cid.wrapping_add(1);
        self.next_cid
    }

    /// The next PDU; an error if the connection has ended, or if nothing comes.
    pub fn receive(&mut self) -> Result<Pdu> {
        self.next_pdu()?.context("the connection ended where a PDU was due")
    }

    /// The next PDU, or `None` if the connection has ended. A malformed PDU is an error.
    pub fn next_pdu(&mut self) -> Result<Option<Pdu>> {
        let mut common = [0; 8];
        if !self.fill(&mut common)? {
            return Ok(None);
        }
        let (kind, flags, hlen, pdo) = (common[0], common[1], usize::from(common[2]), usize::from(common[3]));
        let plen = u32::from_le_bytes([common[4], common[5], common[6], common[7]]) as usize;
        let want = match kind {
            ICRESP => 128,
            C2H_TERM | RESPONSE | C2H_DATA | R2T => 24,
            _ => bail!("a target sent a PDU of type {kind}"),
        };
        ensure!(hlen == want && plen >= hlen && plen < 64 << 20, "HLEN {hlen} and PLEN {plen} of type {kind}");
        let mut rest = vec![0; plen - 8];
        if !self.fill(&mut rest)? {
            return Ok(None);
        }
        let whole = [common.as_slice(), &rest].concat();
        let header = whole[..hlen].to_vec();
        let has_digests = kind != ICRESP && kind != C2H_TERM;
        if has_digests && self.header_digest {
            ensure!(crc32c(&header).to_le_bytes() == whole[hlen..hlen + 4], "a wrong header digest on type {kind}");
        }
        let start = if kind == C2H_DATA { pdo } else { hlen };
        let mut data = whole[start.clamp(hlen, plen)..].to_vec();
        if kind == C2H_DATA && self.data_digest {
            let digest = data.split_off(data.len() - 4);
            ensure!(crc32c(&data).to_le_bytes() == digest[..], "a wrong data digest");
        }
        Ok(Some(Pdu { kind, flags, header, data }))
    }

    /// Fills the buffer; `false` if the connection ended.
    fn fill(&mut self, buffer: &mut [u8]) -> Result<bool> {
        match self.stream.read_exact(buffer) {
            Ok(()) => Ok(true),
            Err(error) if is_end(error.kind()) => Ok(false),
            Err(error) => Err(error).context("waiting for an answer or the end of the connection"),
        }
    }

    /// Lengths of the negotiated digests: of headers, and of data.
    pub fn digest_bytes(&self) -> (usize, usize) {
        (if self.header_digest { 4 } else { 0 }, if self.data_digest { 4 } else { 0 })
    }

    /// Returns the PDU with its negotiated digests; the last `data_bytes` of it are data.
    pub fn digested(&self, pdu: &[u8], data_bytes: usize) -> Vec<u8> {
        if !self.header_digest && !self.data_digest {
            return pdu.to_vec();
        }
        let hlen = usize::from(pdu[2]);
        let (mut header, data) = (pdu[..hlen].to_vec(), &pdu[pdu.len() - data_bytes..]);
        let head = hlen + if self.header_digest { 4 } else { 0 };
        let tail = if self.data_digest && data_bytes > 0 { 4 } else { 0 };
        header[1] |= u8::from(self.header_digest) | if tail > 0 { 2 } else { 0 };
        header[3] = if data_bytes > 0 { head as u8 } else { 0 };
        header[4..8].copy_from_slice(&((head + data_bytes + tail) as u32).to_le_bytes());
        let mut out = header.clone();
        if self.header_digest {
            out.extend(crc32c(&header).to_le_bytes());
        }
        out.extend(data);
        if tail > 0 {
            out.extend(crc32c(data).to_le_bytes());
        }
        out
    }

    /// Sends a command and waits for its completion.
    pub fn call(&mut self, command: Command, data: Data<'_>) -> Result<Answer> {
        let cid = self.cid();
        self.submit(command, cid, &data)?;
        let mut answer = Answer { status: 0, result: 0, data: Vec::new() };
        loop {
            let pdu = self.receive()?;
            match (pdu.kind, &data) {
                (R2T, Data::Write(bytes)) => {
                    let (from, len) = (pdu.dword(12) as usize, pdu.dword(16) as usize);
                    ensure!(pdu.short(8) == cid && from + len <= bytes.len(), "an R2T for other data: {pdu:?}");
                    let part = h2c(true, cid, pdu.short(10), from as u32, &bytes[from..from + len]);
                    let part = self.digested(&part, len);
                    self.send(&part)?;
                }
                (C2H_DATA, Data::Read(len)) => {
                    let at = pdu.dword(12) as usize;
                    ensure!(pdu.short(8) == cid && at == answer.data.len(), "data for something else");
                    answer.data.extend(&pdu.data);
                    ensure!(answer.data.len() <= *len, "more data than asked for");
                    if pdu.flags & SUCCESS != 0 {
                        return Ok(answer);
                    }
                }
                (RESPONSE, _) => {
                    let completion = Completion::from_prefix(&pdu.header[8..]).context("a response is short")?;
                    ensure!(completion.cid.get() == cid, "a response to another command: {completion:?}");
                    answer.status = completion.status().code().get();
                    answer.result = completion.result.get();
                    return Ok(answer);
                }
                _ => bail!("command {cid} is answered by {pdu:?}"),
            }
        }
    }

    /// Sends a command with this identifier; short writes go in the capsule.
    pub fn submit(&mut self, command: Command, cid: u16, data: &Data<'_>) -> Result<()> {
        let command = command.with_cid(cid);
        let pdu = match data {
            Data::None => capsule(&transport(command, 0), &[]),
            Data::Write(bytes) if bytes.len() <= 4096 => capsule(&in_capsule(command, bytes), bytes),
            Data::Write(bytes) => capsule(&transport(command, bytes.len()), &[]),
            Data::Read(len) => capsule(&transport(command, *len), &[]),
        };
        let in_capsule_bytes = pdu.len() - 72;
        let pdu = self.digested(&pdu, in_capsule_bytes);
        self.send(&pdu)
    }

    /// Receives the fatal error of the target, after which the target must end the connection. Skips other PDUs before
    /// it.
    pub fn fatal_error(&mut self) -> Result<(u16, u32)> {
        loop {
            let pdu = self.receive().context("waiting for a termination request")?;
            if pdu.kind == C2H_TERM {
                let error = (pdu.short(8), u32::from(pdu.short(10)) | u32::from(pdu.short(12)) << 16);
                self.read_to_end()?;
                return Ok(error);
            }
        }
    }

    /// Waits for the end of the connection, and returns the PDUs before it.
    pub fn read_to_end(&mut self) -> Result<Vec<Pdu>> {
        let mut pdus = Vec::new();
        while let Some(pdu) = self.next_pdu()? {
            pdus.push(pdu);
        }
        Ok(pdus)
    }

    /// Closes the sending half of the connection.
    pub fn half_close(&self) {
        // Fails only if the target has ended the connection.
        let _ = self.stream.shutdown(Shutdown::Write);
    }

    /// Ends the connection with a reset.
    pub fn reset(self) {
        // Fails only if the connection has already ended.
        let _ = rustix::net::sockopt::set_socket_linger(&self.stream, Some(Duration::ZERO));
    }
}

fn is_end(kind: ErrorKind) -> bool {
    matches!(
        kind,
        ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe | ErrorKind::ConnectionAborted
    )
}
