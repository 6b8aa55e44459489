//! Listeners, all on the first core, which distributes accepted connections to the others. A service manager may have
//! opened some of them, which then also listen while no server runs.
//!
//! A Unix socket for NBD clients exists from when it listens until the server ends or a reload removes it. It has mode
//! 0600, so that the permissions of its folder and file control access. A stale socket at its path is replaced; a
//! socket that somebody listens on, and a file that is not a socket, is left alone.

use std::cell::Cell;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use std::{fmt, fs, io};

use sealblock_runtime_reactor::net::{self, Listener};
use sealblock_runtime_reactor::{CoreHandle, CoreLocal, JoinHandle, sleep, spawn};
use sealblock_stack::{Cause, StackError, is_out_of_descriptors, process_text};

use crate::control::socket_path::{Socket, listener_of};

/// The number of connections that may wait to be accepted.
const BACKLOG: u32 = 128;
/// The interval between checks whether a listener has ended.
const END_POLL_INTERVAL: Duration = Duration::from_millis(5);
const LISTENING: &str = "listen on";
const LISTENING_UNIX: &str = "listen for NBD on";

/// The name of sockets for NBD from a service manager (`FileDescriptorName=`); all others are for NVMe/TCP.
const FOR_NBD: &str = "nbd";

/// Sockets that a service manager has opened (systemd: socket activation). They stay open as long as the server runs,
/// so that they can be used again after every reload.
#[derive(Clone, Debug, Default)]
pub struct Inherited(Arc<Vec<net::Inherited>>);

impl Inherited {
    /// The sockets that were passed to this process, if any.
    ///
    /// # Errors
    /// If anything but TCP sockets was passed.
    pub fn take() -> Result<Inherited, StackError> {
        let failed = |error: net::InheritedError| {
            let advice = "ListenStream= with an address and a port in the .socket unit";
            StackError::new(Cause::Usage, "listen on", error).advise(advice)
        };
        net::Inherited::all().map(|all| Inherited(Arc::new(all))).map_err(failed)
    }

    /// The addresses for NVMe/TCP, and those for NBD.
    pub fn addresses(&self) -> (Vec<SocketAddr>, Vec<SocketAddr>) {
        let of = |nbd: bool| {
            let sockets = self.0.iter().filter(|socket| (socket.name == FOR_NBD) == nbd);
            sockets.map(|socket| socket.address).collect()
        };
        (of(false), of(true))
    }

    /// A copy of the socket at this address.
    fn at(&self, address: SocketAddr) -> Option<io::Result<OwnedFd>> {
        self.0.iter().find(|socket| socket.address == address).map(|socket| socket.fd.try_clone())
    }
}

/// An address or socket to listen on.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Place {
    /// At an address.
    Tcp(SocketAddr),
    /// On a Unix socket.
    Unix(PathBuf),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Tcp(address) => address.fmt(f),
            Place::Unix(path) => path.display().fmt(f),
        }
    }
}

/// A listener on its core that does not accept yet.
struct BoundListener {
    planned: Place,
    /// The address that it got, or its absolute path.
    place: Place,
    /// Removes the file.
    socket: Option<Socket>,
    core: CoreHandle,
    listener: CoreLocal<Cell<Option<Listener>>>,
}

impl BoundListener {
    /// Listens, or takes over a socket that already listens there.
    ///
    /// # Errors
    /// If the address is in use, does not belong to this machine, or is not permitted.
    async fn bind(core: &CoreHandle, planned: Place, inherited: &Inherited) -> Result<BoundListener, StackError> {
        let (there, socket) = match &planned {
            Place::Tcp(address) => {
                let there = inherited.at(*address).transpose().map_err(|error| bind_error(&error, *address))?;
                (there.map_or(Binding::Address(*address), Binding::Socket), None)
            }
            Place::Unix(path) => {
                let socket = Socket::at(path).map_err(|error| bind_unix_error(&error, path))?;
                let copy = socket.listener.try_clone().map_err(|error| bind_unix_error(&error, path))?;
                (Binding::Socket(copy.into()), Some(socket))
            }
        };
        let bound = core.call(move || async move {
            let listener = match there {
                Binding::Address(address) => Listener::bind(address, BACKLOG)?,
                Binding::Socket(socket) => Listener::from_fd(socket)?,
            };
            let address = listener.local_addr();
            io::Result::Ok((address, CoreLocal::new(Rc::new(Cell::new(Some(listener))))))
        });
        let bound = bound.await.map_err(|gone| StackError::new(Cause::Io, LISTENING, gone).on(&planned))?;
        let (place, listener) = match (&planned, bound) {
            (Place::Tcp(_), Ok((Ok(address), listener))) => (Place::Tcp(address), listener),
            (Place::Tcp(address), Ok((Err(error), _)) | Err(error)) => return Err(bind_error(&error, *address)),
            (Place::Unix(path), Ok((_, listener))) => (Place::Unix(absolute(path)), listener),
            (Place::Unix(path), Err(error)) => return Err(StackError::io(LISTENING, &error).on(path.display())),
        };
        Ok(BoundListener { planned, place, socket, core: core.clone(), listener })
    }

    /// Makes `serve` accept connections from now on, on the listener's core.
    ///
    /// # Errors
    /// If the core has stopped.
    async fn accept<F>(self, serve: impl FnOnce(Listener) -> F + Send + 'static) -> Result<ActiveListener, StackError>
    where
        F: Future<Output = io::Result<()>> + 'static,
    {
        let BoundListener { planned, place, socket, core, listener } = self;
        let name = place.to_string();
        let task = core.call(move || async move {
            let listener = listener.get().and_then(|listener| listener.take());
            CoreLocal::new(Rc::new(spawn(async move {
                let Some(listener) = listener else { return };
                if let Err(error) = serve(listener).await {
                    // Existing connections and other listeners continue.
                    tracing::error!("no longer accepting connections on {name}: {error}");
                }
            })))
        });
        let task = task.await.map_err(|gone| StackError::new(Cause::Io, LISTENING, gone).on(&place))?;
        Ok(ActiveListener { planned, place, _socket: socket, core, task })
    }
}

/// What will become a listener.
enum Binding {
    Address(SocketAddr),
    Socket(OwnedFd),
}

/// A listener that accepts.
struct ActiveListener {
    planned: Place,
    place: Place,
    /// Removes the file.
    _socket: Option<Socket>,
    core: CoreHandle,
    task: CoreLocal<JoinHandle<()>>,
}

/// The listeners of one protocol.
pub struct Listeners {
    core: CoreHandle,
    active: Vec<ActiveListener>,
    /// The listeners that were bound for a plan that is being applied.
    bound: Vec<BoundListener>,
}

impl Listeners {
    /// No listeners yet, on this core.
    pub fn new(core: CoreHandle) -> Listeners {
        Listeners { core, active: Vec::new(), bound: Vec::new() }
    }

    /// Binds the addresses on which nothing listens yet.
    ///
    /// # Errors
    /// The error of the first that cannot be bound.
    pub async fn prepare(&mut self, planned: &[Place], inherited: &Inherited) -> Result<(), StackError> {
        let mut bound = Vec::new();
        for place in planned.iter().filter(|place| !self.active.iter().any(|active| active.planned == **place)) {
            bound.push(BoundListener::bind(&self.core, place.clone(), inherited).await?);
        }
        self.bound = bound;
        Ok(())
    }

    /// Drops what was bound, because the plan is not applied.
    pub fn abandon(&mut self) {
        self.bound.clear();
    }

    /// Also accepts at the addresses that were bound, and stops accepting at those that are no longer planned. Existing
    /// connections stay.
    ///
    /// # Errors
    /// If the core has stopped.
    pub async fn change<F>(
        &mut self,
        planned: &[Place],
        serve: impl Fn(Listener) -> F + Clone + Send + 'static,
    ) -> Result<(), StackError>
    where
        F: Future<Output = io::Result<()>> + 'static,
    {
        for bound in std::mem::take(&mut self.bound) {
            self.active.push(bound.accept(serve.clone()).await?);
        }
        for old in self.active.extract_if(.., |active| !planned.contains(&active.planned)) {
            // A core that has stopped accepts nothing either.
            let _ = old.core.call(move || async move { old.task.get().inspect(|task| task.abort()).is_some() }).await;
        }
        Ok(())
    }

    /// True if there is none.
    pub fn is_empty(&self) -> bool {
        self.active.is_empty()
    }

    /// The addresses and sockets on which they listen.
    pub fn places(&self) -> impl Iterator<Item = &Place> {
        self.active.iter().map(|active| &active.place)
    }

    /// The requested addresses, each with the actual one.
    pub fn addresses(&self) -> impl Iterator<Item = (SocketAddr, SocketAddr)> {
        self.active.iter().filter_map(|active| match (&active.planned, &active.place) {
            (Place::Tcp(planned), Place::Tcp(address)) => Some((*planned, *address)),
            _ => None,
        })
    }

    /// The paths of Unix sockets.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        self.places().filter_map(|place| match place {
            Place::Unix(path) => Some(path.as_path()),
            Place::Tcp(_) => None,
        })
    }

    /// Waits until all have ended, which they do once their server has stopped and is drained.
    pub async fn ended(&self) {
        for active in &self.active {
            while !active.has_ended().await {
                sleep(END_POLL_INTERVAL).await;
            }
        }
    }
}

impl ActiveListener {
    async fn has_ended(&self) -> bool {
        let task = self.task.clone();
        let ended = self.core.call(move || async move { task.get().is_none_or(|task| task.is_finished()) });
        ended.await.unwrap_or(true)
    }
}

/// The absolute path, which clients in any working folder can use.
fn absolute(path: &Path) -> PathBuf {
    fs::canonicalize(path).or_else(|_| std::path::absolute(path)).unwrap_or_else(|_| path.to_owned())
}

fn bind_error(error: &io::Error, address: SocketAddr) -> StackError {
    let (cause, advice) = match error.kind() {
        io::ErrorKind::AddrInUse => (Cause::Refused, "use another address and port; port 0 chooses a free one"),
        io::ErrorKind::PermissionDenied => (Cause::Refused, "use a port from 1024 on, such as 4420 or 10809"),
        io::ErrorKind::AddrNotAvailable => (Cause::Unreachable, "use an address of this machine, such as 127.0.0.1"),
        _ => return io_error(LISTENING, error, "use another address and port").on(address),
    };
    StackError::new(cause, LISTENING, error).on(address).advise(advice)
}

/// A failure with this advice, unless another address would not help: where no socket can be opened any more.
fn io_error(action: &str, error: &io::Error, advice: &str) -> StackError {
    let failure = StackError::io(action, error);
    if is_out_of_descriptors(error) { failure } else { failure.advise(advice) }
}

fn bind_unix_error(error: &io::Error, path: &Path) -> StackError {
    if error.kind() != io::ErrorKind::AddrInUse {
        let advice = "use another --nbd-socket PATH, in a directory of this user";
        return io_error(LISTENING_UNIX, error, advice).on(path.display());
    }
    let who = listener_of(path).map_or("another process".to_owned(), |pid| format!("process {}", process_text(pid)));
    StackError::new(Cause::Refused, LISTENING_UNIX, format!("{who} listens there"))
        .on(path.display())
        .advise("use another --nbd-socket PATH")
}
