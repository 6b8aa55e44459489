//! What a protocol must implement to serve namespaces: the trait of all exports.
//!
//! A change of the plan has steps, each of which is done for all exports: first everything that can fail, while the old
//! state is served; then what is no longer wanted is withdrawn, what is new is offered, and listeners change. So a plan
//! that fails changes nothing.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use futures_util::future::{FutureExt, LocalBoxFuture, ready};
use sealblock_protocols_nvme::nqn::Nqn;
use sealblock_runtime_reactor::{now, sleep};
use sealblock_stack::StackError;

use crate::devices::ServedDevice;
use crate::events::Serving;
use crate::exports::block_device::Ended;
use crate::exports::listeners::Place;
use crate::exports::offered::{Offered, OfferedNamespace};
use crate::plan::{NamespacePlan, Plan, SubsystemPlan};
use crate::status::server::{ClientStatus, ExportStatus};

/// Subsystems with their open namespaces, by name.
pub type Subsystems = BTreeMap<Nqn, Offered>;
/// Lists the clients of an export, whenever it is called.
pub type ListClients = Box<dyn Fn() -> Vec<ClientStatus>>;

/// A change of what is served.
#[derive(Clone, Copy)]
pub struct Change<'a> {
    /// The plan.
    pub plan: &'a Plan,
    /// What was served before.
    pub before: &'a Subsystems,
    /// What is to be served.
    pub wanted: &'a Subsystems,
}

/// How long a change waits for clients that are just leaving: the end of a connection is noticed a moment after the client.
const LEAVING: Duration = Duration::from_secs(1);
/// How often it is looked whether they have left.
const LEAVING_POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Repeats a check that fails because of a client, until it passes or the client stays.
pub(super) async fn once_left(check: impl Fn() -> Result<(), StackError>) -> Result<(), StackError> {
    let deadline = now() + LEAVING;
    loop {
        match check() {
            Err(_) if now() < deadline => sleep(LEAVING_POLL_INTERVAL).await,
            checked => return checked,
        }
    }
}

/// A protocol by which namespaces are served.
pub trait Export {
    /// Its name in JSON.
    fn protocol(&self) -> &'static str;

    /// Does everything in a change that can fail, and changes nothing yet. What it has made is kept for the next steps.
    ///
    /// # Errors
    /// If the plan cannot be applied; the error has the reason.
    fn prepare<'a>(&'a mut self, change: Change<'a>) -> LocalBoxFuture<'a, Result<(), StackError>>;

    /// Drops what was prepared, because the plan is not applied.
    fn abandon(&mut self);

    /// Withdraws what is no longer wanted, or is another device now.
    ///
    /// # Errors
    /// Only after a bug, or if a core has stopped. The same holds for the next two methods.
    fn withdraw<'a>(&'a mut self, change: Change<'a>) -> LocalBoxFuture<'a, Result<(), StackError>>;

    /// Offers what is not offered yet, in the order of the plan.
    ///
    /// # Errors
    /// As for [`Export::withdraw`].
    fn offer(&mut self, change: Change<'_>) -> Result<(), StackError>;

    /// Accepts clients at the addresses of the plan, and nowhere else. Existing connections stay.
    ///
    /// # Errors
    /// As for [`Export::withdraw`].
    fn listen<'a>(&'a mut self, plan: &'a Plan) -> LocalBoxFuture<'a, Result<(), StackError>> {
        let _ = plan;
        ready(Ok(())).boxed_local()
    }

    /// Offers one more namespace, whose target was not open before.
    ///
    /// # Errors
    /// If it is refused; then no protocol offers it.
    fn add<'a>(
        &'a mut self,
        subsystem: &'a SubsystemPlan,
        space: &'a OfferedNamespace,
    ) -> LocalBoxFuture<'a, Result<(), StackError>>;

    /// Withdraws a namespace that was just added, because another export refused it.
    ///
    /// # Errors
    /// As for [`Export::withdraw`].
    fn remove(&mut self, subsystem: &SubsystemPlan, space: &OfferedNamespace) -> Result<(), StackError>;

    /// Refuses to resize a device whose clients could not learn of it.
    ///
    /// # Errors
    /// If there is such a client; the error names it.
    fn check_resize(&self, device: &Rc<ServedDevice>) -> Result<(), StackError> {
        let _ = device;
        Ok(())
    }

    /// Makes clients see the current state of a device, under all its names.
    ///
    /// # Errors
    /// The error of the first that fails.
    fn resize(&mut self, device: &Rc<ServedDevice>, offered: &Subsystems) -> Result<(), StackError>;

    /// The names by which its clients reach a namespace, whose device is given if it is open.
    fn names(
        &self,
        subsystem: &SubsystemPlan,
        namespace: &NamespacePlan,
        device: Option<&Rc<ServedDevice>>,
    ) -> Vec<ExportStatus>;

    /// Adds what it serves, for the events that report it.
    fn serving(&self, offered: &Subsystems, serving: &mut Serving) {
        let _ = (offered, serving);
    }

    /// The addresses and sockets on which it listens.
    fn places(&self) -> Vec<Place>;

    /// The current number of connections.
    fn connections(&self) -> usize {
        0
    }

    /// Lists its clients.
    fn clients(&self) -> ListClients {
        Box::new(Vec::new)
    }

    /// Ends what outlives connections, before anything else ends.
    fn leave(&mut self) -> LocalBoxFuture<'_, Ended> {
        ready(Ended::Gone).boxed_local()
    }

    /// Accepts no more connections and requests.
    fn stop(&mut self) {}

    /// Waits until it has stopped and its clients have their replies.
    fn drained(&self) -> LocalBoxFuture<'_, ()> {
        ready(()).boxed_local()
    }
}
