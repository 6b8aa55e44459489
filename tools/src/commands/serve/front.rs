//! The state of the server as a whole, for `status` requests on the control socket.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;

use futures_util::future::join_all;
use sealblock_exports_nbd::{Client, Server as Nbd};
use sealblock_exports_nvme_tcp::{ConnectedHost, Target as Export};
use sealblock_protocols_nvme::nqn::Nqn;

use super::announce::shell_word;
use super::control::Offer;
use super::failing::unix_s;
use super::health::{assess, of_all};
use super::recent;
use crate::control::server::{ClientStatus, DeviceStatus, Health, ServerStatus};
use crate::control::socket_path::user;

/// Clients that are named.
const MAX_CLIENTS: usize = 1024;
/// Warnings and errors that `status` repeats.
const MAX_ERRORS: usize = 32;

/// What can be looked at of a server, besides its devices.
#[derive(Clone)]
pub struct Front {
    export: Export,
    nbd: Nbd,
    listeners: Vec<SocketAddr>,
    nbd_listeners: Vec<SocketAddr>,
    nbd_sockets: Vec<PathBuf>,
    /// What is to be served and is not open.
    not_open: Vec<DeviceStatus>,
    /// The control socket.
    control: String,
}

impl Front {
    /// Of a server that listens here.
    pub fn new(export: Export, listeners: Vec<SocketAddr>, nbd: Nbd, nbd_listeners: Vec<SocketAddr>) -> Front {
        Front {
            export,
            nbd,
            listeners,
            nbd_listeners,
            nbd_sockets: Vec::new(),
            not_open: Vec::new(),
            control: String::new(),
        }
    }

    /// The same, which listens on these Unix sockets, too.
    pub fn at(self, nbd_sockets: Vec<PathBuf>) -> Front {
        Front { nbd_sockets, ..self }
    }

    /// The same, which lacks these.
    pub fn without(self, not_open: Vec<DeviceStatus>) -> Front {
        Front { not_open, ..self }
    }

    /// The same with its control socket.
    pub fn reached_by(self, control: String) -> Front {
        Front { control, ..self }
    }

    /// How the server is now, and all that it offers.
    pub async fn status(&self, offers: &[Offer]) -> ServerStatus {
        let started_unix_s = started_unix_s();
        let mut of_devices: Vec<Vec<&Offer>> = Vec::new();
        for offer in offers {
            match of_devices.iter_mut().find(|known| known[0].insight.is_same(&offer.insight)) {
                Some(known) => known.push(offer),
                None => of_devices.push(vec![offer]),
            }
        }
        let mut devices = join_all(of_devices.iter().map(|offers| device(offers, started_unix_s))).await;
        devices.extend(self.not_open.iter().cloned());
        let healths: Vec<Health> = devices.iter().map(|device| device.health).collect();
        let (health, summary) = of_all(&healths);
        let mut clients = self.clients();
        let clients_unlisted = clients.len().saturating_sub(MAX_CLIENTS) as u64;
        clients.truncate(MAX_CLIENTS);
        ServerStatus {
            pid: std::process::id(),
            uid: user().unwrap_or(u32::MAX),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            started_unix_s,
            control: self.control.clone(),
            health,
            summary,
            listeners: self.listeners.clone(),
            nbd_listeners: self.nbd_listeners.clone(),
            nbd_sockets: self.nbd_sockets.clone(),
            devices,
            clients,
            clients_unlisted,
            errors: recent::last(MAX_ERRORS),
        }
    }

    fn clients(&self) -> Vec<ClientStatus> {
        let hosts = self.export.connected_hosts().into_iter().map(of_host);
        hosts.chain(self.nbd.clients().into_iter().map(of_client)).collect()
    }
}

/// When this server was started; settled by the first call.
pub fn started_unix_s() -> u64 {
    static STARTED: std::sync::OnceLock<u64> = std::sync::OnceLock::new();
    *STARTED.get_or_init(unix_s)
}

/// A device by all offers of it.
async fn device(offers: &[&Offer], started_unix_s: u64) -> DeviceStatus {
    let seen = offers[0].insight.snapshot().await;
    let target = offers[0].text.clone();
    let verdict = assess(&shell_word(&target), &seen, started_unix_s);
    DeviceStatus {
        target,
        health: verdict.health,
        summary: verdict.summary,
        advice: verdict.advice,
        exports: offers.iter().flat_map(|offer| offer.exports.clone()).collect(),
        opening: None,
        seen,
    }
}

fn of_host(guest: ConnectedHost) -> ClientStatus {
    ClientStatus {
        protocol: "nvme".to_owned(),
        host: guest.host.as_ref().map(Nqn::to_string),
        from: guest.from,
        name: guest.subsystem.to_string(),
        queues: Some(guest.io_queues as u64),
        connected_s: guest.connected.as_secs(),
    }
}

fn of_client(client: Client) -> ClientStatus {
    ClientStatus {
        protocol: "nbd".to_owned(),
        host: None,
        from: client.from,
        name: client.export,
        queues: None,
        connected_s: client.connected.as_secs(),
    }
}

/// The address by which this machine's own clients reach a listener.
pub fn on_this_machine(listener: SocketAddr) -> SocketAddr {
    let port = listener.port();
    match listener {
        SocketAddr::V4(address) if address.ip().is_unspecified() => (Ipv4Addr::LOCALHOST, port).into(),
        SocketAddr::V6(address) if address.ip().is_unspecified() => (Ipv6Addr::LOCALHOST, port).into(),
        other => other,
    }
}
