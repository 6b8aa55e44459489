//! Generates load on namespace 1 of a target from one core: `load ADDRESS NQN CORE read|write BYTES DEPTH QUEUES
//! SECONDS [digests] [pract]`.
//!
//! DEPTH applies to each of the QUEUES. Blocks are random within the first 64 MiB, 4096 bytes each. Prints I/Os per
//! second, and the mean and the 99th percentile of the latency.

use std::cell::{Cell, RefCell};
use std::error::Error;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::{Duration, Instant};

use sealblock_protocols_nvme::fabrics::{
    CNTLID_DYNAMIC, Connect, ConnectAttributes, ConnectData, FabricsCommand, PropertySet,
};
use sealblock_protocols_nvme::nvm::{BlockCommand, IoCommand};
use sealblock_protocols_nvme::{Command, Completion};
use sealblock_protocols_nvme_tcp::host::{Event, HostData};
use sealblock_protocols_nvme_tcp::{Host, HostConfig, TransmitLimit};
use sealblock_runtime_memory::{Buffer, Slice};
use sealblock_runtime_reactor::net::Stream;
use sealblock_runtime_reactor::{Config, Cores, Placement, now, pool, spawn};
use sealblock_units::Extent;

const USAGE: &str = "load ADDRESS NQN CORE read|write BYTES DEPTH QUEUES SECONDS [digests] [pract]";
const BLOCK_BYTES: u64 = 4096;
const SPAN_BLOCKS: u64 = (64 << 20) / BLOCK_BYTES;

type Failure = Box<dyn Error>;

#[derive(Clone)]
struct Ask {
    address: SocketAddr,
    nqn: String,
    writes: bool,
    bytes: usize,
    depth: usize,
    queues: u16,
    time: Duration,
    digests: bool,
    pract: bool,
}

/// Latencies in steps of 100 ns; the last step counts everything longer.
struct Tally {
    done: Cell<u64>,
    failed: Cell<u64>,
    nanoseconds: Cell<u64>,
    steps: RefCell<Vec<u32>>,
}

impl Tally {
    fn new() -> Rc<Tally> {
        let steps = RefCell::new(vec![0; 100_000]);
        Rc::new(Tally { done: Cell::new(0), failed: Cell::new(0), nanoseconds: Cell::new(0), steps })
    }

    fn count(&self, good: bool, took_ns: u64) {
        self.done.set(self.done.get() + 1);
        self.failed.set(self.failed.get() + u64::from(!good));
        self.nanoseconds.set(self.nanoseconds.get() + took_ns);
        let mut steps = self.steps.borrow_mut();
        let last_step = steps.len() - 1;
        steps[((took_ns / 100) as usize).min(last_step)] += 1;
    }

    fn report(&self, seconds: f64) -> String {
        let done = self.done.get();
        let mut left = done / 100;
        let steps = self.steps.borrow();
        let slow = steps.iter().rposition(|&count| {
            let reached = left <= u64::from(count);
            left = left.saturating_sub(u64::from(count));
            reached
        });
        let mean_us = self.nanoseconds.get() as f64 / done.max(1) as f64 / 1000.0;
        let slow_us = slow.unwrap_or(0) as f64 / 10.0;
        let (rate, failed) = (done as f64 / seconds, self.failed.get());
        format!("{rate:.0} a second, mean {mean_us:.1} us, p99 {slow_us:.1} us, {failed} failed")
    }
}

struct Queue {
    host: Host,
    stream: Stream,
    out: Vec<Slice>,
}

impl Queue {
    async fn open(ask: &Ask) -> Result<Queue, Failure> {
        let stream = Stream::connect(ask.address).await?;
        stream.set_nodelay(true)?;
        let mut config = HostConfig::new(pool());
        config.staging_bytes = 256 << 10;
        (config.header_digest, config.data_digest) = (ask.digests, ask.digests);
        let mut queue = Queue { host: Host::new(config), stream, out: Vec::new() };
        queue.send().await?;
        while queue.host.negotiated().is_none() {
            queue.receive(|_, _, _| ()).await?;
        }
        Ok(queue)
    }

    async fn send(&mut self) -> Result<(), Failure> {
        while self.host.transmit(&mut self.out, TransmitLimit::default()) > 0 {
            self.stream.send_all(self.out.drain(..)).await?;
        }
        Ok(())
    }

    async fn receive(&mut self, mut done: impl FnMut(u16, Completion, Option<Buffer>)) -> Result<(), Failure> {
        let buffer = self.host.receive_buffer().ok_or("the connection is closed")?;
        let (result, buffer) = self.stream.recv(buffer).await;
        let len = result?;
        if len == 0 {
            return Err("the target closed the connection".into());
        }
        self.host.received(buffer, len);
        while let Some(event) = self.host.next_event() {
            match event {
                Event::Established(_) => {}
                Event::Completed { cid, completion, data } => done(cid.0, completion, data.map(|data| data.buffer)),
                Event::Closed(reason) => return Err(format!("{reason:?}").into()),
            }
        }
        Ok(())
    }

    async fn call(&mut self, command: Command, data: HostData) -> Result<Completion, Failure> {
        self.host.submit(command, data)?;
        self.send().await?;
        let answer = Cell::new(None);
        while answer.get().is_none() {
            self.receive(|_, completion, _| answer.set(Some(completion))).await?;
        }
        let completion = answer.get().ok_or("there is an answer")?;
        match completion.status().is_success() {
            true => Ok(completion),
            false => Err(format!("{completion:?}").into()),
        }
    }

    async fn connect(&mut self, ask: &Ask, queue: u16, cntlid: u16) -> Result<u16, Failure> {
        let entries = if queue == 0 { 32 } else { 128 };
        let connect = Connect { queue, entries, attributes: ConnectAttributes::NONE, keep_alive_ms: 0 };
        let hostnqn = "nqn.2026-11.org.example:load".parse().ok();
        let subnqn = ask.nqn.parse().map_err(|_| "no such name")?;
        let data = ConnectData { hostid: [7; 16], cntlid, subnqn, hostnqn };
        let data = Slice::copy_from(&data.encode());
        let done = self.call(connect.encode(), HostData::Write(data.into())).await?;
        Ok(Connect::from_result(done.result.get()).0)
    }
}

fn command(ask: &Ask, at: u64, buffer: Buffer, payload: &Slice) -> Result<(Command, HostData), Failure> {
    let count = ask.bytes as u64 / BLOCK_BYTES;
    let mut blocks = BlockCommand::new(Extent::from_raw(at, count).map_err(|_| "an extent")?);
    blocks.protection.pract = ask.pract;
    let (command, data) = match ask.writes {
        true => (IoCommand::Write(blocks), HostData::Write(payload.clone().into())),
        false => (IoCommand::Read(blocks), HostData::Read { buffer, layout: None }),
    };
    Ok((command.encode(1).map_err(|_| "a command")?, data))
}

/// Keeps `depth` commands in flight until the end.
async fn load(ask: &Ask, queue: &mut Queue, tally: &Tally, seed: u64) -> Result<(), Failure> {
    let payload = Slice::copy_from(&vec![0x5A; ask.bytes]);
    let mut started = vec![now(); 1 << 16];
    let mut idle: Vec<Buffer> =
        (0..ask.depth).map(|_| Buffer::zeroed(if ask.writes { 0 } else { ask.bytes })).collect();
    let (count, mut random) = (ask.bytes as u64 / BLOCK_BYTES, seed);
    let end = now() + ask.time;
    let mut in_flight = 0;
    loop {
        let time = now();
        while time < end
            && let Some(buffer) = idle.pop()
        {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let at = (random >> 33) % (SPAN_BLOCKS / count) * count;
            let (command, data) = command(ask, at, buffer, &payload)?;
            let cid = queue.host.submit(command, data)?;
            started[usize::from(cid.0)] = time;
            in_flight += 1;
        }
        if in_flight == 0 {
            return Ok(());
        }
        queue.send().await?;
        let mut ended = Vec::new();
        queue.receive(|cid, completion, buffer| ended.push((cid, completion.status().is_success(), buffer))).await?;
        let time = now();
        for (cid, good, buffer) in ended {
            let took = (time - started[usize::from(cid)]).as_nanos() as u64;
            tally.count(good, took);
            idle.push(buffer.unwrap_or_default());
            in_flight -= 1;
        }
    }
}

async fn run(ask: Ask) -> Result<String, String> {
    all(ask).await.map_err(|error| error.to_string())
}

async fn all(ask: Ask) -> Result<String, Failure> {
    let mut admin = Queue::open(&ask).await?;
    let cntlid = admin.connect(&ask, 0, CNTLID_DYNAMIC).await?;
    let enable = FabricsCommand::PropertySet(PropertySet { offset: 0x14, bytes: 4, value: 0x0046_0001 });
    admin.call(enable.encode(), HostData::None).await?;
    // A controller grants one I/O queue until the host sets Number of Queues.
    let queues = u32::from(ask.queues) - 1;
    let mut features = Command { opcode: 0x09, ..Command::default() };
    features.cdw10.set(7);
    features.cdw11.set(queues << 16 | queues);
    admin.call(features, HostData::None).await?;
    let tally = Tally::new();
    let start = Instant::now();
    let mut tasks = Vec::new();
    for number in 1..=ask.queues {
        let mut queue = Queue::open(&ask).await?;
        queue.connect(&ask, number, cntlid).await?;
        let (ask, tally) = (ask.clone(), Rc::clone(&tally));
        tasks.push(spawn(async move {
            load(&ask, &mut queue, &tally, u64::from(number)).await.map_err(|error| error.to_string())
        }));
    }
    for task in tasks {
        task.await.map_err(|_| "a task ended early")??;
    }
    Ok(tally.report(start.elapsed().as_secs_f64()))
}

fn main() -> Result<(), Failure> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [address, nqn, core, way, bytes, depth, queues, seconds, rest @ ..] = words.as_slice() else {
        return Err(USAGE.into());
    };
    let ask = Ask {
        address: address.parse()?,
        nqn: nqn.clone(),
        writes: way == "write",
        bytes: bytes.parse()?,
        depth: depth.parse()?,
        queues: queues.parse()?,
        time: Duration::from_secs(seconds.parse()?),
        digests: rest.iter().any(|word| word == "digests"),
        pract: rest.iter().any(|word| word == "pract"),
    };
    let config = Config { spin_us: 1000, ..Config::default() };
    let cores = Cores::start(Placement::Cpus(vec![core.parse()?]), config)?;
    let handle = cores.handle(0).ok_or("there is one core")?;
    println!("{}", futures_executor::block_on(handle.call(move || run(ask)))??);
    Ok(())
}
