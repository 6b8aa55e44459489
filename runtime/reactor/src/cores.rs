//! Several reactors, one thread each, pinned to one CPU each.

use std::io;
use std::pin::pin;
use std::sync::{Arc, mpsc};
use std::task::Poll;
use std::thread;
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::call::CoreHandle;
use crate::config::{Attempt, Backend, Config, StartError};
use crate::executor::Reactor;
use crate::shutdown::shutdown_requested;
use crate::sync::Semaphore;
use crate::timer;

/// Which CPUs get a core.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Placement {
    /// This many cores (at least one), on the CPUs that the process may use, in order; if there are more cores than
    /// CPUs, starting over.
    Count(usize),
    /// One core on each of these CPUs, by the kernel's numbers.
    Cpus(Vec<usize>),
}

/// Reactors on threads of their own. Dropping it stops them at once, without draining.
pub struct Cores {
    cores: Vec<Running>,
}

struct Running {
    handle: CoreHandle,
    backend: Backend,
    thread: Option<thread::JoinHandle<usize>>,
}

/// The result of a shutdown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stopped {
    /// Tasks on all cores that had not ended by the deadline and were dropped.
    pub aborted_tasks: usize,
    /// Cores whose thread had panicked.
    pub panicked_cores: usize,
}

impl Cores {
    /// Starts one reactor per thread with the same configuration. A thread that cannot be pinned runs unpinned, with a
    /// warning.
    ///
    /// # Errors
    /// When any of them does not start; those that did are stopped again.
    pub fn start(placement: Placement, config: Config) -> Result<Cores, StartError> {
        let cpus = cpus(placement)?;
        let mut cores = Cores { cores: Vec::with_capacity(cpus.len()) };
        for cpu in cpus {
            cores.cores.push(start_one(cpu, config.clone())?);
        }
        Ok(cores)
    }

    /// The number of cores; never zero.
    #[allow(clippy::len_without_is_empty, reason = "there is always a core")]
    pub fn len(&self) -> usize {
        self.cores.len()
    }

    /// The handle of core `index`, counted from zero; `None` if there are not that many.
    pub fn handle(&self, index: usize) -> Option<CoreHandle> {
        self.cores.get(index).map(|core| core.handle.clone())
    }

    /// The handles of all cores, in order.
    pub fn handles(&self) -> Vec<CoreHandle> {
        self.cores.iter().map(|core| core.handle.clone()).collect()
    }

    /// The backend of core `index`.
    pub fn backend(&self, index: usize) -> Option<&Backend> {
        self.cores.get(index).map(|core| &core.backend)
    }

    /// Rejects new calls, lets the tasks of every core run until they end or `drain` has passed, drops the rest, waits
    /// for the operations in flight, and joins the threads. Tasks that would run forever should wait for
    /// [`crate::shutdown_requested`].
    pub fn shutdown(mut self, drain: Duration) -> Stopped {
        let now = timer::now();
        // A drain beyond the clock's range becomes a century.
        let by = now.checked_add(drain).unwrap_or(now + Duration::from_secs(100 * 365 * 86400));
        self.stop(by)
    }

    fn stop(&mut self, by: Instant) -> Stopped {
        for core in &self.cores {
            core.handle.shared.stop(by);
        }
        let mut stopped = Stopped::default();
        for thread in self.cores.iter_mut().filter_map(|core| core.thread.take()) {
            match thread.join() {
                Ok(aborted) => stopped.aborted_tasks += aborted,
                Err(_panic) => stopped.panicked_cores += 1,
            }
        }
        stopped
    }
}

impl Drop for Cores {
    fn drop(&mut self) {
        self.stop(timer::now());
    }
}

impl std::fmt::Debug for Cores {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.cores.iter().map(|core| &core.backend)).finish()
    }
}

fn start_one(cpu: usize, config: Config) -> Result<Running, StartError> {
    let permits = Semaphore::new(config.calls_in_flight_limit);
    let (send, receive) = mpsc::sync_channel(1);
    let run = move || {
        if let Err(error) = pin_to(cpu) {
            tracing::warn!(cpu, %error, "the core's thread runs unpinned");
        }
        let reactor = match Reactor::new(config) {
            Ok(reactor) => reactor,
            Err(error) => {
                // The starting thread waits for this message.
                let _ = send.send(Err(error));
                return 0;
            }
        };
        let _ = send.send(Ok((Arc::clone(&reactor.core().shared), reactor.backend().clone())));
        run_until_stopped(&reactor)
    };
    let thread = thread::Builder::new()
        .name(format!("core-{cpu}"))
        .spawn(run)
        .map_err(|source| StartError::System { what: Attempt::StartThread, source })?;
    match receive.recv() {
        Ok(Ok((remote, backend))) => {
            Ok(Running { handle: CoreHandle { shared: remote, semaphore: permits }, backend, thread: Some(thread) })
        }
        Ok(Err(error)) => Err(error),
        Err(_panicked) => {
            Err(StartError::System { what: Attempt::StartThread, source: io::Error::other("the thread panicked") })
        }
    }
}

/// Runs a core until its shutdown. Returns the number of tasks that had not ended in time.
fn run_until_stopped(reactor: &Reactor) -> usize {
    let core = reactor.core();
    reactor.block_on(async {
        shutdown_requested().await;
        let by = core.stop_by.get().expect("a core whose shutdown was requested has a deadline");
        let mut drained = pin!(core.drained());
        let mut deadline = timer::sleep(by.saturating_duration_since(timer::now()));
        std::future::poll_fn(|cx| {
            if drained.as_mut().poll(cx).is_ready() {
                return Poll::Ready(());
            }
            std::pin::Pin::new(&mut deadline).poll(cx)
        })
        .await;
    });
    core.tasks.borrow().live()
}

fn cpus(placement: Placement) -> Result<Vec<usize>, StartError> {
    let count = match placement {
        Placement::Cpus(cpus) if !cpus.is_empty() => return Ok(cpus),
        Placement::Cpus(_) => 1,
        Placement::Count(count) => count.max(1),
    };
    let allowed = allowed_cpus().map_err(|source| StartError::System { what: Attempt::ReadAffinity, source })?;
    Ok(allowed.iter().copied().cycle().take(count).collect())
}

fn allowed_cpus() -> io::Result<Vec<usize>> {
    let set = sched_getaffinity(None)?;
    Ok((0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect())
}

fn pin_to(cpu: usize) -> io::Result<()> {
    if cpu >= CpuSet::MAX_CPU {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut set = CpuSet::new();
    set.set(cpu);
    Ok(sched_setaffinity(None, &set)?)
}
