//! The sleep handshake of a reactor under random interleavings of its atomic operations.

use std::sync::Arc;

use shuttle::sync::{Condvar, Mutex};
use shuttle::{check_random, thread};

/// The model's atomics in place of the machine's, for the file that is included below.
mod sync {
    pub use shuttle::sync::atomic::{AtomicBool, Ordering};
}

#[path = "../src/sleep_handshake.rs"]
#[allow(dead_code, reason = "the reactor's spin is not part of the model")]
mod sleep_handshake;

use sleep_handshake::SleepHandshake;

const SENDERS: u32 = 3;
const MESSAGES: u32 = 2;
const INTERLEAVINGS: usize = 20_000;

/// An event descriptor: stays set until it is read.
#[derive(Default)]
struct Event(Mutex<bool>, Condvar);

impl Event {
    fn set(&self) {
        *self.0.lock().unwrap() = true;
        self.1.notify_one();
    }

    fn wait(&self) {
        let mut set = self.0.lock().unwrap();
        while !*set {
            set = self.1.wait(set).unwrap();
        }
        *set = false;
    }
}

trait Handshake: Send + Sync + 'static {
    fn new() -> Self;
    fn notify(&self) -> bool;
    fn fall_asleep(&self) -> bool;
    fn wake_up(&self);
    fn take_notice(&self) -> bool;
}

/// Runs senders against a reactor that sleeps whenever it may. A notice that is slept through is a deadlock, which fails.
fn run<H: Handshake>() {
    let (handshake, event, inbox) = (Arc::new(H::new()), Arc::new(Event::default()), Arc::new(Mutex::new(0)));
    let senders: Vec<_> = (0..SENDERS)
        .map(|_| {
            let (handshake, event, inbox) = (Arc::clone(&handshake), Arc::clone(&event), Arc::clone(&inbox));
            thread::spawn(move || {
                for _ in 0..MESSAGES {
                    *inbox.lock().unwrap() += 1;
                    if handshake.notify() {
                        event.set();
                    }
                }
            })
        })
        .collect();
    let mut received = 0;
    while received < SENDERS * MESSAGES {
        if handshake.take_notice() {
            received += std::mem::take(&mut *inbox.lock().unwrap());
            continue;
        }
        if handshake.fall_asleep() {
            event.wait();
        }
        handshake.wake_up();
    }
    senders.into_iter().for_each(|sender| sender.join().unwrap());
}

impl Handshake for SleepHandshake {
    fn new() -> SleepHandshake {
        SleepHandshake::new()
    }
    fn notify(&self) -> bool {
        SleepHandshake::notify(self)
    }
    fn fall_asleep(&self) -> bool {
        SleepHandshake::fall_asleep(self)
    }
    fn wake_up(&self) {
        SleepHandshake::wake_up(self);
    }
    fn take_notice(&self) -> bool {
        SleepHandshake::take_notice(self)
    }
}

#[test]
fn no_notice_is_slept_through() {
    check_random(run::<SleepHandshake>, INTERLEAVINGS);
}

/// A reactor that looks for a notice before it says that it sleeps.
struct LooksTooEarly(SleepHandshake);

impl Handshake for LooksTooEarly {
    fn new() -> LooksTooEarly {
        LooksTooEarly(SleepHandshake::new())
    }
    fn notify(&self) -> bool {
        self.0.notify()
    }
    fn fall_asleep(&self) -> bool {
        !self.0.has_notice() && {
            self.0.fall_asleep();
            true
        }
    }
    fn wake_up(&self) {
        self.0.wake_up();
    }
    fn take_notice(&self) -> bool {
        self.0.take_notice()
    }
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_reactor_that_looks_before_it_says_that_it_sleeps_is_caught() {
    check_random(run::<LooksTooEarly>, INTERLEAVINGS);
}
