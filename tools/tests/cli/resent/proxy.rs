//! A proxy that loses connections in the middle of a request: for both sides, or for the client only, with bytes that the server gets
//! when its client has long sent them again.

use std::cell::{Cell, RefCell};
use std::net::{Ipv4Addr, Shutdown, SocketAddr};
use std::rc::Rc;

use sealblock_runtime_memory::{Buffer, Slice};
use sealblock_runtime_reactor::net::{Listener, Stream};
use sealblock_runtime_reactor::spawn;

/// How a connection ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum End {
    /// By FIN.
    Close,
    /// By RST.
    Reset,
}

pub struct Proxy {
    pub address: SocketAddr,
    links: Rc<RefCell<Vec<Rc<Link>>>>,
}

/// One connection of the client, and the one to the server that it is joined to.
struct Link {
    client: Stream,
    server: Stream,
    /// Bytes for the server that still pass. Those behind them are kept.
    passing: Cell<usize>,
    held: RefCell<Vec<Slice>>,
    /// Bytes of the server do not reach the client.
    is_mute: Cell<bool>,
    is_cut: Cell<bool>,
    /// Bytes that came from the client since it was muted or held.
    caught: Cell<usize>,
}

impl Proxy {
    pub fn start(server: SocketAddr) -> Proxy {
        let listener = Listener::bind((Ipv4Addr::LOCALHOST, 0).into(), 16).unwrap();
        let address = listener.local_addr().unwrap();
        let links = Rc::<RefCell<Vec<Rc<Link>>>>::default();
        let all = Rc::clone(&links);
        spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let Ok(server) = Stream::connect(server).await else { continue };
                let link = Rc::new(Link {
                    client,
                    server,
                    passing: Cell::new(usize::MAX),
                    held: RefCell::default(),
                    is_mute: Cell::new(false),
                    is_cut: Cell::new(false),
                    caught: Cell::new(0),
                });
                all.borrow_mut().push(Rc::clone(&link));
                spawn(Rc::clone(&link).to_server());
                spawn(link.to_client());
            }
        });
        Proxy { address, links }
    }

    /// Connections that there were.
    pub fn connections(&self) -> usize {
        self.links.borrow().len()
    }

    fn each(&self, act: impl Fn(&Link)) {
        self.links.borrow().iter().filter(|link| !link.is_cut.get()).for_each(|link| act(link));
    }

    /// From now on no bytes of the server reach the client, and only so many more of the client reach the server, on the connections
    /// that there are.
    pub fn catch(&self, passing: usize) {
        self.each(|link| {
            link.caught.set(0);
            link.is_mute.set(true);
            link.passing.set(passing);
        });
    }

    /// Bytes that came from the client since then, on the connection with most of them.
    pub fn caught(&self) -> usize {
        self.links.borrow().iter().map(|link| link.caught.get()).max().unwrap_or(0)
    }

    /// Ends the connections that are there, for both sides.
    pub fn cut(&self, end: End) {
        self.each(|link| {
            link.is_cut.set(true);
            finish(&link.client, end);
            finish(&link.server, end);
        });
    }

    /// Ends these connections for the client, while the server takes them for alive.
    pub fn cut_clients(&self) {
        self.each(|link| {
            link.is_cut.set(true);
            finish(&link.client, End::Reset);
        });
    }

    /// Sends what was kept, and ends these connections for the server too.
    pub async fn deliver(&self, end: End) {
        let links = self.links.borrow().clone();
        for link in links.iter().filter(|link| link.is_cut.get()) {
            let held = link.held.take();
            // The server may have ended the connection by now.
            let _ = link.server.send_all(held).await;
            finish(&link.server, end);
        }
    }
}

/// Ends a stream for its peer. Fails only if it is closed already.
fn finish(stream: &Stream, end: End) {
    if end == End::Reset {
        // What was sent before is delivered all the same, or not: either is a loss.
        let _ = stream.reset();
    }
    let _ = stream.shutdown(Shutdown::Both);
}

impl Link {
    async fn to_server(self: Rc<Self>) {
        while let Some(bytes) = receive(&self.client).await {
            self.caught.set(self.caught.get() + bytes.len());
            let now = self.passing.get().min(bytes.len());
            if self.passing.get() != usize::MAX {
                self.passing.set(self.passing.get() - now);
            }
            if now < bytes.len() {
                self.held.borrow_mut().push(bytes.slice(now..));
            }
            if now > 0 && self.server.send_all([bytes.slice(..now)]).await.is_err() {
                break;
            }
        }
        if !self.is_cut.get() {
            let _ = self.server.shutdown(Shutdown::Write);
        }
    }

    async fn to_client(self: Rc<Self>) {
        while let Some(bytes) = receive(&self.server).await {
            if !self.is_mute.get() && self.client.send_all([bytes]).await.is_err() {
                break;
            }
        }
        let _ = self.client.shutdown(Shutdown::Both);
    }
}

async fn receive(stream: &Stream) -> Option<Slice> {
    let (result, buffer) = stream.recv(Buffer::zeroed(64 << 10)).await;
    match result {
        Ok(0) | Err(_) => None,
        Ok(len) => Some(buffer.freeze().slice(..len)),
    }
}
