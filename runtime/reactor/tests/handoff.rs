//! The sleep handshake of a reactor and the mailbox between cores, under random interleavings of their atomic
//! operations and locks.

use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::task::{Context, Poll, Wake, Waker};

use shuttle::future::block_on;
use shuttle::sync::{Condvar, Mutex};
use shuttle::{check_random, thread};

/// The model checker's locks and atomics replace the standard ones, for the file that is included below.
mod primitives {
    pub use shuttle::sync::atomic::{AtomicBool, Ordering};
    pub use shuttle::sync::{Mutex, MutexGuard};
}

#[path = "../src/handoff.rs"]
#[allow(dead_code, reason = "the reactor's spin is not part of the model")]
mod handoff;

use handoff::{Mailbox, SleepHandshake};
use primitives::Ordering;

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

/// Runs senders against a reactor that sleeps whenever it may. A missed notice is a deadlock, which fails the test.
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

/// A reactor that checks for a notice before it announces that it sleeps.
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

const ITEMS: u32 = 3;

/// Takes all items until the mailbox is finished. A push that wakes no waiting reader is a deadlock, which fails the
/// test.
async fn take_all(mailbox: &Mailbox<u32>) -> Vec<u32> {
    let mut all = Vec::new();
    loop {
        let mut got = Vec::new();
        if !poll_fn(|cx| mailbox.poll_take(cx, &mut got)).await {
            return all;
        }
        all.append(&mut got);
    }
}

#[test]
fn every_item_is_taken_once_and_in_the_order_of_its_sender() {
    check_random(
        || {
            let mailbox = Arc::new(Mailbox::default());
            let senders: Vec<_> = (0..SENDERS)
                .map(|sender| {
                    let mailbox = Arc::clone(&mailbox);
                    thread::spawn(move || {
                        // One by one, or the first alone and the others together.
                        let mut items: Vec<u32> = (0..ITEMS).map(|item| sender * ITEMS + item).collect();
                        let alone = if sender == 0 { items.len() } else { 1 };
                        items.drain(..alone).for_each(|item| mailbox.push(item).unwrap());
                        assert!(mailbox.push_all(&mut items) && items.is_empty());
                    })
                })
                .collect();
            let closing = Arc::clone(&mailbox);
            let closing = thread::spawn(move || {
                senders.into_iter().for_each(|sender| sender.join().unwrap());
                closing.finish();
            });
            let mut all = block_on(take_all(&mailbox));
            for sender in 0..SENDERS {
                let of_sender = all.iter().filter(|item| **item / ITEMS == sender);
                assert!(of_sender.is_sorted(), "{all:?}");
            }
            all.sort_unstable();
            assert_eq!(all, (0..SENDERS * ITEMS).collect::<Vec<_>>());
            closing.join().unwrap();
        },
        INTERLEAVINGS,
    );
}

/// A mailbox whose reader stores its waker after it has found the queue empty, not under the same lock.
struct RegistersLate {
    mailbox: Mailbox<u32>,
    reader: Mutex<Option<Waker>>,
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_reader_that_leaves_its_waker_too_late_is_detected() {
    check_random(
        || {
            let late = Arc::new(RegistersLate { mailbox: Mailbox::default(), reader: Mutex::new(None) });
            let sending = Arc::clone(&late);
            let sender = thread::spawn(move || {
                sending.mailbox.push(1).unwrap();
                if let Some(reader) = sending.reader.lock().unwrap().take() {
                    reader.wake();
                }
            });
            let mut got = Vec::new();
            block_on(poll_fn(|cx| {
                let looked = late.mailbox.poll_take(&mut Context::from_waker(Waker::noop()), &mut got);
                if looked.is_pending() {
                    *late.reader.lock().unwrap() = Some(cx.waker().clone());
                }
                looked
            }));
            assert_eq!(got, [1]);
            sender.join().unwrap();
        },
        INTERLEAVINGS,
    );
}

#[derive(Default)]
struct Count(AtomicU32);

impl Wake for Count {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn a_reader_is_woken_once_and_takes_all() {
    check_random(
        || {
            let (mailbox, count) = (Mailbox::default(), Arc::new(Count::default()));
            let waker = Waker::from(Arc::clone(&count));
            let (mut cx, mut got) = (Context::from_waker(&waker), Vec::new());
            assert!(mailbox.poll_take(&mut cx, &mut got).is_pending());
            for number in 0..3 {
                mailbox.push(number).unwrap();
            }
            assert_eq!(count.0.load(Ordering::Relaxed), 1);
            assert_eq!((mailbox.poll_take(&mut cx, &mut got), &got[..]), (Poll::Ready(true), &[0, 1, 2][..]));
            mailbox.push(3).unwrap();
            assert_eq!(count.0.load(Ordering::Relaxed), 1, "a busy reader looks again by itself");
            assert!(mailbox.push_all(&mut vec![4, 5]));
            got.clear();
            assert_eq!((mailbox.poll_take(&mut cx, &mut got), &got[..]), (Poll::Ready(true), &[3, 4, 5][..]));
            got.clear();
            assert!(mailbox.poll_take(&mut cx, &mut got).is_pending());
            assert!(
                mailbox.push_all(&mut Vec::new()) && count.0.load(Ordering::Relaxed) == 1,
                "there is nothing to take"
            );
            assert!(mailbox.push_all(&mut vec![6, 7]) && count.0.load(Ordering::Relaxed) == 2, "one wake for both");
        },
        1,
    );
}

#[test]
fn a_finished_mailbox_is_read_to_its_end_and_a_closed_one_emptied() {
    check_random(
        || {
            let (mailbox, mut cx, mut got) = (Mailbox::default(), Context::from_waker(Waker::noop()), Vec::new());
            mailbox.push(1).unwrap();
            mailbox.finish();
            assert_eq!(mailbox.push(2), Err(2));
            assert_eq!(mailbox.poll_take(&mut cx, &mut got), Poll::Ready(true));
            got.clear();
            assert_eq!(mailbox.poll_take(&mut cx, &mut got), Poll::Ready(false));
            let mailbox = Mailbox::default();
            mailbox.push(1).unwrap();
            assert_eq!((mailbox.close(), mailbox.push(2)), (vec![1], Err(2)));
            let mut refused = vec![3, 4];
            assert!(!mailbox.push_all(&mut refused) && refused == [3, 4], "they are still the sender's");
        },
        1,
    );
}
