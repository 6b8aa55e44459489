//! Signals. Alone in its process, which it sends them to.

#![allow(unsafe_code)]

mod common;

use std::time::Duration;

use sealblock_runtime_reactor::{Reactor, Signal, shutdown_signal, sleep, spawn, timeout};

#[test]
fn a_signal_ends_every_waiting_future_and_later_ones() {
    let reactor = Reactor::new(common::small()).expect("starts");
    reactor.block_on(async {
        let early = timeout(Duration::from_millis(5), shutdown_signal()).await;
        assert!(early.is_err(), "no signal was sent");
        let waiting: Vec<_> = (0..3).map(|_| spawn(shutdown_signal())).collect();
        sleep(Duration::from_millis(1)).await;
        // SAFETY: the handler is installed, since the future was polled above.
        assert_eq!(unsafe { libc::kill(libc::getpid(), libc::SIGTERM) }, 0);
        for task in waiting {
            let signal = task.await.expect("not aborted").expect("the handlers are installed");
            assert_eq!(signal, Signal::Terminate);
        }
        assert_eq!(shutdown_signal().await.expect("installed"), Signal::Terminate);
    });
}
