//! The protocols by which namespaces are served: a list of exports, each behind one trait.
//!
//! To add a protocol, write a file in this folder that implements `export::Export`, add a line to [`Exports::new`],
//! and, if it listens, its addresses to the plan (`Plan::listening`).

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

/// All exports of a server. Namespaces are offered in this order, and withdrawn in reverse order.
pub struct Exports(Vec<Box<dyn Export>>);

impl Exports {
    /// Exports on these cores that offer nothing yet. `attaches` is the reason why these cores cannot serve block
    /// devices of the kernel, if they cannot.
    pub fn new(cores: &[CoreHandle], limits: &Limits, attaches: Result<(), StackError>) -> Result<Exports, StackError> {
        Ok(Exports(vec![
            Box::new(NvmeExport::new(cores.to_vec(), limits)?),
            Box::new(NbdExport::new(cores.to_vec(), limits)?),
            // This is last, because what it prepares would have to be removed if another one failed.
            Box::new(BlockDevices::new(cores.to_vec(), attaches)),
        ]))
    }

    /// Does everything in a change that can fail; after an error, nothing of it remains.
    pub async fn prepare(&mut self, change: Change<'_>) -> Result<(), StackError> {
        for at in 0..self.0.len() {
            if let Err(failure) = self.0[at].prepare(change).await {
                self.0.iter_mut().for_each(|export| export.abandon());
                return Err(failure);
            }
        }
        Ok(())
    }

    /// Withdraws what is no longer wanted, and offers what is new.
    pub async fn change(&mut self, change: Change<'_>) -> Result<(), StackError> {
        for export in self.0.iter_mut().rev() {
            export.withdraw(change).await?;
        }
        self.0.iter_mut().try_for_each(|export| export.offer(change))
    }

    /// Accepts clients at the addresses of the plan.
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

    /// Refuses to resize a device whose clients could not learn of it.
    pub fn check_resize(&self, device: &Rc<ServedDevice>) -> Result<(), StackError> {
        self.0.iter().try_for_each(|export| export.check_resize(device))
    }

    /// Makes clients see the current state of a device.
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

    /// The current number of connections.
    pub fn connections(&self) -> usize {
        self.0.iter().map(|export| export.connections()).sum()
    }

    /// The clients of each export.
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

    /// Accepts no more connections and requests, and waits until clients have their replies.
    pub async fn stop(&mut self) {
        self.0.iter_mut().for_each(|export| export.stop());
        for export in &self.0 {
            export.drained().await;
        }
    }
}
