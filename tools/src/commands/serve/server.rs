//! The server: opens what the plan names, serves it until it is told to end, and leaves volumes clean.

use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::Poll;

use futures_util::future::{Either, join_all, select};
use futures_util::stream::{FuturesUnordered, StreamExt};
use sealblock_block::{Device, Gate, Stack};
use sealblock_exports_nvme_tcp::{Namespace, SetupError, Shows, Subsystem, Target as Server};
use sealblock_runtime_reactor::net::Listener;
use sealblock_runtime_reactor::{JoinHandle, ShutdownSignal, shutdown_signal, spawn};

use super::announce::{Announcer, Event, NamespaceFacts, Serving, SubsystemFacts};
use super::identity::{derived, serial_of};
use super::notify::notify;
use super::plan::{NamespacePlan, Plan, SubsystemPlan};
use crate::cli::Protection;
use crate::exit::{Cause, Exit, Failure};
use crate::stack::{Access, Closer, ReadOnly};

/// Connections that may wait to be accepted.
const BACKLOG: u32 = 128;

/// What was opened, and what closes it.
#[derive(Default)]
struct Open {
    subsystems: Vec<Subsystem>,
    facts: Vec<SubsystemFacts>,
    closers: Vec<Closer>,
}

/// Serves the plan until a signal ends it.
///
/// # Errors
/// What kept it from being served, or from being left clean.
pub async fn run(plan: &Plan, announcer: &Announcer) -> Result<Exit, Failure> {
    // From here on a signal is an order to end in good order, even while volumes are being opened.
    let mut signal = shutdown_signal();
    watch(&mut signal).await;
    let mut open = Open::default();
    let served = match open_all(plan, &mut open).await {
        Ok(()) => serve(plan, &mut open, &mut signal, announcer).await,
        Err(failure) => Err(failure),
    };
    let mut closed = Ok(());
    for closer in open.closers {
        closed = closed.and(closer.close().await);
    }
    served?;
    closed?;
    announcer.tell(&Event::Stopped);
    Ok(Exit::Clean)
}

/// Lets the handlers be installed.
async fn watch(signal: &mut ShutdownSignal) {
    poll_fn(|cx| {
        let _ = Pin::new(&mut *signal).poll(cx);
        Poll::Ready(())
    })
    .await;
}

async fn open_all(plan: &Plan, open: &mut Open) -> Result<(), Failure> {
    for subsystem in &plan.subsystems {
        open_subsystem(subsystem, open).await?;
    }
    let facts: Vec<_> = open.facts.iter().flat_map(|subsystem| &subsystem.namespaces).collect();
    for (i, namespace) in facts.iter().enumerate() {
        if facts[..i].iter().any(|other| other.uuid == namespace.uuid) {
            let why = format!("another namespace has the identity {}, too", namespace.uuid);
            return Err(Failure::new(Cause::Unsuitable, "serving", why).on(&namespace.target));
        }
    }
    Ok(())
}

async fn open_subsystem(plan: &SubsystemPlan, open: &mut Open) -> Result<(), Failure> {
    let mut namespaces = Vec::with_capacity(plan.namespaces.len());
    let mut facts = Vec::with_capacity(plan.namespaces.len());
    let mut serial = plan.serial.clone();
    for namespace in &plan.namespaces {
        let (made, fact, uuid) = open_namespace(namespace, plan.nqn.as_str(), open).await?;
        serial.get_or_insert_with(|| serial_of(&uuid));
        namespaces.push((namespace.nsid, made));
        facts.push(fact);
    }
    let serial = serial.unwrap_or_default();
    let mut subsystem = Subsystem::new(plan.nqn.clone(), serial.clone()).with_hosts(plan.hosts.clone());
    if let Some(model) = &plan.model {
        subsystem = subsystem.with_model(model.clone());
    }
    for (nsid, namespace) in namespaces {
        subsystem = subsystem.with_namespace(nsid, namespace).map_err(|error| of_setup(&error).on(&plan.nqn))?;
    }
    open.facts.push(SubsystemFacts::new(plan, serial, facts));
    open.subsystems.push(subsystem);
    Ok(())
}

async fn open_namespace(
    plan: &NamespacePlan,
    nqn: &str,
    open: &mut Open,
) -> Result<(Namespace, NamespaceFacts, [u8; 16]), Failure> {
    let access = if plan.read_only { Access::Read } else { Access::Write };
    let (mut device, facts, closer) = crate::stack::open(&plan.target, access).await?.share();
    open.closers.push(closer);
    if plan.read_only {
        device = Rc::new(Gate::new(plan.target.to_string(), Stack::new(ReadOnly::new(device))));
    }
    let of_volume = facts.volume.as_ref().map(|volume| volume.uuid);
    let uuid = plan.uuid.or(of_volume).unwrap_or_else(|| derived(&plan.target, &format!("{nqn} {}", plan.nsid)));
    let facts = NamespaceFacts::new(plan, device.geometry(), &uuid);
    let shows = match plan.protection {
        Protection::Plain => Shows::Plain,
        Protection::Shown => Shows::Protected,
    };
    let namespace = Namespace::new(device, uuid).showing(shows);
    Ok((namespace.map_err(|error| of_setup(&error).on(&plan.target))?, facts, uuid))
}

fn of_setup(error: &SetupError) -> Failure {
    let failure = |cause| Failure::new(cause, "serving", error);
    match error {
        SetupError::NotProtected => failure(Cause::Unsuitable).advise("--protection plain, or a protected volume"),
        SetupError::Nsid(_) | SetupError::DuplicateNsid(_) | SetupError::Reserved(_) | SetupError::DuplicateNqn(_) => {
            failure(Cause::Usage)
        }
    }
}

/// Listens, says so, and serves until a signal comes or a listener fails.
async fn serve(
    plan: &Plan,
    open: &mut Open,
    signal: &mut ShutdownSignal,
    announcer: &Announcer,
) -> Result<(), Failure> {
    let server = Server::new(std::mem::take(&mut open.subsystems), plan.limits.clone());
    let server = server.map_err(|error| of_setup(&error))?;
    let mut addresses = Vec::with_capacity(plan.listeners.len());
    let mut listeners = Vec::with_capacity(plan.listeners.len());
    for address in &plan.listeners {
        let (listener, address) = listen(*address)?;
        listeners.push(listener);
        addresses.push(address);
    }
    let mut serving: FuturesUnordered<JoinHandle<io::Result<()>>> = listeners
        .into_iter()
        .map(|listener| {
            let server = server.clone();
            spawn(async move { server.serve(listener).await })
        })
        .collect();
    announcer.tell(&Event::Ready(Serving { listeners: addresses, subsystems: std::mem::take(&mut open.facts) }));
    notify("READY=1");
    // A listener ends by itself only when it fails.
    let first = match select(pin!(signal), serving.next()).await {
        Either::Left((signal, _)) => {
            signal.map_err(|error| Failure::io("waiting for signals", &error))?;
            notify("STOPPING=1");
            announcer.tell(&Event::Draining { connections: server.connections() });
            None
        }
        Either::Right((ended, _)) => ended,
    };
    server.stop();
    let rest = join_all(serving).await;
    for ended in first.into_iter().chain(rest) {
        let ended = ended.map_err(|error| Failure::new(Cause::Io, "serving", error))?;
        ended.map_err(|error| Failure::io("accepting connections", &error))?;
    }
    Ok(())
}

/// Listens on an address; gives the one it got.
fn listen(address: SocketAddr) -> Result<(Listener, SocketAddr), Failure> {
    let bound = Listener::bind(address, BACKLOG).and_then(|listener| {
        let address = listener.local_addr()?;
        Ok((listener, address))
    });
    bound.map_err(|error| {
        let (cause, advice) = match error.kind() {
            io::ErrorKind::AddrInUse => (Cause::Refused, "another --listen ADDR:PORT; port 0 chooses a free one"),
            io::ErrorKind::PermissionDenied => (Cause::Refused, "a port from 1024 on, such as 4420"),
            io::ErrorKind::AddrNotAvailable => (Cause::Unreachable, "an address of this machine, such as 127.0.0.1"),
            _ => (Cause::Io, "another --listen ADDR:PORT"),
        };
        Failure::new(cause, "listening", error).on(address).advise(advice)
    })
}
