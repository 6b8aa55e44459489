//! Telling a service manager how far the server is (`sd_notify(3)`): a datagram to the socket that it names.

use std::env;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

use rustix::time::{ClockId, clock_gettime};

/// How far the server is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum State {
    /// It accepts connections, and what is to be read again has been.
    Ready,
    /// It reads the configuration again.
    Reloading,
    /// Requests in flight end before the server stops.
    Stopping,
}

impl State {
    fn to_text(self) -> String {
        match self {
            State::Ready => "READY=1".to_owned(),
            // By the time, `Type=notify-reload` (systemd 253 and later) distinguishes this reload from an earlier one.
            State::Reloading => format!("RELOADING=1\nMONOTONIC_USEC={}", monotonic_us()),
            State::Stopping => "STOPPING=1".to_owned(),
        }
    }
}

/// Sends the state to the service manager, if there is one. A failure to send is ignored.
pub fn notify(state: State) {
    let Some(name) = env::var_os("NOTIFY_SOCKET") else { return };
    let address = match name.as_bytes() {
        // The manual's form of an abstract address.
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name),
        _ => SocketAddr::from_pathname(&name),
    };
    let sent = address.and_then(|address| UnixDatagram::unbound()?.send_to_addr(state.to_text().as_bytes(), &address));
    if let Err(error) = sent {
        tracing::warn!("the service manager was not told '{state:?}': {error}");
    }
}

/// Microseconds of the clock that the manager compares with.
fn monotonic_us() -> i64 {
    let time = clock_gettime(ClockId::Monotonic);
    time.tv_sec * 1_000_000 + time.tv_nsec / 1000
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reload_says_when_it_began() {
        let us = |state: State| {
            let words = state.to_text();
            words.strip_prefix("RELOADING=1\nMONOTONIC_USEC=").unwrap().parse::<i64>().unwrap()
        };
        let (first, second) = (us(State::Reloading), us(State::Reloading));
        assert!(0 < first && first <= second, "{first} {second}");
        assert_eq!((State::Ready.to_text().as_str(), State::Stopping.to_text().as_str()), ("READY=1", "STOPPING=1"));
    }
}
