//! Streams that send when the future is polled, on every backend.

mod common;

use std::cell::Cell;
use std::future::{Future, poll_fn};
use std::net::Shutdown;
use std::pin::pin;
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

use common::{everywhere, pair, pattern, receive};
use sealblock_runtime_memory::{Buffer, Slice};
use sealblock_runtime_reactor::net::Stream;
use sealblock_runtime_reactor::{Config, Reactor, sleep, spawn};

/// The number of sends of one byte, at most `most`, that end within one poll.
async fn sent_in_one_poll(stream: &Stream, most: usize) -> usize {
    for done in 0..most {
        let mut sending = pin!(stream.send_all([Slice::copy_from(&[done as u8])]));
        let first = poll_fn(|cx| Poll::Ready(sending.as_mut().poll(cx))).await;
        if first.is_pending() {
            sending.await.expect("sends");
            return done;
        }
    }
    most
}

#[test]
fn only_a_prompt_stream_sends_within_the_poll() {
    everywhere(|reactor| {
        reactor.block_on(async {
            let (client, server) = pair().await;
            assert_eq!(sent_in_one_poll(&client, 1).await, 0);
            client.set_prompt(true);
            assert_eq!(sent_in_one_poll(&client, 1).await, 1);
            client.set_prompt(false);
            assert_eq!(sent_in_one_poll(&client, 1).await, 0);
            assert_eq!(receive(&server, 3, 8).await, [0, 0, 0]);
        });
    });
}

#[test]
fn a_task_that_only_sends_lets_others_have_their_turn() {
    everywhere(|reactor| {
        reactor.block_on(async {
            let (client, server) = pair().await;
            client.set_prompt(true);
            let first = sent_in_one_poll(&client, 1000).await;
            assert!((1..100).contains(&first), "{first}");
            let second = sent_in_one_poll(&client, 1000).await;
            assert!((1..100).contains(&second), "the next poll has its own: {second}");
            assert_eq!(receive(&server, first + second + 2, 4096).await.len(), first + second + 2);
        });
    });
}

#[test]
fn a_prompt_send_waits_for_a_slow_peer_and_loses_nothing() {
    everywhere(|reactor| {
        reactor.block_on(async {
            let (client, server) = pair().await;
            let client = Rc::new(client);
            client.set_prompt(true);
            let data = pattern(8 << 20, 3);
            let sending = spawn({
                let (client, data) = (Rc::clone(&client), data.clone());
                async move {
                    for parts in data.chunks(300_000) {
                        client.send_all(parts.chunks(4100).map(Slice::copy_from)).await.expect("sends");
                    }
                    client.shutdown(Shutdown::Write).expect("ends");
                }
            });
            assert!(receive(&server, data.len(), 50_000).await == data);
            sending.await.expect("is not aborted");
        });
        assert_eq!(reactor.pool().counters().in_use_bytes, 0);
    });
}

#[test]
fn a_prompt_send_to_a_peer_that_is_gone_is_an_error() {
    everywhere(|reactor| {
        reactor.block_on(async {
            let (client, server) = pair().await;
            client.set_prompt(true);
            client.shutdown(Shutdown::Write).expect("ends");
            let sent = client.send_all([Slice::copy_from(b"x")]).await;
            assert_eq!(sent.map_err(|error| error.raw_os_error()), Err(Some(libc::EPIPE)));
            drop(server);
        });
    });
}

/// Reactors that poll for this long before they sleep.
fn spinning(test: impl Fn(&Reactor)) {
    for config in common::configurations() {
        test(&Reactor::new(Config { spin_us: 20_000, ..config }).expect("a reactor starts"));
    }
}

#[test]
fn only_a_prompt_stream_receives_within_the_poll() {
    everywhere(|reactor| {
        reactor.block_on(async {
            let (client, server) = pair().await;
            for prompt in [true, false] {
                client.set_prompt(true);
                server.set_prompt(prompt);
                client.send(Slice::copy_from(b"here")).await.expect("sends");
                let mut receiving = pin!(server.recv(Buffer::zeroed(8)));
                let pending = common::start(receiving.as_mut()).await;
                assert_eq!(pending, !prompt, "on loopback the bytes are there once they are sent");
                if pending {
                    assert_eq!(receiving.await.0.expect("receives"), 4);
                }
            }
        });
    });
}

#[test]
fn a_receive_that_lingers_gets_what_comes_soon_and_what_comes_late() {
    spinning(|reactor| {
        reactor.block_on(async {
            let (client, server) = pair().await;
            let client = Rc::new(client);
            server.set_prompt(true);
            server.set_busy_poll(true);
            for pause_ms in [0, 1, 40] {
                let sending = spawn({
                    let client = Rc::clone(&client);
                    async move {
                        sleep(Duration::from_millis(pause_ms)).await;
                        client.send(Slice::copy_from(b"abc")).await.expect("sends");
                    }
                });
                assert_eq!(receive(&server, 3, 8).await, b"abc");
                sending.await.expect("is not aborted");
            }
        });
    });
}

#[test]
fn a_receive_that_is_dropped_while_it_lingers_loses_nothing_and_lets_others_linger() {
    spinning(|reactor| {
        reactor.block_on(async {
            let (client, server) = pair().await;
            let (other, peer) = pair().await;
            for stream in [&server, &peer] {
                stream.set_prompt(true);
                stream.set_busy_poll(true);
            }
            for _ in 0..3 {
                assert!(common::start(pin!(server.recv(Buffer::zeroed(8)))).await, "nothing is there yet");
                assert!(common::start(pin!(peer.recv(Buffer::zeroed(8)))).await);
            }
            client.send(Slice::copy_from(b"one")).await.expect("sends");
            other.send(Slice::copy_from(b"two")).await.expect("sends");
            assert_eq!(receive(&server, 3, 8).await, b"one");
            assert_eq!(receive(&peer, 3, 8).await, b"two");
        });
    });
}

#[test]
fn tasks_and_timers_go_on_beside_a_receive_that_lingers() {
    spinning(|reactor| {
        reactor.block_on(async {
            let (_client, server) = pair().await;
            server.set_prompt(true);
            server.set_busy_poll(true);
            let turns = Cell::new(0);
            let counting = async {
                for _ in 0..5 {
                    sleep(Duration::from_millis(1)).await;
                    turns.set(turns.get() + 1);
                }
            };
            let mut receiving = pin!(server.recv(Buffer::zeroed(8)));
            let mut counting = pin!(counting);
            poll_fn(|cx| {
                assert!(receiving.as_mut().poll(cx).is_pending());
                counting.as_mut().poll(cx)
            })
            .await;
            assert_eq!(turns.get(), 5);
        });
    });
}
