//! The server's side of the control socket.
//!
//! A thread accepts, since a Unix socket's connections are rare and the reactor's listener is for TCP; each connection is then a
//! task of the first reactor, which gives orders and serves no blocks. Whatever comes over one is bounded, in bytes, in time and
//! in number, and can do no more than be refused.

use std::cell::RefCell;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use sealblock_runtime_memory::{Buffer, Slice};
use sealblock_runtime_reactor::net::Stream;
use sealblock_runtime_reactor::{CoreAddress, CoreLocal, spawn, timeout};
use sealblock_stack::{Cause, StackError};

use super::protocol::{
    ControlCommand, ControlError, ControlErrorKind, ControlRequest, ControlResponse, ControlResult, MAX_REQUEST_BYTES,
    VERSION, line_of,
};
use super::socket_path::{ControlSocket, Socket};
use crate::log;
use crate::resize_queue::ResizeQueue;
use crate::status::front::{Front, Offer};

/// Connections at once; further ones are closed as they come.
const MAX_CONNECTIONS: usize = 16;
/// From one request, or the beginning, until the next is complete.
const IDLE: Duration = Duration::from_secs(10);
/// For an answer to be taken.
const ANSWER: Duration = Duration::from_secs(10);
/// Bytes received at once.
const CHUNK_BYTES: usize = 4096;
/// Rest after accepting failed for a reason that passes, such as a want of descriptors.
const REST: Duration = Duration::from_millis(100);

/// What those who come have to do with.
#[derive(Default)]
struct Desk {
    /// What is offered now.
    offers: RefCell<Vec<Offer>>,
    /// The server as a whole, once it serves.
    front: RefCell<Option<Front>>,
    orders: Rc<ResizeQueue>,
}

/// The control socket of this server. Dropped, it is gone.
pub struct Control {
    desk: Rc<Desk>,
    closing: Arc<AtomicBool>,
    path: Option<PathBuf>,
    /// Removes the file.
    socket: Option<Socket>,
}

impl Control {
    /// Listens at a place, or at the usual one, or nowhere. The usual one is a convenience: a server goes without it, with a
    /// warning, where it cannot be had.
    ///
    /// # Errors
    /// When a place that was named cannot be had.
    pub fn open(place: Option<&ControlSocket>) -> Result<Control, StackError> {
        let socket = match place {
            Some(ControlSocket::None) => None,
            Some(ControlSocket::Path(path)) => {
                let failed = |error| StackError::io("listening for control", &error).on(path.display());
                Some(Socket::at(path).map_err(|error| {
                    match error.kind() {
                        io::ErrorKind::AddrInUse => {
                            StackError::new(Cause::Refused, "listening for control", "another server listens there")
                                .on(path.display())
                                .advise("another --control PATH")
                        }
                        _ => failed(error),
                    }
                })?)
            }
            None => Socket::in_folder().map_err(warn).ok(),
        };
        let control = Control {
            desk: Rc::default(),
            closing: Arc::default(),
            path: socket.as_ref().map(|socket| socket.path().to_owned()),
            socket,
        };
        control.listen().map_err(|error| StackError::io("listening for control", &error))?;
        Ok(control)
    }

    /// Has this be what is offered.
    pub fn offer(&self, (offers, front): (Vec<Offer>, Front)) {
        self.desk.offers.replace(offers);
        let control = self.path.as_ref().map_or(String::new(), |path| path.to_string_lossy().into_owned());
        self.desk.front.replace(Some(Front { control, ..front }));
    }

    /// The orders that come and that the server carries out.
    pub fn resizes(&self) -> &ResizeQueue {
        &self.desk.orders
    }

    fn listen(&self) -> io::Result<()> {
        let Some(socket) = &self.socket else { return Ok(()) };
        let listener = socket.listener.try_clone()?;
        let door = Acceptor {
            desk: CoreLocal::new(Rc::clone(&self.desk)),
            home: CoreAddress::here(),
            connections: Arc::default(),
            closing: Arc::clone(&self.closing),
        };
        thread::Builder::new().name("control".to_owned()).spawn(move || door.accept(&listener)).map(drop)
    }
}

fn warn(error: io::Error) {
    tracing::warn!(
        "there is no control socket, so `sealblock status`, `scrub` and `resize` cannot reach this server: {error} (--control PATH puts it \
         elsewhere, and --control none does without)"
    );
}

impl Drop for Control {
    fn drop(&mut self) {
        self.desk.offers.take();
        self.desk.front.take();
        self.desk.orders.refuse_all();
        self.closing.store(true, Ordering::Release);
        if let Some(path) = &self.path {
            // The thread wakes up for a connection, and sees that it was the last.
            drop(UnixStream::connect(path));
        }
    }
}

/// What the accepting thread has.
struct Acceptor {
    desk: CoreLocal<Desk>,
    home: CoreAddress,
    connections: Arc<AtomicUsize>,
    closing: Arc<AtomicBool>,
}

/// A place among the connections.
struct ConnectionPermit(Arc<AtomicUsize>);

impl Drop for ConnectionPermit {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Acceptor {
    fn accept(self, listener: &UnixListener) {
        loop {
            let accepted = listener.accept();
            if self.closing.load(Ordering::Acquire) {
                return;
            }
            let Ok((stream, _)) = accepted else {
                thread::sleep(REST);
                continue;
            };
            let guest = ConnectionPermit(Arc::clone(&self.connections));
            if self.connections.fetch_add(1, Ordering::Relaxed) >= MAX_CONNECTIONS {
                continue;
            }
            let (desk, fd) = (self.desk.clone(), OwnedFd::from(stream));
            let sent = self.home.send(move || {
                let Some(desk) = desk.get() else { return };
                drop(spawn(async move {
                    let guest = guest;
                    serve(fd, &desk).await;
                    drop(guest);
                }));
            });
            if sent.is_err() {
                return;
            }
        }
    }
}

/// Answers the requests of a connection, one after the other, until it ends or breaks a rule.
async fn serve(fd: OwnedFd, desk: &Desk) {
    let Ok(stream) = Stream::from_fd(fd) else { return };
    let mut received = Vec::new();
    loop {
        let line = match timeout(IDLE, next_line(&stream, &mut received)).await {
            Ok(Some(line)) => line,
            Ok(None) | Err(_) => return,
        };
        let (outcome, goes_on) = match line {
            Ok(line) => (answer(&line, desk).await, true),
            Err(problem) => (Err(problem), false),
        };
        let outcome = outcome.unwrap_or_else(ControlResult::Error);
        let line = line_of(&ControlResponse { version: VERSION, result: outcome });
        let sent = timeout(ANSWER, stream.send_all([Slice::copy_from(&line)])).await;
        if !goes_on || !matches!(sent, Ok(Ok(()))) {
            return;
        }
    }
}

/// The next line without its end; nothing when no more come.
async fn next_line(stream: &Stream, received: &mut Vec<u8>) -> Option<Result<Vec<u8>, ControlError>> {
    let mut buffer = Buffer::zeroed(CHUNK_BYTES);
    let mut looked_at = 0;
    loop {
        if let Some(end) = received[looked_at..].iter().position(|byte| *byte == b'\n') {
            let rest = received.split_off(looked_at + end + 1);
            let mut line = std::mem::replace(received, rest);
            line.pop();
            return Some(Ok(line));
        }
        looked_at = received.len();
        if looked_at >= MAX_REQUEST_BYTES {
            let why = format!("a request has at most {MAX_REQUEST_BYTES} bytes");
            return Some(Err(ControlError::new(ControlErrorKind::BadRequest, why)));
        }
        let result;
        (result, buffer) = stream.recv(buffer).await;
        let count = result.ok().filter(|count| *count > 0)?;
        received.extend_from_slice(&buffer[..count]);
    }
}

async fn answer(line: &[u8], desk: &Desk) -> Result<ControlResult, ControlError> {
    let request = ControlRequest::read(line)?;
    if request.command == ControlCommand::Status {
        let (offers, front) = (desk.offers.borrow().clone(), desk.front.borrow().clone());
        let front =
            front.ok_or_else(|| ControlError::new(ControlErrorKind::Refused, "it is being started or ended"))?;
        return Ok(ControlResult::Server(Box::new(front.status(&offers).await)));
    }
    if let ControlCommand::Log { level } = request.command {
        return log::change(level).map(ControlResult::Log);
    }
    let offer = {
        let offers = desk.offers.borrow();
        let mut fitting = offers.iter().filter(|offer| offer.is(&request.target));
        let text = &request.target.text;
        let unknown = || ControlError::new(ControlErrorKind::UnknownTarget, format!("{text} is not served here"));
        let offer = fitting.next().ok_or_else(unknown)?;
        if fitting.next().is_some() {
            return Err(ControlError::new(ControlErrorKind::AmbiguousTarget, "several namespaces have this name"));
        }
        offer.clone()
    };
    match request.command {
        ControlCommand::MirrorStatus
        | ControlCommand::MirrorAdd { .. }
        | ControlCommand::MirrorReplace { .. }
        | ControlCommand::MirrorAcceptStale { .. }
        | ControlCommand::MirrorRemove { .. } => {
            let no_mirror = || ControlError::new(ControlErrorKind::Usage, format!("{} is no mirror", offer.text));
            let mirror = offer.mirror.as_ref().ok_or_else(no_mirror)?;
            mirror.execute(request.command).await.map(|status| ControlResult::Mirror(Box::new(status)))
        }
        ControlCommand::Resize { size } => {
            let resized = desk.orders.resize(offer.nqn, offer.nsid, size).await?;
            Ok(ControlResult::Resized(Box::new(resized)))
        }
        scrub => offer.scrub.execute(scrub).await.map(|status| ControlResult::Scrub(Box::new(status))),
    }
}
