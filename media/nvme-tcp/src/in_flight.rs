//! Who waits: for the completion of a command, or for room in the queue.

use std::collections::VecDeque;
use std::task::Waker;

use sealblock_protocols_nvme::Completion;
use sealblock_protocols_nvme_tcp::host::ReadData;

/// How a command ended.
#[derive(Debug)]
pub(crate) struct CommandResult {
    /// Its identifier, under which the error log knows it.
    pub(crate) cid: u16,
    pub(crate) completion: Completion,
    /// The data of a command that reads.
    pub(crate) data: Option<ReadData>,
}

/// How the wait for a command's completion stands.
#[derive(Debug)]
enum CommandState {
    Free,
    /// In flight.
    Waiting(Option<Waker>),
    /// In flight, and nobody waits any more.
    Abandoned,
    /// Ended, and not fetched yet.
    Done(CommandResult),
    /// The connection ended before the command did.
    Lost,
}

struct InFlightCommand {
    state: CommandState,
    /// The tick at which the command was submitted; `None` for one that may take for ever.
    submitted_tick: Option<u32>,
}

/// What a command has come to.
#[derive(Debug)]
pub(crate) enum CommandProgress {
    /// It is in flight.
    InFlight,
    /// It ended.
    Done(CommandResult),
    /// It never will.
    Lost,
}

/// The commands in flight of a queue and those whose end was not fetched yet.
///
/// Invariant: `by_place` is right for each place at which a command is in flight.
pub(crate) struct InFlightCommands {
    entries: Vec<InFlightCommand>,
    free: Vec<usize>,
    by_place: Vec<usize>,
    tick: u32,
}

impl InFlightCommands {
    /// For commands at `places` places at once.
    pub(crate) fn new(places: usize) -> InFlightCommands {
        InFlightCommands { entries: Vec::new(), free: Vec::new(), by_place: vec![0; places.max(1)], tick: 0 }
    }

    /// Notes a command that was submitted; gives its entry.
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

    /// Notes the end of the command at `place`; gives who waits for it.
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

    /// What the command has come to; one that ended gives up its entry, one in flight keeps the waker.
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

    /// Nobody waits for this command any more. What it held is given back, to be dropped outside of any borrow.
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

    /// The connection is over: all commands in flight are lost. Gives who waits for them.
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

    /// Counts a tick, and tells whether a command has been in flight for more than `most` of them.
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
    /// How many wait.
    pub(crate) fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Joins at the end; gives a ticket.
    pub(crate) fn join(&mut self, waker: Waker) -> u64 {
        self.tickets += 1;
        self.waiting.push_back((self.tickets, waker));
        self.tickets
    }

    /// Whether this ticket is the first.
    pub(crate) fn is_first(&self, ticket: u64) -> bool {
        self.waiting.front().is_some_and(|(first, _)| *first == ticket)
    }

    /// Takes a ticket out.
    pub(crate) fn leave(&mut self, ticket: u64) -> Option<Waker> {
        let at = self.waiting.iter().position(|(other, _)| *other == ticket)?;
        self.waiting.remove(at).map(|(_, waker)| waker)
    }

    /// Who is to be woken for this ticket from now on; gives who was before.
    pub(crate) fn keep_waker(&mut self, ticket: u64, waker: &Waker) -> Option<Waker> {
        let (_, kept) = self.waiting.iter_mut().find(|(other, _)| *other == ticket)?;
        if kept.will_wake(waker) { None } else { Some(std::mem::replace(kept, waker.clone())) }
    }

    /// Who is first.
    pub(crate) fn first_waker(&self) -> Option<Waker> {
        self.waiting.front().map(|(_, waker)| waker.clone())
    }

    /// All who wait.
    pub(crate) fn wakers(&self) -> Vec<Waker> {
        self.waiting.iter().map(|(_, waker)| waker.clone()).collect()
    }
}
