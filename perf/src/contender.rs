//! A namespace of a target as one side of a comparison.

use std::rc::Rc;

use sealblock_block::Gate;
use sealblock_integrity::PiFormat;
use sealblock_media_nvme_tcp::NvmeTcpDevice;
use sealblock_runtime_reactor::CoreHandle;

use crate::cpu::{core_cpu, thread_cpu};
use crate::host_guard::HostGuarded;
use crate::load::{self, Load, Sample, Until};
use crate::remote::{self, NQN, Serving, View};
use crate::setup::Turn;

/// One side of a comparison.
pub struct Contender {
    /// Its name in tables.
    pub name: String,
    /// The namespace.
    pub gate: Rc<Gate<NvmeTcpDevice>>,
    /// The core of our target; `None` for another target, which has none in this process.
    pub target: Option<CoreHandle>,
    /// Enables the target's background work.
    pub on_turn: Turn,
    /// The format of the host's tags, if it differs from the format on the wire.
    pub host: Option<PiFormat>,
}

/// The result of a turn.
#[derive(Clone, Copy)]
pub struct Measured {
    /// The requests.
    pub turn: Sample,
    /// CPU seconds of the host.
    pub host_cpu: f64,
    /// How much of that is spent on converting tags between the host's format and that of the wire.
    pub boundary_cpu: f64,
    /// CPU seconds of the target, if known.
    pub target_cpu: Option<f64>,
    /// Bytes that the host checksummed for each byte of data moved.
    pub host_summed: f64,
}

impl Contender {
    /// A namespace of our own target.
    pub async fn ours(
        name: String,
        serving: &Serving,
        (index, view): (usize, View),
        digests: bool,
    ) -> anyhow::Result<Contender> {
        let device = remote::connect(serving.address, NQN, Some(remote::nsid(index, view)), digests).await?;
        let (target, on_turn) = (Some(serving.core.clone()), serving.turns[index].clone());
        Ok(Contender { name, gate: Rc::new(Gate::new("remote", device)), target, on_turn, host: None })
    }

    /// The first protected namespace of our own target, for a host that makes its own tags.
    pub async fn tagged(name: String, serving: &Serving, host: Option<PiFormat>) -> anyhow::Result<Contender> {
        Ok(Contender { host, ..Contender::ours(name, serving, (1, View::Tagged), false).await? })
    }

    /// One turn.
    pub async fn turn(&self, load: Load, until: Until, seed: u64) -> anyhow::Result<Measured> {
        self.on_turn.set(true);
        let before = (self.target_cpu().await?, thread_cpu(), self.gate.device().counters().bytes_checksummed());
        let (turn, boundary_cpu) = match self.host {
            None => (load::drive(Rc::clone(&self.gate), load, until, seed).await?, 0.0),
            Some(host) => {
                let guarded = Rc::new(HostGuarded::new(Rc::clone(&self.gate), host));
                (load::drive(Rc::clone(&guarded), load, until, seed).await?, guarded.boundary_cpu())
            }
        };
        let after = (thread_cpu(), self.target_cpu().await?, self.gate.device().counters().bytes_checksummed());
        self.on_turn.set(false);
        let host_summed = (after.2 - before.2) as f64 / turn.bytes as f64;
        let target_cpu = before.0.zip(after.1).map(|(before, after)| after - before);
        Ok(Measured { turn, host_cpu: after.0 - before.1, boundary_cpu, target_cpu, host_summed })
    }

    async fn target_cpu(&self) -> anyhow::Result<Option<f64>> {
        match &self.target {
            Some(core) => Ok(Some(core_cpu(core).await?)),
            None => Ok(None),
        }
    }
}
