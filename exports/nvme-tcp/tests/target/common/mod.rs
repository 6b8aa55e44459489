//! A small host over our own core, and a target with three namespaces.
pub mod early;
pub mod fixed;
pub mod requests;
pub mod spread;

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::rc::Rc;
use std::time::Duration;

use sealblock_block::DynDevice;
use sealblock_exports_nvme_tcp::{Limits, Namespace, PiVisibility, Subsystem, Target};
use sealblock_integrity::{ChecksumKind, GuardKind, PiFormat, ProtectionType};
use sealblock_layers_cross_core::SharedDevice;
use sealblock_media_memory::MemoryDevice;
use sealblock_protocols_nvme::admin::{AdminCommand, GetLogPage, Identify};
use sealblock_protocols_nvme::fabrics::{
    CNTLID_DYNAMIC, Connect, ConnectAttributes, ConnectData, FabricsCommand, PropertyGet, PropertySet,
};
use sealblock_protocols_nvme::logs::{ErrorEntry, ErrorLog};
use sealblock_protocols_nvme::nqn::Nqn;
use sealblock_protocols_nvme::nvm::{BlockCommand, Checksum, IoCommand};
use sealblock_protocols_nvme::{Command, Completion};
use sealblock_protocols_nvme_tcp::host::Event;
use sealblock_protocols_nvme_tcp::host::HostData;
use sealblock_protocols_nvme_tcp::{Host, HostConfig, TransmitLimit};
use sealblock_runtime_memory::{Buffer, Slice};
use sealblock_runtime_reactor::net::{Listener, Stream};
use sealblock_runtime_reactor::{Config, JoinHandle, Reactor, pool, sleep, spawn};
use sealblock_units::{BlockSize, Extent};
use zerocopy::IntoBytes;

pub const SUBNQN: &str = "nqn.2026-11.org.example:volumes";
pub const PLAIN: u32 = 1;
pub const PROTECTED: u32 = 2;
pub const BARE: u32 = 4;
pub const BLOCKS: u64 = 4096;

/// A running target, and its devices.
pub struct Served {
    pub target: Target,
    pub address: SocketAddr,
    pub serving: JoinHandle<std::io::Result<()>>,
    pub plain: Rc<MemoryDevice>,
    pub protected: Rc<MemoryDevice>,
}

/// Runs a test in a reactor.
pub fn run<F: Future<Output = ()>>(test: impl FnOnce() -> F) {
    let reactor = Reactor::new(Config::default()).expect("a reactor starts");
    reactor.block_on(async { test().await });
}

pub fn format() -> PiFormat {
    PiFormat::with_default_storage_tag(GuardKind::Crc16, ProtectionType::Type1)
}

fn namespace(device: &Rc<MemoryDevice>, id: u8) -> Namespace {
    Namespace::new(SharedDevice::publish(DynDevice::new("mem", Rc::clone(device))), [id; 16])
}

pub fn subsystem(plain: &Rc<MemoryDevice>, protected: &Rc<MemoryDevice>) -> Subsystem {
    let bare = Rc::new(MemoryDevice::new(BlockSize::from_bytes(512).unwrap(), BLOCKS, None));
    Subsystem::new(SUBNQN.parse().unwrap(), "SN1")
        .with_namespace(PLAIN, namespace(plain, 1))
        .and_then(|all| {
            all.with_namespace(PROTECTED, namespace(protected, 2).with_visibility(PiVisibility::Protected)?)
        })
        .and_then(|all| all.with_namespace(BARE, namespace(&bare, 4)))
        .unwrap()
}

pub fn serve(limits: Limits) -> Served {
    serve_with(limits, |subsystem| subsystem)
}

pub fn serve_with(limits: Limits, change: impl FnOnce(Subsystem) -> Subsystem) -> Served {
    let size = BlockSize::from_bytes(4096).unwrap();
    let device = || Rc::new(MemoryDevice::new(size, BLOCKS, Some(format())));
    let (plain, protected) = (device(), device());
    let target = Target::new([change(subsystem(&plain, &protected))], limits).unwrap();
    let listener = Listener::bind((Ipv4Addr::LOCALHOST, 0).into(), 16).unwrap();
    let address = listener.local_addr().unwrap();
    let (serving, target) = (target.clone(), target);
    let serving = spawn(async move { serving.serve(listener).await });
    Served { target, address, serving, plain, protected }
}

/// The NQN of hosts unless a test sets another.
pub const HOSTNQN: &str = "nqn.2026-11.org.example:host";

/// One queue, seen from the host.
pub struct Queue {
    host: Host,
    pub stream: Stream,
    done: HashMap<u16, (Completion, Vec<u8>)>,
    pub cntlid: u16,
    /// The NQN of the host; if it is empty, Connect carries none.
    pub hostnqn: &'static str,
}

/// The result of a command.
pub struct Done {
    pub completion: Completion,
    pub data: Vec<u8>,
}

impl Done {
    pub fn status(&self) -> u16 {
        self.completion.status().code().get()
    }

    pub fn ok(self) -> Done {
        assert!(self.completion.status().is_success(), "{:?}", self.completion);
        self
    }
}

pub enum Data {
    None,
    Write(Vec<u8>),
    Read(usize),
}

impl Queue {
    pub async fn open(address: SocketAddr, digests: bool) -> Queue {
        let stream = Stream::connect(address).await.unwrap();
        let mut config = HostConfig::new(pool());
        (config.header_digest, config.data_digest) = (digests, digests);
        let mut queue = Queue { host: Host::new(config), stream, done: HashMap::new(), cntlid: 0, hostnqn: HOSTNQN };
        queue.send().await;
        while queue.host.negotiated().is_none() {
            assert!(queue.receive().await, "the target sets the connection up");
        }
        assert_eq!(queue.host.negotiated().map(|agreed| agreed.data_digest), Some(digests));
        queue
    }

    async fn send(&mut self) {
        assert!(self.try_send().await, "the connection takes what is sent");
    }

    /// Sends pending bytes; true if the connection is still open.
    async fn try_send(&mut self) -> bool {
        let mut out = Vec::new();
        while self.host.transmit(&mut out, TransmitLimit::default()) > 0 {
            if self.stream.send_all(out.drain(..)).await.is_err() {
                return false;
            }
        }
        true
    }

    /// Receives once; true if the connection is still open.
    pub async fn receive(&mut self) -> bool {
        let Some(buffer) = self.host.receive_buffer() else { return false };
        let (result, buffer) = self.stream.recv(buffer).await;
        let Ok(len @ 1..) = result else { return false };
        self.host.received(buffer, len);
        while let Some(event) = self.host.next_event() {
            if let Event::Completed { cid, completion, data } = event {
                let data = data.map(|data| data.buffer.to_vec()).unwrap_or_default();
                self.done.insert(cid.0, (completion, data));
            }
        }
        self.send().await;
        true
    }

    /// From now on, the target has to request all data.
    pub fn put_no_data_in_capsules(&mut self) {
        self.host.set_max_in_capsule_bytes(0);
    }

    pub async fn submit(&mut self, command: Command, data: Data) -> u16 {
        let cid = self.host.submit(command, host_data(data)).unwrap().0;
        self.send().await;
        cid
    }

    /// Receives once while only the start of a PDU is expected: its type and PLEN (NVMe/TCP, "Common Header").
    pub async fn receive_header(&mut self) -> (u8, usize) {
        let buffer = self.host.receive_buffer().unwrap();
        let (result, buffer) = self.stream.recv(buffer).await;
        let header: [u8; 8] = buffer[..8].try_into().unwrap();
        self.host.received(buffer, result.unwrap());
        while self.host.next_event().is_some() {}
        (header[0], u32::from_le_bytes(header[4..].try_into().unwrap()) as usize)
    }

    /// True if a command without data completes, at a target that may have ended the connection.
    pub async fn tries(&mut self, command: Command) -> bool {
        let Ok(cid) = self.host.submit(command, HostData::None) else { return false };
        let mut lives = self.try_send().await;
        while lives && !self.is_done(cid.0) {
            lives = self.receive().await;
        }
        lives
    }

    /// Submits a Write and waits for its R2T. The data are sent with the next send.
    pub async fn submit_and_hold(&mut self, command: Command, data: Vec<u8>) -> u16 {
        let cid = self.submit(command, Data::Write(data)).await;
        let buffer = self.host.receive_buffer().unwrap();
        let (result, buffer) = self.stream.recv(buffer).await;
        self.host.received(buffer, result.unwrap());
        while self.host.next_event().is_some() {}
        assert!(!self.done.contains_key(&cid));
        cid
    }

    /// True if this command has completed.
    pub fn is_done(&self, cid: u16) -> bool {
        self.done.contains_key(&cid)
    }

    pub async fn done(&mut self, cid: u16) -> Done {
        while !self.done.contains_key(&cid) {
            assert!(self.receive().await, "the connection ended: {:?}", self.host.closed());
        }
        let (completion, data) = self.done.remove(&cid).unwrap();
        Done { completion, data }
    }

    pub async fn call(&mut self, command: Command, data: Data) -> Done {
        let cid = self.submit(command, data).await;
        self.done(cid).await
    }

    pub async fn connect(&mut self, subnqn: &str, queue: u16, cntlid: u16, keep_alive_ms: u32) -> Done {
        let (command, data) = connect_command(subnqn, queue, cntlid, keep_alive_ms, self.hostnqn);
        let done = self.call(command, Data::Write(data)).await;
        self.cntlid = Connect::from_result(done.completion.result.get()).0;
        done
    }

    /// An admin queue whose controller is ready.
    pub async fn admin(address: SocketAddr, subnqn: &str, digests: bool) -> Queue {
        let mut queue = Queue::open(address, digests).await;
        queue.connect(subnqn, 0, CNTLID_DYNAMIC, 0).await.ok();
        queue.configure(0x0046_0001).await;
        while queue.property(0x1C, 4).await != 1 {
            sleep(Duration::from_millis(1)).await;
        }
        queue
    }

    pub async fn configure(&mut self, value: u64) {
        let set = FabricsCommand::PropertySet(PropertySet { offset: 0x14, bytes: 4, value });
        self.call(set.encode(), Data::None).await.ok();
    }

    pub async fn property(&mut self, offset: u32, bytes: usize) -> u64 {
        let get = FabricsCommand::PropertyGet(PropertyGet { offset, bytes });
        self.call(get.encode(), Data::None).await.ok().completion.result.get()
    }

    pub async fn identify(&mut self, cns: sealblock_protocols_nvme::admin::Cns, nsid: u32) -> Done {
        let ask = Identify { cns, nsid, cntid: 0, csi: 0 };
        assert_eq!(AdminCommand::decode(&ask.encode()), Ok(AdminCommand::Identify(ask)));
        self.call(ask.encode(), Data::Read(4096)).await
    }

    pub async fn log(&mut self, lid: u8, len: usize) -> Done {
        self.call(GetLogPage::new(lid, len as u64).encode(), Data::Read(len)).await
    }

    /// The newest entry of the error log.
    pub async fn newest_error(&mut self) -> ErrorEntry {
        let page = self.log(1, 4096).await.ok().data;
        ErrorLog::decode(&page).next().expect("an error was logged")
    }

    /// Admin and I/O queue of a new controller.
    pub async fn pair(address: SocketAddr, digests: bool) -> (Queue, Queue) {
        let admin = Queue::admin(address, SUBNQN, digests).await;
        let mut io = Queue::open(address, digests).await;
        io.connect(SUBNQN, 1, admin.cntlid, 0).await.ok();
        (admin, io)
    }

    pub async fn io(&mut self, nsid: u32, command: IoCommand, data: Data) -> Done {
        self.call(command.encode(nsid).unwrap(), data).await
    }

    /// Sends raw bytes, which do not come from this host's core.
    pub async fn send_raw(&mut self, bytes: &[u8]) {
        self.stream.send_all([Slice::copy_from(bytes)]).await.unwrap();
    }
}

fn host_data(data: Data) -> HostData {
    match data {
        Data::None => HostData::None,
        Data::Write(bytes) => HostData::Write(Slice::copy_from(&bytes).into()),
        Data::Read(len) => HostData::Read { buffer: Buffer::zeroed(len), layout: None },
    }
}

/// A Connect and its data.
fn connect_command(subnqn: &str, queue: u16, cntlid: u16, keep_alive_ms: u32, host: &str) -> (Command, Vec<u8>) {
    let ask = Connect { queue, entries: 32, attributes: ConnectAttributes::NONE, keep_alive_ms };
    let hostnqn = host.parse::<Nqn>().ok();
    let data = ConnectData { hostid: [9; 16], cntlid, subnqn: subnqn.parse().unwrap(), hostnqn };
    (ask.encode(), data.encode().to_vec())
}

/// A command without data, as it is sent over the wire, without digests.
pub fn capsule(command: &Command) -> Vec<u8> {
    [&[4, 0, 72, 0, 72, 0, 0, 0], command.as_bytes()].concat()
}

pub fn blocks(start: u64, count: u64) -> BlockCommand {
    BlockCommand::new(Extent::from_raw(start, count).unwrap())
}

/// A Checksum of these blocks, of the kind CRC-64/NVME.
pub fn checksum(blocks: BlockCommand) -> IoCommand {
    IoCommand::Checksum(Checksum { blocks, kind: ChecksumKind::Crc64Nvme })
}

/// Bytes that differ from block to block.
pub fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|i| (i / 7) as u8 ^ (i >> 12) as u8 ^ seed).collect()
}

pub fn short() -> Limits {
    Limits { drain: Duration::from_secs(2), ..Limits::default() }
}
