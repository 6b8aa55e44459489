//! Commands of a queue that wait: for their completion, or for room in the queue.

use std::collections::VecDeque;
use std::task::Waker;

use sealblock_protocols_nvme::Completion;
use sealblock_protocols_nvme_tcp::host::ReadData;

/// The end of a command.
#[derive(Debug)]
pub(crate) struct CommandResult {
    /// Command identifier, which the error log repeats.
    pub(crate) cid: u16,
    pub(crate) completion: Completion,
    /// The data of a command that reads.
    pub(crate) data: Option<ReadData>,
}

/// State of an entry.
#[derive(Debug)]
enum CommandState {
    Free,
    /// In flight.
    Waiting(Option<Waker>),
    /// In flight; its future was dropped.
    Abandoned,
    /// Completed; its future has not read the result yet.
    Done(CommandResult),
    /// The connection ended before the command did.
    Lost,
}

struct InFlightCommand {
    state: CommandState,
    /// Tick at which the command was submitted; `None` for a command without a timeout.
    submitted_tick: Option<u32>,
}

/// Progress of a command.
#[derive(Debug)]
pub(crate) enum CommandProgress {
    /// The command is in flight.
    InFlight,
    /// The command completed.
    Done(CommandResult),
    /// The connection ended before the command completed.
    Lost,
}

/// The commands of a queue that are in flight, and those whose future has not read the result yet.
///
/// Invariant: for each command in flight, `by_place` maps its index in [`Host`](sealblock_protocols_nvme_tcp::Host) to its
/// entry.
pub(crate) struct InFlightCommands {
    entries: Vec<InFlightCommand>,
    free: Vec<usize>,
    by_place: Vec<usize>,
    tick: u32,
}

impl InFlightCommands {
    /// Room for `places` commands in flight.
    pub(crate) fn new(places: usize) -> InFlightCommands {
        InFlightCommands { entries: Vec::new(), free: Vec::new(), by_place: vec![0; places.max(1)], tick: 0 }
    }

    /// Adds a command that was submitted; returns its entry.
    pub(crate) fn insert(&mut self, place: usize, has_no_timeout: bool) -> usize {
        let since = (!has_no_timeout).then_some(self.tick);
        let new = InFlightCommand { state: CommandState::Waiting(None), submitted_tick: since };
        let entry = match self.free.pop() {
            Some(entry) => {
                self.entries[entry] = new;
                entry
            }
            None => {
                self.entries.push(new);
                self.entries.len() - 1
            }
        };
        self.by_place[place] = entry;
        entry
    }

    /// Stores the result of the command at `place`; returns the waker of its future.
    pub(crate) fn finish(&mut self, place: usize, finished: CommandResult) -> Option<Waker> {
        let entry = self.by_place[place];
        let state = &mut self.entries[entry].state;
        match std::mem::replace(state, CommandState::Free) {
            CommandState::Waiting(waker) => {
                *state = CommandState::Done(finished);
                waker
            }
            CommandState::Abandoned => {
                self.free.push(entry);
                None
            }
            other @ (CommandState::Free | CommandState::Done(_) | CommandState::Lost) => {
                *state = other;
                None
            }
        }
    }

    /// Polls a command: frees the entry of one that ended, keeps the waker for one in flight.
    pub(crate) fn poll(&mut self, entry: usize, waker: &Waker) -> CommandProgress {
        let state = &mut self.entries[entry].state;
        match std::mem::replace(state, CommandState::Free) {
            CommandState::Waiting(before) => {
                let kept = before.filter(|before| before.will_wake(waker)).unwrap_or_else(|| waker.clone());
                *state = CommandState::Waiting(Some(kept));
                CommandProgress::InFlight
            }
            CommandState::Done(finished) => {
                self.free.push(entry);
                CommandProgress::Done(finished)
            }
            CommandState::Lost | CommandState::Abandoned | CommandState::Free => {
                self.free.push(entry);
                CommandProgress::Lost
            }
        }
    }

    /// Marks the command's future as dropped. The caller drops the returned state outside of any borrow.
    pub(crate) fn abandon(&mut self, entry: usize) -> impl Sized + use<> {
        let state = &mut self.entries[entry].state;
        let was = std::mem::replace(state, CommandState::Free);
        if matches!(was, CommandState::Waiting(_)) {
            *state = CommandState::Abandoned;
        } else {
            self.free.push(entry);
        }
        was
    }

    /// Marks all commands in flight as lost; returns the wakers of their futures.
    pub(crate) fn lose_all(&mut self) -> Vec<Waker> {
        let mut wakers = Vec::new();
        for (i, entry) in self.entries.iter_mut().enumerate() {
            match std::mem::replace(&mut entry.state, CommandState::Free) {
                CommandState::Waiting(waker) => {
                    entry.state = CommandState::Lost;
                    wakers.extend(waker);
                }
                CommandState::Abandoned => self.free.push(i),
                other => entry.state = other,
            }
        }
        wakers
    }

    /// Advances the tick. True if a command has been in flight for more than `max_ticks` ticks.
    pub(crate) fn advance_tick(&mut self, max_ticks: u32) -> bool {
        self.tick = self.tick.wrapping_add(1);
        self.entries.iter().any(|entry| {
            let in_flight = matches!(entry.state, CommandState::Waiting(_) | CommandState::Abandoned);
            in_flight && entry.submitted_tick.is_some_and(|since| self.tick.wrapping_sub(since) > max_ticks)
        })
    }
}

/// Commands that wait for room, first come, first served.
#[derive(Default)]
pub(crate) struct FifoWaiters {
    waiting: VecDeque<(u64, Waker)>,
    tickets: u64,
}

impl FifoWaiters {
    /// Waiting commands.
    pub(crate) fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Joins the end of the queue; returns a ticket.
    pub(crate) fn join(&mut self, waker: Waker) -> u64 {
        self.tickets += 1;
        self.waiting.push_back((self.tickets, waker));
        self.tickets
    }

    /// True if this ticket is the first.
    pub(crate) fn is_first(&self, ticket: u64) -> bool {
        self.waiting.front().is_some_and(|(first, _)| *first == ticket)
    }

    /// Removes a ticket.
    pub(crate) fn leave(&mut self, ticket: u64) -> Option<Waker> {
        let at = self.waiting.iter().position(|(other, _)| *other == ticket)?;
        self.waiting.remove(at).map(|(_, waker)| waker)
    }

    /// Replaces the waker of a ticket; returns the previous one, for the caller to drop outside of any borrow.
    pub(crate) fn keep_waker(&mut self, ticket: u64, waker: &Waker) -> Option<Waker> {
        let (_, kept) = self.waiting.iter_mut().find(|(other, _)| *other == ticket)?;
        if kept.will_wake(waker) { None } else { Some(std::mem::replace(kept, waker.clone())) }
    }

    /// The waker of the first command.
    pub(crate) fn first_waker(&self) -> Option<Waker> {
        self.waiting.front().map(|(_, waker)| waker.clone())
    }

    /// The wakers of all commands.
    pub(crate) fn wakers(&self) -> Vec<Waker> {
        self.waiting.iter().map(|(_, waker)| waker.clone()).collect()
    }
}
