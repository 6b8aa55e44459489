//! A whole NVMe/TCP target on a loopback socket, and a host that sends the commands in the input.
//!
//! The target, its reactor and its devices are made once and live as long as the process. Each input is a separate
//! host: it connects an admin queue and, mostly, an I/O queue, then sends commands without waiting. Each command must
//! complete once, or its connection must end, within a time that only a hang exceeds; after that every resource of the
//! host must be free.

use std::cell::OnceCell;
use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use sealblock_block::DynDevice;
use sealblock_exports_nvme_tcp::{Limits, Namespace, PiVisibility, Subsystem, Target};
use sealblock_integrity::{GuardKind, PiFormat, ProtectionType};
use sealblock_layers_cross_core::SharedDevice;
use sealblock_media_memory::MemoryDevice;
use sealblock_protocols_nvme::extensions::ReservedArea;
use sealblock_protocols_nvme::fabrics::{
    CNTLID_DYNAMIC, Connect, ConnectAttributes, ConnectData, FabricsCommand, PropertySet,
};
use sealblock_protocols_nvme::{Command, Completion, FABRICS_OPCODE, Fuse};
use sealblock_protocols_nvme_tcp::host::{Event, HostData};
use sealblock_protocols_nvme_tcp::{BlockLayout, Host, HostConfig, TransmitLimit};
use sealblock_runtime_memory::{Buffer, Slice};
use sealblock_runtime_reactor::net::{Listener, Stream};
use sealblock_runtime_reactor::{Config, Reactor, pool, spawn, timeout, yield_now};
use sealblock_units::BlockSize;
use zerocopy::FromBytes;

use crate::Pieces;

const SUBNQN: &str = "nqn.2026-11.org.example:fuzz";
/// Far longer than any command takes, so that only a hang reaches it.
const HANG: Duration = Duration::from_secs(20);
const ASYNCHRONOUS_EVENT_REQUEST: u8 = 0x0C;
const EVENT_REQUESTS: usize = 4;

struct Harness {
    reactor: Reactor,
    target: Target,
    address: SocketAddr,
}

thread_local! {
    static HARNESS: OnceCell<&'static Harness> = const { OnceCell::new() };
}

/// Runs one input, as described at the top of this file.
pub fn try_controller(input: &[u8]) {
    // Never dropped, because a reactor dropped at the end of a thread would have no thread to run on.
    let harness = HARNESS.with(|harness| *harness.get_or_init(|| Box::leak(Box::new(start()))));
    let mut pieces = Pieces::new(input);
    harness.reactor.block_on(async {
        session(harness.address, &mut pieces).await;
        let gone = async {
            while harness.target.connections() > 0 {
                yield_now().await;
            }
        };
        timeout(HANG, gone).await.expect("the target frees the connections of a host that is gone");
    });
}

fn start() -> Harness {
    let reactor = Reactor::new(Config { pool_arena_bytes: 4 << 20, ..Config::default() }).expect("a reactor starts");
    let (target, address) = reactor.block_on(async {
        let limits = Limits { transfer_bytes: 64 << 10, bytes_in_flight: 256 << 10, ..Limits::default() };
        let target = Target::new([subsystem()], limits).expect("the names differ");
        let listener = Listener::bind((Ipv4Addr::LOCALHOST, 0).into(), 64).expect("loopback has a free port");
        let address = listener.local_addr().expect("a bound listener has an address");
        let serving = target.clone();
        spawn(async move { panic!("the target ended: {:?}", serving.serve(listener).await) });
        (target, address)
    });
    Harness { reactor, target, address }
}

fn subsystem() -> Subsystem {
    let namespace = |bytes, format, id: u8| {
        let size = BlockSize::from_bytes(bytes).expect("a block size");
        let device = MemoryDevice::new(size, 64, format);
        Namespace::new(SharedDevice::publish(DynDevice::new("mem", device)), [id; 16])
    };
    let protected = |bytes, guard, protection, id| {
        let format = PiFormat::with_default_storage_tag(guard, protection);
        namespace(bytes, Some(format), id).with_visibility(PiVisibility::Protected).expect("the device is protected")
    };
    Subsystem::new(SUBNQN.parse().expect("a name"), "1")
        .with_namespace(1, namespace(512, None, 1))
        .and_then(|all| all.with_namespace(2, protected(512, GuardKind::Crc16, ProtectionType::Type1, 2)))
        .and_then(|all| all.with_namespace(3, protected(4096, GuardKind::Crc64, ProtectionType::Type2, 3)))
        .expect("the identifiers differ")
}

struct Queue {
    host: Host,
    stream: Stream,
    /// Opcodes of the commands in flight.
    open: HashMap<u16, u8>,
    last: Option<Completion>,
    /// Event requests in flight; they need not complete.
    open_ended: usize,
    /// True if bytes were sent that are not a PDU, so that the target may wait for the rest of one.
    noisy: bool,
    /// True if the last command is the first of a fused pair, which completes only after the second has arrived.
    half: bool,
}

async fn session(address: SocketAddr, pieces: &mut Pieces<'_>) {
    let (choice, digests) = (pieces.byte(), pieces.byte());
    let mut admin = Queue::open(address, digests).await;
    admin.open_ended = EVENT_REQUESTS;
    let connect = connect(pieces, choice, 0, CNTLID_DYNAMIC);
    let Some(cntlid) = admin.call(connect.0, connect.1).await.filter(|_| admin.is_up()) else { return };
    let ready = PropertySet { offset: 0x14, bytes: 4, value: 0x0046_0001 };
    if choice & 0x10 == 0 {
        admin.call(FabricsCommand::PropertySet(ready).encode(), HostData::None).await;
    }
    let mut io = None;
    if choice & 0x20 == 0 {
        let mut queue = Queue::open(address, digests >> 2).await;
        let connect = self::connect(pieces, choice >> 2, 1, cntlid.result.get() as u16);
        queue.call(connect.0, connect.1).await;
        io = Some(queue);
    }
    for _ in 0..48 {
        if pieces.is_empty() {
            break;
        }
        let to = pieces.byte();
        let queue = match &mut io {
            Some(io) if to & 1 == 1 => io,
            _ => &mut admin,
        };
        match to >> 1 & 15 {
            0 => queue.drain().await,
            1 if to & 0x20 != 0 => queue.noise(pieces.bytes(32)).await,
            _ => queue.submit(pieces).await,
        }
    }
    if let Some(mut io) = io {
        io.drain().await;
        io.end(choice & 0x40 != 0);
    }
    admin.drain().await;
    admin.end(choice & 0x80 != 0);
}

/// Connect, valid unless `choice` corrupts the command or its data.
fn connect(pieces: &mut Pieces, choice: u8, queue: u16, cntlid: u16) -> (Command, HostData) {
    let ask = Connect { queue, entries: 64, attributes: ConnectAttributes::NONE, keep_alive_ms: 0 };
    let data = ConnectData {
        hostid: [9; 16],
        cntlid,
        subnqn: SUBNQN.parse().expect("a name"),
        hostnqn: "nqn.2026-11.org.example:host".parse().ok(),
    };
    let (mut command, mut data) = (ask.encode(), data.encode().to_vec());
    if choice & 1 != 0 {
        (command.cdw10, command.cdw11) = ((pieces.word() as u32).into(), (pieces.word() as u32).into());
    }
    if choice & 2 != 0 {
        let at = usize::from(pieces.short()) % data.len();
        let bytes = pieces.bytes(8).to_vec();
        let len = bytes.len().min(data.len() - at);
        data[at..at + len].copy_from_slice(&bytes[..len]);
    }
    (command, write(&data))
}

fn write(bytes: &[u8]) -> HostData {
    HostData::Write(Slice::copy_from(bytes).into())
}

/// A plausible command (usually), with random fields.
fn command(pieces: &mut Pieces) -> Command {
    const OPCODES: [u8; 16] = [0, 1, 2, 4, 5, 8, 9, 0x0C, 0x0D, 0x19, 0x06, 0x0A, 0x18, 0x86, FABRICS_OPCODE, 0xC0];
    let choice = pieces.byte();
    if choice & 0x80 != 0 {
        let mut bytes = [0; 64];
        let given = pieces.bytes(64);
        bytes[..given.len()].copy_from_slice(given);
        return Command::read_from_bytes(&bytes).expect("64 bytes are a command");
    }
    let (small, flags) = (pieces.byte(), pieces.short());
    let mut command =
        Command::new(OPCODES[usize::from(choice & 15)], u32::from(small & 3) + u32::from(choice >> 4 & 1));
    if command.opcode == FABRICS_OPCODE {
        command.nsid = (u32::from(small & 7)).into();
    }
    command.cdw10 = (u32::from(small >> 2) | u32::from(pieces.byte()) << 16).into();
    // Vendor-specific features and log pages, whose numbers do not fit in the six bits above.
    if flags & 7 == 7 {
        command.cdw10 = (command.cdw10.get() | 0xC0).into();
    }
    command.cdw11 = (if choice & 0x20 != 0 { u32::from(pieces.byte()) } else { 0 }).into();
    command.cdw12 = (u32::from(pieces.byte() & 0x8F) | u32::from(flags) << 16).into();
    if choice & 0x40 != 0 {
        command.cdw13 = (pieces.word() as u32).into();
        command.cdw14 = (u32::from(small >> 2)).into();
        command.cdw15 = (pieces.word() as u32).into();
    }
    command
}

fn data(pieces: &mut Pieces, command: &Command) -> HostData {
    const LENGTHS: [usize; 8] = [4, 16, 512, 520, 4096, 4112, 8192, 128 << 10];
    let choice = pieces.byte();
    let fitting = ((command.cdw12.get() & 0xFFFF) as usize + 1) * if choice & 0x10 != 0 { 520 } else { 512 };
    let len = if choice & 8 != 0 { fitting.min(1 << 20) } else { LENGTHS[usize::from(choice & 7)] };
    let direction = if choice & 0xC0 == 0xC0 { pieces.byte() } else { command.opcode };
    match direction & 3 {
        1 if choice & 0x20 != 0 => {
            let area = ReservedArea::ALL[usize::from(choice & 1)];
            write(&area.encode(pieces.bytes(len.min(64))).expect("an area has room for this"))
        }
        1 => {
            let mut bytes = vec![0; len];
            let given = pieces.bytes(len.min(64));
            bytes[..given.len()].copy_from_slice(given);
            write(&bytes)
        }
        2 => HostData::Read { buffer: Buffer::zeroed(len), layout: BlockLayout::new(512, 8) },
        _ => HostData::None,
    }
}

impl Queue {
    async fn open(address: SocketAddr, choice: u8) -> Queue {
        let stream = Stream::connect(address).await.expect("the target listens");
        let mut config = HostConfig::new(pool());
        (config.header_digest, config.data_digest) = (choice & 1 != 0, choice & 2 != 0);
        config.staging_bytes = 4096;
        let mut queue = Queue {
            host: Host::new(config),
            stream,
            open: HashMap::new(),
            last: None,
            open_ended: 0,
            noisy: false,
            half: false,
        };
        queue.send().await;
        while queue.host.negotiated().is_none() {
            assert!(queue.receive().await, "a valid request is granted: {:?}", queue.host.closed());
        }
        queue
    }

    fn is_up(&self) -> bool {
        self.host.closed().is_none()
    }

    async fn send(&mut self) {
        let mut out = Vec::new();
        while self.host.transmit(&mut out, TransmitLimit::default()) > 0 {
            if self.stream.send_all(out.drain(..)).await.is_err() {
                self.host.close();
            }
        }
    }

    /// Receives once. Returns true if the connection is still open.
    async fn receive(&mut self) -> bool {
        let Some(buffer) = self.host.receive_buffer() else { return false };
        let received = timeout(HANG, self.stream.recv(buffer)).await;
        let (result, buffer) = received.unwrap_or_else(|_| panic!("no completion of {:?}", self.open));
        let Ok(len @ 1..) = result else {
            self.host.close();
            return false;
        };
        self.host.received(buffer, len);
        while let Some(event) = self.host.next_event() {
            if let Event::Completed { cid, completion, .. } = event {
                assert!(self.open.remove(&cid.0).is_some(), "one completion for each command");
                self.last = Some(completion);
            }
        }
        self.send().await;
        true
    }

    /// Submits a command and returns its completion if it succeeded.
    async fn call(&mut self, command: Command, data: HostData) -> Option<Completion> {
        let cid = self.host.submit(command, data).ok()?.0;
        self.open.insert(cid, command.opcode);
        self.send().await;
        while self.open.contains_key(&cid) {
            if !self.receive().await {
                return None;
            }
        }
        self.last.take().filter(|completion| completion.status().is_success())
    }

    async fn submit(&mut self, pieces: &mut Pieces<'_>) {
        let command = command(pieces);
        let data = data(pieces, &command);
        if !self.host.can_submit() {
            self.drain().await;
        }
        self.put(command, data).await;
    }

    async fn put(&mut self, command: Command, data: HostData) {
        if let Ok(cid) = self.host.submit(command, data) {
            self.open.insert(cid.0, command.opcode);
            self.half = command.fuse() == Fuse::First;
            self.send().await;
        }
    }

    /// Sends bytes that are not a PDU of a host.
    async fn noise(&mut self, bytes: &[u8]) {
        if !bytes.is_empty() {
            self.noisy = true;
            // The target may have ended the connection by now.
            let _ = self.stream.send_all([Slice::copy_from(bytes)]).await;
        }
    }

    /// Waits until every command has completed, except those that need not.
    async fn drain(&mut self) {
        if self.noisy {
            // The target may be waiting only for the end of the connection.
            let _ = self.stream.shutdown(std::net::Shutdown::Write);
        }
        if self.half {
            self.put(Command::new(0, 1), HostData::None).await;
        }
        loop {
            let kept = self.open.values().filter(|opcode| **opcode == ASYNCHRONOUS_EVENT_REQUEST).count();
            let done = !self.noisy && self.open.len() <= kept.min(self.open_ended);
            if done || !self.receive().await {
                return;
            }
        }
    }

    fn end(self, resets: bool) {
        if resets {
            // The target does not depend on the result.
            let _ = self.stream.abort();
        }
    }
}
