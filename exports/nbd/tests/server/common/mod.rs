//! A server on two cores with devices in memory, and a small client on plain blocking sockets.
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::rc::Rc;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use sealblock_block::DynDevice;
use sealblock_exports_nbd::{Export, Limits, Server};
use sealblock_integrity::{GuardKind, PiFormat, ProtectionType};
use sealblock_layers_cross_core::SharedDevice;
use sealblock_layers_offset::OffsetLayer;
use sealblock_media_memory::{Corruption, MemoryDevice};
use sealblock_protocols_nbd::wire::{self, chunk, flag, option, rep};
use sealblock_runtime_reactor::net::Listener;
use sealblock_runtime_reactor::{Config, CoreHandle, CoreLocal, Cores, Placement, Stopped, spawn};
use sealblock_units::{BlockSize, Lba};

pub const BLOCK: u64 = 4096;
pub const BLOCKS: u64 = 4096;
/// Longer than any step of a test takes.
pub const LATE: Duration = Duration::from_secs(60);

/// Exports: `protected` (with protection information), `bare` (blocks of 512 bytes without it), and `fixed` (the first
/// one, read-only).
pub struct Served {
    pub server: Server,
    pub address: SocketAddr,
    pub served: mpsc::Receiver<std::io::Result<()>>,
    protected: CoreLocal<MemoryDevice>,
    /// The device of `protected`.
    pub shared: SharedDevice,
    cores: Cores,
}

/// Waits until it is so; other cores cause it.
#[track_caller]
pub fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < LATE, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Runs a function on a core.
fn on<T: Send + 'static>(core: &CoreHandle, make: impl FnOnce() -> T + Send + 'static) -> T {
    let (send, receive) = mpsc::channel();
    core.address().send(move || send.send(make()).expect("the test waits")).expect("the core runs");
    receive.recv_timeout(LATE).expect("the core answers")
}

fn publish(device: &Rc<MemoryDevice>) -> SharedDevice {
    SharedDevice::publish(DynDevice::new("mem", Rc::clone(device)))
}

pub fn serve(limits: Limits) -> Served {
    serve_with(limits, |server| server)
}

/// The same with connections that stay on the core that they got when they were accepted: the first on that of the
/// devices, the second on the other.
pub fn serve_in_place(limits: Limits) -> Served {
    serve_with(limits, Server::without_moves)
}

pub fn serve_with(limits: Limits, change: impl FnOnce(Server) -> Server) -> Served {
    let config = Config { pool_arena_bytes: 4 << 20, ..Config::default() };
    let cores = Cores::start(Placement::Count(2), config).expect("cores start");
    let home = cores.handle(0).unwrap();
    let (protected, shared, bare) = on(&home, || {
        let format = PiFormat::with_default_storage_tag(GuardKind::Crc16, ProtectionType::Type1);
        let protected = Rc::new(MemoryDevice::new(BlockSize::B4096, BLOCKS, Some(format)));
        let bare = Rc::new(MemoryDevice::new(BlockSize::from_bytes(512).unwrap(), BLOCKS, None));
        (CoreLocal::new(Rc::clone(&protected)), publish(&protected), publish(&bare))
    });
    let exports = [
        Export::new("protected", shared.clone()).described("blocks with seals"),
        Export::new("bare", bare),
        Export::new("fixed", shared.clone()).read_only(),
    ];
    let server = change(Server::new(exports, limits).unwrap().with_cores(cores.handles()));
    let (served, address) = listen(&home, server.clone());
    Served { server, address, served, protected, shared, cores }
}

/// Lets a core serve; returns the channel for its result, and its address.
fn listen(core: &CoreHandle, server: Server) -> (mpsc::Receiver<std::io::Result<()>>, SocketAddr) {
    let (send, served) = mpsc::channel();
    let address = on(core, move || {
        let listener = Listener::bind((Ipv4Addr::LOCALHOST, 0).into(), 64).unwrap();
        let address = listener.local_addr().unwrap();
        // Fails only if the test has ended.
        drop(spawn(async move { drop(send.send(server.serve(listener).await)) }));
        address
    });
    (served, address)
}

impl Served {
    /// Changes a bit of a stored block.
    pub fn damage(&self, lba: u64) {
        let protected = self.protected.clone();
        let damaged = on(&self.cores.handle(0).unwrap(), move || {
            protected.get().unwrap().damage(Lba::new(lba), Corruption::Data { at: 100, mask: 4 })
        });
        assert!(damaged, "there is something to damage");
    }

    /// Adds an export of a device that is made on the core of the others.
    pub fn add(&self, name: &str, make: impl FnOnce() -> DynDevice + Send + 'static) {
        self.add_on(0, name, make);
    }

    /// Adds an export of a device that is made on this core.
    pub fn add_on(&self, core: usize, name: &str, make: impl FnOnce() -> DynDevice + Send + 'static) -> SharedDevice {
        let shared = on(&self.cores.handle(core).unwrap(), || SharedDevice::publish(make()));
        self.server.add_export(Export::new(name, shared.clone())).unwrap();
        shared
    }

    /// Resizes an export of the device of `protected`, as a server does whose volume was resized.
    pub fn resize(&self, export: &str, bytes: u64) {
        let (protected, shared) = (self.protected.clone(), self.shared.clone());
        let resized = on(&self.cores.handle(0).unwrap(), move || {
            let part = OffsetLayer::new(protected.get().unwrap(), Lba::ZERO, bytes / BLOCK).unwrap();
            let quiesced = shared.quiesce().expect("no other resize runs");
            assert_eq!(quiesced.in_flight(), 0, "all requests have completed");
            quiesced.replace(DynDevice::new("part", part))
        });
        self.server.resize_export(export, resized).unwrap();
    }

    /// Serves the device of `protected` a second time, as `again`.
    pub fn serve_again(&self) -> SocketAddr {
        let server = Server::new([Export::new("again", self.shared.clone())], Limits::default()).unwrap();
        listen(&self.cores.handle(0).unwrap(), server).1
    }

    /// Blocks a core until the result is dropped.
    pub fn stall(&self, core: usize) -> mpsc::Sender<()> {
        let (release, released) = mpsc::channel::<()>();
        let (begin, begun) = mpsc::channel();
        let stalled = move || {
            begin.send(()).expect("the test waits");
            // Ends when the sender is dropped.
            let _ = released.recv_timeout(LATE);
        };
        self.cores.handle(core).unwrap().address().send(stalled).expect("the core runs");
        begun.recv_timeout(LATE).expect("the core stalls");
        release
    }

    /// Stops the cores, as a process does on SIGTERM.
    pub fn shutdown(self, drain: Duration) -> Stopped {
        self.cores.shutdown(drain)
    }

    #[track_caller]
    pub fn wait_for_connections(&self, wanted: usize) {
        until(&format!("{wanted} connections"), || self.server.connections() == wanted);
    }
}

pub struct Client {
    pub stream: TcpStream,
    is_extended: bool,
    cookie: u64,
    pub size: u64,
    pub flags: u16,
    /// Smallest, best, largest.
    pub sizes: [u32; 3],
}

/// The name of an export, with its length before it.
pub fn name_bytes(export: &str) -> Vec<u8> {
    [&(export.len() as u32).to_be_bytes()[..], export.as_bytes()].concat()
}

/// An option with its header.
pub fn option_bytes(option: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = wire::OPTION_MAGIC.to_be_bytes().to_vec();
    bytes.extend(option.to_be_bytes());
    bytes.extend((data.len() as u32).to_be_bytes());
    bytes.extend(data);
    bytes
}

/// A chunk of a reply: its type and payload.
pub type Chunk = (u16, Vec<u8>);

impl Client {
    /// Connects, and does nothing else.
    pub fn connect(address: SocketAddr, is_extended: bool) -> Client {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(LATE)).unwrap();
        Client { stream, is_extended, cookie: 7, size: 0, flags: 0, sizes: [0; 3] }
    }

    /// Connects and negotiates structured replies, `base:allocation` and this export.
    pub fn open(address: SocketAddr, export: &str, is_extended: bool) -> Client {
        let mut client = Client::connect(address, is_extended);
        assert_eq!(client.bytes(18), b"NBDMAGICIHAVEOPT\0\x03");
        client.stream.write_all(&[0, 0, 0, 3]).unwrap();
        let style = if is_extended { option::EXTENDED_HEADERS } else { option::STRUCTURED_REPLY };
        assert_eq!(client.option(style, &[]).last().unwrap().0, rep::ACK);
        let name = name_bytes(export);
        let context = [&name[..], &1u32.to_be_bytes(), &15u32.to_be_bytes(), b"base:allocation"].concat();
        assert_eq!(client.option(option::SET_META_CONTEXT, &context).last().unwrap().0, rep::ACK);
        let replies = client.option(option::GO, &[&name[..], &[0, 0]].concat());
        assert_eq!(replies.last().unwrap().0, rep::ACK);
        for (_, data) in replies.iter().filter(|reply| reply.0 == rep::INFO) {
            match data[1] {
                0 => {
                    client.size = u64::from_be_bytes(data[2..10].try_into().unwrap());
                    client.flags = u16::from_be_bytes(data[10..12].try_into().unwrap());
                }
                3 => client.sizes = [2, 6, 10].map(|at| u32::from_be_bytes(data[at..at + 4].try_into().unwrap())),
                _ => {}
            }
        }
        client
    }

    /// True if the server has this export.
    pub fn can_open(address: SocketAddr, export: &str) -> bool {
        let mut client = Client::connect(address, false);
        client.bytes(18);
        client.stream.write_all(&[0, 0, 0, 3]).unwrap();
        let name = [&(export.len() as u32).to_be_bytes()[..], export.as_bytes(), &[0, 0]].concat();
        client.option(option::INFO, &name).last().unwrap().0 == rep::ACK
    }

    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.stream.read_exact(&mut bytes).unwrap();
        bytes
    }

    fn word(&mut self) -> u32 {
        u32::from_be_bytes(self.bytes(4).try_into().unwrap())
    }

    fn option(&mut self, option: u32, data: &[u8]) -> Vec<(u32, Vec<u8>)> {
        self.stream.write_all(&option_bytes(option, data)).unwrap();
        self.option_replies(option)
    }

    /// Receives the replies to an option.
    pub fn option_replies(&mut self, option: u32) -> Vec<(u32, Vec<u8>)> {
        let mut replies = Vec::new();
        loop {
            assert_eq!(self.bytes(8), wire::OPTION_REPLY_MAGIC.to_be_bytes());
            assert_eq!(self.word(), option);
            let (kind, len) = (self.word(), self.word() as usize);
            replies.push((kind, self.bytes(len)));
            if kind == rep::ACK || kind >> 31 == 1 {
                return replies;
            }
        }
    }

    /// Sends a request, and returns its cookie.
    pub fn send(&mut self, flags: u16, kind: u16, offset: u64, length: u64, data: &[u8]) -> u64 {
        let bytes = self.request_bytes(flags, kind, offset, length, data);
        self.stream.write_all(&bytes).unwrap();
        self.cookie
    }

    /// The bytes of the next request, whose cookie is one more than that of the last.
    pub fn request_bytes(&mut self, flags: u16, kind: u16, offset: u64, length: u64, data: &[u8]) -> Vec<u8> {
        self.cookie += 1;
        let flags = if self.is_extended && !data.is_empty() { flags | flag::PAYLOAD_LEN } else { flags };
        let magic = if self.is_extended { wire::EXTENDED_REQUEST_MAGIC } else { wire::REQUEST_MAGIC };
        let mut bytes = magic.to_be_bytes().to_vec();
        bytes.extend([flags, kind].into_iter().flat_map(u16::to_be_bytes));
        bytes.extend([self.cookie, offset].into_iter().flat_map(u64::to_be_bytes));
        match self.is_extended {
            true => bytes.extend(length.to_be_bytes()),
            false => bytes.extend((length as u32).to_be_bytes()),
        }
        bytes.extend(data);
        bytes
    }

    /// One chunk: its cookie, whether it is the last, and its content.
    fn chunk(&mut self) -> (u64, bool, Chunk) {
        let magic = if self.is_extended { wire::EXTENDED_REPLY_MAGIC } else { wire::STRUCTURED_REPLY_MAGIC };
        assert_eq!(self.word(), magic);
        let flags_and_kind = self.word();
        let cookie = u64::from_be_bytes(self.bytes(8).try_into().unwrap());
        let len = match self.is_extended {
            true => u64::from_be_bytes(self.bytes(16)[8..].try_into().unwrap()) as usize,
            false => self.word() as usize,
        };
        (cookie, flags_and_kind >> 16 & u32::from(chunk::DONE) != 0, (flags_and_kind as u16, self.bytes(len)))
    }

    /// Receives the next reply.
    pub fn receive(&mut self) -> (u64, Vec<Chunk>) {
        let mut chunks = Vec::new();
        loop {
            let (cookie, is_last, chunk) = self.chunk();
            chunks.push(chunk);
            if is_last {
                return (cookie, chunks);
            }
        }
    }

    /// Sends one request and returns its reply.
    pub fn ask(&mut self, flags: u16, kind: u16, offset: u64, length: u64, data: &[u8]) -> Vec<Chunk> {
        let cookie = self.send(flags, kind, offset, length, data);
        let (replied, chunks) = self.receive();
        assert_eq!(replied, cookie);
        chunks
    }

    /// Returns the errno in the reply to a request; 0 if it succeeded.
    pub fn errno(&mut self, flags: u16, kind: u16, offset: u64, length: u64, data: &[u8]) -> u32 {
        let chunks = self.ask(flags, kind, offset, length, data);
        match &chunks[..] {
            [(chunk::NONE, _)] => 0,
            [(kind, payload)] if kind >> 15 == 1 => u32::from_be_bytes(payload[..4].try_into().unwrap()),
            other => panic!("{other:?}"),
        }
    }

    pub fn write(&mut self, offset: u64, data: &[u8]) {
        assert_eq!(self.errno(0, wire::command::WRITE, offset, data.len() as u64, data), 0);
    }

    pub fn read(&mut self, offset: u64, length: u64) -> Vec<u8> {
        let chunks = self.ask(0, wire::command::READ, offset, length, &[]);
        let [(chunk::OFFSET_DATA, payload)] = &chunks[..] else { panic!("{chunks:?}") };
        assert_eq!(payload[..8], offset.to_be_bytes());
        payload[8..].to_vec()
    }
}

/// Bytes that differ from block to block.
pub fn pattern(len: u64, seed: u64) -> Vec<u8> {
    (0..len).map(|i| ((i / 8).wrapping_mul(31) ^ (i / 512) ^ seed) as u8).collect()
}
