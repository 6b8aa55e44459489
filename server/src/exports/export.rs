//! What a protocol has to do to serve namespaces: the trait of all exports.
//!
//! A change of the plan has steps, and each is one for all exports: first everything that can fail, while the old state is served;
//! then what is not wanted any more goes, what is new is offered, and listeners change. So a plan that fails changes nothing.

use std::collections::BTreeMap;
use std::rc::Rc;

use futures_util::future::{FutureExt, LocalBoxFuture, ready};
use sealblock_protocols_nvme::nqn::Nqn;
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

/// A change of what is offered.
#[derive(Clone, Copy)]
pub struct Change<'a> {
    /// The plan.
    pub plan: &'a Plan,
    /// What was offered before.
    pub before: &'a Subsystems,
    /// What is to be offered.
    pub wanted: &'a Subsystems,
}

/// A protocol by which namespaces are served.
pub trait Export {
    /// Its name in JSON.
    fn protocol(&self) -> &'static str;

    /// Does everything of a change that can fail, and changes nothing yet. What it has made is kept for the next steps.
    ///
    /// # Errors
    /// Why the plan cannot be applied.
    fn prepare<'a>(&'a mut self, change: Change<'a>) -> LocalBoxFuture<'a, Result<(), StackError>>;

    /// Drops what was prepared: the plan is not applied.
    fn abandon(&mut self);

    /// Takes away what is not wanted, or is another device now.
    ///
    /// # Errors
    /// A bug, or a core that has stopped. The same holds for the next two.
    fn withdraw<'a>(&'a mut self, change: Change<'a>) -> LocalBoxFuture<'a, Result<(), StackError>>;

    /// Offers what is not offered yet, in the order of the plan.
    ///
    /// # Errors
    /// As [`Export::withdraw`].
    fn offer(&mut self, change: Change<'_>) -> Result<(), StackError>;

    /// Accepts clients at the places of the plan, and nowhere else. Connections stay.
    ///
    /// # Errors
    /// As [`Export::withdraw`].
    fn listen<'a>(&'a mut self, plan: &'a Plan) -> LocalBoxFuture<'a, Result<(), StackError>> {
        let _ = plan;
        ready(Ok(())).boxed_local()
    }

    /// Offers one more namespace, whose target was not open.
    ///
    /// # Errors
    /// Why it is not offered by any protocol then.
    fn add<'a>(
        &'a mut self,
        subsystem: &'a SubsystemPlan,
        space: &'a OfferedNamespace,
    ) -> LocalBoxFuture<'a, Result<(), StackError>>;

    /// Takes a namespace away that was just added, since another export refused it.
    ///
    /// # Errors
    /// As [`Export::withdraw`].
    fn remove(&mut self, subsystem: &SubsystemPlan, space: &OfferedNamespace) -> Result<(), StackError>;

    /// Refuses another size of a device whose clients could not learn of it.
    ///
    /// # Errors
    /// Which client that is.
    fn check_resize(&self, device: &Rc<ServedDevice>) -> Result<(), StackError> {
        let _ = device;
        Ok(())
    }

    /// Has clients see a device as it is now, under all names that it has.
    ///
    /// # Errors
    /// The first that does not.
    fn resize(&mut self, device: &Rc<ServedDevice>, offered: &Subsystems) -> Result<(), StackError>;

    /// The names by which its clients reach a namespace, whose device is there if it is open.
    fn names(
        &self,
        subsystem: &SubsystemPlan,
        namespace: &NamespacePlan,
        device: Option<&Rc<ServedDevice>>,
    ) -> Vec<ExportStatus>;

    /// Adds what is served to the events that tell it.
    fn serving(&self, offered: &Subsystems, serving: &mut Serving) {
        let _ = (offered, serving);
    }

    /// Where it listens.
    fn places(&self) -> Vec<Place>;

    /// Connections now.
    fn connections(&self) -> usize {
        0
    }

    /// Who uses it.
    fn clients(&self) -> ListClients {
        Box::new(Vec::new)
    }

    /// Ends what outlives connections, before anything else ends.
    fn leave(&mut self) -> LocalBoxFuture<'_, Ended> {
        ready(Ended::Gone).boxed_local()
    }

    /// Takes no more connections and requests.
    fn stop(&mut self) {}

    /// Waits until it has stopped and its clients have their answers.
    fn drained(&self) -> LocalBoxFuture<'_, ()> {
        ready(()).boxed_local()
    }
}
