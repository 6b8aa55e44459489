//! Futures of socket operations that are dropped in flight.

mod common;

use std::net::Shutdown;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use common::{everywhere, listen, pair, pattern, receive, settle, start};
use sealblock_runtime_memory::{Buffer, Slice};
use sealblock_runtime_reactor::net::Stream;
use sealblock_runtime_reactor::{Reactor, pool, spawn, timeout, yield_now};

/// Starts a receive into a buffer of the pool and drops it after this many turns. Returns the bytes that it returned at
/// once.
async fn receive_and_drop(stream: &Stream, len: usize, turns: usize) -> Vec<u8> {
    let mut receiving = pin!(stream.recv(pool().take(len)));
    let polled =
        std::future::poll_fn(|_| Poll::Ready(receiving.as_mut().poll(&mut Context::from_waker(Waker::noop()))));
    if let Poll::Ready((result, buffer)) = polled.await {
        return buffer[..result.expect("receives")].to_vec();
    }
    for _ in 0..turns {
        yield_now().await;
    }
    Vec::new()
}

fn held(reactor: &Reactor) -> usize {
    let counters = reactor.pool().counters();
    counters.in_use_bytes + counters.heap_bytes
}

#[test]
fn a_dropped_receipt_loses_no_bytes() {
    everywhere(|reactor| {
        reactor.block_on(async {
            // Dropped before, while and after the bytes arrive; the buffers of both receives are larger or smaller.
            for (turns, first, second) in [(0, 64, 5), (1, 64, 64), (2, 3, 64), (3, 1, 1), (9, 64, 2)] {
                let (client, server) = pair().await;
                let mut received = receive_and_drop(&server, first, turns).await;
                client.send_all([Slice::copy_from(b"0123456789")]).await.expect("sends");
                received.extend(receive_and_drop(&server, first, turns).await);
                yield_now().await;
                received.extend(receive_and_drop(&server, first, turns).await);
                client.send_all([Slice::copy_from(b"abcdef")]).await.expect("sends");
                client.shutdown(Shutdown::Write).expect("ends");
                received.extend(receive(&server, 16 - received.len(), second).await);
                assert_eq!(received, b"0123456789abcdef", "{turns} {first} {second}");
            }
        });
        assert_eq!(held(reactor), 0);
    });
}

/// Bytes arrive at any time while receives are dropped repeatedly.
#[test]
fn a_stream_of_dropped_receipts_stays_in_order() {
    everywhere(|reactor| {
        reactor.block_on(async {
            let (client, server) = pair().await;
            let data = pattern(60_000, 3);
            let sending = spawn({
                let data = data.clone();
                async move {
                    for (i, part) in data.chunks(113).enumerate() {
                        client.send_all([Slice::copy_from(part)]).await.expect("sends");
                        for _ in 0..i % 4 {
                            yield_now().await;
                        }
                    }
                }
            });
            let mut received = Vec::new();
            for round in 0.. {
                received.extend(receive_and_drop(&server, 50 + round % 200, round % 5).await);
                let part = receive(&server, 1, 1 + round % 97).await;
                if part.is_empty() {
                    break;
                }
                received.extend(part);
            }
            sending.await.expect("is not aborted");
            assert!(received == data);
        });
        assert_eq!(held(reactor), 0);
    });
}

#[test]
fn the_buffer_of_a_dropped_receipt_is_free_soon_and_not_before_its_end() {
    everywhere(|reactor| {
        reactor.block_on(async {
            let (client, server) = pair().await;
            assert!(receive_and_drop(&server, 4096, 3).await.is_empty());
            drop(server);
            let others: Vec<Buffer> = (0..32).map(|_| pool().take(4096)).collect();
            // The peer may have seen the end already, so this may fail.
            let _ = client.send(Slice::copy_from(&[0xaa; 4096])).await;
            settle().await;
            assert!(others.iter().all(|other| other.iter().all(|&byte| byte != 0xaa)));
            drop(others);
        });
        assert_eq!(held(reactor), 0, "it was cancelled, although no byte came");
    });
}

#[test]
fn a_stream_with_a_receipt_in_flight_or_bytes_kept_is_not_given_away() {
    everywhere(|reactor| {
        reactor.block_on(async {
            let (client, server) = pair().await;
            let fd = server.into_fd().expect("nothing is in flight");
            let server = Stream::from_fd(fd).expect("takes over");
            assert!(receive_and_drop(&server, 64, 1).await.is_empty());
            let server = server.into_fd().expect_err("a receipt is in flight");
            client.send_all([Slice::copy_from(b"abc")]).await.expect("sends");
            assert_eq!(receive(&server, 3, 64).await, b"abc");
            let fd = server.into_fd().expect("everything has ended");
            client.send_all([Slice::copy_from(b"def")]).await.expect("sends");
            assert_eq!(receive(&Stream::from_fd(fd).expect("takes over"), 3, 64).await, b"def");
        });
    });
}

#[test]
fn a_dropped_accept_loses_no_connection() {
    everywhere(|reactor| {
        reactor.block_on(async {
            let (listener, address) = listen();
            for turns in [0, 1, 5] {
                {
                    let mut accepting = pin!(listener.accept());
                    assert!(start(accepting.as_mut()).await, "no client has connected");
                    for _ in 0..turns {
                        yield_now().await;
                    }
                }
                let client = Stream::connect(address).await.expect("connects");
                {
                    // This one may have a connection when it is dropped.
                    let mut accepting = pin!(listener.accept());
                    let _going_on = start(accepting.as_mut()).await;
                    for _ in 0..turns {
                        yield_now().await;
                    }
                }
                let (server, peer) = listener.accept().await.expect("accepts");
                assert_eq!(peer, client.local_addr().expect("has an address"));
                server.send_all([Slice::copy_from(b"hello")]).await.expect("sends");
                assert_eq!(receive(&client, 5, 5).await, b"hello");
            }
        });
    });
}

/// The connection that a dropped accept returns after its listener is gone is closed and not leaked.
#[test]
fn a_dropped_listener_closes_what_it_had_accepted() {
    everywhere(|reactor| {
        reactor.block_on(async {
            let (listener, address) = listen();
            let client = Stream::connect(address).await.expect("connects");
            {
                let mut accepting = pin!(listener.accept());
                let _going_on = start(accepting.as_mut()).await;
                yield_now().await;
            }
            drop(listener);
            let waiting = timeout(common::LATE, client.recv(Buffer::zeroed(1)));
            let (result, _) = waiting.await.expect("it is not left open");
            assert!(matches!(result, Ok(0) | Err(_)), "closed or reset: {result:?}");
        });
    });
}

#[test]
fn a_dropped_connect_closes_its_socket() {
    everywhere(|reactor| {
        reactor.block_on(async {
            let (listener, address) = listen();
            for turns in [0, 1, 2] {
                let mut connecting = Box::pin(Stream::connect(address));
                let _going_on = start(connecting.as_mut()).await;
                for _ in 0..turns {
                    yield_now().await;
                }
                drop(connecting);
                settle().await;
            }
            let client = Stream::connect(address).await.expect("connects");
            let last = client.local_addr().expect("has an address");
            loop {
                let (server, peer) = listener.accept().await.expect("accepts");
                if peer == last {
                    break;
                }
                let (result, _) = server.recv(Buffer::zeroed(1)).await;
                assert!(matches!(result, Ok(0) | Err(_)), "the one who connected is gone: {result:?}");
            }
        });
    });
}

#[test]
fn a_dropped_send_keeps_its_slices_until_it_ends() {
    everywhere(|reactor| {
        reactor.block_on(async {
            let (client, server) = pair().await;
            let data = {
                let mut buffer = pool().take(8 << 20);
                buffer.fill(0x55);
                buffer.freeze()
            };
            {
                let mut sending = pin!(client.send_all([data.clone(), data.clone(), data]));
                assert!(start(sending.as_mut()).await, "the peer does not read");
                yield_now().await;
                assert_eq!(held(reactor), 8 << 20);
            }
            settle().await;
            assert_eq!(held(reactor), 0, "it was cancelled, although the peer does not read");
            client.shutdown(Shutdown::Write).expect("ends");
            let mut total = 0;
            loop {
                let (result, buffer) = server.recv(Buffer::zeroed(1 << 20)).await;
                let count = result.expect("receives");
                if count == 0 {
                    break;
                }
                total += count;
                assert!(buffer[..count].iter().all(|&byte| byte == 0x55));
            }
            assert!(total < 24 << 20, "it was cut short");
        });
    });
}
