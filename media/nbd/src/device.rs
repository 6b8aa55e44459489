//! An open export as a block device, and the list of a server's exports.

use std::rc::Rc;

use futures_util::future::LocalBoxFuture;
use sealblock_block::{Abilities, Device, ErrorKind, Geometry, Operation, Outcome, Request};
use sealblock_protocols_nbd::client::{Event, Goal};
use sealblock_transport::ConnectionMonitor;

use crate::io::Io;
use crate::remote_export;
use crate::session::SessionConfig;
use crate::{Address, ConnectError, ConnectionInfo, Counters, Options};

/// An export of an NBD server. Clones are the same device. It belongs to the reactor on which it was opened.
///
/// Dropping the last clone closes the connections without NBD_CMD_DISC; see [`NbdDevice::close`].
#[derive(Clone)]
pub struct NbdDevice(Rc<NbdState>);

struct NbdState {
    io: Io,
    info: ConnectionInfo,
}

impl NbdDevice {
    /// Opens an export; the empty name is the server's default.
    ///
    /// # Errors
    /// See [`ConnectError`]; [`Options::connect_timeout`] limits all of it.
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn connect(
        address: Address,
        export: &str,
        options: Options,
    ) -> LocalBoxFuture<'_, Result<NbdDevice, ConnectError>> {
        Box::pin(async move {
            let config = SessionConfig::new(address, export, options);
            let number = config.lineage.next_session();
            let session = config.open(number).await?;
            let depth = config.options.queue_depth;
            let info = ConnectionInfo::of(export, &session.info, session.connections.len(), depth);
            let session = remote_export::start(config, session, number, info.identities.clone());
            Ok(NbdDevice(Rc::new(NbdState { io: Io { session }, info })))
        })
    }

    /// Waits until no change can be executed any more that nobody waits for: one that was sent on a lost connection, or whose request was
    /// dropped. The caller limits it, and closes the device then. True if there are none; without a connection it does not wait.
    pub fn settled(&self) -> LocalBoxFuture<'_, bool> {
        Box::pin(self.0.io.session.settled())
    }

    /// True if no change can be executed any more that nobody waits for, as those in flight when the device was closed.
    pub fn is_settled(&self) -> bool {
        self.0.io.session.is_settled()
    }

    /// Closes the device for all its clones: sends NBD_CMD_DISC and closes the connections. Requests in flight and
    /// later ones fail. The caller flushes before.
    pub fn close(&self) -> LocalBoxFuture<'_, ()> {
        Box::pin(async move {
            let reconnecting = &self.0.io.session;
            if let Some(session) = reconnecting.current_session() {
                session.disconnect();
            }
            reconnecting.close();
        })
    }

    /// The server's information about the export.
    pub fn info(&self) -> &ConnectionInfo {
        &self.0.info
    }

    /// Reports whether the connection to the server is lost.
    pub fn monitor(&self) -> ConnectionMonitor {
        self.0.io.session.monitor()
    }

    /// What the device transferred since it was opened.
    pub fn counters(&self) -> Counters {
        remote_export::counters(&self.0.io.session)
    }
}

impl Device for NbdDevice {
    fn geometry(&self) -> &Geometry {
        &self.0.io.session.profile.geometry
    }

    fn abilities(&self) -> Abilities {
        self.0.io.session.profile.abilities
    }

    async fn execute(&self, request: Request) -> Outcome {
        let (io, kind) = (&self.0.io, request.kind());
        let Request { operation, extents, durability, .. } = request;
        match operation {
            Operation::Read(_) => io.read(extents.one()).await,
            Operation::Write(data) => io.write(extents.one(), data.into_sealed(), durability).await,
            Operation::Flush => io.flush().await,
            Operation::Discard => io.discard(&extents).await,
            Operation::WriteZeroes { may_unmap } => io.write_zeroes(extents.one(), may_unmap, durability).await,
            Operation::BlockStatus => io.block_status(extents.one()).await,
            Operation::Verify(_)
            | Operation::Copy { .. }
            | Operation::Checksum(..)
            | Operation::Repair
            | Operation::Salvage
            | Operation::Compare(_)
            | Operation::CompareAndWrite(_)
            | Operation::ReadReserved(_)
            | Operation::WriteReserved(..)
            | Operation::WriteUncorrectable { .. } => Err(ErrorKind::Absent(kind).into()),
        }
    }
}

pub use sealblock_protocols_nbd::client::ListedExport;

/// The exports that a server lists, in its order. Uses only [`Options::connect_timeout`] of the options.
///
/// # Errors
/// See [`ConnectError`]. A server may refuse to list its exports; a client can open them all the same.
///
/// # Panics
/// Outside a reactor.
pub fn discover(
    address: Address,
    options: Options,
) -> LocalBoxFuture<'static, Result<Vec<ListedExport>, ConnectError>> {
    Box::pin(async move {
        let config = SessionConfig::new(address, "", options);
        config
            .in_time(async {
                match config.negotiate(Goal::List, None).await? {
                    (_, Event::Listed(exports)) => Ok(exports),
                    _ => Err(config.lost("the negotiation came to something else")),
                }
            })
            .await
    })
}
