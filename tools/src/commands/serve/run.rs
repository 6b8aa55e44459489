//! From start to end: what signals mean.

use std::future::{Future, poll_fn};
use std::io;
use std::pin::{Pin, pin};
use std::task::Poll;
use std::time::Duration;

use futures_util::future::{Either, select};
use sealblock_runtime_reactor::{Config, Cores, Placement, Reactor, ShutdownSignal, Signal, shutdown_signal};
use sealblock_stack::StackError;
use sealblock_units::ByteCount;

use super::announce::{Event, EventWriter};
use super::backing;
use super::control::Control;
use super::mirrors::control_error;
use super::plan::Plan;
use super::resize_queue::ResizeRequest;
use super::scrub::ScrubEventSender;
use super::server::Server;
use super::service::{Hangups, ServiceState, notify};
use super::waiting::Tried;
use crate::cli::ControlSocket;
use crate::commands::resize::DOING;
use crate::control::protocol::ControlError;
use crate::exit::Exit;

/// How long a core that was busy looks for work before it sleeps, in microseconds: longer than a host on a fast network takes to
/// ask again. A core that finds none a few times in a row sleeps at once, so an idle server burns nothing.
const SPIN_US: u32 = 50;
/// Time for tasks of the cores that are left when everything is closed.
const REST: Duration = Duration::from_secs(1);

/// Serves until a signal ends it. `again` makes the plan anew for SIGHUP.
///
/// # Errors
/// What kept it from being served, or from being left clean.
pub fn run(
    plan: &Plan,
    cores: usize,
    announcer: EventWriter,
    control: Option<&ControlSocket>,
    again: impl Fn() -> Result<Plan, StackError>,
) -> Result<Exit, StackError> {
    let failed = |error| sealblock_stack::of_start(&error);
    // This thread only gives orders; blocks are the cores' business.
    let reactor = Reactor::new(Config { pool_arena_bytes: 0, ..Config::default() }).map_err(failed)?;
    let cores =
        Cores::start(Placement::Count(cores), Config { spin_us: SPIN_US, ..Config::default() }).map_err(failed)?;
    cores.backend(0).and_then(sealblock_stack::warning).inspect(|warning| tracing::warn!("{warning}"));
    let served = reactor.block_on(live(plan, &cores, announcer, control, again));
    cores.shutdown(REST);
    served?;
    announcer.write(&Event::Stopped);
    Ok(Exit::Clean)
}

async fn live(
    plan: &Plan,
    cores: &Cores,
    announcer: EventWriter,
    control: Option<&ControlSocket>,
    again: impl Fn() -> Result<Plan, StackError>,
) -> Result<(), StackError> {
    // From here on a signal is an order to end in good order, even while volumes are being opened.
    let mut signal = shutdown_signal();
    install(&mut signal).await;
    let hangups = Hangups::watch().map_err(|error| StackError::io("waiting for signals", &error))?;
    backing::watch().map_err(|error| StackError::io("looking after files", &error))?;
    let control = Control::open(control)?;
    let mut server = Server::new(cores.handles(), &plan.limits, ScrubEventSender::here(announcer))?;
    let served = match server.change(plan).await {
        Ok(()) => {
            control.offer(server.served());
            announcer.write(&Event::Ready(server.serving()));
            notify(ServiceState::Ready);
            until_ended(&mut server, &mut signal, &hangups, announcer, &control, again).await
        }
        Err(failure) => Err(failure),
    };
    drop(control);
    let ended = server.end().await;
    served.and(ended)
}

/// Lets the handlers be installed.
async fn install(signal: &mut ShutdownSignal) {
    poll_fn(|cx| {
        let _ = Pin::new(&mut *signal).poll(cx);
        Poll::Ready(())
    })
    .await;
}

/// What the server is to do next.
enum Turn {
    /// End.
    End(io::Result<Signal>),
    /// Read the configuration again.
    Reload,
    /// Change a size.
    Resize(ResizeRequest),
    /// Serve what is open now, or know that it is still not.
    Admit(Box<Tried>),
}

/// Waits for the next. One thing is done at a time: a signal that comes while a size is changed is heeded when that is done, which
/// is bounded.
async fn next(server: &mut Server, signal: &mut ShutdownSignal, hangups: &Hangups, control: &Control) -> Turn {
    let (hangup, request, tried) = (pin!(hangups.next()), pin!(control.resizes().next()), pin!(server.next_tried()));
    match select(signal, select(hangup, select(request, tried))).await {
        Either::Left((ended, _)) => Turn::End(ended),
        Either::Right((Either::Left(((), _)), _)) => Turn::Reload,
        Either::Right((Either::Right((Either::Left((request, _)), _)), _)) => Turn::Resize(request),
        Either::Right((Either::Right((Either::Right((tried, _)), _)), _)) => Turn::Admit(Box::new(tried)),
    }
}

async fn until_ended(
    server: &mut Server,
    signal: &mut ShutdownSignal,
    hangups: &Hangups,
    announcer: EventWriter,
    control: &Control,
    again: impl Fn() -> Result<Plan, StackError>,
) -> Result<(), StackError> {
    loop {
        match next(server, signal, hangups, control).await {
            Turn::End(ended) => {
                ended.map_err(|error| StackError::io("waiting for signals", &error))?;
                notify(ServiceState::Stopping);
                announcer.write(&Event::Draining { connections: server.connections() });
                return Ok(());
            }
            Turn::Resize(request) => resize(server, request, announcer).await,
            Turn::Admit(tried) => {
                let opened = server.admit(*tried).await;
                control.offer(server.served());
                if let Some(opened) = opened {
                    announcer.write(&Event::Opened(opened));
                }
            }
            Turn::Reload => reload(server, announcer, control, &again).await,
        }
    }
}

async fn resize(server: &mut Server, request: ResizeRequest, announcer: EventWriter) {
    let resized = server.resize(&request.nqn, request.nsid, ByteCount::new(request.size.get())).await;
    match &resized {
        Ok(report) if report.before_bytes != report.size_bytes => announcer.write(&Event::Resized(report.clone())),
        Ok(_) => {}
        Err(failure) => tracing::warn!("{}", failure.in_short()),
    }
    request.complete(resized.map_err(|failure| ControlError { why: failure.reason(DOING), ..control_error(&failure) }));
}

async fn reload(
    server: &mut Server,
    announcer: EventWriter,
    control: &Control,
    again: &impl Fn() -> Result<Plan, StackError>,
) {
    notify(ServiceState::Reloading);
    match take_plan(server, again).await {
        Ok(()) => {
            control.offer(server.served());
            announcer.write(&Event::Reloaded(server.serving()));
        }
        Err(failure) => {
            tracing::error!("the configuration was not taken, and everything stays as it was: {}", failure.in_short());
            announcer.write(&Event::ReloadFailed { reason: failure.to_string() });
        }
    }
    notify(ServiceState::Ready);
}

async fn take_plan(server: &mut Server, again: &impl Fn() -> Result<Plan, StackError>) -> Result<(), StackError> {
    let plan = again()?;
    server.change(&plan).await?;
    if server.waits_for_restart(&plan) {
        tracing::warn!("other limits count from the next start on");
    }
    Ok(())
}
