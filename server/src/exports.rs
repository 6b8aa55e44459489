//! By which protocols namespaces are offered: a list of exports, each behind one trait.
//!
//! To add a protocol: a file in this folder that implements `export::Export`, a line in [`Exports::new`], and, where it
//! listens, its places in the plan (`Plan::listening`).

pub mod block_device;
pub(crate) mod block_devices;
pub(crate) mod export;
pub mod listeners;
pub(crate) mod nbd;
pub(crate) mod nvme_tcp;
pub(crate) mod offered;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::rc::Rc;

use sealblock_exports_nvme_tcp::Limits;
use sealblock_runtime_reactor::CoreHandle;
use sealblock_stack::StackError;

use crate::devices::ServedDevice;
use crate::events::Serving;
use crate::exports::block_device::Ended;
use crate::exports::block_devices::BlockDevices;
use crate::exports::export::{Change, Export, ListClients, Subsystems};
use crate::exports::listeners::Place;
use crate::exports::nbd::NbdExport;
use crate::exports::nvme_tcp::NvmeExport;
use crate::exports::offered::OfferedNamespace;
use crate::plan::{NamespacePlan, Plan, SubsystemPlan};
use crate::status::server::ExportStatus;

/// All exports of a server. What is offered is offered in this order, and taken away in the reverse one.
pub struct Exports(Vec<Box<dyn Export>>);

impl Exports {
    /// Exports that offer nothing yet, on these cores. `attaches` is why they can serve no block devices of the kernel, if they cannot.
    pub fn new(cores: &[CoreHandle], limits: &Limits, attaches: Result<(), StackError>) -> Result<Exports, StackError> {
        Ok(Exports(vec![
            Box::new(NvmeExport::new(cores.to_vec(), limits)?),
            Box::new(NbdExport::new(cores.to_vec(), limits)?),
            // Last: what it prepares would have to be taken away if another one failed.
            Box::new(BlockDevices::new(cores.to_vec(), attaches)),
        ]))
    }

    /// Does everything of a change that can fail; after an error, nothing is left of it.
    pub async fn prepare(&mut self, change: Change<'_>) -> Result<(), StackError> {
        for at in 0..self.0.len() {
            if let Err(failure) = self.0[at].prepare(change).await {
                self.0.iter_mut().for_each(|export| export.abandon());
                return Err(failure);
            }
        }
        Ok(())
    }

    /// Takes away what is not wanted, and offers what is new.
    pub async fn change(&mut self, change: Change<'_>) -> Result<(), StackError> {
        for export in self.0.iter_mut().rev() {
            export.withdraw(change).await?;
        }
        self.0.iter_mut().try_for_each(|export| export.offer(change))
    }

    /// Accepts clients at the places of the plan.
    pub async fn listen(&mut self, plan: &Plan) -> Result<(), StackError> {
        for export in &mut self.0 {
            export.listen(plan).await?;
        }
        Ok(())
    }

    /// Offers one more namespace, by all exports or by none.
    pub async fn add(&mut self, subsystem: &SubsystemPlan, space: &OfferedNamespace) -> Result<(), StackError> {
        for at in 0..self.0.len() {
            if let Err(failure) = self.0[at].add(subsystem, space).await {
                self.0[..at].iter_mut().try_for_each(|export| export.remove(subsystem, space))?;
                return Err(failure);
            }
        }
        Ok(())
    }

    /// Refuses another size of a device whose clients could not learn of it.
    pub fn check_resize(&self, device: &Rc<ServedDevice>) -> Result<(), StackError> {
        self.0.iter().try_for_each(|export| export.check_resize(device))
    }

    /// Has clients see a device as it is now.
    pub fn resize(&mut self, device: &Rc<ServedDevice>, offered: &Subsystems) -> Result<(), StackError> {
        self.0.iter_mut().try_for_each(|export| export.resize(device, offered))
    }

    /// All names by which clients reach a namespace.
    pub fn names(
        &self,
        subsystem: &SubsystemPlan,
        namespace: &NamespacePlan,
        device: Option<&Rc<ServedDevice>>,
    ) -> Vec<ExportStatus> {
        self.0.iter().flat_map(|export| export.names(subsystem, namespace, device)).collect()
    }

    /// Adds what each export serves.
    pub fn serving(&self, offered: &Subsystems, serving: &mut Serving) {
        self.0.iter().for_each(|export| export.serving(offered, serving));
    }

    /// The addresses and the Unix sockets where a protocol listens.
    pub fn listening(&self, protocol: &str) -> (Vec<SocketAddr>, Vec<PathBuf>) {
        let (mut addresses, mut sockets) = (Vec::new(), Vec::new());
        for place in self.0.iter().filter(|export| export.protocol() == protocol).flat_map(|export| export.places()) {
            match place {
                Place::Tcp(address) => addresses.push(address),
                Place::Unix(path) => sockets.push(path),
            }
        }
        (addresses, sockets)
    }

    /// Connections now.
    pub fn connections(&self) -> usize {
        self.0.iter().map(|export| export.connections()).sum()
    }

    /// Who uses each export.
    pub fn clients(&self) -> Vec<ListClients> {
        self.0.iter().map(|export| export.clients()).collect()
    }

    /// Ends what outlives connections.
    pub async fn leave(&mut self) -> Ended {
        let mut ended = Ended::Gone;
        for export in &mut self.0 {
            if export.leave().await == Ended::Left {
                ended = Ended::Left;
            }
        }
        ended
    }

    /// Takes no more connections and requests, and waits until clients have their answers.
    pub async fn stop(&mut self) {
        self.0.iter_mut().for_each(|export| export.stop());
        for export in &self.0 {
            export.drained().await;
        }
    }
}
