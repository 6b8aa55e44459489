//! The interface to a service manager and the operator: SIGHUP as a future, and `sd_notify(3)`.

use std::env;
use std::future::pending;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixStream};
use std::sync::{Mutex, PoisonError};

use rustix::time::{ClockId, clock_gettime};
use sealblock_runtime_memory::Buffer;
use sealblock_runtime_reactor::net::Stream;

/// The number of signals that are read at once.
const PENDING_BYTES: usize = 64;

/// SIGHUP as a future: it completes once for each signal; several pending ones count as one, because each causes a
/// complete reload. SIGHUP no longer ends the process.
pub struct Hangups(Stream);

/// Where signals arrive since [`Hangups::keep`].
static KEPT: Mutex<Option<UnixStream>> = Mutex::new(None);

impl Hangups {
    /// Keeps signals from now on, before there is a reactor, for the first [`Hangups::watch`]: a start takes some time,
    /// and a SIGHUP meanwhile must not end the process.
    ///
    /// # Errors
    /// If the system cannot create a socket.
    pub fn keep() -> io::Result<()> {
        let watched = Hangups::register()?;
        *KEPT.lock().unwrap_or_else(PoisonError::into_inner) = Some(watched);
        Ok(())
    }

    /// Watches from now on, and delivers the signals that were kept.
    ///
    /// # Errors
    /// If the system cannot create a socket.
    pub fn watch() -> io::Result<Hangups> {
        let kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner).take();
        let watched = kept.map_or_else(Hangups::register, Ok)?;
        Stream::from_fd(watched.into()).map(Hangups)
    }

    /// A signal handler can do little more than write to a socket.
    fn register() -> io::Result<UnixStream> {
        let (read, write) = UnixStream::pair()?;
        signal_hook::low_level::pipe::register(signal_hook::consts::SIGHUP, write)?;
        Ok(read)
    }

    /// Waits for the next signal. Cancel safe: signals that a dropped call has read are delivered with the next one.
    pub async fn next(&self) {
        let (received, _) = self.0.recv(Buffer::zeroed(PENDING_BYTES)).await;
        if !received.is_ok_and(|bytes| bytes > 0) {
            // No more signals arrive.
            pending().await
        }
    }
}

/// The state of the server.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ServiceState {
    /// It accepts connections, and a reload has finished.
    Ready,
    /// It reloads the configuration.
    Reloading,
    /// It is ending, and completes requests in flight first.
    Stopping,
}

impl ServiceState {
    fn to_text(self) -> String {
        match self {
            ServiceState::Ready => "READY=1".to_owned(),
            // With the time, `Type=notify-reload` (systemd 253 and later) distinguishes this reload from an earlier
            // one.
            ServiceState::Reloading => format!("RELOADING=1\nMONOTONIC_USEC={}", monotonic_us()),
            ServiceState::Stopping => "STOPPING=1".to_owned(),
        }
    }
}

/// Sends the state to the service manager, if there is one. A failure to send is ignored.
pub fn notify(state: ServiceState) {
    let Some(name) = env::var_os("NOTIFY_SOCKET") else { return };
    let address = match name.as_bytes() {
        // The form of an abstract address in the manual.
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name),
        _ => SocketAddr::from_pathname(&name),
    };
    let sent = address.and_then(|address| UnixDatagram::unbound()?.send_to_addr(state.to_text().as_bytes(), &address));
    if let Err(error) = sent {
        tracing::warn!("cannot notify the service manager of '{state:?}': {error}");
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
        let us = |state: ServiceState| {
            let words = state.to_text();
            words.strip_prefix("RELOADING=1\nMONOTONIC_USEC=").unwrap().parse::<i64>().unwrap()
        };
        let (first, second) = (us(ServiceState::Reloading), us(ServiceState::Reloading));
        assert!(0 < first && first <= second, "{first} {second}");
        assert_eq!(
            (ServiceState::Ready.to_text().as_str(), ServiceState::Stopping.to_text().as_str()),
            ("READY=1", "STOPPING=1")
        );
    }
}
