//! Sockets that work, on every backend.

mod common;

use std::net::{Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr};
use std::os::fd::AsFd;
use std::rc::Rc;
use std::time::Duration;

use common::{everywhere, listen, pair, pattern, receive};
use sealblock_runtime_memory::{Buffer, Slice};
use sealblock_runtime_reactor::net::{GATHER_LIMIT, HostPort, Keepalive, Listener, Stream};
use sealblock_runtime_reactor::{Cores, Placement, pool, sleep, spawn, timeout, yield_now};

/// Sends back everything until the peer sends no more. Returns the number of bytes.
async fn echo(stream: Stream, chunk_bytes: usize) -> usize {
    let mut total = 0;
    loop {
        let (result, mut buffer) = stream.recv(pool().take(chunk_bytes)).await;
        let count = result.expect("receives");
        if count == 0 {
            return total;
        }
        total += count;
        buffer.truncate(count);
        stream.send_all([buffer.freeze()]).await.expect("sends");
    }
}

#[test]
fn an_echo_returns_every_byte_however_it_is_cut() {
    everywhere(|reactor| {
        reactor.block_on(async {
            for (sent, echoed, received) in [(1, 1, 1), (1, 7, 4096), (4095, 33, 511), (70_000, 999, 1 << 20)] {
                let data = pattern(if sent < 100 { 700 } else { 200_000 }, sent);
                let (client, server) = pair().await;
                for end in [&client, &server] {
                    end.set_nodelay(true).expect("sets");
                }
                let client = Rc::new(client);
                let echoing = spawn(echo(server, echoed));
                let sending = spawn({
                    let (client, data) = (Rc::clone(&client), data.clone());
                    async move {
                        for part in data.chunks(sent) {
                            client.send_all([Slice::copy_from(part)]).await.expect("sends");
                        }
                        client.shutdown(Shutdown::Write).expect("ends");
                    }
                });
                assert!(receive(&client, data.len(), received).await == data);
                sending.await.expect("is not aborted");
                assert_eq!(echoing.await.expect("is not aborted"), data.len());
                assert!(receive(&client, 1, 1).await.is_empty(), "the echo has closed");
            }
        });
        assert_eq!(reactor.pool().counters().in_use_bytes, 0);
    });
}

#[test]
fn many_connections_are_served_side_by_side() {
    const CONNECTIONS: usize = 200;
    everywhere(|reactor| {
        reactor.block_on(async {
            let (listener, address) = listen();
            let serving = spawn(async move {
                let mut echoing = Vec::new();
                for _ in 0..CONNECTIONS {
                    let (stream, _) = listener.accept().await.expect("accepts");
                    echoing.push(spawn(echo(stream, 100)));
                }
                let mut total = 0;
                for one in echoing {
                    total += one.await.expect("is not aborted");
                }
                total
            });
            let mut clients = Vec::new();
            for _ in 0..CONNECTIONS {
                clients.push(Stream::connect(address).await.expect("connects"));
            }
            for round in 0..3 {
                for (i, client) in clients.iter().enumerate() {
                    client.send_all([Slice::copy_from(&pattern(150, i + round))]).await.expect("sends");
                }
                for (i, client) in clients.iter().enumerate() {
                    assert_eq!(receive(client, 150, 64).await, pattern(150, i + round));
                }
            }
            drop(clients);
            assert_eq!(serving.await.expect("is not aborted"), CONNECTIONS * 3 * 150);
        });
    });
}

#[test]
fn half_a_connection_can_be_closed() {
    everywhere(|reactor| {
        reactor.block_on(async {
            let (client, server) = pair().await;
            client.send_all([Slice::copy_from(b"question")]).await.expect("sends");
            client.shutdown(Shutdown::Write).expect("ends");
            assert_eq!(receive(&server, 100, 100).await, b"question");
            assert_eq!(server.recv(Buffer::zeroed(9)).await.0.expect("the end stays"), 0);
            server.send_all([Slice::copy_from(b"answer")]).await.expect("the other way is open");
            drop(server);
            assert_eq!(receive(&client, 100, 100).await, b"answer");
        });
    });
}

/// Far more than the socket buffers hold, so that sends are partial repeatedly.
#[test]
fn a_gather_larger_than_all_buffers_arrives_in_order() {
    everywhere(|reactor| {
        reactor.block_on(async {
            let (client, server) = pair().await;
            client.set_send_buffer_bytes(16 << 10).expect("sets");
            server.set_recv_buffer_bytes(16 << 10).expect("sets");
            let data = pattern(1_500_000, 5);
            // Slices of odd lengths, some of them empty, and more than one operation accepts.
            let (mut rest, mut slices) = (&data[..], Vec::new());
            for i in 0.. {
                let (part, behind) = rest.split_at(rest.len().min(i * 97 % 20_011));
                slices.push(Slice::copy_from(part));
                rest = behind;
                if rest.is_empty() {
                    break;
                }
            }
            assert!(slices.len() > 2 * GATHER_LIMIT, "the premise: {} slices", slices.len());
            let sending = spawn(async move {
                client.send_all(slices.drain(..)).await.expect("sends");
                assert!(slices.is_empty());
            });
            let mut received = Vec::new();
            while received.len() < data.len() {
                received.extend(receive(&server, 1, 6000).await);
                yield_now().await;
                yield_now().await;
            }
            assert!(received == data);
            sending.await.expect("is not aborted");
        });
    });
}

#[test]
fn nothing_is_sent_or_received_without_bytes_or_room() {
    everywhere(|reactor| {
        reactor.block_on(async {
            let (client, server) = pair().await;
            assert_eq!(client.send(Slice::empty()).await.expect("sends nothing"), 0);
            client.send_all([Slice::empty(), Slice::empty()]).await.expect("sends nothing");
            client.send_all([]).await.expect("sends nothing");
            assert_eq!(server.recv(Buffer::default()).await.0.expect("receives nothing"), 0);
            assert_eq!(client.send(Slice::copy_from(b"x")).await.expect("sends"), 1);
            assert_eq!(receive(&server, 1, 1).await, b"x");
        });
    });
}

#[test]
fn a_connection_moves_to_another_core_with_what_it_holds() {
    for config in common::configurations() {
        let cores = Cores::start(Placement::Count(2), config).expect("starts");
        let handles = cores.handles();
        let worker = handles[1].clone();
        let asked = handles[0].call(move || async move {
            let (client, server) = pair().await;
            client.send_all([Slice::copy_from(b"early")]).await.expect("sends");
            let fd = server.into_fd().expect("nothing is in flight");
            let serving = spawn(async move {
                let work = move || async move { echo(Stream::from_fd(fd).expect("takes over"), 64).await };
                worker.call(work).await.expect("the worker is there")
            });
            assert_eq!(receive(&client, 5, 5).await, b"early");
            client.send_all([Slice::copy_from(b"late")]).await.expect("sends");
            assert_eq!(receive(&client, 4, 4).await, b"late");
            client.shutdown(Shutdown::Write).expect("ends");
            serving.await.expect("is not aborted")
        });
        assert_eq!(futures_executor(asked), Ok(9));
        assert_eq!(cores.shutdown(Duration::from_secs(10)), Default::default());
    }
}

/// Runs a future that needs no reactor, on a reactor of its own.
fn futures_executor<F: Future>(future: F) -> F::Output {
    sealblock_runtime_reactor::Reactor::new(common::syscalls()).expect("starts").block_on(future)
}

#[test]
fn listeners_share_an_address_only_when_all_agree() {
    everywhere(|reactor| {
        reactor.block_on(async {
            let first = Listener::bind_shared(common::loopback(), 8).expect("listens");
            let address = first.local_addr().expect("has an address");
            let second = Listener::bind_shared(address, 8).expect("shares");
            let refused = Listener::bind(address, 8).expect_err("does not share");
            assert_eq!(refused.raw_os_error(), Some(libc::EADDRINUSE));
            drop((first, second));
            Listener::bind(address, 8).expect("the address is free again");
        });
    });
}

#[test]
fn options_take_effect_and_wrong_ones_are_refused() {
    fn option(stream: &Stream, level: i32, name: i32) -> u32 {
        let fd = stream.as_fd().try_clone_to_owned().expect("a descriptor");
        let socket = std::net::TcpStream::from(fd);
        match (level, name) {
            (libc::IPPROTO_TCP, libc::TCP_NODELAY) => socket.nodelay().expect("has the option").into(),
            _ => unreachable!("no other option is asked for"),
        }
    }
    everywhere(|reactor| {
        reactor.block_on(async {
            let (client, server) = pair().await;
            assert_eq!(client.peer_addr().expect("has a peer"), server.local_addr().expect("has an address"));
            client.set_nodelay(true).expect("sets");
            assert_eq!(option(&client, libc::IPPROTO_TCP, libc::TCP_NODELAY), 1);
            assert_eq!(option(&server, libc::IPPROTO_TCP, libc::TCP_NODELAY), 0);
            let keepalive = Keepalive { idle_s: 10, interval_s: 2, probes: 3 };
            client.set_keepalive(Some(keepalive)).expect("sets");
            client.set_keepalive(None).expect("sets");
            let wrong = client.set_keepalive(Some(Keepalive { probes: 1000, ..keepalive }));
            assert_eq!(wrong.expect_err("out of range").raw_os_error(), Some(libc::EINVAL));
            assert!(client.set_send_buffer_bytes(100_000).expect("sets") >= 100_000);
        });
    });
}

#[test]
fn literals_are_taken_as_they_are_and_names_looked_up() {
    everywhere(|reactor| {
        reactor.block_on(async {
            let v4 = SocketAddr::from((Ipv4Addr::new(192, 0, 2, 7), 4420));
            let v6 = SocketAddr::from((Ipv6Addr::LOCALHOST, 10809));
            assert_eq!(HostPort::from(v4).resolve().await.unwrap(), [v4]);
            assert_eq!(HostPort::from(v6).resolve().await.unwrap(), [v6]);
            assert_eq!(HostPort::new("[::1]", 10809).resolve().await.unwrap(), [v6]);
            let named = HostPort::new("localhost", 99).resolve().await.unwrap();
            assert!(!named.is_empty() && named.iter().all(|found| found.ip().is_loopback() && found.port() == 99));
        });
    });
}

#[test]
fn a_name_without_an_address_is_the_systems_error() {
    everywhere(|reactor| {
        reactor.block_on(async {
            for wrong in ["no such host", ""] {
                assert!(HostPort::new(wrong, 1).resolve().await.is_err(), "'{wrong}' has no address");
            }
        });
    });
}

#[test]
fn who_asked_may_go_away() {
    everywhere(|reactor| {
        reactor.block_on(async {
            // Dropped before or after the thread has responded: both are fine.
            let _ = timeout(Duration::ZERO, HostPort::new("localhost", 1).resolve()).await;
            sleep(Duration::from_millis(20)).await;
            assert!(!HostPort::new("localhost", 1).resolve().await.unwrap().is_empty());
        });
    });
    // The last response may arrive after the reactor has ended.
    everywhere(|reactor| {
        let _ = reactor.block_on(timeout(Duration::ZERO, HostPort::new("localhost", 1).resolve()));
    });
}
