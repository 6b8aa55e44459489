//! The device: an export that is open.

use std::rc::Rc;

use sealblock_block::{Abilities, Device, ErrorKind, Geometry, Outcome, Request};

use crate::io::Io;
use crate::reconnecting_session::ReconnectingSession;
use crate::session::SessionConfig;
use crate::{Address, ConnectError, ConnectionInfo, Counters, Options};

/// An export of an NBD server. Clones are the same device. It belongs to the reactor on which it was opened.
///
/// Dropping the last clone closes the connections without a word to the server; see [`NbdDevice::close`].
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
    /// As [`ConnectError`] says; everything within [`Options::connect_timeout`].
    ///
    /// # Panics
    /// Outside a reactor.
    pub async fn connect(address: Address, export: &str, options: Options) -> Result<NbdDevice, ConnectError> {
        let plan = SessionConfig { address, export: export.to_owned(), options };
        let session = plan.open().await?;
        let depth = plan.options.queue_depth;
        let facts = ConnectionInfo::of(export, &session.info, session.connections.len(), depth);
        Ok(NbdDevice(Rc::new(NbdState { io: Io { session: ReconnectingSession::new(plan, session) }, info: facts })))
    }

    /// Ends the device for all its clones: tells the server so, and closes the connections. Requests in flight and later
    /// ones fail. Writes that were not flushed are the caller's to flush before.
    pub async fn close(&self) {
        let link = &self.0.io.session;
        if let Some(session) = link.current_session() {
            session.disconnect();
        }
        link.fail("the device was closed");
    }

    /// What the server says of the export.
    pub fn info(&self) -> &ConnectionInfo {
        &self.0.info
    }

    /// What went through since the device was opened.
    pub fn counters(&self) -> Counters {
        self.0.io.session.counters()
    }
}

impl Device for NbdDevice {
    fn geometry(&self) -> &Geometry {
        &self.0.io.session.profile.geometry
    }

    fn abilities(&self) -> Abilities {
        self.0.io.session.profile.abilities
    }

    async fn execute(&self, operation: Request) -> Outcome {
        let io = &self.0.io;
        match operation {
            Request::Read { extent, .. } => io.read(extent).await,
            Request::Write { extent, data, durability } => io.write(extent, data, durability).await,
            Request::Flush => io.flush().await,
            Request::Discard { extents } => io.discard(&extents).await,
            Request::WriteZeroes { extent, may_unmap, durability } => {
                io.write_zeroes(extent, may_unmap, durability).await
            }
            Request::BlockStatus { extent } => io.block_status(extent).await,
            Request::Verify { .. }
            | Request::Checksum { .. }
            | Request::Repair { .. }
            | Request::Compare { .. }
            | Request::ReadReserved { .. }
            | Request::WriteReserved { .. }
            | Request::WriteUncorrectable { .. } => Err(ErrorKind::Absent(operation.kind()).into()),
        }
    }
}
