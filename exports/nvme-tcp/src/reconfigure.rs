//! Changes of a target while it serves: adds, removes and resizes subsystems, namespaces and allowed hosts.
//!
//! Each change is complete when its function returns. Controllers that a change ends complete their commands in flight
//! and close within [`crate::Limits::drain`], on their own cores.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;

use sealblock_layers_cross_core::SharedDevice;
use sealblock_protocols_nvme::nqn::Nqn;

use crate::model::controller::Controller;
use crate::model::namespace::{Namespace, SetupError};
use crate::model::subsystem::{Hosts, Subsystem};
use crate::target::Target;

impl Target {
    /// Adds a subsystem.
    ///
    /// # Errors
    /// [`SetupError::DuplicateNqn`] and [`SetupError::Reserved`].
    pub fn add_subsystem(&self, subsystem: Subsystem) -> Result<(), SetupError> {
        if subsystem.nqn.is_discovery() {
            return Err(SetupError::Reserved(subsystem.nqn));
        }
        self.0.change_subsystems(|all| {
            if all.iter().any(|other| other.nqn == subsystem.nqn) {
                return Err(SetupError::DuplicateNqn(subsystem.nqn.clone()));
            }
            all.push(Arc::new(subsystem));
            Ok(())
        })
    }

    /// Removes a subsystem, and ends its controllers once their commands in flight have completed. Another subsystem
    /// may use its name at once. [`Target::controllers`] counts the remaining controllers.
    ///
    /// # Errors
    /// [`SetupError::UnknownNqn`].
    pub fn remove_subsystem(&self, nqn: &Nqn) -> Result<(), SetupError> {
        let subsystem = self.find_subsystem(nqn)?;
        self.0.change_subsystems(|all| {
            all.retain(|other| !Arc::ptr_eq(other, &subsystem));
            Ok::<(), SetupError>(())
        })?;
        subsystem.is_removed.set(true);
        self.drain_controllers(&subsystem, |_| true);
        Ok(())
    }

    /// Sets which hosts may connect. Controllers of hosts that are no longer allowed end once their commands in flight
    /// have completed.
    ///
    /// # Errors
    /// [`SetupError::UnknownNqn`].
    pub fn set_hosts(&self, nqn: &Nqn, hosts: Hosts) -> Result<(), SetupError> {
        let subsystem = self.find_subsystem(nqn)?;
        self.0.change_subsystems(|_| {
            subsystem.set_hosts(hosts);
            Ok::<(), SetupError>(())
        })?;
        self.drain_controllers(&subsystem, |controller| !subsystem.allows(controller.host.as_ref()));
        Ok(())
    }

    /// Adds a namespace to a subsystem. Its controllers see it with their next command.
    ///
    /// # Errors
    /// [`SetupError::UnknownNqn`], [`SetupError::Nsid`] and [`SetupError::DuplicateNsid`].
    pub fn add_namespace(&self, nqn: &Nqn, nsid: u32, namespace: Namespace) -> Result<(), SetupError> {
        self.exchange_namespaces(nqn, &[], vec![(nsid, namespace)])
    }

    /// Sets the addresses in the discovery log: pairs of a listener's address and the address at which hosts outside
    /// reach it, for instance through address translation. Replaces earlier pairs.
    pub fn advertise(&self, addresses: Vec<(SocketAddr, SocketAddr)>) {
        self.0.advertised.set(addresses);
        // The subsystems stay the same, but the page changes.
        let Ok(()) = self.0.change_subsystems(|_| Ok::<(), Infallible>(()));
    }

    /// Removes a namespace from a subsystem. Commands in flight on it complete; the last of them releases the
    /// namespace, and with it its references to the device and to [`Namespace::state`]. The owner of a clone of that
    /// state can see by its reference count when the device may be closed.
    ///
    /// # Errors
    /// [`SetupError::UnknownNqn`] and [`SetupError::UnknownNsid`].
    pub fn remove_namespace(&self, nqn: &Nqn, nsid: u32) -> Result<(), SetupError> {
        self.exchange_namespaces(nqn, &[nsid], Vec::new())
    }

    /// Removes namespaces from a subsystem and adds others, like [`Target::remove_namespace`] and
    /// [`Target::add_namespace`], in one step: a host that is notified of the first change finds all of them. After an
    /// error nothing has changed.
    ///
    /// # Errors
    /// As for these two.
    pub fn exchange_namespaces(
        &self,
        nqn: &Nqn,
        removed: &[u32],
        added: Vec<(u32, Namespace)>,
    ) -> Result<(), SetupError> {
        let subsystem = self.find_subsystem(nqn)?;
        let new: Vec<u32> = added.iter().map(|(nsid, _)| *nsid).collect();
        let gone = subsystem.exchange(removed, added)?;
        for controller in self.controllers_of(&subsystem) {
            gone.iter().for_each(|(nsid, namespace)| controller.namespace_removed(*nsid, namespace));
            new.iter().for_each(|nsid| controller.namespaces_changed(*nsid));
        }
        Ok(())
    }

    /// Sets the geometry of a namespace to that of `device`, which is a newer handle of the same device. Its
    /// controllers see it with their next command, and report it to their hosts (Attached Namespace Attribute Changed).
    /// The identity of the namespace, its state and its flush cursors stay. An operator should shrink a host's file
    /// system first, but safety does not depend on that: the device fails requests past its end.
    ///
    /// # Errors
    /// [`SetupError::UnknownNqn`] and [`SetupError::UnknownNsid`].
    pub fn resize_namespace(&self, nqn: &Nqn, nsid: u32, device: SharedDevice) -> Result<(), SetupError> {
        let subsystem = self.find_subsystem(nqn)?;
        subsystem.replace(nsid, |namespace| {
            debug_assert!(namespace.device.is_same(&device), "another device is another namespace");
            namespace.resized(device)
        })?;
        for controller in self.controllers_of(&subsystem) {
            controller.namespace_resized(nsid);
        }
        Ok(())
    }

    /// The names of the subsystems, in the order in which they were added.
    pub fn subsystems(&self) -> Vec<Nqn> {
        self.0.subsystems().1.iter().map(|subsystem| subsystem.nqn.clone()).collect()
    }

    /// The identifiers of a subsystem's namespaces, in ascending order.
    ///
    /// # Errors
    /// [`SetupError::UnknownNqn`].
    pub fn namespaces(&self, nqn: &Nqn) -> Result<Vec<u32>, SetupError> {
        Ok(self.find_subsystem(nqn)?.namespaces().keys().copied().collect())
    }

    fn find_subsystem(&self, nqn: &Nqn) -> Result<Arc<Subsystem>, SetupError> {
        let (_, all) = self.0.subsystems();
        let found = all.iter().find(|subsystem| subsystem.nqn == *nqn).cloned();
        found.ok_or_else(|| SetupError::UnknownNqn(nqn.clone()))
    }

    fn drain_controllers(&self, subsystem: &Arc<Subsystem>, which: impl Fn(&Controller) -> bool) {
        for controller in self.controllers_of(subsystem).iter().filter(|controller| which(controller)) {
            controller.drain();
        }
    }

    fn controllers_of(&self, subsystem: &Arc<Subsystem>) -> Vec<Arc<Controller>> {
        let all = self.0.controllers().into_iter();
        all.filter(|controller| Arc::ptr_eq(&controller.subsystem, subsystem)).collect()
    }
}
