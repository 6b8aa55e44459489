//! A number of cores as one side of a comparison: a target on these cores, and the clients that send requests to it.

use std::rc::Rc;

use anyhow::Context;
use futures_util::future::try_join_all;
use sealblock_block::{Abilities, Device, Gate, Geometry, Outcome, Request};
use sealblock_layers_cross_core::{Attached, SharedDevice};
use sealblock_media_nvme_tcp::NvmeTcpDevice;
use sealblock_runtime_reactor::{CoreHandle, CoreLocal, yield_now};
use sealblock_units::BlockSize;

use super::super::options::{DeviceKind, ScaleOptions};
use super::target::{Target, nsid};
use crate::cpu::core_cpu;
use crate::load::{self, Load, Sample, Stopwatch, Until};
use crate::remote::{NQN, connect};

/// Reads every block, which loads the tables of volumes.
const WARM_UP: Load = Load { name: "read all", write: false, blocks: 32, random: false, depth: 8, flush_every: 0 };

/// A device as an export uses it: a request that needs no waiting is executed in place. Then other tasks of the core
/// have a turn, as they do after what a connection has received. So a core that never waits still serves the others.
struct InPlace(Attached);

impl Device for InPlace {
    fn geometry(&self) -> &Geometry {
        self.0.geometry()
    }

    fn abilities(&self) -> Abilities {
        self.0.abilities()
    }

    async fn execute(&self, request: Request) -> Outcome {
        let Some(outcome) = self.0.try_execute(&request) else { return self.0.execute(request).await };
        yield_now().await;
        outcome
    }
}

/// A queue of the host, or the work of a core of the target.
enum Client {
    Remote(Rc<Gate<NvmeTcpDevice>>),
    Local(Rc<InPlace>),
}

impl Client {
    async fn turn(&self, load: Load, until: Until, seed: u64) -> anyhow::Result<Sample> {
        match self {
            Client::Remote(gate) => load::drive(Rc::clone(gate), load, until, seed).await,
            Client::Local(device) => load::drive(Rc::clone(device), load, until, seed).await,
        }
    }

    async fn close(&self) {
        if let Client::Remote(gate) = self {
            gate.device().close().await;
        }
    }
}

/// A client on its core.
struct Queue {
    core: CoreHandle,
    client: CoreLocal<Client>,
    namespace: usize,
}

impl Queue {
    /// Opens a client on a core, on which `open` runs.
    async fn open<F>(
        core: &CoreHandle,
        namespace: usize,
        open: impl FnOnce() -> F + Send + 'static,
    ) -> anyhow::Result<Queue>
    where
        F: Future<Output = anyhow::Result<Client>> + 'static,
    {
        let opened = core.call(move || async move { Ok(CoreLocal::new(Rc::new(open().await?))) });
        let client = opened.await.context("the client's core is gone")?;
        client.map(|client| Queue { core: core.clone(), client, namespace })
    }

    /// Calls `work` with the client, on its core.
    async fn with<F, T>(&self, work: impl FnOnce(Rc<Client>) -> F + Send + 'static) -> anyhow::Result<T>
    where
        F: Future<Output = T> + 'static,
        T: Send + 'static,
    {
        let client = self.client.clone();
        let done = self.core.call(move || async move {
            match client.get() {
                Some(client) => Ok(work(client).await),
                None => Err(anyhow::anyhow!("a client is used on its own core")),
            }
        });
        done.await.context("the client's core is gone")?
    }

    async fn turn(&self, load: Load, until: Until, seed: u64) -> anyhow::Result<Sample> {
        self.with(move |client| async move { client.turn(load, until, seed).await }).await?
    }
}

/// The result of a turn.
#[derive(Clone, Copy, Debug)]
pub struct Measured {
    /// The requests of all clients.
    pub turn: Sample,
    /// CPU seconds of the target: of this process without its host, so with the kernel's workers for it.
    pub target_cpu: f64,
    /// CPU seconds of the host.
    pub host_cpu: f64,
    /// How much of the time the busiest core of the target worked or polled.
    pub busiest: f64,
    /// Requests that crossed from the core of their connection to another one.
    pub crossings: u64,
}

impl Measured {
    /// Crossings for each request.
    pub fn crossings_per_request(&self) -> f64 {
        self.crossings as f64 / self.turn.requests as f64
    }
}

/// A target on some cores, and its clients.
pub struct Contender {
    target: Target,
    queues: Vec<Queue>,
    /// Empty without a network.
    hosts: Vec<CoreHandle>,
}

impl Contender {
    /// Opens the devices on these cores, and the clients on `hosts`, or without a network on the same cores.
    pub async fn start(
        kind: DeviceKind,
        cores: &[CoreHandle],
        hosts: &[CoreHandle],
        options: &ScaleOptions,
    ) -> anyhow::Result<Contender> {
        let target = Target::open(kind, cores, options).await?;
        let (mut queues, shared) = (Vec::new(), target.shared().collect::<Vec<_>>());
        let wanted = options.queues.map_or(cores.len(), Into::into);
        let count = wanted.next_multiple_of(shared.len());
        let address = match options.in_process {
            true => None,
            false => Some(target.serve().await?),
        };
        // One after the other, so that the target spreads them evenly.
        for index in 0..count {
            let namespace = index % shared.len();
            queues.push(match address {
                None => local(&cores[index % cores.len()], namespace, shared[namespace].clone()).await?,
                Some(address) => {
                    let host = &hosts[index % hosts.len()];
                    let open = move || async move {
                        let device = connect(address, NQN, Some(nsid(namespace)), false).await?;
                        Ok(Client::Remote(Rc::new(Gate::new("remote", device))))
                    };
                    Queue::open(host, namespace, open).await?
                }
            });
        }
        let hosts = if options.in_process { Vec::new() } else { hosts.to_vec() };
        let contender = Contender { target, queues, hosts };
        contender.warm_up(options.blocks()).await?;
        Ok(contender)
    }

    async fn warm_up(&self, blocks: u64) -> anyhow::Result<()> {
        for namespace in 0..self.target.shared().count() {
            let first = self.queues.iter().find(|queue| queue.namespace == namespace);
            let queue = first.context("every namespace has a queue")?;
            queue.turn(WARM_UP, Until::Asked(blocks / WARM_UP.blocks), 1).await?;
        }
        Ok(())
    }

    /// One turn of all clients at the same time.
    pub async fn turn(&self, load: Load, until: Until, seed: u64) -> anyhow::Result<Measured> {
        let crossings = self.target.crossings();
        let before = (cpu_of(&self.hosts).await?, cpu_of(&self.target.cores).await?);
        let watch = Stopwatch::start();
        let turns = (0..).zip(&self.queues).map(|(index, queue)| queue.turn(load, until, seed << 16 | index));
        let requests = try_join_all(turns).await?.iter().map(|turn| turn.requests).sum();
        let turn = watch.stop(requests, load.blocks << BlockSize::B4096.shift());
        let after = (cpu_of(&self.hosts).await?, cpu_of(&self.target.cores).await?);
        let host_cpu = after.0.iter().sum::<f64>() - before.0.iter().sum::<f64>();
        let busy = before.1.iter().zip(&after.1).map(|(before, after)| after - before);
        Ok(Measured {
            turn,
            target_cpu: turn.cpu_seconds - host_cpu,
            host_cpu,
            busiest: busy.fold(0.0, f64::max) / turn.seconds,
            crossings: self.target.crossings() - crossings,
        })
    }

    /// Closes the clients, and then the devices.
    pub async fn close(self) -> anyhow::Result<()> {
        for queue in &self.queues {
            queue.with(|client| async move { client.close().await }).await?;
        }
        self.target.close().await
    }
}

/// A client without a network.
async fn local(core: &CoreHandle, namespace: usize, shared: SharedDevice) -> anyhow::Result<Queue> {
    let open = move || async move { Ok(Client::Local(Rc::new(InPlace(shared.attach())))) };
    Queue::open(core, namespace, open).await
}

/// CPU seconds of each core.
async fn cpu_of(cores: &[CoreHandle]) -> anyhow::Result<Vec<f64>> {
    try_join_all(cores.iter().map(core_cpu)).await
}
