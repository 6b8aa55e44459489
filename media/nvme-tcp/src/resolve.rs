//! Names to addresses, on a thread, because the system's resolver blocks.

use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::sync::{Arc, Mutex};
use std::task::{Poll, Waker};

use crate::{Address, ConnectError};

#[derive(Default)]
struct Answer {
    result: Option<io::Result<Vec<SocketAddr>>>,
    waker: Option<Waker>,
}

/// The addresses of a host, in the order in which they are to be tried; at least one.
pub(crate) async fn resolve(address: &Address) -> Result<Vec<SocketAddr>, ConnectError> {
    let (host, port) = (address.bare_host().to_owned(), address.port);
    if let Ok(literal) = host.parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(literal, port)]);
    }
    let failed = |source| ConnectError::Resolve { host: host.clone(), source };
    let shared = Arc::new(Mutex::new(Answer::default()));
    let (theirs, name) = (Arc::clone(&shared), host.clone());
    // Scoped IPv6 addresses (with %) are literals that only the system's resolver reads.
    let thread = std::thread::Builder::new().name("resolve".to_owned()).spawn(move || {
        let result = (name.as_str(), port).to_socket_addrs().map(Iterator::collect);
        let waker = {
            let mut answer = theirs.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            answer.result = Some(result);
            answer.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    });
    thread.map_err(failed)?;
    let found: io::Result<Vec<SocketAddr>> = std::future::poll_fn(|cx| {
        let mut answer = shared.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        match answer.result.take() {
            Some(result) => Poll::Ready(result),
            None => {
                answer.waker = Some(cx.waker().clone());
                Poll::Pending
            }
        }
    })
    .await;
    match found {
        Ok(addresses) if !addresses.is_empty() => Ok(addresses),
        Ok(_) => Err(failed(io::Error::new(io::ErrorKind::NotFound, "the name has no address"))),
        Err(error) => Err(failed(error)),
    }
}
