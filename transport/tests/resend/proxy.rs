//! A proxy that loses connections: for both sides, or only for the client, with bytes that the server receives later.

use std::cell::{Cell, RefCell};
use std::net::{Ipv4Addr, Shutdown, SocketAddr};
use std::rc::Rc;

use sealblock_runtime_memory::{Buffer, Slice};
use sealblock_runtime_reactor::net::{Listener, Stream};
use sealblock_runtime_reactor::spawn;

/// How a connection ends.
#[derive(Clone, Copy, Debug)]
pub enum End {
    /// By FIN.
    Close,
    /// By RST.
    Reset,
}

pub struct Proxy {
    pub address: SocketAddr,
    server: Rc<Cell<SocketAddr>>,
    links: Rc<RefCell<Vec<Rc<Link>>>>,
}

struct Link {
    client: Stream,
    server: Stream,
    /// True if bytes for the server are held back.
    is_held: Cell<bool>,
    /// True if the connection to the client is closed.
    is_cut: Cell<bool>,
    held: RefCell<Vec<Slice>>,
}

impl Proxy {
    pub fn start(server: SocketAddr) -> Proxy {
        let listener = Listener::bind((Ipv4Addr::LOCALHOST, 0).into(), 16).unwrap();
        let address = listener.local_addr().unwrap();
        let links = Rc::<RefCell<Vec<Rc<Link>>>>::default();
        let server = Rc::new(Cell::new(server));
        let (all, to) = (Rc::clone(&links), Rc::clone(&server));
        spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let Ok(server) = Stream::connect(to.get()).await else { continue };
                let (is_held, is_cut) = (Cell::new(false), Cell::new(false));
                let link = Rc::new(Link { client, server, is_held, is_cut, held: RefCell::default() });
                all.borrow_mut().push(Rc::clone(&link));
                spawn(Rc::clone(&link).to_server());
                spawn(link.to_client());
            }
        });
        Proxy { address, server, links }
    }

    /// Where new connections lead from now on.
    pub fn lead_to(&self, server: SocketAddr) {
        self.server.set(server);
    }

    fn each(&self, act: impl Fn(&Link)) {
        self.links.borrow().iter().filter(|link| !link.is_cut.get()).for_each(|link| act(link));
    }

    /// Ends the open connections, for both sides.
    pub fn cut(&self, end: End) {
        self.each(|link| {
            link.is_cut.set(true);
            finish(&link.client, end);
            finish(&link.server, end);
        });
    }

    /// From now on, holds back bytes for the server on the open connections.
    pub fn hold(&self) {
        self.each(|link| link.is_held.set(true));
    }

    pub fn has_held(&self) -> bool {
        self.links.borrow().iter().any(|link| !link.held.borrow().is_empty())
    }

    /// Ends these connections for the client; they stay open for the server.
    pub fn cut_clients(&self) {
        self.each(|link| {
            link.is_cut.set(true);
            finish(&link.client, End::Reset);
        });
    }

    /// Sends the bytes that were held back, and ends these connections for the server too.
    pub async fn deliver(&self, end: End) {
        let links = self.links.borrow().clone();
        for link in links.iter().filter(|link| link.is_held.get()) {
            let held = link.held.take();
            // The server may have ended the connection by now.
            let _ = link.server.send_all(held).await;
            finish(&link.server, end);
        }
    }
}

/// Ends a stream for its peer. Fails only if it is closed already.
fn finish(stream: &Stream, end: End) {
    if matches!(end, End::Reset) {
        // Bytes that were sent before may or may not be delivered: both are a loss of the connection.
        let _ = stream.reset();
    }
    let _ = stream.shutdown(Shutdown::Both);
}

impl Link {
    async fn to_server(self: Rc<Self>) {
        while let Some(bytes) = receive(&self.client).await {
            match self.is_held.get() {
                true => self.held.borrow_mut().push(bytes),
                false if self.server.send_all([bytes]).await.is_err() => break,
                false => {}
            }
        }
        if !self.is_held.get() {
            let _ = self.server.shutdown(Shutdown::Write);
        }
    }

    async fn to_client(self: Rc<Self>) {
        while let Some(bytes) = receive(&self.server).await {
            if !self.is_cut.get() && self.client.send_all([bytes]).await.is_err() {
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
