//! Names to addresses, on a thread, because the system's resolver blocks.

use std::cell::Cell;
use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::rc::Rc;

use sealblock_runtime_reactor::{Bell, Homed, Post};

use crate::{Address, ConnectError};

/// What the thread brings, and the bell that tells of it.
#[derive(Default)]
struct Desk {
    found: Cell<Option<io::Result<Vec<SocketAddr>>>>,
    bell: Bell,
}

/// The addresses of a host, in the order in which they are to be tried; at least one.
pub(crate) async fn resolve(address: &Address) -> Result<Vec<SocketAddr>, ConnectError> {
    let (host, port) = (address.bare_host().to_owned(), address.port);
    if let Ok(literal) = host.parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(literal, port)]);
    }
    let failed = |source| ConnectError::Resolve { host: host.clone(), source };
    let desk = Rc::new(Desk::default());
    let (theirs, home, name) = (Homed::new(Rc::clone(&desk)), Post::here(), host.clone());
    // Scoped IPv6 addresses (with %) are literals that only the system's resolver reads.
    let thread = std::thread::Builder::new().name("resolve".to_owned()).spawn(move || {
        let found = (name.as_str(), port).to_socket_addrs().map(Iterator::collect);
        // Whoever asked may be gone, and its reactor with it.
        let _ = home.send(move || {
            if let Some(desk) = theirs.get() {
                desk.found.set(Some(found));
                desk.bell.ring();
            }
        });
    });
    thread.map_err(failed)?;
    desk.bell.wait().await;
    match desk.found.take() {
        Some(Ok(addresses)) if !addresses.is_empty() => Ok(addresses),
        Some(Err(error)) => Err(failed(error)),
        _ => Err(failed(io::Error::new(io::ErrorKind::NotFound, "the name has no address"))),
    }
}
