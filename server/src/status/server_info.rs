//! The state of the server as a whole, for `status` requests on the control socket.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::rc::Rc;

use futures_util::future::join_all;
use sealblock_stack::target::TargetName;
use sealblock_stack::{Sameness, TargetIdentity, TargetLabel};

use super::assess::{assess, overall_health};
use super::health::Health;
use super::server::{ClientStatus, DeviceStatus, ExportStatus, ServerStatus};
use crate::control::peer::user;
use crate::control::protocol::TargetRef;
use crate::dates::unix_s;
use crate::devices::DeviceHandle;
use crate::exports::export::ListClients;
use crate::log;

/// The maximum number of clients that are listed.
const MAX_CLIENTS: usize = 1024;
/// The maximum number of warnings and errors that `status` repeats.
const MAX_ERRORS: usize = 32;

/// A served namespace, with all its names.
#[derive(Clone)]
pub struct NamespaceView {
    /// The target's text.
    pub text: String,
    /// Its label.
    pub label: TargetLabel,
    /// The NQN of its subsystem.
    pub nqn: String,
    /// Its identifier in it.
    pub nsid: u32,
    /// The addresses on which the server listens.
    pub listeners: Vec<SocketAddr>,
    /// The device.
    pub device: DeviceHandle,
    /// The names by which clients reach it.
    pub exports: Vec<ExportStatus>,
}

/// Information about a server, besides its devices.
#[derive(Clone)]
pub struct ServerInfo {
    /// The clients of each of its exports.
    pub clients: Rc<[ListClients]>,
    /// The addresses on which it listens for hosts.
    pub listeners: Vec<SocketAddr>,
    /// The addresses on which it listens for NBD clients.
    pub nbd_listeners: Vec<SocketAddr>,
    /// The Unix sockets on which it listens for NBD clients.
    pub nbd_sockets: Vec<PathBuf>,
    /// The namespaces of the plan that are not open.
    pub not_open: Vec<DeviceStatus>,
    /// The identity of each of these.
    pub waiting: Vec<TargetIdentity>,
    /// The control socket.
    pub control: String,
}

impl ServerInfo {
    /// The current state of the server and of everything that it serves.
    pub async fn status(&self, offers: &[NamespaceView]) -> ServerStatus {
        let started_unix_s = started_unix_s();
        let mut of_devices: Vec<Vec<&NamespaceView>> = Vec::new();
        for offer in offers {
            match of_devices.iter_mut().find(|known| known[0].device.is_same(&offer.device)) {
                Some(known) => known.push(offer),
                None => of_devices.push(vec![offer]),
            }
        }
        let mut devices = join_all(of_devices.iter().map(|offers| device(offers, started_unix_s))).await;
        devices.extend(self.not_open.iter().cloned());
        let healths: Vec<Health> = devices.iter().map(|device| device.health).collect();
        let (health, summary) = overall_health(&healths);
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
            errors: log::last(MAX_ERRORS),
        }
    }

    fn clients(&self) -> Vec<ClientStatus> {
        self.clients.iter().flat_map(|list| list()).collect()
    }
}

/// When this server was started; the first call determines it.
pub fn started_unix_s() -> u64 {
    static STARTED: std::sync::OnceLock<u64> = std::sync::OnceLock::new();
    *STARTED.get_or_init(unix_s)
}

/// The status of a device, from all namespaces that serve it.
async fn device(offers: &[&NamespaceView], started_unix_s: u64) -> DeviceStatus {
    let seen = offers[0].device.snapshot().await;
    let target = offers[0].text.clone();
    let verdict = assess(&sealblock_stack::shell_word(&target), &seen, started_unix_s);
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

impl NamespaceView {
    /// How the target in a request compares with this one.
    pub fn compare(&self, name: &TargetRef) -> Sameness {
        let same_if = |is_same| if is_same { Sameness::Same } else { Sameness::Different };
        if let Some(nqn) = &name.nqn {
            let is_here = |address: &SocketAddr| self.listeners.iter().any(|listener| reaches(*listener, *address));
            return same_if(
                *nqn == self.nqn
                    && name.nsid.is_none_or(|nsid| nsid == self.nsid)
                    && (name.addresses.is_empty() || name.addresses.iter().any(is_here)),
            );
        }
        match (&name.identity, &name.path) {
            (Some(asked), _) => self.label.compare(asked),
            (None, Some(path)) => self.label.compare(&TargetIdentity::of(&TargetName::File(path.into()))),
            (None, None) => same_if(name.text == self.text),
        }
    }
}

impl ServerInfo {
    /// The text of the target that a request refers to, if it is to be served but is not open.
    pub fn waiting_for(&self, name: &TargetRef) -> Option<String> {
        let is_it = |(status, identity): &(&DeviceStatus, &TargetIdentity)| match (&name.nqn, &name.identity) {
            (Some(nqn), _) => {
                let is_it =
                    |export: &ExportStatus| export.name == *nqn && (name.nsid.is_none() || export.nsid == name.nsid);
                name.addresses.is_empty() && status.exports.iter().any(is_it)
            }
            (None, Some(asked)) => asked.compare(identity) == Sameness::Same,
            (None, None) => name.path.is_none() && status.target == name.text,
        };
        self.not_open.iter().zip(&self.waiting).find(is_it).map(|(status, _)| status.target.clone())
    }
}

/// True if a connection to an address of this machine reaches the listener.
pub fn reaches(listener: SocketAddr, address: SocketAddr) -> bool {
    let (own, asked) = (listener.ip().to_canonical(), address.ip().to_canonical());
    let takes_all = own.is_unspecified() && (listener.is_ipv6() || asked.is_ipv4());
    listener.port() == address.port() && (takes_all || own == asked)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listener_is_reached_by_its_address_or_by_any() {
        for (listener, address, reached) in [
            ("127.0.0.1:4420", "127.0.0.1:4420", true),
            ("127.0.0.1:4420", "127.0.0.1:4421", false),
            ("127.0.0.1:4420", "192.0.2.1:4420", false),
            ("0.0.0.0:4420", "192.0.2.1:4420", true),
            ("0.0.0.0:4420", "[::1]:4420", false),
            ("[::]:4420", "[::1]:4420", true),
            ("[::]:4420", "192.0.2.1:4420", true),
        ] {
            assert_eq!(reaches(listener.parse().unwrap(), address.parse().unwrap()), reached, "{listener} {address}");
        }
    }
}
