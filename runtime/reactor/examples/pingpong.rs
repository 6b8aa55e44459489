//! Requests and responses over loopback TCP, between two threads on two CPUs: the number per second, and the CPU time.
//!
//! `pingpong [SECONDS] [SPIN_US]` runs reads (a request of 64 bytes, a response of 16 + 4096) and writes (64 + 4096,
//! and 16) at depths of 1, 32 and 128, on io_uring, on system calls, and on both with a spin before sleeping if one is
//! given.

use std::error::Error;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use sealblock_runtime_memory::{Buffer, Slice};
use sealblock_runtime_reactor::net::{Listener, Stream};
use sealblock_runtime_reactor::{BackendChoice, Config, Cores, Placement, pool, spawn};

const REQUEST_BYTES: usize = 64;
const RESPONSE_BYTES: usize = 16;
const PAYLOAD_BYTES: usize = 4096;
const RECEIVE_BYTES: usize = 256 << 10;

/// The lengths of the parts of a request and of a response.
#[derive(Clone, Copy)]
struct Shape {
    name: &'static str,
    request: &'static [usize],
    response: &'static [usize],
}

const SHAPES: [Shape; 2] = [
    Shape { name: "read ", request: &[REQUEST_BYTES], response: &[RESPONSE_BYTES, PAYLOAD_BYTES] },
    Shape { name: "write", request: &[REQUEST_BYTES, PAYLOAD_BYTES], response: &[RESPONSE_BYTES] },
];

/// CPU time of this thread.
fn cpu_time() -> io::Result<Duration> {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat")?;
    let first = stat.split_whitespace().next().and_then(|number| number.parse().ok());
    first.map(Duration::from_nanos).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// Counts whole messages in a stream of bytes.
struct Messages {
    buffer: Buffer,
    len_bytes: usize,
    partial_bytes: usize,
}

impl Messages {
    fn new(parts: &[usize]) -> Messages {
        Messages { buffer: pool().take(RECEIVE_BYTES), len_bytes: parts.iter().sum(), partial_bytes: 0 }
    }

    /// Receives until at least one message is complete; zero at the end of the stream.
    async fn next(&mut self, stream: &Stream) -> io::Result<usize> {
        loop {
            let (result, buffer) = stream.recv(std::mem::take(&mut self.buffer)).await;
            self.buffer = buffer;
            let count = result?;
            let total = self.partial_bytes + count;
            self.partial_bytes = total % self.len_bytes;
            if count == 0 || total >= self.len_bytes {
                return Ok(total / self.len_bytes);
            }
        }
    }
}

async fn send(stream: &Stream, parts: &[Slice], messages: usize) -> io::Result<()> {
    stream.send_all((0..messages).flat_map(|_| parts.iter().cloned())).await
}

fn slices(parts: &[usize]) -> Vec<Slice> {
    parts.iter().map(|&len| pool().take(len).freeze()).collect()
}

/// Answers all requests; returns the CPU time that it took.
async fn serve(listener: Listener, shape: Shape) -> io::Result<Duration> {
    let (stream, _) = listener.accept().await?;
    stream.set_nodelay(true)?;
    let (mut requests, response) = (Messages::new(shape.request), slices(shape.response));
    let start = cpu_time()?;
    loop {
        match requests.next(&stream).await? {
            0 => return Ok(cpu_time()? - start),
            count => send(&stream, &response, count).await?,
        }
    }
}

/// Keeps `depth` requests in flight; returns the number of responses, and the time and CPU time.
async fn ask(
    address: SocketAddr,
    shape: Shape,
    depth: usize,
    length: Duration,
) -> io::Result<(u64, Duration, Duration)> {
    let stream = Stream::connect(address).await?;
    stream.set_nodelay(true)?;
    let (mut responses, request) = (Messages::new(shape.response), slices(shape.request));
    let (start, start_cpu, mut answered) = (Instant::now(), cpu_time()?, 0);
    send(&stream, &request, depth).await?;
    while start.elapsed() < length {
        let count = responses.next(&stream).await?;
        answered += count as u64;
        send(&stream, &request, count).await?;
    }
    let outcome = (answered, start.elapsed(), cpu_time()? - start_cpu);
    // Closing with unread bytes would reset the connection.
    let mut left = depth;
    while left > 0 {
        left -= responses.next(&stream).await?;
    }
    Ok(outcome)
}

async fn run(server: &Cores, shape: Shape, depth: usize, length: Duration) -> Result<(), Box<dyn Error>> {
    let handles = server.handles();
    let bound = handles[0].call(move || async move {
        let listener = Listener::bind((Ipv4Addr::LOCALHOST, 0).into(), 1)?;
        let address = listener.local_addr()?;
        Ok::<_, io::Error>((address, spawn_serving(listener, shape)))
    });
    let (address, served) = bound.await??;
    let asked = handles[1].call(move || ask(address, shape, depth, length)).await??;
    let served = outcome(served)?;
    let (answered, elapsed, client) = asked;
    let (rate, each) = (answered as f64 / elapsed.as_secs_f64() / 1e3, 1e6 / answered as f64);
    println!(
        "  {} depth {depth:3}: {rate:6.1} kIOPS, CPU per request {:5.2} us serving, {:5.2} us asking",
        shape.name,
        served.as_secs_f64() * each,
        client.as_secs_f64() * each
    );
    Ok(())
}

/// Serves in a task of its own; the channel returns the result.
fn spawn_serving(listener: Listener, shape: Shape) -> std::sync::mpsc::Receiver<io::Result<Duration>> {
    let (send, receive) = std::sync::mpsc::sync_channel(1);
    drop(spawn(async move {
        // A failed send means that the receiver is gone, which needs no result.
        let _ = send.send(serve(listener, shape).await);
    }));
    receive
}

fn outcome(served: std::sync::mpsc::Receiver<io::Result<Duration>>) -> Result<Duration, Box<dyn Error>> {
    Ok(served.recv()??)
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let seconds: u64 = arguments.next().map_or(Ok(2), |seconds| seconds.parse())?;
    let spin: u32 = arguments.next().map_or(Ok(0), |spin_us| spin_us.parse())?;
    let spins = if spin > 0 { vec![0, spin] } else { vec![0] };
    // The results arrive here through a reactor that has nothing else to do.
    let main =
        sealblock_runtime_reactor::Reactor::new(Config { runtime: BackendChoice::Syscalls, ..Config::default() })?;
    for spin_us in spins {
        for runtime in [BackendChoice::Uring, BackendChoice::Syscalls] {
            let config = Config { runtime, spin_us, ..Config::default() };
            let cores = Cores::start(Placement::Count(2), config)?;
            println!("{}, spin {spin_us} us", cores.backend(0).ok_or("there is a core")?);
            for shape in SHAPES {
                for depth in [1, 32, 128] {
                    main.block_on(run(&cores, shape, depth, Duration::from_secs(seconds)))?;
                }
            }
        }
    }
    Ok(())
}
