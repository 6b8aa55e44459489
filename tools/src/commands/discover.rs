//! `sealblock discover`: what a server lets this host see, over NVMe/TCP or NBD.

use sealblock_protocols_nvme::logs::{DiscoveryEntry, SubsystemType, TransportType};
use sealblock_stack::target::{Address, NbdAddress};
use sealblock_stack::{StackError, discover, exports, on_reactor};
use serde::Serialize;

use crate::cli::{Discover, RemoteServer};
use crate::exit::Exit;
use crate::report::{note, print_json, say};

/// The answer of `discover`.
#[derive(Serialize)]
struct Report {
    target: String,
    entries: Vec<Entry>,
}

/// Something that the server names.
#[derive(Serialize)]
struct Entry {
    nqn: String,
    #[serde(rename = "type")]
    kind: Option<&'static str>,
    transport: Option<&'static str>,
    address: String,
    port: Option<u16>,
}

/// The answer of `discover` for an NBD server.
#[derive(Serialize)]
struct NbdReport {
    target: String,
    exports: Vec<NbdExport>,
}

/// Something that an NBD server exports.
#[derive(Serialize)]
struct NbdExport {
    name: String,
    description: String,
}

/// Asks the server.
pub fn run(arguments: &Discover) -> Result<Exit, StackError> {
    match &arguments.server {
        RemoteServer::NvmeTcp(address) => subsystems(arguments, address),
        RemoteServer::Nbd(address) => nbd(arguments, address),
    }
}

fn nbd(arguments: &Discover, address: &NbdAddress) -> Result<Exit, StackError> {
    let found = on_reactor(exports(address))?;
    let told = |(name, description): (String, String)| NbdExport { name: printable(&name), description };
    let exports: Vec<NbdExport> = found.into_iter().map(told).collect();
    if arguments.json {
        print_json(&NbdReport { target: arguments.server.to_string(), exports })?;
    } else {
        if exports.is_empty() {
            note(&format_args!("{} has no exports", arguments.server));
        }
        exports.iter().try_for_each(|export| say(line(&export.name)))?;
    }
    Ok(Exit::Clean)
}

/// The line of an export. The name of the default one is empty, and an empty line would look like nothing at all.
fn line(name: &str) -> &str {
    if name.is_empty() { "\"\" (the default export)" } else { name }
}

fn subsystems(arguments: &Discover, address: &Address) -> Result<Exit, StackError> {
    let found = on_reactor(discover(address, arguments.host_nqn.clone()))?;
    if arguments.json {
        let entries = found.iter().map(entry).collect();
        print_json(&Report { target: address.to_string(), entries })?;
        return Ok(Exit::Clean);
    }
    let mut names: Vec<String> = found.iter().filter(|entry| is_subsystem(entry)).map(name).collect();
    names.dedup();
    if names.is_empty() {
        note(&format_args!(
            "no subsystem of {address} is visible to this host NQN; the server may restrict hosts (try --host-nqn)"
        ));
    }
    names.iter().try_for_each(|name| say(name))?;
    Ok(Exit::Clean)
}

fn is_subsystem(entry: &DiscoveryEntry) -> bool {
    entry.subtype == SubsystemType::Nvm.code()
}

/// The name, without characters that would do something to a terminal.
fn name(entry: &DiscoveryEntry) -> String {
    printable(&entry.subnqn.text())
}

fn printable(text: &str) -> String {
    sealblock_stack::printable(text).into_owned()
}

fn entry(entry: &DiscoveryEntry) -> Entry {
    let kind = [
        (SubsystemType::Nvm, "nvm"),
        (SubsystemType::CurrentDiscovery, "discovery"),
        (SubsystemType::Referral, "referral"),
    ];
    let transports = [
        (TransportType::Tcp, "tcp"),
        (TransportType::Rdma, "rdma"),
        (TransportType::FibreChannel, "fc"),
        (TransportType::Loop, "loop"),
    ];
    Entry {
        nqn: name(entry),
        kind: kind.iter().find(|(kind, _)| kind.code() == entry.subtype).map(|(_, word)| *word),
        transport: transports.iter().find(|(kind, _)| kind.code() == entry.trtype).map(|(_, word)| *word),
        address: printable(&entry.traddr.text()),
        port: entry.trsvcid.text().parse().ok(),
    }
}
