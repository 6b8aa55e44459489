//! Unix sockets for NBD clients. Each is there from when it listens until the server ends or a reload leaves it out, with mode 0600,
//! so that the permissions of its folder and file control access. A stale socket at its path is replaced;
//! a socket with a listener, and a file that is no socket, is left alone.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use sealblock_exports_nbd::Server;
use sealblock_runtime_reactor::CoreHandle;
use sealblock_stack::{Cause, StackError, process_text};

use crate::control::socket_path::{Socket, listener_of};
use crate::listeners::{Accepting, Idle};

const DOING: &str = "listening for NBD";

/// A socket that accepts.
pub struct UnixEar {
    /// The path in the configuration.
    planned: PathBuf,
    /// Removes the file.
    socket: Socket,
    accepting: Accepting,
}

/// A bound socket that accepts nothing yet.
pub struct UnixBound {
    planned: PathBuf,
    socket: Socket,
    idle: Idle,
}

/// Binds the sockets that are not bound yet.
///
/// # Errors
/// The first that cannot be bound.
pub async fn bind_new(core: &CoreHandle, planned: &[PathBuf], ears: &[UnixEar]) -> Result<Vec<UnixBound>, StackError> {
    let mut bound = Vec::new();
    for path in planned.iter().filter(|path| !ears.iter().any(|ear| ear.planned == **path)) {
        let socket = Socket::at(path).map_err(|error| of_bind(&error, path))?;
        let copy = socket.listener.try_clone().map_err(|error| of_bind(&error, path))?;
        let idle = Idle::take(core, copy.into(), &path.to_string_lossy()).await?;
        bound.push(UnixBound { planned: path.clone(), socket, idle });
    }
    Ok(bound)
}

impl UnixBound {
    /// Starts accepting connections.
    ///
    /// # Errors
    /// When the core has stopped.
    pub async fn accept(self, server: Server) -> Result<UnixEar, StackError> {
        let name = self.planned.to_string_lossy().into_owned();
        let accepting = self.idle.accept(name, |listener| async move { server.serve(listener).await }).await?;
        Ok(UnixEar { planned: self.planned, socket: self.socket, accepting })
    }
}

/// Closes and removes those that the plan does not have.
pub async fn close_old(ears: &mut Vec<UnixEar>, planned: &[PathBuf]) {
    let (stay, go) = std::mem::take(ears).into_iter().partition(|ear| planned.contains(&ear.planned));
    *ears = stay;
    for ear in go {
        ear.accepting.end().await;
    }
}

impl UnixEar {
    /// Its absolute path.
    pub fn path(&self) -> PathBuf {
        let path = self.socket.path();
        fs::canonicalize(path).or_else(|_| std::path::absolute(path)).unwrap_or_else(|_| path.to_owned())
    }

    /// True once its server has stopped and is drained.
    pub async fn has_ended(&self) -> bool {
        self.accepting.has_ended().await
    }
}

fn of_bind(error: &io::Error, path: &Path) -> StackError {
    if error.kind() != io::ErrorKind::AddrInUse {
        return StackError::io(DOING, error)
            .on(path.display())
            .advise("another --nbd-socket PATH, in a folder of this user");
    }
    let who = listener_of(path).map_or("another process".to_owned(), |pid| format!("process {}", process_text(pid)));
    StackError::new(Cause::Refused, DOING, format!("{who} listens there"))
        .on(path.display())
        .advise("another --nbd-socket PATH")
}
