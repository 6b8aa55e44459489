//! What goes on beside the requests of a session: signs of life, commands that are late, events of the controller.

use std::rc::{Rc, Weak};
use std::time::Duration;

use sealblock_protocols_nvme::admin::GetLogPage;
use sealblock_protocols_nvme::features::AsynchronousEvent;
use sealblock_protocols_nvme::logs::LogPage;
use sealblock_protocols_nvme::{AdminOpcode, Command};
use sealblock_protocols_nvme_tcp::host::HostData;
use sealblock_runtime_memory::Buffer;
use sealblock_runtime_reactor::{sleep, spawn};

use crate::error::ConnectionLost;
use crate::identify;
use crate::namespace_profile::NamespaceProfile;
use crate::queue::Queue;
use crate::reconnecting_session::ReconnectingSession;
use crate::session::Session;

/// Looks at commands in flight in one request timeout.
const TICKS: u32 = 8;
/// The pause between two events, so that a controller which tells events without end keeps nobody busy.
const EVENT_PAUSE: Duration = Duration::from_millis(100);
/// Bytes of an event's log page that are read: enough for every page to be cleared, and for all of Changed Namespaces.
const EVENT_PAGE_BYTES: u64 = 4096;

/// Starts what a session needs; it ends with the session.
pub(crate) fn start(link: &Rc<ReconnectingSession>, session: &Rc<Session>) {
    let options = &link.config.options;
    let queues: Vec<Rc<Queue>> = session.queues().cloned().collect();
    let mut tasks = session.tasks.borrow_mut();
    tasks.push(spawn(end_late_commands(queues, options.request_timeout)));
    if !options.keep_alive.is_zero() {
        let admin = Rc::clone(session.controller.admin.queue());
        tasks.push(spawn(keep_alive(admin, options.keep_alive / 2)));
    }
    tasks.push(spawn(events(Rc::downgrade(link), Rc::downgrade(session))));
}

/// Ends the connection of a command that is not answered in time. The others follow when their users find out.
async fn end_late_commands(queues: Vec<Rc<Queue>>, limit: Duration) {
    loop {
        sleep((limit / TICKS).max(Duration::from_millis(1))).await;
        for queue in &queues {
            if queue.advance_tick(TICKS) {
                queue.end(&format!("a command on queue {} was not answered within {limit:?}", queue.id));
            }
        }
    }
}

/// Signs of life. A status is not looked at: whatever it is, it is an answer.
async fn keep_alive(admin: Rc<Queue>, period: Duration) {
    loop {
        sleep(period).await;
        let command = Command::new(AdminOpcode::KeepAlive.code(), 0);
        if admin.execute(command, HostData::None).await.is_err() {
            return;
        }
    }
}

/// Waits for events, and notices the end of the connection even when nobody asks for anything.
async fn events(link: Weak<ReconnectingSession>, session: Weak<Session>) {
    let Err(lost) = watch_events(&link, &session).await else { return };
    if let (Some(link), Some(session)) = (link.upgrade(), session.upgrade()) {
        link.session_lost(&session, &lost);
    }
}

async fn watch_events(link: &Weak<ReconnectingSession>, session: &Weak<Session>) -> Result<(), ConnectionLost> {
    let Some(admin) = session.upgrade().map(|session| Rc::clone(session.controller.admin.queue())) else {
        return Ok(());
    };
    if let Some(session) = session.upgrade() {
        session.enable_events().await?;
    }
    loop {
        let command = Command::new(AdminOpcode::AsynchronousEventRequest.code(), 0);
        let finished = admin.execute_without_timeout(command, HostData::None).await?;
        if !finished.completion.status().is_success() {
            // No events, then; the connection is still to be watched.
            return Err(ended(&admin).await);
        }
        let event = AsynchronousEvent::from_dword0(finished.completion.dword0());
        clear(&admin, event).await?;
        if event == AsynchronousEvent::NAMESPACE_CHANGED {
            recheck(link, session).await;
        }
        sleep(EVENT_PAUSE).await;
    }
}

/// Waits for the end of a connection that tells no events.
async fn ended(queue: &Queue) -> ConnectionLost {
    loop {
        if let Some(lost) = queue.lost() {
            return lost;
        }
        sleep(EVENT_PAUSE).await;
    }
}

/// Reads the event's log page, which lets the controller tell the next one.
async fn clear(admin: &Queue, event: AsynchronousEvent) -> Result<(), ConnectionLost> {
    let length = if event.log_page == LogPage::Health.code() { 512 } else { EVENT_PAGE_BYTES };
    let data = HostData::Read { buffer: Buffer::zeroed(length as usize), layout: None };
    admin.execute(GetLogPage::new(event.log_page, length).encode(), data).await.map(drop)
}

/// Looks at the namespace again. One that is another now, or gone, is not used any more.
async fn recheck(link: &Weak<ReconnectingSession>, session: &Weak<Session>) {
    let (Some(link), Some(session)) = (link.upgrade(), session.upgrade()) else { return };
    let (controller, nsid) = (&session.controller, link.profile.nsid);
    let pages =
        identify::of_namespace(&controller.admin, controller.capabilities, session.pages.controller, nsid).await;
    let shape = pages.and_then(|pages| NamespaceProfile::of(nsid, &pages, &link.config.options));
    match shape.and_then(|shape| shape.check_unchanged(&link.profile).map(|()| shape)) {
        Ok(shape) => link.set_writable(shape.abilities.writable),
        // Whatever ended the connection is dealt with there.
        Err(error) if error.is_transient() => {}
        Err(error) => link.fail(&format!("namespace {nsid} changed: {error}")),
    }
}
