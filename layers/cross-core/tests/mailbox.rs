//! The mailbox between cores, under random interleavings of its senders and its reader.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Waker};

use shuttle::future::block_on;
use shuttle::sync::Mutex;
use shuttle::{check_random, thread};

/// The model checker's locks, for the file that is included below.
mod sync {
    pub use shuttle::sync::{Mutex, MutexGuard};
}

#[path = "../src/mailbox.rs"]
#[allow(dead_code, reason = "`close` is not part of the model")]
mod mailbox;

use mailbox::Mailbox;

const SENDERS: u32 = 3;
const ITEMS: u32 = 3;
const INTERLEAVINGS: usize = 20_000;

/// Takes all items until the mailbox is finished. A push that wakes no waiting reader is a deadlock, which fails the test.
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
            let mailbox = Arc::new(Mailbox::new());
            let senders: Vec<_> = (0..SENDERS)
                .map(|sender| {
                    let mailbox = Arc::clone(&mailbox);
                    thread::spawn(move || {
                        (0..ITEMS).for_each(|item| mailbox.push(sender * ITEMS + item).unwrap());
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

/// A mailbox whose reader leaves its waker after it has found the queue empty, not under the same lock.
struct RegistersLate {
    mailbox: Mailbox<u32>,
    reader: Mutex<Option<Waker>>,
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_reader_that_leaves_its_waker_too_late_is_detected() {
    check_random(
        || {
            let late = Arc::new(RegistersLate { mailbox: Mailbox::new(), reader: Mutex::new(None) });
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
