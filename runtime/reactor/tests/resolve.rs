//! Names to addresses, on every backend.

mod common;

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use common::everywhere;
use sealblock_runtime_reactor::net::HostPort;
use sealblock_runtime_reactor::{sleep, timeout};

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
            // Dropped before the thread has answered, or after: both are well.
            let _ = timeout(Duration::ZERO, HostPort::new("localhost", 1).resolve()).await;
            sleep(Duration::from_millis(20)).await;
            assert!(!HostPort::new("localhost", 1).resolve().await.unwrap().is_empty());
        });
    });
    // The last answer may come when the reactor has ended.
    everywhere(|reactor| {
        let _ = reactor.block_on(timeout(Duration::ZERO, HostPort::new("localhost", 1).resolve()));
    });
}
