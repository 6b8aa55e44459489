//! Who waits: for the completion of a command, or for room in the queue.

use std::collections::VecDeque;
use std::task::Waker;

use crate::queue::Finished;

/// How the wait for a command's completion stands.
#[derive(Debug)]
enum State {
    Free,
    /// In flight.
    Waiting(Option<Waker>),
    /// In flight, and nobody waits any more.
    Abandoned,
    /// Ended, and not fetched yet.
    Done(Finished),
    /// The connection ended before the command did.
    Lost,
}

struct Entry {
    state: State,
    /// The tick at which the command was submitted; `None` for one that may take for ever.
    since: Option<u32>,
}

/// What a command has come to.
#[derive(Debug)]
pub(crate) enum Fetched {
    /// It is in flight.
    NotYet,
    /// It ended.
    Done(Finished),
    /// It never will.
    Lost,
}

/// The commands in flight of a queue and those whose end was not fetched yet.
///
/// Invariant: `by_place` is right for each place at which a command is in flight.
pub(crate) struct InFlightCommands {
    entries: Vec<Entry>,
    free: Vec<usize>,
    by_place: Vec<usize>,
    now: u32,
}

impl InFlightCommands {
    /// For commands at `places` places at once.
    pub(crate) fn new(places: usize) -> InFlightCommands {
        InFlightCommands { entries: Vec::new(), free: Vec::new(), by_place: vec![0; places.max(1)], now: 0 }
    }

    /// Notes a command that was submitted; gives its entry.
    pub(crate) fn insert(&mut self, place: usize, is_patient: bool) -> usize {
        let since = (!is_patient).then_some(self.now);
        let new = Entry { state: State::Waiting(None), since };
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
    pub(crate) fn finish(&mut self, place: usize, finished: Finished) -> Option<Waker> {
        let entry = self.by_place[place];
        let state = &mut self.entries[entry].state;
        match std::mem::replace(state, State::Free) {
            State::Waiting(waker) => {
                *state = State::Done(finished);
                waker
            }
            State::Abandoned => {
                self.free.push(entry);
                None
            }
            other @ (State::Free | State::Done(_) | State::Lost) => {
                *state = other;
                None
            }
        }
    }

    /// What the command has come to; one that ended gives up its entry, one in flight keeps the waker.
    pub(crate) fn fetch(&mut self, entry: usize, waker: &Waker) -> Fetched {
        let state = &mut self.entries[entry].state;
        match std::mem::replace(state, State::Free) {
            State::Waiting(before) => {
                let kept = before.filter(|before| before.will_wake(waker)).unwrap_or_else(|| waker.clone());
                *state = State::Waiting(Some(kept));
                Fetched::NotYet
            }
            State::Done(finished) => {
                self.free.push(entry);
                Fetched::Done(finished)
            }
            State::Lost | State::Abandoned | State::Free => {
                self.free.push(entry);
                Fetched::Lost
            }
        }
    }

    /// Nobody waits for this command any more. What it held is given back, to be dropped outside of any borrow.
    pub(crate) fn abandon(&mut self, entry: usize) -> impl Sized + use<> {
        let state = &mut self.entries[entry].state;
        let was = std::mem::replace(state, State::Free);
        if matches!(was, State::Waiting(_)) {
            *state = State::Abandoned;
        } else {
            self.free.push(entry);
        }
        was
    }

    /// The connection is over: all commands in flight are lost. Gives who waits for them.
    pub(crate) fn lose_all(&mut self) -> Vec<Waker> {
        let mut wakers = Vec::new();
        for (i, entry) in self.entries.iter_mut().enumerate() {
            match std::mem::replace(&mut entry.state, State::Free) {
                State::Waiting(waker) => {
                    entry.state = State::Lost;
                    wakers.extend(waker);
                }
                State::Abandoned => self.free.push(i),
                other => entry.state = other,
            }
        }
        wakers
    }

    /// Counts a tick, and tells whether a command has been in flight for more than `most` of them.
    pub(crate) fn tick(&mut self, most: u32) -> bool {
        self.now = self.now.wrapping_add(1);
        self.entries.iter().any(|entry| {
            let in_flight = matches!(entry.state, State::Waiting(_) | State::Abandoned);
            in_flight && entry.since.is_some_and(|since| self.now.wrapping_sub(since) > most)
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
