//! The servers of the tests: a device that can hold one write, served over each protocol by our servers and by one
//! without sessions.

use std::cell::Cell;
use std::net::{Ipv4Addr, SocketAddr};
use std::rc::Rc;
use std::time::Duration;

use sealblock_block::{Abilities, Device, DynDevice, Expectations, Geometry, Operation, Outcome, Request, Response};
use sealblock_exports_nbd::{Export, Limits as NbdLimits, Server};
use sealblock_exports_nvme_tcp::{Limits as NvmeLimits, Namespace, Subsystem, Target};
use sealblock_integrity::{Sealed, Tags};
use sealblock_layers_cross_core::SharedDevice;
use sealblock_media_memory::MemoryDevice;
use sealblock_media_nbd::{Address, NbdDevice, Options as NbdOptions};
use sealblock_media_nvme_tcp::{HostPort, NvmeTcpDevice, Options as NvmeOptions, Reconnect};
use sealblock_protocols_nbd as nbd;
use sealblock_runtime_reactor::net::{Listener, Stream};
use sealblock_runtime_reactor::{pool, sleep, spawn};
use sealblock_units::{BlockSize, Extent};

const SUBNQN: &str = "nqn.2026-11.org.example:resend";
const BLOCKS: u64 = 256;

/// The kind of server.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Protocol {
    Nbd,
    Nvme,
    /// A server that executes requests concurrently, without sessions and fences.
    ForeignNbd,
}

impl Protocol {
    pub const ALL: [Protocol; 3] = [Protocol::Nbd, Protocol::Nvme, Protocol::ForeignNbd];
}

/// A device in memory that holds one write until it is released: the first write of 1 after [`HeldWrite::arm`].
#[derive(Clone)]
pub struct HeldWrite(Rc<HeldState>);

struct HeldState {
    memory: MemoryDevice,
    is_armed: Cell<bool>,
    is_held: Cell<bool>,
    is_released: Cell<bool>,
    content: Cell<u8>,
}

impl HeldWrite {
    pub fn arm(&self) {
        self.0.is_armed.set(true);
    }

    pub fn is_held(&self) -> bool {
        self.0.is_held.get()
    }

    pub fn release(&self) {
        self.0.is_released.set(true);
    }

    /// The first byte of the last write.
    pub fn content(&self) -> u8 {
        self.0.content.get()
    }
}

impl Device for HeldWrite {
    fn geometry(&self) -> &Geometry {
        self.0.memory.geometry()
    }

    fn abilities(&self) -> Abilities {
        self.0.memory.abilities()
    }

    async fn execute(&self, request: Request) -> Outcome {
        let Operation::Write(data) = &request.operation else { return self.0.memory.execute(request).await };
        let byte = data.clone().into_sealed().joined_data()[0];
        if byte == 1 && self.0.is_armed.replace(false) {
            self.0.is_held.set(true);
            while !self.0.is_released.get() {
                sleep(Duration::from_millis(1)).await;
            }
        }
        self.0.content.set(byte);
        self.0.memory.execute(request).await
    }
}

pub fn serve(protocol: Protocol) -> (HeldWrite, SocketAddr) {
    let held = HeldWrite::new();
    let address = serve_as(protocol, &held, &[]);
    (held, address)
}

impl HeldWrite {
    pub fn new() -> HeldWrite {
        HeldWrite(Rc::new(HeldState {
            memory: MemoryDevice::new(BlockSize::B4096, BLOCKS, None),
            is_armed: Cell::new(false),
            is_held: Cell::new(false),
            is_released: Cell::new(false),
            content: Cell::new(0),
        }))
    }
}

/// A server of this device, which lists these devices.
pub fn serve_as(protocol: Protocol, held: &HeldWrite, listed: &'static [[u8; 16]]) -> SocketAddr {
    let device = DynDevice::new("held", held.clone());
    let listener = Listener::bind((Ipv4Addr::LOCALHOST, 0).into(), 16).unwrap();
    let address = listener.local_addr().unwrap();
    let drain = Duration::from_millis(200);
    match protocol {
        Protocol::Nbd => {
            let limits = NbdLimits { drain, ..NbdLimits::default() };
            let identity = nbd::IdentitySource::new(|| nbd::Identity { uuid: Some([7; 16]), devices: listed.to_vec() });
            let export = Export::new("disk", SharedDevice::publish(device)).with_identity(identity);
            let server = Server::new([export], limits).unwrap();
            spawn(async move { server.serve(listener).await });
        }
        Protocol::Nvme => {
            let namespace = Namespace::new(SharedDevice::publish(device), [7; 16])
                .with_identities(None, std::sync::Arc::new(|| listed.to_vec()));
            let subsystem = Subsystem::new(SUBNQN.parse().unwrap(), "SN1").with_namespace(1, namespace).unwrap();
            let target = Target::new([subsystem], NvmeLimits { drain, ..NvmeLimits::default() }).unwrap();
            spawn(async move { target.serve(listener).await });
        }
        Protocol::ForeignNbd => {
            spawn(async move {
                while let Ok((stream, _)) = listener.accept().await {
                    spawn(serve_foreign(stream, device.clone()));
                }
            });
        }
    }
    address
}

#[derive(Clone, Copy)]
pub struct Settings {
    pub quiesce: Duration,
    pub reconnects: bool,
}

pub async fn open(protocol: Protocol, address: SocketAddr, settings: Settings) -> Result<DynDevice, String> {
    Client::connect(protocol, address, settings).await.map(|client| client.device())
}

/// A client of a server.
#[derive(Clone)]
pub enum Client {
    Nbd(NbdDevice),
    Nvme(NvmeTcpDevice),
}

impl Client {
    pub async fn connect(protocol: Protocol, address: SocketAddr, settings: Settings) -> Result<Client, String> {
        let reconnect = Reconnect {
            attempts: if settings.reconnects { 1000 } else { 0 },
            total: Duration::from_secs(20),
            first_delay: Duration::from_millis(2),
            max_delay: Duration::from_millis(20),
        };
        let quiesce = settings.quiesce;
        match protocol {
            Protocol::Nbd | Protocol::ForeignNbd => {
                let options = NbdOptions { reconnect, quiesce, ..NbdOptions::default() };
                let device = NbdDevice::connect(Address::from(address), "disk", options).await;
                device.map(Client::Nbd).map_err(|error| error.to_string())
            }
            Protocol::Nvme => {
                let options = NvmeOptions { reconnect, quiesce, keep_alive: Duration::ZERO, ..NvmeOptions::default() };
                let subsystem = SUBNQN.parse().unwrap();
                let device = NvmeTcpDevice::connect(HostPort::from(address), subsystem, Some(1), options).await;
                device.map(Client::Nvme).map_err(|error| error.to_string())
            }
        }
    }

    pub fn device(&self) -> DynDevice {
        match self.clone() {
            Client::Nbd(device) => DynDevice::new("nbd", device),
            Client::Nvme(device) => DynDevice::new("nvme", device),
        }
    }

    pub async fn close(&self) -> bool {
        match self {
            Client::Nbd(device) => device.close().await,
            Client::Nvme(device) => device.close().await,
        }
        match self {
            Client::Nbd(device) => device.is_settled(),
            Client::Nvme(device) => device.is_settled(),
        }
    }

    pub async fn settled(&self) -> bool {
        match self {
            Client::Nbd(device) => device.settled().await,
            Client::Nvme(device) => device.settled().await,
        }
    }
}

/// Serves one connection. Each request has a task of its own, which continues after the connection has ended.
async fn serve_foreign(stream: Stream, device: DynDevice) {
    let export = nbd::Export {
        name: "disk".into(),
        description: String::new(),
        size_bytes: BLOCKS * 4096,
        block_bytes: 4096,
        writable: true,
        trim: false,
        write_zeroes: true,
        older: 0,
        identity: nbd::IdentitySource::default(),
    };
    let core = Rc::new(std::cell::RefCell::new(nbd::Server::new(nbd::ServerConfig::new(pool(), [export]))));
    let stream = Rc::new(stream);
    let (sends, sending) = (Rc::clone(&core), Rc::clone(&stream));
    spawn(async move {
        let mut out = Vec::new();
        while sends.borrow().closed().is_none() {
            let bytes = sends.borrow_mut().transmit(&mut out);
            if bytes > 0 && sending.send_all(out.drain(..)).await.is_err() {
                return;
            }
            sends.borrow_mut().sent();
            sleep(Duration::from_millis(1)).await;
        }
    });
    loop {
        let buffer = core.borrow_mut().receive_buffer();
        let Some(buffer) = buffer else { return };
        let (received, buffer) = stream.recv(buffer).await;
        let Ok(len @ 1..) = received else { return core.borrow_mut().close() };
        core.borrow_mut().received(buffer, len);
        loop {
            let event = core.borrow_mut().next_event();
            match event {
                None => break,
                Some(nbd::Event::Request(request)) => {
                    let (core, device) = (Rc::clone(&core), device.clone());
                    spawn(async move { answer(&core, &device, request).await });
                }
                Some(_) => {}
            }
        }
    }
}

async fn answer(core: &std::cell::RefCell<nbd::Server>, device: &DynDevice, request: nbd::Request) {
    let extent = |offset: u64, length: u64| Extent::from_raw(offset / 4096, length / 4096).unwrap();
    let translated = match request.command {
        nbd::Command::Read { offset, length } => Request::read(extent(offset, length.into()), Expectations::NONE),
        nbd::Command::Write { offset, data, .. } => {
            let extent = extent(offset, data.len() as u64);
            let data = Sealed::seal(data.freeze(), BlockSize::B4096, None, &Tags::default());
            Request::write(extent, data, sealblock_block::Durability::Volatile)
        }
        nbd::Command::WriteZeroes { offset, length, .. } => {
            Request::write_zeroes(extent(offset, length), false, sealblock_block::Durability::Volatile)
        }
        _ => Request::flush(),
    };
    let outcome = device.execute(translated).await.unwrap();
    let mut core = core.borrow_mut();
    match outcome {
        Response::Data(data) => core.data(request.ticket, [data.joined_data()]),
        _ => core.done(request.ticket),
    }
}
