//! Changes of a target that serves: subsystems, namespaces and hosts come and go.
//!
//! Each change is there when its function returns; controllers that it ends answer what they are carrying out and
//! close within [`crate::Limits::drain`], on their own cores.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;

use sealblock_layers_cross_core::SharedDevice;
use sealblock_protocols_nvme::nqn::Nqn;

use crate::controller::Controller;
use crate::namespace::Namespace;
use crate::subsystem::{Hosts, SetupError, Subsystem};
use crate::target::Target;

impl Target {
    /// Offers one more subsystem.
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

    /// Offers a subsystem no more and ends its controllers, once commands in flight are answered. Another one may take its
    /// name at once. [`Target::controllers`] tells how many are left.
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

    /// Changes which hosts may connect. Controllers of hosts that no longer may are ended, once commands in flight are
    /// answered.
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

    /// Adds a namespace to a subsystem. Its controllers have it with the next command.
    ///
    /// # Errors
    /// [`SetupError::UnknownNqn`], [`SetupError::Nsid`] and [`SetupError::DuplicateNsid`].
    pub fn add_namespace(&self, nqn: &Nqn, nsid: u32, namespace: Namespace) -> Result<(), SetupError> {
        let subsystem = self.find_subsystem(nqn)?;
        subsystem.add(nsid, namespace)?;
        self.report_namespace_changed(&subsystem, nsid);
        Ok(())
    }

    /// Has the discovery log name other addresses to hosts that came to these: pairs of a listener's address and of the one
    /// by which hosts reach it from outside, as through address translation. Replaces what was said before.
    pub fn advertise(&self, addresses: Vec<(SocketAddr, SocketAddr)>) {
        self.0.advertised.set(addresses);
        // Nothing is offered anew, but the page is another one.
        let Ok(()) = self.0.change_subsystems(|_| Ok::<(), Infallible>(()));
    }

    /// Takes a namespace from a subsystem. Commands that are being carried out on it are answered; the namespace, and with
    /// it its share of the device and of [`Namespace::state`], is let go with the last of them: whoever keeps a clone of that
    /// state sees by its count of owners when the device may be closed.
    ///
    /// # Errors
    /// [`SetupError::UnknownNqn`] and [`SetupError::UnknownNsid`].
    pub fn remove_namespace(&self, nqn: &Nqn, nsid: u32) -> Result<(), SetupError> {
        let subsystem = self.find_subsystem(nqn)?;
        let removed = subsystem.remove(nsid)?;
        for controller in self.controllers_of(&subsystem) {
            controller.namespace_removed(nsid, &removed);
        }
        Ok(())
    }

    /// Has a namespace show the geometry of `device`, which is a newer handle for the device that it has already. Its controllers have
    /// it with the next command, and tell their hosts to look (Attached Namespace Attribute Changed); the identity of the
    /// namespace, its state and who is still to be told of a failed flush stay. Before a device gets smaller hosts are best
    /// told, but nothing depends on it: what lies past its end is refused by the device.
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

    /// The names of the subsystems that are offered, in the order of adding.
    pub fn subsystems(&self) -> Vec<Nqn> {
        self.0.subsystems().1.iter().map(|subsystem| subsystem.nqn.clone()).collect()
    }

    /// The identifiers of a subsystem's namespaces, in rising order.
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

    fn report_namespace_changed(&self, subsystem: &Arc<Subsystem>, nsid: u32) {
        for controller in self.controllers_of(subsystem) {
            controller.namespaces_changed(nsid);
        }
    }

    fn controllers_of(&self, subsystem: &Arc<Subsystem>) -> Vec<Arc<Controller>> {
        let all = self.0.controllers().into_iter();
        all.filter(|controller| Arc::ptr_eq(&controller.subsystem, subsystem)).collect()
    }
}
