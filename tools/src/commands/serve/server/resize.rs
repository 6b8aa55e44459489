//! Resizes a served namespace.

use std::rc::Rc;

use sealblock_stack::{Cause, StackError};
use sealblock_units::ByteCount;

use super::super::resize::ResizeResult;
use super::{Server, of_setup};
use crate::commands::resize::DOING;
use crate::commands::serve::devices::ServedDevice;
use crate::control::protocol::ResizeReport;
use sealblock_protocols_nvme::nqn::Nqn;

impl Server {
    /// Resizes a namespace's volume in use and notifies hosts.
    ///
    /// # Errors
    /// Why the size did not change. The volume is still served, unless the reason says otherwise.
    pub async fn resize(&mut self, nqn: &str, nsid: u32, size: ByteCount) -> Result<ResizeReport, StackError> {
        let offered = self.offered.iter().find(|(name, _)| name.as_str() == nqn);
        let space = offered.and_then(|(_, offered)| offered.spaces.get(&nsid));
        let gone = || StackError::new(Cause::Unreachable, DOING, "it is served no more").on(nqn);
        let device = Rc::clone(&space.ok_or_else(gone)?.device);
        let ResizeResult { device: seen, result: outcome } = device.resize(size).await?;
        // A failed resize leaves the old size: there is nothing to publish.
        if let Some(seen) = seen.filter(|seen| seen.geometry() != device.shared().geometry()) {
            device.state.report_resized(seen.geometry().capacity_blocks);
            device.see(seen);
            self.publish(&device)?;
        }
        outcome
    }

    /// Updates every namespace and export of a device to its current geometry.
    fn publish(&self, device: &Rc<ServedDevice>) -> Result<(), StackError> {
        let failed = |error| of_setup(&error).on(&device.target);
        let spaces = |nqn: &Nqn| {
            let spaces = self.offered[nqn].spaces.iter();
            spaces.filter(|(_, space)| Rc::ptr_eq(&space.device, device)).map(|(nsid, _)| *nsid).collect::<Vec<_>>()
        };
        for nqn in self.offered.keys() {
            for nsid in spaces(nqn) {
                self.export.resize_namespace(nqn, nsid, device.shared()).map_err(failed)?;
            }
        }
        self.nbd.resize(device)
    }
}
