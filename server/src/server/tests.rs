//! What stays the same of a device when its namespaces change, and when it is closed.

use std::pin::pin;
use std::sync::Arc;

use futures_util::future::{Either, select};
use sealblock_exports_nvme_tcp::{Namespace, NamespaceState};
use sealblock_runtime_reactor::{Config, Cores, Placement, Reactor};

use super::*;
use crate::config::parse;

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
        server.end().await.1.unwrap();
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
        // As a command in flight has it.
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
        server.end().await.1.unwrap();
    });
}
