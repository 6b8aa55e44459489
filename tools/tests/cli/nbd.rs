//! Every command against our own NBD server, and a foreign one.

use std::net::{Ipv4Addr, SocketAddr};
use std::rc::Rc;
use std::sync::mpsc;
use std::time::Duration;

use crate::common::{Place, noise};
use sealblock_block::DynDevice;
use sealblock_exports_nbd::{Export, Limits, Server};
use sealblock_integrity::{GuardKind, PiFormat, ProtectionType};
use sealblock_layers_cross_core::SharedDevice;
use sealblock_media_memory::{Corruption, MemoryDevice};
use sealblock_runtime_reactor::net::Listener;
use sealblock_runtime_reactor::{Config, CoreHandle, CoreLocal, Cores, Placement, spawn};
use sealblock_units::{BlockSize, Lba};

/// Longer than anything takes.
const LATE: Duration = Duration::from_secs(60);
const BYTES: u64 = 16 << 20;

/// Exports `disk` of 16 MiB with seals, and `fixed`, the same to be read only.
struct Served {
    server: Server,
    address: SocketAddr,
    device: CoreLocal<MemoryDevice>,
    cores: Cores,
}

/// Has a core make something.
fn on<T: Send + 'static>(core: &CoreHandle, make: impl FnOnce() -> T + Send + 'static) -> T {
    let (send, receive) = mpsc::channel();
    core.address().send(move || send.send(make()).expect("the test waits")).expect("the core runs");
    receive.recv_timeout(LATE).expect("the core answers")
}

fn serve() -> Served {
    let config = Config { pool_arena_bytes: 4 << 20, ..Config::default() };
    let cores = Cores::start(Placement::Count(1), config).expect("a core starts");
    let home = cores.handle(0).unwrap();
    let (device, shared) = on(&home, || {
        let format = PiFormat::with_default_storage_tag(GuardKind::Crc16, ProtectionType::Type1);
        let device = Rc::new(MemoryDevice::new(BlockSize::B4096, BYTES >> 12, Some(format)));
        let gate = DynDevice::new("mem", Rc::clone(&device));
        (CoreLocal::new(device), SharedDevice::publish(gate))
    });
    let exports =
        [Export::new("disk", shared.clone()).described("with seals"), Export::new("fixed", shared).read_only()];
    let server = Server::new(exports, Limits::default()).unwrap();
    let serving = server.clone();
    let address = on(&home, move || {
        let listener = Listener::bind((Ipv4Addr::LOCALHOST, 0).into(), 16).unwrap();
        let address = listener.local_addr().unwrap();
        drop(spawn(async move { drop(serving.serve(listener).await) }));
        address
    });
    Served { server, address, device, cores }
}

impl Served {
    fn target(&self, export: &str) -> String {
        format!("nbd://{}/{export}", self.address)
    }

    fn damage(&self, lba: u64) {
        let device = self.device.clone();
        let damaged = on(&self.cores.handle(0).unwrap(), move || {
            device.get().unwrap().damage(Lba::new(lba), Corruption::Data { at: 9, mask: 1 })
        });
        assert!(damaged, "there is something to damage");
    }
}

#[test]
fn the_commands_work_on_an_export() {
    let place = Place::new();
    let served = serve();
    let (disk, fixed) = (served.target("disk"), served.target("fixed"));
    let data = noise(7, 6 << 20);
    place.write("data", &data);
    let info = place.run(&format!("info {disk} --json")).succeeds().json();
    assert_eq!((&info["bytes"], &info["block_size"]), (&BYTES.into(), &4096.into()));
    assert_eq!(
        (&info["abilities"]["verify"], &info["abilities"]["write_zeroes"]),
        (&"emulated".into(), &"native".into())
    );
    assert_eq!((&info["export"]["name"], &info["export"]["description"]), (&"disk".into(), &"with seals".into()));
    place.run(&format!("info {disk}")).succeeds().says(&["NBD export", "with seals"]);

    for options in ["", "?connections=3"] {
        place.run(&format!("copy data {disk}{options}")).succeeds();
        assert!(place.blocks(&format!("{disk}{options}"), 0, 1535) == data, "{options}");
    }
    place.run("create v --size 16MiB").succeeds();
    place.run(&format!("copy {disk} v")).succeeds();
    let equal = place.run(&format!("compare v {disk} --json")).succeeds().json();
    assert_eq!((&equal["equal"], &equal["bytes_transferred"]), (&true.into(), &BYTES.into()));
    place.run(&format!("zero {disk} --range 100..199")).succeeds();
    let different = place.run(&format!("compare v {disk} --json")).ends_with(1).json();
    assert_eq!(different["differences"].to_string(), r#"[{"blocks":100,"lba":100}]"#);
    place.run(&format!("discard {disk} --range 300..399")).succeeds();
    place.run(&format!("zero {fixed} --yes")).fails(3, &["reading only"]);
    served.server.stop();
}

#[test]
fn verify_names_every_bad_block_of_an_export() {
    let place = Place::new();
    let served = serve();
    let disk = served.target("disk");
    place.write("data", &noise(7, BYTES as usize));
    place.run(&format!("copy data {disk}")).succeeds();
    place.run(&format!("verify {disk}")).succeeds();
    for lba in [0, 1, 2047, 4095] {
        served.damage(lba);
    }
    let report = place.run(&format!("verify {disk} --json")).ends_with(1).json();
    let errors = report["errors"].as_array().unwrap().iter();
    let bad: Vec<_> = errors.map(|error| (error["lba"].as_u64().unwrap(), error["field"].as_str().unwrap())).collect();
    assert_eq!(bad, [(0, "media"), (1, "media"), (2047, "media"), (4095, "media")]);
    assert_eq!(report["offloaded"], false);
    place.run(&format!("verify {disk} --mode offload")).fails(3, &[&disk]);
    served.server.stop();
}

#[test]
fn what_cannot_be_opened_says_why_and_what_to_try() {
    let place = Place::new();
    let served = serve();
    let address = served.address;
    assert_eq!(place.run(&format!("discover nbd://{address}")).succeeds().text(), "disk\nfixed\n");
    let found = place.run(&format!("discover nbd://{address}/ --json")).succeeds().json();
    assert_eq!(found["exports"][0].to_string(), r#"{"description":"with seals","name":"disk"}"#);
    place
        .run(&format!("info nbd://{address}/nothing"))
        .fails(3, &["cannot connect to", "no such export", &format!("discover nbd://{address}")]);
    served.server.stop();
    served.cores.shutdown(LATE);
    place.run(&format!("info nbd://{address}/disk")).fails(3, &["cannot connect to", "server is running"]);
    place.run(&format!("discover nbd://{address}")).fails(3, &["cannot query", "server is running"]);
    place.run("info nbd://localhost/x?tls").fails(2, &["'tls'", "connections=4"]);
}
