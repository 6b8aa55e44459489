//! An open namespace as a block device, and the log of a discovery controller.

use std::rc::Rc;

use futures_util::future::LocalBoxFuture;
use sealblock_block::{Abilities, Device, ErrorKind, Geometry, Operation, Outcome, Request};
use sealblock_media_nvme::PiMode;
use sealblock_media_nvme::requests::Requests;
use sealblock_protocols_nvme::admin::GetLogPage;
use sealblock_protocols_nvme::logs::{DiscoveryEntry, DiscoveryHeader, DiscoveryLog, LogPage};
use sealblock_protocols_nvme::nqn::Nqn;
use sealblock_transport::{ConnectionMonitor, ListedIdentities, Reconnecting};

use crate::admin::Admin;
use crate::block_codec::BlockCodec;
use crate::commands::Io;
use crate::damage::{self, KnownDamage};
use crate::remote_namespace::{self, RemoteNamespace};
use crate::session::SessionConfig;
use crate::{ConnectError, ConnectionInfo, Counters, HostPort, Options, PiSource};

/// A namespace over NVMe/TCP. Clones are the same device. It belongs to the reactor on which it was opened.
///
/// Dropping the last clone closes the connections without shutting the controller down; see [`NvmeTcpDevice::close`].
#[derive(Clone)]
pub struct NvmeTcpDevice(Rc<NvmeTcpState>);

struct NvmeTcpState {
    io: Io,
    /// As found on opening; the controller's identifier changes with the session.
    info: ConnectionInfo,
}

impl NvmeTcpDevice {
    /// Opens a namespace: the one with this identifier, or the only one that exists.
    ///
    /// # Errors
    /// See [`ConnectError`]; [`Options::connect_timeout`] limits all of it.
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn connect(
        address: HostPort,
        subsystem: Nqn,
        namespace: Option<u32>,
        options: Options,
    ) -> LocalBoxFuture<'static, Result<NvmeTcpDevice, ConnectError>> {
        Box::pin(async move {
            let config = SessionConfig::new(address, subsystem, namespace, options);
            let number = config.lineage.next_session();
            let session = config.open().await?;
            let info = connection_info(&config, &session);
            let codec = BlockCodec::new(&session.profile, config.options.data_digest);
            let reconnecting =
                Reconnecting::new(RemoteNamespace::new(config, &session, info.identities.clone()), session, number);
            Ok(NvmeTcpDevice(Rc::new(NvmeTcpState { io: Io { session: reconnecting, codec }, info })))
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

    /// Closes the device for all its clones: shuts the controller down, which lets it write its cache back, and closes
    /// the connections. Requests in flight and later ones fail. Waits at most [`Options::shutdown_timeout`]. The caller
    /// flushes before.
    pub fn close(&self) -> LocalBoxFuture<'_, ()> {
        Box::pin(async move {
            let reconnecting = &self.0.io.session;
            if let Some(session) = reconnecting.current_session() {
                let limit = reconnecting.config.options.shutdown_timeout;
                match sealblock_runtime_reactor::timeout(limit, session.shut_down()).await {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) => tracing::warn!(target = %reconnecting.config.address, %error, "shutdown failed"),
                    Err(elapsed) => {
                        tracing::warn!(target = %reconnecting.config.address, %elapsed, "shutdown took too long")
                    }
                }
            }
            reconnecting.close();
        })
    }

    /// Closes the connections without the shutdown. Requests in flight and later ones fail.
    pub fn disconnect(&self) {
        self.0.io.session.close();
    }

    /// The target's information about itself and the namespace.
    pub fn info(&self) -> ConnectionInfo {
        let controller_id = self.0.io.session.current_session().map(|session| session.controller.id);
        ConnectionInfo { controller_id: controller_id.unwrap_or(self.0.info.controller_id), ..self.0.info.clone() }
    }

    /// The target's known bad blocks, without a new search; `None` if it has no list that this host can read, or cannot
    /// be reached.
    pub fn known_damage(&self) -> LocalBoxFuture<'_, Option<KnownDamage>> {
        Box::pin(async move {
            let session = self.0.io.session.current_session()?;
            damage::known_damage(&session).await
        })
    }

    /// Reports whether the connection to the target is lost.
    pub fn monitor(&self) -> ConnectionMonitor {
        self.0.io.session.monitor()
    }

    /// What the device transferred since it was opened.
    pub fn counters(&self) -> Counters {
        remote_namespace::counters(&self.0.io.session)
    }
}

impl std::fmt::Debug for NvmeTcpDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("NvmeTcpDevice").field(&self.0.info).finish()
    }
}

fn connection_info(config: &SessionConfig, session: &crate::session::Session) -> ConnectionInfo {
    let (profile, controller, version) = (&session.profile, &session.pages.controller, session.controller.version);
    let printable = |text: String| text.chars().filter(|c| !c.is_control()).collect::<String>().trim().to_owned();
    ConnectionInfo {
        subsystem: config.subsystem.clone(),
        model: printable(controller.mn.text()),
        serial: printable(controller.sn.text()),
        firmware: printable(controller.fr.text()),
        version: (version.major, version.minor, version.tertiary),
        controller_id: session.controller.id,
        namespace: profile.nsid,
        uuid: profile.identity.uuid,
        nguid: profile.identity.nguid,
        eui64: profile.identity.eui64,
        origin: session.pages.origin,
        identities: ListedIdentities::new(session.pages.identities.clone()),
        content: profile.identity.content,
        protection: profile.pi_mode.kept(),
        tags: match profile.pi_mode {
            PiMode::None => PiSource::Auto,
            PiMode::Host(_) => PiSource::Host,
            PiMode::Target(_) => PiSource::Target,
        },
        queues: session.io.len() as u16,
        queue_depth: session.queue_depth,
        header_digest: config.options.header_digest,
        data_digest: config.options.data_digest,
        max_transfer_bytes: profile.max_transfer_bytes,
        max_verify_bytes: profile.max_verify_bytes,
        max_write_zeroes_bytes: profile.max_write_zeroes_bytes,
        in_capsule_bytes: session.in_capsule_bytes,
        volatile_write_cache: profile.volatile_write_cache,
        get_lba_status: profile.get_lba_status,
        shared: profile.shared,
    }
}

impl Device for NvmeTcpDevice {
    fn geometry(&self) -> &Geometry {
        &self.0.io.session.profile.geometry
    }

    fn abilities(&self) -> Abilities {
        let reconnecting = &self.0.io.session;
        let (writable, freshness) = (reconnecting.is_writable(), reconnecting.freshness());
        Abilities { writable, freshness, ..reconnecting.profile.abilities }
    }

    async fn execute(&self, request: Request) -> Outcome {
        let io = &self.0.io;
        io.session.check_fresh()?;
        // Only frequent requests are compiled with each stack of devices; the others once, here.
        match request.operation {
            Operation::Read(expectations) => Requests(io).read(request.extents.one(), &expectations).await,
            Operation::Write(data) => {
                Requests(io).write(request.extents.one(), &data.into_sealed(), request.durability).await
            }
            operation => self.execute_rare(Request { operation, ..request }).await,
        }
    }
}

impl NvmeTcpDevice {
    /// Everything but Read and Write.
    fn execute_rare(&self, request: Request) -> LocalBoxFuture<'_, Outcome> {
        Box::pin(async move {
            let (io, kind) = (&self.0.io, request.kind());
            let requests = Requests(io);
            let Request { operation, extents, durability } = request;
            match operation {
                Operation::Flush => io.flush().await,
                Operation::Discard => requests.discard(&extents).await,
                Operation::WriteZeroes { may_unmap } => {
                    requests.write_zeroes(extents.one(), may_unmap, durability).await
                }
                Operation::Copy { source, expectations } => {
                    requests.copy(source, extents.one(), &expectations, durability).await
                }
                Operation::Verify(expectations) => requests.verify(extents.one(), &expectations).await,
                Operation::Compare(data) => requests.compare(extents.one(), &data).await,
                Operation::CompareAndWrite(data) => io.compare_and_write(extents.one(), &data, durability).await,
                Operation::Checksum(kind, expectations) => io.checksum(extents.one(), kind, &expectations).await,
                Operation::ReadReserved(area) => io.read_reserved(area).await,
                Operation::WriteReserved(area, bytes) => io.write_reserved(area, &bytes).await,
                Operation::Read(_) | Operation::Write(_) => unreachable!("executed where they come in"),
                Operation::Salvage
                | Operation::WriteUncorrectable { .. }
                | Operation::Repair
                | Operation::BlockStatus => Err(ErrorKind::Absent(kind).into()),
            }
        })
    }
}

/// Bytes read with one command.
const PART_BYTES: u64 = 4096;
/// Maximum entries of the log; a page that announces more is refused.
const MAX_ENTRIES: u64 = 4096;
/// Attempts to read the page without a change in between.
const ATTEMPTS: usize = 4;

/// The entries of a discovery log: subsystems, and other discovery controllers (see `SubsystemType`). Ignores the
/// options about queues, tags and reconnecting.
///
/// # Errors
/// See [`ConnectError`].
///
/// # Panics
/// Outside a reactor.
pub fn discover(
    address: HostPort,
    options: Options,
) -> LocalBoxFuture<'static, Result<Vec<DiscoveryEntry>, ConnectError>> {
    Box::pin(async move {
        let config = SessionConfig::new(address, Nqn::discovery(), None, options);
        let read = async {
            let controller = config.open_controller().await?;
            let mut last =
                Err(ConnectError::Unexpected { what: LOG_COMMAND, why: "another page each time".to_owned() });
            for _ in 0..ATTEMPTS {
                match read_log(&controller.admin).await? {
                    Some(entries) => {
                        last = Ok(entries);
                        break;
                    }
                    None => continue,
                }
            }
            last
        };
        config.in_time(read).await
    })
}

const LOG_COMMAND: &str = "Get Log Page, Discovery";

/// The page, or `None` if GENCTR changed while it was read.
async fn read_log(admin: &Admin) -> Result<Option<Vec<DiscoveryEntry>>, ConnectError> {
    let unexpected = |why: String| ConnectError::Unexpected { what: LOG_COMMAND, why };
    let head = read_part(admin, 0, DiscoveryHeader::BYTES as u64).await?;
    let header = DiscoveryHeader::decode(&head).map_err(|short| unexpected(short.to_string()))?;
    if header.numrec > MAX_ENTRIES {
        return Err(unexpected(format!("{} entries; {MAX_ENTRIES} are the most that are read", header.numrec)));
    }
    let length = DiscoveryLog::length_bytes(&header).unwrap_or(u64::MAX);
    let mut bytes = head;
    while (bytes.len() as u64) < length {
        let at = bytes.len() as u64;
        bytes.extend(read_part(admin, at, PART_BYTES.min(length - at)).await?);
    }
    let again = read_part(admin, 0, DiscoveryHeader::BYTES as u64).await?;
    let now = DiscoveryHeader::decode(&again).map_err(|short| unexpected(short.to_string()))?;
    if now.genctr != header.genctr {
        return Ok(None);
    }
    let log = DiscoveryLog::decode(&bytes).map_err(|invalid| unexpected(invalid.to_string()))?;
    Ok(Some(log.entries))
}

async fn read_part(admin: &Admin, offset: u64, length_bytes: u64) -> Result<Vec<u8>, ConnectError> {
    let lid = LogPage::Discovery.code();
    let request = GetLogPage { nsid: 0, offset, ..GetLogPage::new(lid, length_bytes) };
    Ok(admin.log(LOG_COMMAND, request).await?.to_vec())
}
