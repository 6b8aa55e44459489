//! Peers that are absent, disconnect, or stay silent.

mod common;

use std::io::ErrorKind;
use std::net::Shutdown;
use std::rc::Rc;
use std::time::Duration;

use common::{LATE, everywhere, listen, pair, receive, settle};
use sealblock_runtime_memory::{Buffer, Slice};
use sealblock_runtime_reactor::net::Stream;
use sealblock_runtime_reactor::{Reactor, spawn, timeout};

const SOON: Duration = Duration::from_millis(5);

#[test]
fn a_port_where_nobody_listens_refuses() {
    everywhere(|reactor| {
        reactor.block_on(async {
            let (listener, address) = listen();
            drop(Stream::connect(address).await.expect("the premise: a listener"));
            drop(listener);
            settle().await;
            let refused = Stream::connect(address).await.expect_err("no listener");
            assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
        });
    });
}

#[test]
fn a_reset_reaches_both_directions() {
    everywhere(|reactor| {
        reactor.block_on(async {
            let (client, server) = pair().await;
            client.send_all([Slice::copy_from(b"unread")]).await.expect("sends");
            server.abort().expect("resets");
            let (result, buffer) = client.recv(Buffer::zeroed(10)).await;
            assert_eq!(result.expect_err("was reset").kind(), ErrorKind::ConnectionReset);
            assert_eq!(buffer.len(), 10);
            let error = client.send_all([Slice::copy_from(b"more")]).await.expect_err("was reset");
            assert_eq!(error.kind(), ErrorKind::BrokenPipe);
        });
    });
}

#[test]
fn a_reset_ends_a_send_that_waits_and_a_receipt_that_waits() {
    everywhere(|reactor| {
        reactor.block_on(async {
            let (client, server) = pair().await;
            let client = Rc::new(client);
            let sending = spawn({
                let client = Rc::clone(&client);
                // More than any socket buffer holds, and the peer does not read.
                async move { client.send_all([Buffer::zeroed(64 << 20).freeze()]).await }
            });
            let receiving = spawn({
                let client = Rc::clone(&client);
                async move { client.recv(Buffer::zeroed(10)).await.0 }
            });
            settle().await;
            assert!(!sending.is_finished() && !receiving.is_finished());
            server.abort().expect("resets");
            let errors = [
                sending.await.expect("is not aborted").expect_err("was reset").kind(),
                receiving.await.expect("is not aborted").err().map_or(ErrorKind::BrokenPipe, |error| error.kind()),
            ];
            // The first call returns the reset, the second one that the connection is closed.
            assert!(errors.iter().all(|kind| matches!(kind, ErrorKind::ConnectionReset | ErrorKind::BrokenPipe)));
        });
    });
}

#[test]
fn a_time_limit_ends_what_a_silent_peer_does_not() {
    everywhere(|reactor| {
        reactor.block_on(async {
            let (client, server) = pair().await;
            for _ in 0..3 {
                timeout(SOON, client.recv(Buffer::zeroed(10))).await.expect_err("nothing comes");
            }
            timeout(SOON, server.send_all([Buffer::zeroed(64 << 20).freeze()]))
                .await
                .expect_err("the peer does not read");
            let (result, _) = timeout(LATE, client.recv(Buffer::zeroed(10))).await.expect("something came");
            assert_eq!(result.expect("receives"), 10);
            let (listener, _) = listen();
            timeout(SOON, listener.accept()).await.expect_err("no client connects");
        });
    });
}

#[test]
fn a_clean_close_delivers_the_last_answer_although_bytes_are_unread() {
    everywhere(|reactor| {
        reactor.block_on(async {
            let (client, server) = pair().await;
            client.send_all([Slice::copy_from(&[1; 100_000])]).await.expect("sends");
            server.send_all([Slice::copy_from(b"goodbye")]).await.expect("sends");
            let closing = spawn(server.close(LATE));
            assert_eq!(receive(&client, 100, 100).await, b"goodbye");
            assert!(!closing.is_finished(), "it waits for the peer");
            drop(client);
            closing.await.expect("is not aborted").expect("closes");

            let (client, server) = pair().await;
            let error = server.close(SOON).await.expect_err("the peer does not close");
            assert_eq!(error.kind(), ErrorKind::TimedOut);
            // The twin: if it is just dropped with unread bytes, the connection is reset.
            let (other, dropped) = pair().await;
            other.send_all([Slice::copy_from(b"unread")]).await.expect("sends");
            settle().await;
            drop(dropped);
            let (result, _) = other.recv(Buffer::zeroed(1)).await;
            assert_eq!(result.expect_err("was reset").kind(), ErrorKind::ConnectionReset);
            drop(client);
        });
    });
}

#[test]
fn sending_after_the_end_is_an_error_and_no_signal() {
    everywhere(|reactor| {
        reactor.block_on(async {
            let (client, _server) = pair().await;
            client.shutdown(Shutdown::Write).expect("ends");
            let error = client.send(Slice::copy_from(b"x")).await.expect_err("was ended");
            assert_eq!(error.kind(), ErrorKind::BrokenPipe);
            let parts = [Slice::copy_from(b"x"), Slice::copy_from(b"y")];
            assert_eq!(client.send_all(parts).await.expect_err("was ended").kind(), ErrorKind::BrokenPipe);
        });
    });
}

/// Tasks, futures outside tasks, and dropped futures all hold operations that no peer will ever end.
#[test]
fn a_reactor_ends_with_open_sockets() {
    for config in common::configurations() {
        let reactor = Reactor::new(config).expect("starts");
        let pool = reactor.pool().clone();
        let (stream, mut receiving) = reactor.block_on(async {
            let (listener, address) = listen();
            let mut accepted = Vec::new();
            for _ in 0..20 {
                let client = Stream::connect(address).await.expect("connects");
                accepted.push(listener.accept().await.expect("accepts").0);
                drop(spawn(async move { client.recv(sealblock_runtime_reactor::pool().take(4096)).await }));
            }
            for server in accepted {
                drop(spawn(async move { server.send_all([Buffer::zeroed(16 << 20).freeze(), Slice::empty()]).await }));
            }
            drop(spawn(async move { listener.accept().await }));
            let (client, server) = pair().await;
            let client = Rc::new(client);
            let mut receiving = Box::pin({
                let client = Rc::clone(&client);
                async move { client.recv(sealblock_runtime_reactor::pool().take(4096)).await }
            });
            assert!(common::start(receiving.as_mut()).await);
            settle().await;
            ((client, server), receiving)
        });
        assert!(pool.counters().in_use_bytes + pool.counters().heap_bytes > 0, "the premise: receipts are in flight");
        drop(reactor);
        let left = pool.counters();
        let waker = std::task::Waker::noop();
        let polled = receiving.as_mut().poll(&mut std::task::Context::from_waker(waker));
        let std::task::Poll::Ready((result, buffer)) = polled else { panic!("it has ended with the reactor") };
        assert_eq!(result.expect_err("was cancelled").raw_os_error(), Some(libc::ECANCELED));
        assert_eq!(left.in_use_bytes + left.heap_bytes, buffer.len(), "only this one is still held");
        drop(stream);
    }
}
