//! Events of scrubs. The first thread writes them, so a slow or closed reader blocks no device.

use sealblock_runtime_reactor::CoreAddress;
use sealblock_scrub::{ScrubEvent, ScrubRun};
use sealblock_stack::quantity::count;
use serde::Serialize;

use super::ScrubTask;
use crate::commands::serve::announce::{Event, EventWriter};
use crate::control::status::RunStatus;

/// Sends events from any core to the event writer.
#[derive(Clone)]
pub struct ScrubEventSender {
    post: CoreAddress,
    announcer: EventWriter,
}

impl ScrubEventSender {
    /// Sends events to the reactor of the calling thread.
    pub fn here(announcer: EventWriter) -> ScrubEventSender {
        ScrubEventSender { post: CoreAddress::here(), announcer }
    }

    fn send(&self, event: Event) {
        let announcer = self.announcer;
        // A server that is ending writes no more events.
        let _ = self.post.send(move || announcer.write(&event));
    }
}

/// A scrub begins, or continues after a restart.
#[derive(Serialize)]
pub struct ScrubStarted {
    target: String,
    position: u64,
    resumed: bool,
}

/// A scrub has ended.
#[derive(Serialize)]
pub struct ScrubFinished {
    target: String,
    #[serde(flatten)]
    run: RunStatus,
}

impl ScrubStarted {
    /// One line for people.
    pub fn to_text(&self) -> String {
        let how = if self.resumed { "goes on" } else { "begins" };
        format!("scrub of {}: {how} at block {}", self.target, self.position)
    }
}

impl ScrubFinished {
    /// One line for people.
    pub fn to_text(&self) -> String {
        let RunStatus { blocks, bad, repaired, unrepaired, unchecked, .. } = self.run;
        let target = &self.target;
        let ended = if unchecked > 0 {
            format!("ended incomplete, {} with a copy that was not checked", count(unchecked, "block"))
        } else {
            "ended".to_owned()
        };
        let checked = count(blocks, "block");
        format!(
            "scrub of {target}: {ended}, {checked} checked, {bad} bad, {repaired} repaired, {unrepaired} unrepaired"
        )
    }
}

impl ScrubTask {
    /// Reports the events since the last call.
    pub(super) fn report_events(&self) {
        loop {
            let event = self.scrub.borrow_mut().take_event();
            match event {
                None => return,
                Some(ScrubEvent::Started { at, resumed }) => {
                    self.told.set(0);
                    self.told_unchecked.set(false);
                    let target = self.target.to_string();
                    self.scrub_events.send(Event::ScrubStarted(ScrubStarted { target, position: at, resumed }));
                }
                Some(ScrubEvent::Ended(run)) => self.report_end(&run),
            }
        }
    }

    fn report_end(&self, run: &ScrubRun) {
        let target = self.target.to_string();
        self.scrub_events.send(Event::ScrubFinished(ScrubFinished { target, run: RunStatus::ended(run) }));
    }
}
