//! The device: a namespace that is open.

use std::rc::Rc;

use sealblock_block::{Abilities, Device, ErrorKind, Geometry, Outcome, Request};
use sealblock_protocols_nvme::nqn::Nqn;

use crate::block_codec::BlockCodec;
use crate::io::Io;
use crate::namespace_profile::PiMode;
use crate::reconnecting_session::ReconnectingSession;
use crate::session::SessionConfig;
use crate::{ConnectError, ConnectionInfo, Counters, HostPort, Options, PiSource};

/// A namespace over NVMe/TCP. Clones are the same device. It belongs to the reactor on which it was opened.
///
/// Dropping the last clone closes the connections without a word to the target; see [`NvmeTcpDevice::close`].
#[derive(Clone)]
pub struct NvmeTcpDevice(Rc<NvmeTcpState>);

struct NvmeTcpState {
    io: Io,
    /// What was found at first; the controller's identifier is that of the session of the moment.
    info: ConnectionInfo,
}

impl NvmeTcpDevice {
    /// Opens a namespace: the one with this identifier, or the only one there is.
    ///
    /// # Errors
    /// As [`ConnectError`] says; everything within [`Options::connect_timeout`].
    ///
    /// # Panics
    /// Outside a reactor.
    pub async fn connect(
        address: HostPort,
        subsystem: Nqn,
        namespace: Option<u32>,
        options: Options,
    ) -> Result<NvmeTcpDevice, ConnectError> {
        let plan = SessionConfig { address, subsystem, namespace, options };
        let session = plan.open().await?;
        let facts = connection_info(&plan, &session);
        let wire = BlockCodec::new(&session.profile, plan.options.data_digest);
        let link = ReconnectingSession::new(plan, session);
        Ok(NvmeTcpDevice(Rc::new(NvmeTcpState { io: Io { session: link, codec: wire }, info: facts })))
    }

    /// Ends the device for all its clones: shuts the controller down, which lets it write its cache back, and closes the
    /// connections. Requests in flight and later ones fail. Gives up after [`Options::shutdown_timeout`]. Writes that were
    /// not flushed are the caller's to flush before.
    pub async fn close(&self) {
        let link = &self.0.io.session;
        if let Some(session) = link.current_session() {
            let limit = link.config.options.shutdown_timeout;
            match sealblock_runtime_reactor::timeout(limit, session.shut_down()).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => tracing::warn!(target = %link.config.address, %error, "shutdown failed"),
                Err(elapsed) => tracing::warn!(target = %link.config.address, %elapsed, "shutdown took too long"),
            }
        }
        link.fail("the device was closed");
    }

    /// What the target says of itself and of the namespace.
    pub fn info(&self) -> ConnectionInfo {
        let controller_id = self.0.io.session.current_session().map(|session| session.controller.id);
        ConnectionInfo { controller_id: controller_id.unwrap_or(self.0.info.controller_id), ..self.0.info.clone() }
    }

    /// What went through since the device was opened.
    pub fn counters(&self) -> Counters {
        self.0.io.session.counters()
    }
}

fn connection_info(plan: &SessionConfig, session: &crate::session::Session) -> ConnectionInfo {
    let (shape, controller, version) = (&session.profile, &session.pages.controller, session.controller.version);
    let printable = |text: String| text.chars().filter(|c| !c.is_control()).collect::<String>().trim().to_owned();
    ConnectionInfo {
        subsystem: plan.subsystem.clone(),
        model: printable(controller.mn.text()),
        serial: printable(controller.sn.text()),
        firmware: printable(controller.fr.text()),
        version: (version.major, version.minor, version.tertiary),
        controller_id: session.controller.id,
        namespace: shape.nsid,
        uuid: shape.identity.uuid,
        nguid: shape.identity.nguid,
        eui64: shape.identity.eui64,
        protection: shape.pi_mode.kept(),
        tags: match shape.pi_mode {
            PiMode::None => PiSource::Auto,
            PiMode::Host(_) => PiSource::Host,
            PiMode::Target(_) => PiSource::Target,
        },
        queues: session.io.len() as u16,
        queue_depth: session.queue_depth,
        header_digest: plan.options.header_digest,
        data_digest: plan.options.data_digest,
        max_transfer_bytes: shape.max_transfer_bytes,
        max_verify_bytes: shape.max_verify_bytes,
        max_write_zeroes_bytes: shape.max_write_zeroes_bytes,
        in_capsule_bytes: session.in_capsule_bytes,
        volatile_write_cache: shape.volatile_write_cache,
        get_lba_status: shape.get_lba_status,
        shared: shape.shared,
    }
}

impl Device for NvmeTcpDevice {
    fn geometry(&self) -> &Geometry {
        &self.0.io.session.profile.geometry
    }

    fn abilities(&self) -> Abilities {
        let link = &self.0.io.session;
        Abilities { writable: link.is_writable(), ..link.profile.abilities }
    }

    async fn execute(&self, operation: Request) -> Outcome {
        let io = &self.0.io;
        match operation {
            Request::Read { extent, checks } => io.read(extent, checks).await,
            Request::Write { extent, data, durability } => io.write(extent, &data, durability).await,
            Request::Flush => io.flush().await,
            Request::Discard { extents } => io.discard(&extents).await,
            Request::WriteZeroes { extent, may_unmap, durability } => {
                io.write_zeroes(extent, may_unmap, durability).await
            }
            Request::Verify { extent, checks } => io.verify(extent, checks).await,
            Request::Compare { extent, data } => io.compare(extent, &data).await,
            Request::Checksum { extent, checks } => io.checksum(extent, checks).await,
            Request::ReadReserved { slot } => io.read_reserved(slot).await,
            Request::WriteReserved { slot, bytes } => io.write_reserved(slot, &bytes).await,
            Request::WriteUncorrectable { .. } | Request::Repair { .. } | Request::BlockStatus { .. } => {
                Err(ErrorKind::Absent(operation.kind()).into())
            }
        }
    }
}
