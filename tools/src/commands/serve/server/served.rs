//! What is served, for those who come by the control socket.

use futures_util::future::join_all;

use super::Server;
use crate::commands::scrub::canonical;
use crate::commands::serve::control::Offer;

impl Server {
    /// Everything that is offered now.
    pub fn served(&self) -> Vec<Offer> {
        let listeners: Vec<_> = self.ears.iter().map(|ear| ear.address).collect();
        let spaces =
            self.offered.iter().flat_map(|(nqn, offered)| offered.spaces.values().map(move |space| (nqn, space)));
        let offer = |(nqn, space): (&sealblock_protocols_nvme::nqn::Nqn, &super::Space)| Offer {
            text: space.plan.target.to_string(),
            path: space.plan.target.path().and_then(canonical),
            nqn: nqn.to_string(),
            nsid: space.plan.nsid,
            listeners: listeners.clone(),
            scrub: space.device.scrub.clone(),
            mirror: space.device.mirror.clone(),
        };
        spaces.map(offer).collect()
    }

    /// Has the scrubs of all devices do what the plan says.
    pub(super) async fn configure_scrubs(&self) {
        let spaces = self.offered.values().flat_map(|offered| offered.spaces.values());
        join_all(spaces.map(|space| space.device.scrub.configure(space.plan.scrub))).await;
    }
}
