//! The server from start to end: what signals do, and the watch over the served files.

pub mod attach;
pub mod service;

use std::io;
use std::num::NonZeroUsize;
use std::thread::{self, available_parallelism};
use std::time::Duration;

use futures_util::future::{FutureExt, select_all};
use sealblock_media_file::{Backing, BackingError, open_files};
use sealblock_runtime_reactor::{Config, Cores, Placement, Reactor, ShutdownSignal, Signal, shutdown_signal};
use sealblock_stack::StackError;
use sealblock_units::ByteCount;

use crate::control::protocol::{ControlError, RESIZING};
use crate::control::responder::{Control, ResizeRequest};
use crate::control::socket_path::ControlSocket;
use crate::devices::mirrors::control_error;
use crate::devices::waiting::OpenAttempt;
use crate::events::{Event, EventSender, EventSink};
use crate::exports::block_device::check_backend;
use crate::plan::Plan;
use crate::run::service::{Hangups, ServiceState, notify};
use crate::server::{Ending, Server};
use crate::status::server_info::started_unix_s;

/// How long a core that was busy polls for work before it sleeps, in microseconds: longer than a host on a fast network
/// needs to send the next request. A core that finds no work a few times in a row sleeps at once, so an idle server
/// uses no CPU time.
pub(crate) const SPIN_US: u32 = 50;
/// Time for remaining tasks of the cores after everything is closed.
pub(crate) const SHUTDOWN_GRACE: Duration = Duration::from_secs(1);
/// The interval between checks of the files.
const FILE_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Serves until a signal ends it, and reports to `events`. `again` makes the plan anew on SIGHUP.
///
/// # Errors
/// If the plan could not be served, or the devices could not be closed cleanly.
pub fn run(
    plan: &Plan,
    events: EventSink,
    control: Option<&ControlSocket>,
    again: impl Fn() -> Result<Plan, StackError>,
) -> Result<(), StackError> {
    // Recorded before anything is opened.
    started_unix_s();
    let cores = cores_of(plan.cores);
    let failed = |error| sealblock_stack::start_error(&error);
    // This thread only coordinates; the cores handle blocks.
    let reactor = Reactor::new(Config { pool_arena_bytes: 0, ..Config::default() }).map_err(failed)?;
    let cores =
        Cores::start(Placement::Count(cores), Config { spin_us: SPIN_US, ..Config::default() }).map_err(failed)?;
    cores.backend(0).and_then(sealblock_stack::warning).inspect(|warning| tracing::warn!("{warning}"));
    let lived = reactor.block_on(live(plan, &cores, events, control, again));
    let (is_idle, served) = lived.unwrap_or_else(|failure| (true, Err(failure)));
    match is_idle {
        true => _ = cores.shutdown(SHUTDOWN_GRACE),
        // A core would wait for its commands.
        false => std::mem::forget(cores),
    }
    served?;
    events(&Event::Stopped);
    Ok(())
}

/// The number of cores to serve on: the configured number, but no more than there are CPUs, because two threads on one
/// CPU only disturb each other; by default all CPUs up to eight. A host opens a connection for each of its CPUs and
/// these are spread over the cores, but a volume's work stays on one core, so more cores are seldom worth their memory.
fn cores_of(said: Option<NonZeroUsize>) -> usize {
    const MAX_DEFAULT_CORES: usize = 8;
    let cpus = available_parallelism().map_or(1, usize::from);
    said.map_or(cpus.min(MAX_DEFAULT_CORES), |said| said.get().min(cpus))
}

/// Runs from the first signal handler until the last device is closed. Returns whether no command is in flight then, and
/// how it went; an error if nothing could be served.
async fn live(
    plan: &Plan,
    cores: &Cores,
    events: EventSink,
    control: Option<&ControlSocket>,
    again: impl Fn() -> Result<Plan, StackError>,
) -> Result<(bool, Result<(), StackError>), StackError> {
    // From here on a signal requests an orderly end, even while volumes are being opened.
    let mut signal = shutdown_signal();
    // The first poll installs its handlers.
    let _ = (&mut signal).now_or_never();
    let hangups = Hangups::watch().map_err(|error| StackError::io("wait for signals", &error))?;
    watch_files().map_err(|error| StackError::io("watch files", &error))?;
    let control = Control::open(control)?;
    let mut server = Server::new(cores.handles(), &plan.limits, EventSender::here(events), check_backend(cores))?;
    let served = async {
        server.change(plan).await?;
        control.offer(server.served());
        events(&Event::Ready(server.serving()));
        notify(ServiceState::Ready);
        until_ended(&mut server, &mut signal, &hangups, events, &control, again).await
    };
    let served = served.await;
    drop(control);
    let Ending { is_idle, closed } = server.end().await;
    Ok((is_idle, served.and(closed)))
}

/// What the server does next.
enum NextAction {
    /// Ends.
    End(io::Result<Signal>),
    /// Reloads the configuration.
    Reload,
    /// Changes a size.
    Resize(ResizeRequest),
    /// Serves a target that is open now, or records that it still is not.
    Admit(Box<OpenAttempt>),
}

/// Waits for the next action. Actions are executed one after the other: a signal during a resize takes effect after the
/// resize, which has a time limit.
async fn next(server: &mut Server, signal: &mut ShutdownSignal, hangups: &Hangups, control: &Control) -> NextAction {
    let turns = [
        signal.map(NextAction::End).boxed_local(),
        hangups.next().map(|()| NextAction::Reload).boxed_local(),
        control.next_resize().map(NextAction::Resize).boxed_local(),
        server.next_tried().map(|tried| NextAction::Admit(Box::new(tried))).boxed_local(),
    ];
    select_all(turns).await.0
}

async fn until_ended(
    server: &mut Server,
    signal: &mut ShutdownSignal,
    hangups: &Hangups,
    events: EventSink,
    control: &Control,
    again: impl Fn() -> Result<Plan, StackError>,
) -> Result<(), StackError> {
    loop {
        match next(server, signal, hangups, control).await {
            NextAction::End(ended) => {
                ended.map_err(|error| StackError::io("wait for signals", &error))?;
                notify(ServiceState::Stopping);
                events(&Event::Draining { connections: server.connections() });
                return Ok(());
            }
            NextAction::Resize(request) => resize(server, request, events).await,
            NextAction::Admit(tried) => {
                let opened = server.admit(*tried).await;
                control.offer(server.served());
                if let Some(opened) = opened {
                    events(&Event::Opened(opened));
                }
            }
            NextAction::Reload => reload(server, events, control, &again).await,
        }
    }
}

async fn resize(server: &mut Server, request: ResizeRequest, events: EventSink) {
    let resized = server.resize(&request.nqn, request.nsid, ByteCount::new(request.size.get())).await;
    match &resized {
        Ok(report) if report.before_bytes != report.size_bytes => events(&Event::Resized(report.clone())),
        Ok(_) => {}
        Err(failure) => tracing::warn!("{}", failure.in_short()),
    }
    let problem = |failure| ControlError { why: StackError::reason(&failure, RESIZING), ..control_error(&failure) };
    // The connection may have ended.
    let _ = request.reply.send(resized.map_err(problem));
}

async fn reload(
    server: &mut Server,
    events: EventSink,
    control: &Control,
    again: &impl Fn() -> Result<Plan, StackError>,
) {
    notify(ServiceState::Reloading);
    match take_plan(server, again).await {
        Ok(()) => {
            control.offer(server.served());
            events(&Event::Reloaded(server.serving()));
        }
        Err(failure) => {
            tracing::error!("the reload failed, and the old configuration stays in effect: {}", failure.in_short());
            events(&Event::ReloadFailed { reason: failure.to_string() });
        }
    }
    notify(ServiceState::Ready);
}

async fn take_plan(server: &mut Server, again: &impl Fn() -> Result<Plan, StackError>) -> Result<(), StackError> {
    let plan = again()?;
    server.change(&plan).await?;
    if server.waits_for_restart(&plan) {
        tracing::warn!("changed limits take effect at the next start");
    }
    Ok(())
}

/// Watches the files of served targets until the process ends: logs when one is deleted, renamed, replaced or
/// truncated, and when that is undone. On a separate thread, because a file system may be slow.
fn watch_files() -> io::Result<()> {
    let check = || loop {
        thread::sleep(FILE_CHECK_INTERVAL);
        for backing in open_files() {
            if let Some(news) = backing.check() {
                report_file(&backing, news);
            }
        }
    };
    thread::Builder::new().name("backing".to_owned()).spawn(check).map(drop)
}

fn report_file(backing: &Backing, news: Option<BackingError>) {
    let file = backing.path().display();
    match news {
        Some(BackingError::Gone) => tracing::error!(%file, "the file in use was deleted or renamed"),
        Some(BackingError::Replaced) => {
            tracing::error!(%file, "the file in use was replaced by another file")
        }
        Some(BackingError::CutOff { left_bytes, length_bytes }) => {
            tracing::error!(%file, left_bytes, length_bytes, "the file in use was truncated");
        }
        None => tracing::warn!(%file, "the file is back"),
    }
}
