//! Listeners: all on the first core, which hands what it accepts to the others. A service manager may have opened some, which
//! then listen also while no server runs.

use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;

use sealblock_runtime_reactor::net::{self, Listener};
use sealblock_runtime_reactor::{CoreHandle, CoreLocal, JoinHandle, spawn};
use sealblock_stack::{Cause, StackError};

/// Connections that may wait to be accepted.
const BACKLOG: u32 = 128;

/// What a service manager calls sockets for NBD (`FileDescriptorName=`); all others are for NVMe/TCP.
const FOR_NBD: &str = "nbd";

/// Sockets that a service manager has opened (systemd: socket activation). They stay open as long as the server, so that it
/// comes back to them after every reload.
#[derive(Clone, Debug, Default)]
pub struct Inherited(Arc<Vec<net::Inherited>>);

impl Inherited {
    /// What was handed to this process, if anything.
    ///
    /// # Errors
    /// When there are other things than TCP sockets among it.
    pub fn take() -> Result<Inherited, StackError> {
        let failed = |error: net::InheritedError| {
            let advice = "ListenStream= with an address and a port in the .socket unit";
            StackError::new(Cause::Usage, "listening", error).advise(advice)
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

/// A listener that accepts.
pub struct ActiveListener {
    /// The address that was asked for.
    pub planned: SocketAddr,
    /// The address it got.
    pub address: SocketAddr,
    accepting: Accepting,
}

/// Accepting, on the listener's core.
pub struct Accepting {
    core: CoreHandle,
    task: CoreLocal<JoinHandle<()>>,
}

/// A listener on its core, before it accepts.
pub struct Idle {
    core: CoreHandle,
    listener: CoreLocal<std::cell::Cell<Option<Listener>>>,
}

/// A listener that is bound and accepts nothing yet.
pub struct BoundListener {
    planned: SocketAddr,
    /// The address it got.
    pub address: SocketAddr,
    idle: Idle,
}

impl BoundListener {
    /// Listens, or takes over the socket that listens there already.
    ///
    /// # Errors
    /// When the address is taken, not this machine's, or not allowed.
    pub async fn bind(
        core: &CoreHandle,
        planned: SocketAddr,
        inherited: &Inherited,
    ) -> Result<BoundListener, StackError> {
        let there = inherited.at(planned).transpose().map_err(|error| of_bind(&error, planned))?;
        let bound = core.call(move || async move {
            let listener = there.map_or_else(|| Listener::bind(planned, BACKLOG), Listener::from_fd)?;
            Ok((listener.local_addr()?, on_core(listener)))
        });
        let bound = bound.await.map_err(|gone| StackError::new(Cause::Io, "listening", gone).on(planned))?;
        let (address, listener) = bound.map_err(|error| of_bind(&error, planned))?;
        Ok(BoundListener { planned, address, idle: Idle { core: core.clone(), listener } })
    }

    /// Has `serve` accept connections from now on, on the listener's core.
    ///
    /// # Errors
    /// When the core has stopped.
    pub async fn accept<F>(
        self,
        serve: impl FnOnce(Listener) -> F + Send + 'static,
    ) -> Result<ActiveListener, StackError>
    where
        F: Future<Output = io::Result<()>>,
    {
        let accepting = self.idle.accept(self.address.to_string(), serve).await?;
        Ok(ActiveListener { planned: self.planned, address: self.address, accepting })
    }
}

fn on_core(listener: Listener) -> CoreLocal<std::cell::Cell<Option<Listener>>> {
    CoreLocal::new(Rc::new(std::cell::Cell::new(Some(listener))))
}

impl Idle {
    /// A socket that listens already, on this core.
    ///
    /// # Errors
    /// When that core has stopped, or cannot wait for it.
    pub async fn take(core: &CoreHandle, socket: OwnedFd, name: &str) -> Result<Idle, StackError> {
        let taken = core.call(move || async move { Listener::from_fd(socket).map(on_core) });
        let taken = taken.await.map_err(|gone| StackError::new(Cause::Io, "listening", gone).on(name))?;
        let listener = taken.map_err(|error| StackError::io("listening", &error).on(name))?;
        Ok(Idle { core: core.clone(), listener })
    }

    /// Has `serve` accept connections from now on.
    ///
    /// # Errors
    /// When the core has stopped.
    pub async fn accept<F>(
        self,
        name: String,
        serve: impl FnOnce(Listener) -> F + Send + 'static,
    ) -> Result<Accepting, StackError>
    where
        F: Future<Output = io::Result<()>>,
    {
        let (listener, address) = (self.listener, name.clone());
        let task = self.core.call(move || async move {
            let listener = listener.get().and_then(|listener| listener.take());
            CoreLocal::new(Rc::new(spawn(async move {
                let Some(listener) = listener else { return };
                if let Err(error) = serve(listener).await {
                    // The connections that are there and the other listeners go on.
                    tracing::error!("no more connections are accepted on {address}: {error}");
                }
            })))
        });
        let task = task.await.map_err(|gone| StackError::new(Cause::Io, "listening", gone).on(name))?;
        Ok(Accepting { core: self.core, task })
    }
}

/// Binds those addresses that no ear is at yet.
///
/// # Errors
/// The first that cannot be bound.
pub async fn bind_new(
    core: &CoreHandle,
    planned: &[SocketAddr],
    inherited: &Inherited,
    ears: &[ActiveListener],
) -> Result<Vec<BoundListener>, StackError> {
    let mut bound = Vec::new();
    for address in planned {
        if !ears.iter().any(|ear| ear.planned == *address) {
            bound.push(BoundListener::bind(core, *address, inherited).await?);
        }
    }
    Ok(bound)
}

/// Closes the ears that are planned no more.
pub async fn close_old(ears: &mut Vec<ActiveListener>, planned: &[SocketAddr]) {
    let (stay, go) = std::mem::take(ears).into_iter().partition(|ear| planned.contains(&ear.planned));
    *ears = stay;
    for ear in go {
        ear.close().await;
    }
}

impl ActiveListener {
    /// Accepts no more. Connections stay.
    pub async fn close(self) {
        self.accepting.end().await;
    }

    /// Whether it has ended, as it does once its server has stopped and is drained.
    pub async fn has_ended(&self) -> bool {
        self.accepting.has_ended().await
    }
}

impl Accepting {
    /// Ends it. Connections stay.
    pub async fn end(self) {
        let task = self.task;
        // A core that has stopped accepts nothing either.
        let _ = self.core.call(move || async move { task.get().inspect(|task| task.abort()).is_some() }).await;
    }

    /// Whether it has ended, as it does once its server has stopped and is drained.
    pub async fn has_ended(&self) -> bool {
        let task = self.task.clone();
        let ended = self.core.call(move || async move { task.get().is_none_or(|task| task.is_finished()) });
        ended.await.unwrap_or(true)
    }
}

fn of_bind(error: &io::Error, address: SocketAddr) -> StackError {
    let (cause, advice) = match error.kind() {
        io::ErrorKind::AddrInUse => (Cause::Refused, "another address and port; port 0 chooses a free one"),
        io::ErrorKind::PermissionDenied => (Cause::Refused, "a port from 1024 on, such as 4420 or 10809"),
        io::ErrorKind::AddrNotAvailable => (Cause::Unreachable, "an address of this machine, such as 127.0.0.1"),
        _ => (Cause::Io, "another address and port"),
    };
    StackError::new(cause, "listening", error).on(address).advise(advice)
}
