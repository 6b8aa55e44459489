//! What stays the same for a device when its namespaces change, and when it is closed.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::pin::pin;
use std::sync::Arc;

use futures_util::future::{Either, select};
use sealblock_block::Medium;
use sealblock_exports_nvme_tcp::{Namespace, NamespaceState};
use sealblock_media_file::Options;
use sealblock_media_volume::format::{Layout, SUPERBLOCK_BYTES, SUPERBLOCK_OFFSETS, Superblock};
use sealblock_media_volume::{CreateOptions, WhyLost, create};
use sealblock_runtime_reactor::{Config, Cores, Placement, Reactor};
use sealblock_stack::open_medium;
use sealblock_units::BlockSize;

use super::*;
use crate::plan::config::parse;

/// A subsystem with one namespace and these lines about it.
fn subsystem(name: &str, target: &str, more: &str) -> String {
    format!("[[subsystems]]\nname = \"{name}\"\n[[subsystems.namespaces]]\ntarget = \"{target}\"\n{more}\n")
}

fn plan(text: &str) -> Plan {
    Plan { listeners: Vec::new(), ..parse(&format!("[limits]\ndrain = \"1min\"\n{text}")).unwrap() }
}

impl Server {
    /// The first namespace of a subsystem, as it would be offered.
    fn namespace(&self, name: &str) -> Namespace {
        let offered = self.offered.iter().find(|(nqn, _)| nqn.as_str().ends_with(&format!(":{name}"))).unwrap().1;
        offered.spaces.values().next().unwrap().namespace().unwrap()
    }

    fn state(&self, name: &str) -> Arc<NamespaceState> {
        self.namespace(name).state()
    }
}

/// Runs a test with a server on one core.
fn with_server<F: Future<Output = ()>>(test: impl FnOnce(Server) -> F) {
    let config = Config { pool_arena_bytes: 0, ..Config::default() };
    let reactor = Reactor::new(config.clone()).unwrap();
    let cores = Cores::start(Placement::Count(1), config).unwrap();
    reactor.block_on(async {
        let limits = plan(&subsystem("a", "mem:1MiB", "")).limits;
        test(Server::new(cores.handles(), &limits, EventSender::here(|_| ()), Ok(())).unwrap()).await;
    });
    cores.shutdown(Duration::from_secs(30));
}

#[test]
fn a_device_keeps_its_state_however_it_is_offered_and_another_has_its_own() {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(1 << 20).unwrap();
    let path = &format!("raw:{}", file.path().display());
    with_server(|mut server| async move {
        let memory = |more: &str| subsystem("m", "mem:1MiB", more);
        server.change(&plan(&format!("{}{}", memory(""), subsystem("a", path, "")))).await.unwrap();
        let (of_memory, of_file) = (server.state("m"), server.state("a"));
        assert!(!Arc::ptr_eq(&of_memory, &of_file));
        let other = "uuid = \"6f0c3b9e-54c2-4d5b-9d0a-3a1f6a1b2c3d\"";
        server.change(&plan(&format!("{}{}", memory(other), subsystem("b", path, "")))).await.unwrap();
        assert!(Arc::ptr_eq(&of_memory, &server.state("m")), "the same memory, under another identity");
        assert!(Arc::ptr_eq(&of_file, &server.state("b")), "the same file, in another subsystem");
        let larger = subsystem("m", "mem:2MiB", "");
        // A strong reference to the state would keep the device open.
        drop((of_file, of_memory));
        let before = Arc::downgrade(&server.state("m"));
        server.change(&plan(&larger)).await.unwrap();
        assert!(before.upgrade().is_none(), "another memory, with another state");
        server.end().await.closed.unwrap();
    });
}

/// A volume whose superblocks say that changes may be lost.
async fn volume_with_loss(path: &Path) {
    let medium = open_medium(path, Options::WRITE).await.unwrap();
    let shape = CreateOptions {
        block_size: BlockSize::B4096,
        capacity_blocks: 64,
        protection: None,
        uuid: [7; 16],
        preallocate: false,
    };
    medium.set_len(Layout::new(shape.block_size, medium.sector_bytes(), 64).unwrap().medium_bytes()).await.unwrap();
    create(&medium, &shape).await.unwrap();
    drop(medium);
    let file = File::options().read(true).write(true).open(path).unwrap();
    for at in SUPERBLOCK_OFFSETS {
        let said = Superblock { unreported_loss: Some(WhyLost::Damaged), ..superblock(path, at) };
        file.write_all_at(&said.encode(), at).unwrap();
    }
}

fn superblock(path: &Path, at: u64) -> Superblock {
    let mut bytes = [0; SUPERBLOCK_BYTES];
    File::open(path).unwrap().read_exact_at(&mut bytes, at).unwrap();
    Superblock::decode(&bytes).unwrap()
}

fn newest(path: &Path) -> Superblock {
    SUPERBLOCK_OFFSETS.map(|at| superblock(path, at)).into_iter().max_by_key(|found| found.write_seq).unwrap()
}

#[test]
fn that_changes_may_be_lost_is_forgotten_when_clients_had_the_time_to_come_back_and_not_before() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let path = file.path().to_owned();
    let served = plan(&subsystem("v", &path.display().to_string(), ""));
    with_server(|mut server| async move {
        volume_with_loss(&path).await;
        server.change(&served).await.unwrap();
        let seen =
            server.offered.values().next().unwrap().spaces.values().next().unwrap().device.handle.snapshot().await;
        assert!(seen.unflushed_lost.iter().any(|why| why.ends_with("notes are damaged")), "{:?}", seen.unflushed_lost);
        server.change(&plan(&subsystem("m", "mem:1MiB", ""))).await.unwrap();
        assert_eq!(
            newest(&path).unreported_loss,
            Some(WhyLost::Damaged),
            "it ended before its clients could come back"
        );
        server.devices.clients_come_back = Duration::from_millis(20);
        server.change(&served).await.unwrap();
        for _ in 0..500 {
            sleep(Duration::from_millis(10)).await;
            if newest(&path).unreported_loss.is_none() {
                return server.end().await.closed.unwrap();
            }
        }
        panic!("it is not forgotten");
    });
}

#[test]
fn a_device_is_closed_when_nobody_uses_it_any_more() {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(1 << 20).unwrap();
    let path = &format!("raw:{}", file.path().display());
    with_server(|mut server| async move {
        let stays = subsystem("m", "mem:1MiB", "");
        server.change(&plan(&format!("{stays}{}", subsystem("a", path, "")))).await.unwrap();
        // Like a command in flight.
        let used = server.namespace("a");
        let without = plan(&stays);
        {
            let change = pin!(server.change(&without));
            let Either::Right(((), change)) = select(change, pin!(sleep(DRAIN_POLL_INTERVAL * 10))).await else {
                panic!("it was closed although it was being used");
            };
            drop(used);
            change.await.unwrap();
        }
        server.end().await.closed.unwrap();
    });
}

/// What a reload does with a device if one key of its namespace changes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Reload {
    /// The same device stays open and served.
    Keeps,
    /// The reload is refused and nothing changes.
    Refuses,
}

/// Each key of a namespace except the target and its place, which identify the device; and the keys of its subsystem.
const KEYS: [(&str, &str, Reload); 11] = [
    ("", "read_only = true", Reload::Refuses),
    ("", "relocate = false", Reload::Refuses),
    ("", "as_member = true", Reload::Refuses),
    ("", "protection = \"shown\"", Reload::Refuses),
    ("", "uuid = \"6f0c3b9e-54c2-4d5b-9d0a-3a1f6a1b2c3d\"", Reload::Keeps),
    ("", "scrub = { every = \"7d\", rate = \"1MB/s\", pause_when_busy = false }", Reload::Keeps),
    ("", "nbd = \"other\"", Reload::Keeps),
    ("serial = \"S1\"", "", Reload::Keeps),
    ("model = \"M\"", "", Reload::Keeps),
    ("hosts = [\"nqn.2026-01.org.example:host\"]", "", Reload::Keeps),
    ("", "", Reload::Keeps),
];

#[test]
fn a_reload_keeps_the_device_that_it_names_or_refuses_by_name() {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(1 << 20).unwrap();
    let raw = format!("raw:{}", file.path().display());
    let kinds =
        ["mem:1MiB", "null:1MiB", &raw, "offset:0..99,mem:1MiB", "fault:[flip@5],mem:1MiB", "stripe:mem:1MiB,mem:1MiB"];
    with_server(|mut server| async move {
        for target in kinds {
            let of = |head: &str, more: &str| {
                plan(&subsystem("m", target, more).replacen("[[subsystems.", &format!("{head}\n[[subsystems."), 1))
            };
            for (head, key, wanted) in KEYS {
                server.change(&of("", "")).await.unwrap();
                let before = Arc::downgrade(&server.state("m"));
                let changed = server.change(&of(head, key)).await;
                let is_same = std::ptr::eq(Arc::as_ptr(&server.state("m")), before.as_ptr());
                assert!(is_same && before.upgrade().is_some(), "{target} with {head}{key}: another device is offered");
                let done = if changed.is_ok() { Reload::Keeps } else { Reload::Refuses };
                assert_eq!(done, wanted, "{target} with {head}{key}: {changed:?}");
                if let Err(error) = changed {
                    assert!(error.to_string().contains(target), "{error}");
                }
            }
        }
        server.end().await.closed.unwrap();
    });
}

#[test]
fn memory_with_a_uuid_is_named_by_it() {
    let uuid = "uuid = \"6f0c3b9e-54c2-4d5b-9d0a-3a1f6a1b2c3d\"";
    with_server(|mut server| async move {
        server.change(&plan(&subsystem("m", "mem:1MiB", uuid))).await.unwrap();
        let before = Arc::downgrade(&server.state("m"));
        // In another subsystem, with another number: the same memory device.
        server.change(&plan(&subsystem("n", "mem:1MiB", &format!("{uuid}\nnsid = 7")))).await.unwrap();
        assert!(std::ptr::eq(Arc::as_ptr(&server.state("n")), before.as_ptr()));
        for other in ["mem:2MiB", "null:1MiB", "offset:0..9,mem:1MiB"] {
            let refused = server.change(&plan(&subsystem("n", other, &format!("{uuid}\nnsid = 7")))).await.unwrap_err();
            assert!(refused.to_string().contains("would be lost"), "{refused}");
            assert!(std::ptr::eq(Arc::as_ptr(&server.state("n")), before.as_ptr()));
        }
        let refused = server.change(&plan(&subsystem("n", "mem:1MiB", &format!("{uuid}\nread_only = true")))).await;
        assert!(refused.unwrap_err().to_string().contains("the other setting"));
        server.end().await.closed.unwrap();
    });
}
