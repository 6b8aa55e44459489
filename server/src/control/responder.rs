//! The server's side of the control socket.
//!
//! Each connection is a task of the first reactor, which only coordinates and serves no blocks. Whatever arrives over a
//! connection is limited in bytes, time and number, and at worst is refused.

use std::cell::RefCell;
use std::future::poll_fn;
use std::io;
use std::num::NonZeroU64;
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

use futures_channel::{mpsc, oneshot};
use futures_util::stream::StreamExt;
use sealblock_runtime_memory::{Buffer, Slice};
use sealblock_runtime_reactor::net::{Listener, Stream};
use sealblock_runtime_reactor::{JoinHandle, spawn, timeout};
use sealblock_stack::{Cause, Sameness, StackError};

use super::protocol::{
    ControlCommand, ControlError, ControlErrorKind, ControlRequest, ControlResponse, ControlResult, FoundTarget,
    MAX_REQUEST_BYTES, ResizeReport, TargetRef, VERSION, line_of,
};
use super::socket_path::{ControlSocket, Socket};
use crate::log;
use crate::status::server_info::{NamespaceView, ServerInfo};

/// The maximum number of connections; further ones are closed when they arrive.
const MAX_CONNECTIONS: usize = 16;
/// The time from one request, or from the start, until the next is complete.
const IDLE: Duration = Duration::from_secs(10);
/// The time for a response to be received.
const ANSWER: Duration = Duration::from_secs(10);
/// Bytes received at once.
const CHUNK_BYTES: usize = 4096;

/// A request to resize a namespace, sent to the task that serves. That task executes one such request at a time, and
/// never during a reload or the end of the server, because it does all of these.
pub struct ResizeRequest {
    /// The NQN of its subsystem.
    pub nqn: String,
    /// The identifier of the namespace in it.
    pub nsid: u32,
    /// The new size in bytes of data.
    pub size: NonZeroU64,
    /// The channel for the result.
    pub reply: oneshot::Sender<Result<ResizeReport, ControlError>>,
}

/// State shared by the control connections.
struct ControlState {
    /// The namespaces that are served now.
    offers: RefCell<Vec<NamespaceView>>,
    /// The server as a whole, once it serves.
    info: RefCell<Option<ServerInfo>>,
    /// Limited by the number of connections, each of which waits for its response.
    resizes: mpsc::UnboundedSender<ResizeRequest>,
}

impl ControlState {
    /// The namespace that a request refers to.
    fn offer_of(&self, name: &TargetRef) -> Result<NamespaceView, ControlError> {
        let offers = self.offers.borrow();
        let (mut found, mut near) = (Vec::new(), None);
        for offer in offers.iter() {
            let why = match offer.compare(name) {
                Sameness::Same => {
                    found.push(offer);
                    continue;
                }
                Sameness::Shares(device) if device == name.text => {
                    format!("it is part of {}, which is served", offer.label)
                }
                Sameness::Shares(device) => format!("it shares {device} with {}, which is served", offer.label),
                Sameness::Replaced => format!("the served {} is another file that had this name", offer.label),
                Sameness::Different => continue,
            };
            near.get_or_insert(ControlError::new(ControlErrorKind::SharesDevices, why));
        }
        match &found[..] {
            [offer] => Ok((*offer).clone()),
            [] => Err(near.unwrap_or_else(|| {
                ControlError::new(ControlErrorKind::UnknownTarget, format!("{} is not served here", name.text))
            })),
            _ => Err(ControlError::new(ControlErrorKind::AmbiguousTarget, "several namespaces have this name")),
        }
    }
}

/// The control socket of this server. Dropping it removes the socket.
pub struct Control {
    state: Rc<ControlState>,
    resizes: RefCell<mpsc::UnboundedReceiver<ResizeRequest>>,
    accepting: Option<JoinHandle<()>>,
    /// Removes the file.
    socket: Option<Socket>,
}

impl Control {
    /// Listens at the given path, at the default path, or not at all. The default socket is only a convenience: if it
    /// cannot be created, the server logs a warning and runs without it.
    ///
    /// # Errors
    /// If the given path cannot be used.
    pub fn open(place: Option<&ControlSocket>) -> Result<Control, StackError> {
        let socket = match place {
            Some(ControlSocket::None) => None,
            Some(ControlSocket::Path(path)) => {
                let failed = |error| StackError::io("listen for control on", &error).on(path.display());
                Some(Socket::at(path).map_err(|error| {
                    match error.kind() {
                        io::ErrorKind::AddrInUse => {
                            StackError::new(Cause::Refused, "listen for control on", "another server listens there")
                                .on(path.display())
                                .advise("use another --control PATH")
                        }
                        _ => failed(error),
                    }
                })?)
            }
            None => Socket::in_folder().map_err(warn).ok(),
        };
        let (sender, receiver) = mpsc::unbounded();
        let state = Rc::new(ControlState { offers: RefCell::default(), info: RefCell::default(), resizes: sender });
        let accepting = socket.as_ref().map(|socket| listen(socket, Rc::clone(&state))).transpose();
        let accepting = accepting.map_err(|error| StackError::io("listen for control on", &error))?;
        Ok(Control { state, resizes: RefCell::new(receiver), accepting, socket })
    }

    /// Sets the served namespaces.
    pub fn offer(&self, (offers, info): (Vec<NamespaceView>, ServerInfo)) {
        self.state.offers.replace(offers);
        let control = self.socket.as_ref().map(|socket| socket.path().to_string_lossy().into_owned());
        let control = control.unwrap_or_default();
        self.state.info.replace(Some(ServerInfo { control, ..info }));
    }

    /// Waits for the next request to resize. Cancel safe.
    pub async fn next_resize(&self) -> ResizeRequest {
        let next = poll_fn(|cx| self.resizes.borrow_mut().poll_next_unpin(cx)).await;
        next.expect("the state has a sender as long as this is there")
    }
}

/// Accepts connections as tasks of this reactor.
fn listen(socket: &Socket, state: Rc<ControlState>) -> io::Result<JoinHandle<()>> {
    let listener = Listener::from_fd(socket.listener.try_clone()?.into())?;
    Ok(spawn(async move {
        let connections = Rc::new(());
        while let Ok(Some(stream)) = listener.accept_until(|_| Poll::Pending).await {
            if Rc::strong_count(&connections) <= MAX_CONNECTIONS {
                let (state, permit) = (Rc::clone(&state), Rc::clone(&connections));
                drop(spawn(async move {
                    serve(&stream, &state).await;
                    drop(permit);
                }));
            }
        }
    }))
}

fn warn(error: io::Error) {
    tracing::warn!(
        "there is no control socket, so `sealblock status`, `scrub` and `resize` cannot reach this server: {error} (--control PATH puts it \
         elsewhere, and --control none does without)"
    );
}

impl Drop for Control {
    fn drop(&mut self) {
        self.state.offers.take();
        self.state.info.take();
        if let Some(accepting) = &self.accepting {
            accepting.abort();
        }
    }
}

/// Handles the requests of a connection, one after the other, until it ends or violates a rule.
async fn serve(stream: &Stream, state: &ControlState) {
    let mut received = Vec::new();
    loop {
        let line = match timeout(IDLE, next_line(stream, &mut received)).await {
            Ok(Some(line)) => line,
            Ok(None) | Err(_) => return,
        };
        let (outcome, goes_on) = match line {
            Ok(line) => (answer(&line, state).await, true),
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

/// The next line without its end; `None` when no more lines come.
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
            let why = format!("a request is at most {MAX_REQUEST_BYTES} bytes long");
            return Some(Err(ControlError::new(ControlErrorKind::BadRequest, why)));
        }
        let result;
        (result, buffer) = stream.recv(buffer).await;
        let count = result.ok().filter(|count| *count > 0)?;
        received.extend_from_slice(&buffer[..count]);
    }
}

async fn answer(line: &[u8], state: &ControlState) -> Result<ControlResult, ControlError> {
    let request = ControlRequest::read(line)?;
    if request.command == ControlCommand::Status {
        let (offers, info) = (state.offers.borrow().clone(), state.info.borrow().clone());
        let info = info.ok_or_else(|| ControlError::new(ControlErrorKind::Refused, "it is starting or stopping"))?;
        return Ok(ControlResult::Server(Box::new(info.status(&offers).await)));
    }
    if let ControlCommand::Log { level } = request.command {
        return log::change(level).map(ControlResult::Log);
    }
    let offer = match state.offer_of(&request.target) {
        Err(problem) if request.command == ControlCommand::Find && problem.kind == ControlErrorKind::UnknownTarget => {
            let target = state.info.borrow().as_ref().and_then(|info| info.waiting_for(&request.target));
            let target = target.ok_or(problem)?;
            return Ok(ControlResult::Found(Box::new(FoundTarget { target, waiting: true, members: Vec::new() })));
        }
        offer => offer?,
    };
    match request.command {
        ControlCommand::Find => {
            let members = offer.label.members();
            Ok(ControlResult::Found(Box::new(FoundTarget { target: offer.text, waiting: false, members })))
        }
        ControlCommand::MirrorStatus
        | ControlCommand::MirrorAdd { .. }
        | ControlCommand::MirrorReplace { .. }
        | ControlCommand::MirrorAcceptStale { .. }
        | ControlCommand::MirrorRemove { .. } => {
            offer.device.execute_mirror(request.command).await.map(|status| ControlResult::Mirror(Box::new(status)))
        }
        ControlCommand::Resize { size } => {
            let (reply, resized) = oneshot::channel();
            // Without a receiver the request is dropped, and its result is cancelled.
            let _ = state.resizes.unbounded_send(ResizeRequest { nqn: offer.nqn, nsid: offer.nsid, size, reply });
            let gone = |_| Err(ControlError::new(ControlErrorKind::Refused, "the server is stopping"));
            resized.await.unwrap_or_else(gone).map(|report| ControlResult::Resized(Box::new(report)))
        }
        scrub => offer.device.execute_scrub(scrub).await.map(|status| ControlResult::Scrub(Box::new(status))),
    }
}
