//! An I/O queue's reference to its controller and to its devices, on the queue's own core.
//!
//! Invariant: the controller counts these references, and each lives as long as its connection or one of its commands.
//! When the count is zero, nothing of the controller accesses any block any more.
//!
//! Shape: through this context, commands reach devices, flags and counters without an atomic count, a lock or a lookup
//! in state that cores share.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Deref;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use sealblock_block::{Device, Outcome, Request, Response};
use sealblock_layers_cross_core::{Attached, ClientSession};
use sealblock_protocols_nvme::StatusCode;
use sealblock_runtime_reactor::now;

use crate::model::command_error::CommandError;
use crate::model::controller::Controller;
use crate::model::damage_list::RequestSummary;
use crate::model::namespace::Namespace;
use crate::model::subsystem::QueueCounters;

pub(crate) struct QueueContext {
    controller: Arc<Controller>,
    /// The traffic of this queue. Only this core changes the counters.
    pub(crate) traffic: Arc<QueueCounters>,
    handles: RefCell<Rc<NamespaceHandles>>,
    /// The session of this queue's commands; when it ends, those in flight are fenced.
    session: Rc<ClientSession>,
}

/// The namespaces of a subsystem, after this number of changes.
pub(crate) struct NamespaceHandles {
    changes: u64,
    pub(crate) namespaces: BTreeMap<u32, Rc<NamespaceHandle>>,
}

/// A namespace whose device is attached to this core.
pub(crate) struct NamespaceHandle {
    pub(crate) device: Attached,
    namespace: Arc<Namespace>,
}

impl NamespaceHandle {
    /// Attaches the namespace's device to this core for admin commands of a controller.
    pub(crate) fn new(namespace: &Arc<Namespace>, controller: &Controller) -> NamespaceHandle {
        NamespaceHandle::in_session(namespace, controller, &ClientSession::begin())
    }

    fn in_session(namespace: &Arc<Namespace>, controller: &Controller, session: &Rc<ClientSession>) -> NamespaceHandle {
        let flush_cursor = controller.flush_cursor(&namespace.device);
        NamespaceHandle { device: namespace.device.attach_in(&flush_cursor, session), namespace: Arc::clone(namespace) }
    }
}

impl Deref for NamespaceHandle {
    type Target = Namespace;

    fn deref(&self) -> &Namespace {
        &self.namespace
    }
}

impl Deref for QueueContext {
    type Target = Controller;

    fn deref(&self) -> &Controller {
        &self.controller
    }
}

impl NamespaceHandles {
    /// Attaches the current namespaces. Those in `previous` stay attached.
    fn now(
        controller: &Controller,
        session: &Rc<ClientSession>,
        previous: Option<&NamespaceHandles>,
    ) -> Rc<NamespaceHandles> {
        let (changes, namespaces) = controller.subsystem.snapshot();
        let handle_of = |(nsid, namespace): (&u32, &Arc<Namespace>)| {
            let existing = previous.and_then(|handles| handles.namespaces.get(nsid));
            let existing = existing.filter(|handle| Arc::ptr_eq(&handle.namespace, namespace)).cloned();
            let attach = || Rc::new(NamespaceHandle::in_session(namespace, controller, session));
            (*nsid, existing.unwrap_or_else(attach))
        };
        Rc::new(NamespaceHandles { changes, namespaces: namespaces.iter().map(handle_of).collect() })
    }
}

impl QueueContext {
    /// Makes the context of a queue that [`Controller::add_io_queue`] has already counted.
    pub(crate) fn new(controller: Arc<Controller>) -> Rc<QueueContext> {
        let traffic = controller.subsystem.start_counting();
        let session = ClientSession::begin();
        let handles = RefCell::new(NamespaceHandles::now(&controller, &session, None));
        Rc::new(QueueContext { controller, traffic, handles, session })
    }

    /// The controller, which all cores share.
    pub(crate) fn controller(&self) -> &Arc<Controller> {
        &self.controller
    }

    /// Ends the queue's session: its commands in flight are not executed after newer ones, and those with several steps
    /// start no further step.
    pub(crate) async fn fence(&self) {
        self.session.end().await;
    }

    /// Fails if the queue's session has ended, so that a command with several steps starts no further step.
    ///
    /// # Errors
    /// The status is Command Abort Requested, but no host receives it.
    pub(crate) fn check_goes_on(&self) -> Result<(), CommandError> {
        if self.session.has_ended() { Err(StatusCode::ABORT_REQUESTED.into()) } else { Ok(()) }
    }

    /// The namespaces, attached to this core.
    pub(crate) fn namespaces(&self) -> Rc<NamespaceHandles> {
        let handles = Rc::clone(&self.handles.borrow());
        if handles.changes == self.controller.subsystem.changes() {
            return handles;
        }
        let now = NamespaceHandles::now(&self.controller, &self.session, Some(&handles));
        self.handles.replace(Rc::clone(&now));
        now
    }
}

impl Drop for QueueContext {
    fn drop(&mut self) {
        self.controller.subsystem.stop_counting(&self.traffic);
        self.controller.release_queue_ref();
    }
}

/// Executes a request that is made now, and updates the damage list.
pub(crate) async fn execute(namespace: &NamespaceHandle, request: Request) -> Result<Response, CommandError> {
    execute_arrived(namespace, request, now()).await
}

/// The same for a request of a command that arrived at this moment.
pub(crate) async fn execute_arrived(
    namespace: &NamespaceHandle,
    request: Request,
    arrived: Instant,
) -> Result<Response, CommandError> {
    let summary = RequestSummary::of(&request, namespace.device.geometry());
    let outcome = namespace.device.execute_arrived(request, arrived).await;
    record(namespace, &summary, outcome)
}

/// Updates the damage list with the outcome of a request.
pub(crate) fn record(
    namespace: &NamespaceHandle,
    summary: &RequestSummary,
    outcome: Outcome,
) -> Result<Response, CommandError> {
    namespace.state.record(summary, &outcome);
    outcome.map_err(|error| CommandError::of_error(&error, summary.kind))
}
