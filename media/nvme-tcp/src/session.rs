//! An association with a controller: opens its admin queue and its I/O queues.
//!
//! Every value from the target is checked before use, and one time limit covers all steps.

use std::cell::RefCell;
use std::net::SocketAddr;
use std::num::NonZeroU16;
use std::rc::Rc;
use std::time::Duration;

use sealblock_block::{Error, ErrorKind, RequestKind};
use sealblock_media_nvme::{IdentifyPages, NamespaceProfile, PiMode};
use sealblock_protocols_nvme::admin::SetFeatures;
use sealblock_protocols_nvme::extensions::Extensions;
use sealblock_protocols_nvme::fabrics::{
    CNTLID_DYNAMIC, Connect, ConnectAttributes, ConnectData, InvalidParameter, PropertyGet, PropertySet,
};
use sealblock_protocols_nvme::features::{EventConfiguration, FeatureId, NumberOfQueues};
use sealblock_protocols_nvme::identify::{Controller as ControllerPage, Fuses};
use sealblock_protocols_nvme::nqn::Nqn;
use sealblock_protocols_nvme::registers::{
    Capabilities, Configuration, ControllerStatus, Property, ShutdownNotification, ShutdownStatus, Version,
};
use sealblock_protocols_nvme::{Command, StatusCode, fabrics::FabricsCommand};
use sealblock_protocols_nvme_tcp::HostConfig;
use sealblock_protocols_nvme_tcp::host::HostData;
use sealblock_runtime_memory::{Pool, Slice};
use sealblock_runtime_reactor::{JoinHandle, pool, sleep, timeout};
use sealblock_transport::{ConnectionLost, Lineage};

use crate::admin::{self, Admin};
use crate::queue::{self, Queue};
use crate::{ConnectError, HostPort, Options};

/// Entries of the admin queue: the minimum that every controller supports.
const ADMIN_ENTRIES: u16 = 32;
/// First and longest pause between two reads of CSTS.
const STATUS_PAUSES: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(50));

/// Target, namespace and options of a session; opens it again after a loss.
pub(crate) struct SessionConfig {
    pub(crate) address: HostPort,
    pub(crate) subsystem: Nqn,
    pub(crate) namespace: Option<u32>,
    pub(crate) options: Options,
    pub(crate) lineage: Lineage,
}

/// An enabled controller with its admin queue.
pub(crate) struct Controller {
    pub(crate) admin: Admin,
    pub(crate) capabilities: Capabilities,
    pub(crate) version: Version,
    pub(crate) id: u16,
    socket: SocketAddr,
    pool: Pool,
}

/// An enabled controller with its I/O queues.
pub(crate) struct Session {
    pub(crate) controller: Controller,
    pub(crate) io: Vec<Rc<Queue>>,
    pub(crate) queue_depth: u16,
    pub(crate) in_capsule_bytes: u32,
    pub(crate) profile: NamespaceProfile,
    pub(crate) pages: IdentifyPages,
    /// True if the target no longer executes any command of this device's ended controllers.
    pub(crate) is_fenced: bool,
    /// Keep alive, timeouts and events; aborted when the session ends.
    pub(crate) tasks: RefCell<Vec<JoinHandle<()>>>,
}

impl SessionConfig {
    pub(crate) fn new(address: HostPort, subsystem: Nqn, namespace: Option<u32>, options: Options) -> SessionConfig {
        let peer = format!("nvme {address} {subsystem} {}", namespace.unwrap_or_default());
        let lineage = Lineage::of(peer, options.quiesce());
        SessionConfig { address, subsystem, namespace, options, lineage }
    }

    /// Opens all queues within [`Options::connect_timeout`].
    pub(crate) async fn open(&self) -> Result<Session, ConnectError> {
        self.in_time(self.open_session()).await
    }

    /// Limits `work` to [`Options::connect_timeout`].
    pub(crate) async fn in_time<T>(
        &self,
        work: impl Future<Output = Result<T, ConnectError>>,
    ) -> Result<T, ConnectError> {
        let limit = self.options.connect_timeout;
        let timed_out = |_| Err(ConnectError::Timeout { address: self.address.clone(), limit });
        timeout(limit, work).await.unwrap_or_else(timed_out)
    }

    async fn open_session(&self) -> Result<Session, ConnectError> {
        let controller = self.open_controller().await?;
        let (nsid, pages) = admin::find_namespace(&controller.admin, controller.capabilities, self.namespace).await?;
        let mut profile = NamespaceProfile::of(nsid, &pages, &self.options.profile())?;
        let is_same = self.lineage.is_at_same_server(&pages.identities);
        let is_fenced = is_same && pages.extensions.contains(Extensions::FENCE);
        if is_fenced {
            self.fence_ended(&controller).await?;
        }
        let queues = self.number_of_queues(&controller).await?;
        let entries = controller.capabilities.max_queue_entries;
        let maxcmd = if pages.controller.maxcmd == 0 { u16::MAX } else { pages.controller.maxcmd };
        // A queue has one entry more than commands: a full ring would look like an empty one.
        let depth = u32::from(self.options.queue_depth.max(1).min(maxcmd)).min(entries.saturating_sub(1)).max(1) as u16;
        let in_capsule = if pages.controller.icdoff == 0 { pages.controller.in_capsule_bytes() } else { 0 };
        let in_capsule_bytes = u32::try_from(in_capsule).unwrap_or(u32::MAX);
        profile.abilities.compare_and_write_blocks = pair_blocks(&profile, &pages.controller, depth);
        let mut session = Session {
            controller,
            io: Vec::new(),
            queue_depth: depth,
            in_capsule_bytes,
            profile,
            pages,
            is_fenced,
            tasks: RefCell::default(),
        };
        for id in 1..=queues {
            let queue = self.open_io(&session, id).await?;
            session.io.push(queue);
        }
        Ok(session)
    }

    /// Opens the admin queue and enables the controller.
    pub(crate) async fn open_controller(&self) -> Result<Controller, ConnectError> {
        let mut failure = None;
        let unknown = |source| ConnectError::Resolve { host: self.address.bare_host().to_owned(), source };
        for socket in self.address.resolve().await.map_err(unknown)? {
            match self.open_queue(socket, 0, self.config(ADMIN_ENTRIES - 1, None)).await {
                Ok(queue) => return self.enable(socket, queue).await,
                Err(error @ ConnectError::Connect { .. }) => failure = Some(error),
                Err(error) => return Err(error),
            }
        }
        Err(failure.expect("names that are looked up have at least one address"))
    }

    /// The configuration of a connection for `commands` commands.
    fn config(&self, commands: u16, in_capsule_bytes: Option<u32>) -> HostConfig {
        let mut config = HostConfig::new(pool());
        config.max_commands = NonZeroU16::new(commands).unwrap_or(NonZeroU16::MIN);
        config.header_digest = self.options.header_digest;
        config.data_digest = self.options.data_digest;
        if let Some(bytes) = in_capsule_bytes {
            config.max_in_capsule_bytes = bytes;
        }
        config
    }

    /// Connects one queue and negotiates digests.
    async fn open_queue(&self, socket: SocketAddr, id: u16, config: HostConfig) -> Result<Rc<Queue>, ConnectError> {
        let failed = |source| ConnectError::Connect { address: self.address.clone(), source };
        let queue = queue::open(socket, id, config).await.map_err(failed)?;
        let negotiated = queue.negotiated(|core| core.negotiated()).await.map_err(|lost| self.lost(&lost))?;
        if self.options.header_digest && !negotiated.header_digest {
            return Err(ConnectError::NoDigest("header"));
        }
        if self.options.data_digest && !negotiated.data_digest {
            return Err(ConnectError::NoDigest("data"));
        }
        Ok(queue)
    }

    fn lost(&self, lost: &ConnectionLost) -> ConnectError {
        ConnectError::Lost { address: self.address.clone(), reason: lost.to_string() }
    }

    /// Connect, CAP, CC.EN, CSTS.RDY, VS.
    async fn enable(&self, socket: SocketAddr, queue: Rc<Queue>) -> Result<Controller, ConnectError> {
        let keep_alive_ms = u32::try_from(self.options.keep_alive.as_millis()).unwrap_or(u32::MAX);
        let request = Connect {
            queue: 0,
            entries: u32::from(ADMIN_ENTRIES),
            attributes: ConnectAttributes::NONE,
            keep_alive_ms: if self.subsystem.is_discovery() { 0 } else { keep_alive_ms },
        };
        let admin = Admin::new(queue, self.address.clone());
        let id = self.connect(&admin, request, CNTLID_DYNAMIC).await?;
        let capabilities = Capabilities::from_bits(property(&admin, Property::Capabilities).await?);
        let version = Version::from_bits(property(&admin, Property::Version).await? as u32);
        let sets = capabilities.command_sets;
        let command_set = match sets {
            _ if sets & Capabilities::SEVERAL_COMMAND_SETS != 0 => 6,
            _ if sets & Capabilities::NVM_COMMAND_SET != 0 => 0,
            _ if sets & Capabilities::NO_COMMAND_SET != 0 => 7,
            _ => 0,
        };
        let enabled = Configuration { enable: true, command_set, mps: capabilities.mpsmin, ..configuration() };
        configure(&admin, enabled).await?;
        wait_for(&admin, |status| status.ready).await?;
        Ok(Controller { admin, capabilities, version, id, socket, pool: pool() })
    }

    /// Sends Connect; returns the controller's identifier.
    async fn connect(&self, admin: &Admin, request: Connect, cntlid: u16) -> Result<u16, ConnectError> {
        let (subnqn, hostnqn) = (self.subsystem.clone(), Some(self.options.host_nqn.clone()));
        let data = ConnectData { hostid: self.options.host_id, cntlid, subnqn, hostnqn };
        let data = HostData::Write(Slice::copy_from(&data.encode()).into());
        let finished = admin.try_execute(request.encode(), data).await?;
        let status = finished.completion.status();
        if !status.is_success() {
            let detail = match status.code() {
                StatusCode::CONNECT_INVALID_PARAMETERS => {
                    format!(" ({})", InvalidParameter::from_dword0(finished.completion.dword0()))
                }
                _ => String::new(),
            };
            return Err(ConnectError::Refused { what: "Connect", status, detail });
        }
        let (id, required) = Connect::from_result(finished.completion.result.get());
        if required.bits() != 0 {
            return Err(ConnectError::AuthenticationRequired);
        }
        Ok(id)
    }

    /// Makes the target end this device's lost controllers, if it still counts them as alive; returns when none of
    /// their commands is executed any more.
    async fn fence_ended(&self, controller: &Controller) -> Result<(), ConnectError> {
        let ended = self.lineage.ended();
        for id in &ended {
            let cdw11 = u32::from(*id);
            let request = SetFeatures { fid: FeatureId::EndController.code(), save: false, nsid: 0, cdw11 };
            controller.admin.execute("Set Features, End Controller", request.encode(), HostData::None).await?;
        }
        self.lineage.are_ended(&ended);
        Ok(())
    }

    async fn number_of_queues(&self, controller: &Controller) -> Result<u16, ConnectError> {
        let wanted = u32::from(self.options.queues.max(1));
        let cdw11 = NumberOfQueues { submission: wanted, completion: wanted }.bits();
        let request = SetFeatures { fid: FeatureId::NumberOfQueues.code(), save: false, nsid: 0, cdw11 };
        let finished =
            controller.admin.execute("Set Features, Number of Queues", request.encode(), HostData::None).await?;
        let granted = NumberOfQueues::from_bits(finished.completion.dword0())
            .map_err(|invalid| ConnectError::Unexpected { what: "Number of Queues", why: invalid.to_string() })?;
        Ok(wanted.min(granted.submission).min(granted.completion) as u16)
    }

    async fn open_io(&self, session: &Session, id: u16) -> Result<Rc<Queue>, ConnectError> {
        let config = self.config(session.queue_depth, Some(session.in_capsule_bytes));
        let queue = self.open_queue(session.controller.socket, id, config).await?;
        let io_queue = Admin::new(Rc::clone(&queue), self.address.clone());
        // Without SQ flow control, a Read may complete with its data, which saves a PDU. A controller that requires
        // flow control refuses the parameter.
        let entries = u32::from(session.queue_depth) + 1;
        let attributes = ConnectAttributes::DISABLE_SQ_FLOW_CONTROL;
        let request = Connect { queue: id, entries, attributes, keep_alive_ms: 0 };
        match self.connect(&io_queue, request, session.controller.id).await {
            Err(ConnectError::Refused { status, .. }) if status.code() == StatusCode::CONNECT_INVALID_PARAMETERS => {
                let request = Connect { attributes: ConnectAttributes::NONE, ..request };
                self.connect(&io_queue, request, session.controller.id).await?
            }
            other => other?,
        };
        queue.core().start_counting();
        Ok(queue)
    }
}

impl Session {
    /// The I/O queue with the fewest commands.
    pub(crate) fn pick(&self) -> &Rc<Queue> {
        match self.io.as_slice() {
            [only] => only,
            several => several.iter().min_by_key(|queue| queue.load()).expect("a session has an I/O queue"),
        }
    }

    /// Refuses a command of this kind that needs an extension which the target does not offer.
    pub(crate) fn offers(&self, extension: Extensions, kind: RequestKind) -> Result<(), Error> {
        match self.pages.extensions.contains(extension) {
            true => Ok(()),
            false => Err(ErrorKind::Absent(kind).into()),
        }
    }

    /// The pool for read buffers.
    pub(crate) fn pool(&self) -> &Pool {
        &self.controller.pool
    }

    /// All connections, the admin queue first.
    pub(crate) fn queues(&self) -> impl Iterator<Item = &Rc<Queue>> {
        std::iter::once(self.controller.admin.queue()).chain(&self.io)
    }

    /// Ends all connections.
    pub(crate) fn end(&self, reason: &str) {
        self.queues().for_each(|queue| queue.end(reason));
        let tasks = self.tasks.take();
        tasks.iter().for_each(JoinHandle::abort);
    }

    /// Enables the event Namespace Attribute Changed if the controller supports it.
    pub(crate) async fn enable_events(&self) -> Result<(), ConnectionLost> {
        let wanted = EventConfiguration::NAMESPACE_ATTRIBUTE.bits() & self.pages.controller.oaes.bits();
        if wanted == 0 {
            return Ok(());
        }
        let request = SetFeatures { fid: FeatureId::AsynchronousEvents.code(), save: false, nsid: 0, cdw11: wanted };
        // A controller may refuse; it then reports no changes, and nothing else depends on them.
        self.controller.admin.queue().execute((request.encode(), HostData::None)).await?;
        Ok(())
    }

    /// Shuts the controller down and waits for CSTS.SHST. The caller limits the time, and ends the session afterwards.
    pub(crate) async fn shut_down(&self) -> Result<(), ConnectError> {
        // A target may end the I/O queues of a controller that is shut down; that is no loss to reconnect after.
        self.tasks.take().iter().for_each(JoinHandle::abort);
        let admin = &self.controller.admin;
        let before = property(admin, Property::Configuration).await? as u32;
        configure(admin, Configuration { shutdown: ShutdownNotification::Normal, ..Configuration::from_bits(before) })
            .await?;
        wait_for(admin, |status| status.shutdown == ShutdownStatus::Complete).await
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.end("closed by this host");
    }
}

/// CC as every host sets it.
fn configuration() -> Configuration {
    Configuration { iosqes: 6, iocqes: 4, ..Configuration::from_bits(0) }
}

async fn property(admin: &Admin, property: Property) -> Result<u64, ConnectError> {
    let get = FabricsCommand::PropertyGet(PropertyGet { offset: property.code(), bytes: property.bytes() });
    let finished = admin.execute("Property Get", get.encode(), HostData::None).await?;
    let value = finished.completion.result.get();
    Ok(if property.bytes() == 4 { value & u64::from(u32::MAX) } else { value })
}

async fn configure(admin: &Admin, configuration: Configuration) -> Result<(), ConnectError> {
    let (offset, bytes) = (Property::Configuration.code(), Property::Configuration.bytes());
    let value = u64::from(configuration.bits());
    let set: Command = FabricsCommand::PropertySet(PropertySet { offset, bytes, value }).encode();
    admin.execute("Property Set, CC", set, HostData::None).await.map(drop)
}

/// Polls CSTS until `is_there`. The caller sets the time limit.
async fn wait_for(admin: &Admin, is_there: impl Fn(&ControllerStatus) -> bool) -> Result<(), ConnectError> {
    let (mut pause, longest) = STATUS_PAUSES;
    loop {
        let status = ControllerStatus::from_bits(property(admin, Property::Status).await? as u32);
        if status.fatal {
            let why = "a controller with a fatal error (CFS)".to_owned();
            return Err(ConnectError::Unexpected { what: "CSTS", why });
        }
        if is_there(&status) {
            return Ok(());
        }
        sleep(pause).await;
        pause = (pause * 2).min(longest);
    }
}

/// Blocks of a fused Compare and Write: one, which every controller changes atomically (ACWU is 0's based) and which
/// crosses no boundary. None if blocks have metadata, since a Compare compares these too, and on a queue of one
/// command, which has no room for a pair.
fn pair_blocks(profile: &NamespaceProfile, controller: &ControllerPage, queue_depth: u16) -> u32 {
    let is_plain = profile.pi_mode == PiMode::None && profile.metadata.bytes == 0;
    u32::from(is_plain && queue_depth > 1 && controller.fuses.contains(Fuses::COMPARE_AND_WRITE))
}
