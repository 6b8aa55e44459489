//! A server's listeners and connections on all its cores: accepts connections, limits their number, spreads them over
//! cores and ends them.
//!
//! Invariants: a connection counts against the limit until its [`Registration`] is dropped, or until it is ended in
//! favour of another one. A signal to all is also sent to those that register later, and is never withdrawn.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Context;
use std::time::Duration;

use sealblock_runtime_reactor::net::{Listener, Stream};
use sealblock_runtime_reactor::{CoreAddress, CoreHandle, now, sleep};

use crate::admission::{Admission, Admitted, decide, origin};
use crate::cores::{CorePlace, ServingCores};
use crate::signal::{ControlSignal, LogRateLimit, Signals};

/// The interval at which a stopping server checks whether connections remain.
const DRAIN_POLL_INTERVAL: Duration = Duration::from_millis(2);
/// The time that connections have to end after they were aborted.
const ABORT_TIMEOUT: Duration = Duration::from_secs(1);

/// The state of a server's connections that its cores share.
pub struct Serving {
    max_connections: usize,
    drain: Duration,
    members: Mutex<Members>,
    cores: Mutex<Arc<ServingCores>>,
    /// True if connections may move once it is known which devices they use.
    moves: AtomicBool,
    /// Rate limit of the log line about connections above the limit.
    over_limit: LogRateLimit,
}

#[derive(Default)]
struct Members {
    /// The flags that were sent to all.
    order: Option<Signals>,
    next: u64,
    connections: BTreeMap<u64, Member>,
    listeners: BTreeMap<u64, Arc<ControlSignal>>,
}

/// A connection.
struct Member {
    signal: Arc<ControlSignal>,
    admitted: Admitted,
    /// True if it was ended in favour of another connection; then it no longer counts.
    is_replaced: bool,
    /// True if its peer gets no more replies: what it still has in flight only waits for devices.
    is_answered: bool,
}

/// Registers a listener or connection for signals, until it is dropped.
pub struct Registration {
    serving: Arc<Serving>,
    /// Unique among the listeners and connections of a server; later ones have higher numbers.
    pub number: u64,
    /// The signal to its task.
    pub signal: Arc<ControlSignal>,
    /// The core that serves it; `None` for the one that accepted it.
    place: RefCell<Option<CorePlace>>,
}

impl Registration {
    /// Excludes the connection from the load of its core from now on.
    pub fn exclude_from_load(&self) {
        if let Some(place) = &mut *self.place.borrow_mut() {
            place.exclude();
        }
    }

    /// True if the connection may go to another core, once it is known which devices it uses.
    pub fn can_move(&self) -> bool {
        self.serving.moves.load(Ordering::Relaxed) && self.place.borrow().as_ref().is_some_and(CorePlace::has_others)
    }

    /// Chooses the core again, for a connection that uses devices which are on these cores only; if there are none, all
    /// cores are alike. True if that is another core, on which the connection counts from now on; then call
    /// [`hand_to_core`]. Connections for which cores are alike take turns.
    pub fn choose_core(&self, homes: &[CoreAddress], turn: u64) -> bool {
        self.can_move() && self.place.borrow_mut().as_mut().is_some_and(|place| place.choose_again(homes, turn))
    }

    /// Records that the peer has introduced itself: this connection is no longer ended in favour of others.
    pub fn set_introduced(&self) {
        if let Some(member) = self.serving.members().connections.get_mut(&self.number) {
            member.admitted.is_introduced = true;
        }
    }

    /// Records that the peer gets no more replies: a server that stops waits no longer than for its requests in flight.
    pub fn set_answered(&self) {
        if let Some(member) = self.serving.members().connections.get_mut(&self.number) {
            member.is_answered = true;
        }
    }

    /// The core that is to serve the connection, if it is not this one.
    fn other_core(&self) -> Option<CoreAddress> {
        let place = self.place.borrow();
        place.as_ref().map(CorePlace::address).filter(|address| !address.is_here()).cloned()
    }

    /// The connection stays on this core, although another one was chosen.
    fn stay_here(&self) {
        if let Some(place) = &mut *self.place.borrow_mut() {
            place.stay_here();
        }
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let mut members = self.serving.members();
        let gone = (members.connections.remove(&self.number), members.listeners.remove(&self.number));
        drop(members);
        drop(gone);
        // Last, so that a core without load has no connections that are still counted.
        drop(self.place.take());
    }
}

impl Serving {
    /// Connections above `max_connections`, and those of an address above its share (`admission`), are closed right
    /// after they are accepted. When the server stops, requests in flight have the time `drain` to complete, and their
    /// replies the same time again to be sent; then connections are aborted. Requests that do not complete in time
    /// are left to their devices.
    pub fn new(max_connections: usize, drain: Duration) -> Arc<Serving> {
        Arc::new(Serving {
            max_connections,
            drain,
            members: Mutex::default(),
            cores: Mutex::new(Arc::new(ServingCores::new([]))),
            moves: AtomicBool::new(true),
            over_limit: LogRateLimit::default(),
        })
    }

    /// From now on, spreads connections over these cores, whichever core accepts them. Without cores, connections stay
    /// on the core that accepts them.
    pub fn set_cores(&self, cores: impl IntoIterator<Item = CoreHandle>) {
        let cores = Arc::new(ServingCores::new(cores));
        let before = std::mem::replace(&mut *self.lock_cores(), cores);
        drop(before);
    }

    /// From now on, each connection stays on the core that was chosen when it was accepted.
    pub fn keep_in_place(&self) {
        self.moves.store(false, Ordering::Relaxed);
    }

    /// The number of connections on each of the cores, without those that are excluded from their loads.
    pub fn loads(&self) -> Vec<usize> {
        self.lock_cores().loads()
    }

    fn lock_cores(&self) -> MutexGuard<'_, Arc<ServingCores>> {
        self.cores.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Serves the connections of a listener until [`Serving::stop`] is called or the reactor's core stops; then stops
    /// all, and waits until they have ended. `begin` starts to serve a connection; it is called on the core that serves
    /// it.
    ///
    /// # Errors
    /// The error of a listener that can no longer accept connections. Only this listener ends then.
    pub async fn serve(
        self: &Arc<Self>,
        listener: Listener,
        begin: impl Fn(Stream, Registration) + Clone + Send + 'static,
    ) -> io::Result<()> {
        let registration = self.register_listener();
        let outcome = self.accept(&listener, &registration.signal, begin).await;
        drop(listener);
        outcome?;
        self.stop();
        self.wait_drained().await;
        Ok(())
    }

    async fn accept(
        self: &Arc<Self>,
        listener: &Listener,
        signal: &ControlSignal,
        begin: impl Fn(Stream, Registration) + Clone + Send + 'static,
    ) -> io::Result<()> {
        let mut is_stopping = |cx: &mut Context<'_>| signal.poll_for(Signals::DRAIN, cx);
        while let Some(stream) = listener.accept_until(&mut is_stopping).await? {
            let from = stream.peer_addr().ok().map(|address| origin(address.ip()));
            let Some(registration) = self.admit(from) else {
                if let Some(connections) = self.over_limit.count(now()) {
                    let limit = self.max_connections;
                    let why = "connections closed: connection limit reached, over all or for one address";
                    tracing::warn!(limit, connections, "{why}");
                }
                continue;
            };
            hand_to_core(stream, registration, begin.clone());
        }
        Ok(())
    }

    /// Registers one more connection, and chooses its core; `None` if it exceeds the limit or the share of its address.
    fn admit(self: &Arc<Self>, from: Option<IpAddr>) -> Option<Registration> {
        let mut members = self.members();
        let counted = |member: &&Member| !member.is_replaced;
        let admitted: Vec<Admitted> =
            members.connections.values().filter(counted).map(|member| member.admitted).collect();
        let replaced = match decide(&admitted, self.max_connections, from) {
            Admission::Admit => None,
            Admission::InPlaceOf(number) => members.connections.get_mut(&number).map(|member| {
                member.is_replaced = true;
                Arc::clone(&member.signal)
            }),
            Admission::Refuse => return None,
        };
        let (number, signal) = members.next_signal();
        let admitted = Admitted { number, from, is_introduced: false };
        members
            .connections
            .insert(number, Member { signal: Arc::clone(&signal), admitted, is_replaced: false, is_answered: false });
        drop(members);
        if let Some(replaced) = replaced {
            replaced.send(Signals::ABORT);
        }
        let registration = self.registration(number, signal);
        let cores = Arc::clone(&self.lock_cores());
        registration.place.replace(CorePlace::choose(&cores, number));
        Some(registration)
    }

    fn register_listener(self: &Arc<Self>) -> Registration {
        let mut members = self.members();
        let (number, signal) = members.next_signal();
        members.listeners.insert(number, Arc::clone(&signal));
        drop(members);
        self.registration(number, signal)
    }

    fn registration(self: &Arc<Self>, number: u64, signal: Arc<ControlSignal>) -> Registration {
        Registration { serving: Arc::clone(self), number, signal, place: RefCell::default() }
    }

    /// Stops accepting connections and requests, on all cores. [`Serving::serve`] returns when the server has stopped.
    pub fn stop(&self) {
        self.signal_all(Signals::DRAIN);
    }

    /// The number of connections on all cores that are served, or that still have requests in flight.
    pub fn connections(&self) -> usize {
        self.members().connections.len()
    }

    /// Sends flags to all listeners and connections, also to later ones.
    fn signal_all(&self, order: Signals) {
        let signals: Vec<Arc<ControlSignal>> = {
            let mut members = self.members();
            if members.order != Some(Signals::ABORT) {
                members.order = Some(order);
            }
            let connections = members.connections.values().map(|member| &member.signal);
            members.listeners.values().chain(connections).cloned().collect()
        };
        signals.iter().for_each(|signal| signal.send(order));
    }

    /// Waits until every connection has ended, and aborts those whose peers take their replies too slowly.
    async fn wait_drained(&self) {
        let drained = now() + self.drain;
        let answered = drained + self.drain;
        while self.connections() > 0 && now() < drained || self.is_answering() && now() < answered {
            sleep(DRAIN_POLL_INTERVAL).await;
        }
        if !self.is_answering() {
            return;
        }
        self.signal_all(Signals::ABORT);
        while self.connections() > 0 && now() < answered + ABORT_TIMEOUT {
            sleep(DRAIN_POLL_INTERVAL).await;
        }
    }

    /// True if a peer may still get replies.
    fn is_answering(&self) -> bool {
        self.members().connections.values().any(|member| !member.is_answered)
    }

    fn members(&self) -> MutexGuard<'_, Members> {
        self.members.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Members {
    /// The number of the next listener or connection, and its signal, which already has the flags that were sent to
    /// all.
    fn next_signal(&mut self) -> (u64, Arc<ControlSignal>) {
        let signal = Arc::new(ControlSignal::default());
        if let Some(order) = self.order {
            signal.send(order);
        }
        self.next += 1;
        (self.next, signal)
    }
}

/// Begins to serve a connection on its core, or on this one if that core stops.
pub fn hand_to_core<B>(stream: Stream, registration: Registration, begin: B)
where
    B: FnOnce(Stream, Registration) + Send + 'static,
{
    // Without this option a small reply waits for an acknowledgement. A socket on which this fails is about to close.
    let _ = stream.set_nodelay(true);
    let Some(address) = registration.other_core() else { return begin(stream, registration) };
    let fd = match stream.into_fd() {
        Ok(fd) => fd,
        Err(stream) => {
            registration.stay_here();
            return begin(stream, registration);
        }
    };
    let parcel = Arc::new(Parcel(Mutex::new(Some((fd, registration, begin)))));
    let there = Arc::clone(&parcel);
    // A core that ends before it has run this drops the connection, which closes it.
    if address.send(move || there.open()).is_err() {
        parcel.open_here();
    }
}

/// A connection on its way to another core, which one of both takes out.
struct Parcel<B>(Mutex<Option<(OwnedFd, Registration, B)>>);

impl<B: FnOnce(Stream, Registration)> Parcel<B> {
    fn take(&self) -> Option<(OwnedFd, Registration, B)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn open(&self) {
        if let Some((fd, registration, begin)) = self.take() {
            adopt(fd, registration, begin);
        }
    }

    fn open_here(&self) {
        if let Some((fd, registration, begin)) = self.take() {
            registration.stay_here();
            adopt(fd, registration, begin);
        }
    }
}

fn adopt(fd: OwnedFd, registration: Registration, begin: impl FnOnce(Stream, Registration)) {
    match Stream::from_fd(fd) {
        Ok(stream) => begin(stream, registration),
        Err(error) => tracing::warn!(%error, "connection closed: its core cannot adopt the socket"),
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, TcpStream};
    use std::sync::mpsc;

    use sealblock_runtime_reactor::{Config, Cores, Placement};

    use super::*;

    fn serving(max_connections: usize) -> Arc<Serving> {
        Serving::new(max_connections, Duration::ZERO)
    }

    /// Accepts a connection on the first core, chooses the second one for it, and hands it over; returns whether it
    /// begins on the first, the loads then, and those after its end.
    fn hand_over(serving: &Arc<Serving>, first: &Cores, second: &CoreHandle) -> (bool, Vec<usize>, Vec<usize>) {
        let (send, begun) = mpsc::channel();
        let (here, there, serving) = (first.handle(0).unwrap().address(), second.address(), Arc::clone(serving));
        let (at, of) = (here.clone(), Arc::clone(&serving));
        let listening = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let client = TcpStream::connect(listening.local_addr().unwrap()).unwrap();
        let work = move || {
            let stream = Stream::from_fd(listening.accept().unwrap().0.into()).unwrap();
            let registration = of.admit(None).unwrap();
            registration.choose_core(&[there], 0);
            hand_to_core(stream, registration, move |_stream, registration| {
                let loads = registration.serving.loads();
                drop(registration);
                send.send((at.is_here(), loads, of.loads())).unwrap();
            });
        };
        here.send(work).unwrap();
        let begun = begun.recv_timeout(Duration::from_secs(30)).unwrap();
        assert_eq!(serving.connections(), 0);
        drop(client);
        begun
    }

    #[test]
    fn a_connection_whose_new_core_stops_stays_and_counts_where_it_is() {
        let start = || {
            let config = Config { pool_arena_bytes: 0, ..Config::default() };
            Cores::start(Placement::Count(1), config).unwrap()
        };
        let (first, second, serving) = (start(), start(), serving(2));
        let handles = [first.handle(0).unwrap(), second.handle(0).unwrap()];
        serving.set_cores(handles.clone());
        for _ in 0..2 {
            assert_eq!(hand_over(&serving, &first, &handles[1]), (false, vec![0, 1], vec![0, 0]));
        }
        second.shutdown(Duration::ZERO);
        for _ in 0..2 {
            assert_eq!(hand_over(&serving, &first, &handles[1]), (true, vec![1, 0], vec![0, 0]));
        }
    }

    #[test]
    fn connections_are_limited_and_unregistered() {
        let serving = serving(1);
        let _listener = serving.register_listener();
        let first = serving.admit(None).unwrap();
        assert!(serving.admit(None).is_none());
        assert_eq!(serving.connections(), 1);
        drop(first);
        assert!(serving.admit(None).is_some());
    }

    #[test]
    fn a_silent_connection_is_ended_for_another_address_and_one_in_use_is_not() {
        let (serving, address) = (serving(2), |last| Some(IpAddr::from([192, 0, 2, last])));
        let (used, silent) = (serving.admit(address(1)).unwrap(), serving.admit(address(2)).unwrap());
        used.set_introduced();
        let late = serving.admit(address(3)).unwrap();
        assert!(silent.signal.has(Signals::ABORT) && !used.signal.has(Signals::ABORT));
        late.set_introduced();
        assert!(serving.admit(address(4)).is_none(), "both that count are in use, though one more is still ending");
        drop((silent, late));
        assert!(serving.admit(address(4)).is_some());
    }

    #[test]
    fn signals_reach_all_and_later_connections() {
        let serving = serving(2);
        let one = serving.admit(None).unwrap();
        assert!(!one.signal.has(Signals::DRAIN));
        serving.stop();
        let late = serving.register_listener();
        assert!(one.signal.has(Signals::DRAIN) && late.signal.has(Signals::DRAIN) && !one.signal.has(Signals::ABORT));
        serving.signal_all(Signals::ABORT);
        serving.stop();
        let last = serving.register_listener();
        assert!(one.signal.has(Signals::ABORT) && last.signal.has(Signals::ABORT));
    }
}
