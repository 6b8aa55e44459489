//! How many pieces of a check are read at a time.
//!
//! A disk is idle between two pieces if there are few, and each holds its memory while it is read. So a check of what is
//! on a disk may have many pieces in flight while it is alone, and the checks of a core together have a bound. Data of the
//! page cache come at once, and are checksummed in half the time if they are still in the core's near cache.
//!
//! Invariants: each check has [`LEAST_PIECES`] pieces in flight whatever the others do, so none waits for another. What
//! all checks of a core have in flight beyond that is at most [`SHARED_PIECES`].

use std::cell::Cell;
use std::future::Future;

use futures_util::stream::{self, FuturesOrdered, Stream, StreamExt};

/// Bytes of a piece.
pub(super) const PIECE_BYTES: u32 = 256 << 10;
/// The pieces of a check that are always its own. Together they fit in a core's near cache.
const LEAST_PIECES: usize = 2;
/// The most pieces of a check in flight.
const MOST_PIECES: usize = 16;
/// The pieces beyond those that all checks of a core share: 8 MiB.
const SHARED_PIECES: usize = (8 << 20) / PIECE_BYTES as usize;

thread_local! {
    /// Shared pieces in flight on this core.
    static SHARED_IN_FLIGHT: Cell<usize> = const { Cell::new(0) };
}

/// A shared piece, until it is dropped.
struct SharedPiece;

impl SharedPiece {
    fn take() -> Option<SharedPiece> {
        SHARED_IN_FLIGHT.with(|taken| {
            (taken.get() < SHARED_PIECES).then(|| {
                taken.set(taken.get() + 1);
                SharedPiece
            })
        })
    }
}

impl Drop for SharedPiece {
    fn drop(&mut self) {
        SHARED_IN_FLIGHT.with(|taken| taken.set(taken.get() - 1));
    }
}

/// The outputs of the pieces of one check, in order, with as many in flight as it may have: more than a few only if
/// `reads_wait`. A piece counts until its future has ended, and must hold no memory after that.
pub(super) fn in_order<F: Future>(
    mut pieces: impl Iterator<Item = F>,
    reads_wait: bool,
) -> impl Stream<Item = F::Output> {
    let most = if reads_wait { MOST_PIECES } else { LEAST_PIECES };
    let mut in_flight = FuturesOrdered::new();
    stream::poll_fn(move |context| {
        while in_flight.len() < most {
            let shared = match in_flight.len() < LEAST_PIECES {
                true => None,
                false => match SharedPiece::take() {
                    Some(shared) => Some(shared),
                    None => break,
                },
            };
            let Some(piece) = pieces.next() else { break };
            in_flight.push_back(async move {
                let output = piece.await;
                drop(shared);
                output
            });
        }
        in_flight.poll_next_unpin(context)
    })
}

#[cfg(test)]
mod tests {
    use std::pin::{Pin, pin};
    use std::rc::Rc;
    use std::task::{Context, Poll, Waker};

    use futures_util::FutureExt;
    use sealblock_block::Condition;

    use super::*;

    /// Pieces that end once their number is below `done`.
    #[derive(Default)]
    struct Medium {
        done: Cell<usize>,
        started: Cell<usize>,
        changed: Condition,
    }

    impl Medium {
        fn check(self: &Rc<Medium>, pieces: usize, reads_wait: bool) -> Pin<Box<dyn Stream<Item = usize>>> {
            let medium = Rc::clone(self);
            let pieces = (0..pieces).map(move |piece| {
                let medium = Rc::clone(&medium);
                medium.started.set(medium.started.get() + 1);
                async move {
                    medium.changed.wait_until(|| piece < medium.done.get()).await;
                    piece
                }
            });
            Box::pin(in_order(pieces, reads_wait))
        }

        fn complete(&self, done: usize) {
            self.done.set(done);
            self.changed.notify();
        }
    }

    fn is_waiting(check: &mut Pin<Box<dyn Stream<Item = usize>>>) -> bool {
        check.as_mut().poll_next(&mut Context::from_waker(Waker::noop())) == Poll::Pending
    }

    fn shared() -> usize {
        SHARED_IN_FLIGHT.with(Cell::get)
    }

    #[test]
    fn a_check_alone_has_many_pieces_in_flight_and_many_checks_have_two_each() {
        let media: Vec<Rc<Medium>> = (0..20).map(|_| Rc::default()).collect();
        let mut checks: Vec<_> = media.iter().map(|medium| medium.check(100, true)).collect();
        assert!(checks.iter_mut().all(is_waiting));
        let started: Vec<usize> = media.iter().map(|medium| medium.started.get()).collect();
        assert_eq!(started[..4], [MOST_PIECES, MOST_PIECES, 2 + SHARED_PIECES - 2 * (MOST_PIECES - 2), 2]);
        assert_eq!((started[4..].iter().max(), started.iter().sum::<usize>()), (Some(&2), 2 * 20 + SHARED_PIECES));
        // A dropped check gives back what it had, and the next one that makes progress has it.
        drop(checks.remove(0));
        assert_eq!(shared(), SHARED_PIECES - (MOST_PIECES - 2));
        media[10].complete(1);
        assert_eq!(checks[9].next().now_or_never(), Some(Some(0)));
        assert!(is_waiting(&mut checks[9]));
        assert_eq!((media[10].started.get(), shared()), (MOST_PIECES, SHARED_PIECES));
        checks.clear();
        assert_eq!(shared(), 0);
        let cached = Rc::<Medium>::default();
        assert!(is_waiting(&mut cached.check(100, false)));
        assert_eq!((cached.started.get(), shared()), (LEAST_PIECES, 0), "the page cache needs no more");
    }

    #[test]
    fn outputs_come_in_order_and_nothing_stays_taken() {
        let medium = Rc::<Medium>::default();
        let mut outputs = pin!(medium.check(50, true).collect::<Vec<_>>());
        for done in (0..=50).step_by(7).chain([50]) {
            assert!(outputs.as_mut().now_or_never().is_none() && shared() > 0);
            medium.complete(done);
        }
        assert_eq!(outputs.now_or_never(), Some((0..50).collect()));
        assert_eq!((medium.started.get(), shared()), (50, 0));
        assert_eq!(medium.check(0, true).next().now_or_never(), Some(None), "a check of nothing");
    }
}
