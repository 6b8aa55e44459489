//! One request to one server, or to many at once, with limits for everything that is received.
//!
//! The peer may be broken or hostile. Time, bytes and values of a response are limited, its control characters do not
//! reach a terminal, and information about the process comes from the kernel, not from the process.

use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use sealblock_stack::note;
use serde_json::Value;

use super::folder::{FoundSocket, MAX_SOCKETS};
use super::peer::Peer;
use super::protocol::{
    ControlCommand, ControlError, ControlErrorKind, ControlRequest, ControlResponse, ControlResult, VERSION, line_of,
};

/// The maximum bytes of a response.
const MAX_ANSWER_BYTES: usize = 1 << 20;
/// The maximum bytes of a server's state, which may contain thousands of devices, each of some 4 KiB and 270 values.
const MAX_STATUS_BYTES: usize = 32 << 20;
/// The maximum bytes of the responses of all servers that are queried at once.
const MAX_TOTAL_BYTES: usize = 64 << 20;
/// The maximum number of values in a response; each takes more memory than its bytes.
const MAX_VALUES: usize = 1 << 20;
/// The maximum bytes of a text in a response; longer texts are truncated.
const MAX_TEXT_BYTES: usize = 64 << 10;
/// Bytes received at once.
const CHUNK_BYTES: usize = 16 << 10;

/// Sends a request and waits for the response until a deadline. `expected`, if given, is the process that must still be
/// listening there.
///
/// # Errors
/// If there is no response; the error has the reason.
pub fn exchange(
    socket: &FoundSocket,
    expected: Option<Peer>,
    request: &ControlRequest,
    timeout: Duration,
) -> io::Result<(Peer, ControlResult)> {
    let deadline = Instant::now() + timeout;
    let connected = socket.connect(deadline)?;
    let peer = connected.1;
    if expected.is_some_and(|expected| expected != peer) {
        return Err(io::Error::other(format!("another process of {} listens there now", peer.user_text())));
    }
    exchange_until(socket, connected, request, deadline, &AtomicUsize::new(0))
}

fn exchange_until(
    socket: &FoundSocket,
    (mut stream, peer): (UnixStream, Peer),
    request: &ControlRequest,
    deadline: Instant,
    total: &AtomicUsize,
) -> io::Result<(Peer, ControlResult)> {
    let left = || Some(deadline.saturating_duration_since(Instant::now())).filter(|left| !left.is_zero());
    stream.set_write_timeout(Some(left().ok_or(ErrorKind::TimedOut)?))?;
    stream.write_all(&line_of(request))?;
    let is_status = request.command == ControlCommand::Status;
    let max_bytes = if is_status { MAX_STATUS_BYTES } else { MAX_ANSWER_BYTES };
    let (mut line, mut chunk) = (Vec::new(), vec![0; CHUNK_BYTES]);
    while line.last() != Some(&b'\n') {
        stream.set_read_timeout(Some(left().ok_or(ErrorKind::TimedOut)?))?;
        let count = match stream.read(&mut chunk) {
            Ok(0) => return Err(io::Error::new(ErrorKind::UnexpectedEof, "the server's response is truncated")),
            Ok(count) => count,
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        let end = chunk[..count].iter().position(|byte| *byte == b'\n').map_or(count, |end| end + 1);
        line.extend_from_slice(&chunk[..end]);
        if line.len() > max_bytes || total.fetch_add(end, Ordering::Relaxed) + end > MAX_TOTAL_BYTES {
            return Err(io::Error::other(format!("the server's response is larger than {max_bytes} bytes")));
        }
    }
    Ok((peer, read(&line, socket, peer)?))
}

/// Parses a response.
fn read(line: &[u8], socket: &FoundSocket, peer: Peer) -> io::Result<ControlResult> {
    if values_in(line) > MAX_VALUES {
        return Err(io::Error::other(format!("the server's response has more than {MAX_VALUES} values")));
    }
    let mut answer: Value = serde_json::from_slice(line).map_err(io::Error::from)?;
    strip_controls(&mut answer);
    let answer: ControlResponse = serde_json::from_value(answer).map_err(io::Error::from)?;
    if answer.version != VERSION {
        let why = format!("the server responds in version {}", answer.version);
        return Ok(ControlResult::Error(ControlError::new(ControlErrorKind::Version, why)));
    }
    Ok(match answer.result {
        ControlResult::Server(mut status) => {
            status.uid = peer.uid;
            status.pid = peer.pid.unwrap_or(status.pid);
            status.control = printable(&socket.path.to_string_lossy());
            ControlResult::Server(status)
        }
        result => result,
    })
}

/// Queries servers at the same time, each in its own thread, so that one that hangs does not delay the others. Sockets
/// that nobody listens on are left out. Returns the responses in the order of the sockets. `patience` returns how long
/// to wait for a process, or, if the process is not known, for whoever listens.
pub fn ask_all(
    sockets: Vec<FoundSocket>,
    request: &ControlRequest,
    patience: impl Fn(Option<&Peer>) -> Duration,
) -> Vec<(FoundSocket, io::Result<(Peer, ControlResult)>)> {
    let mut live: Vec<(FoundSocket, Option<(UnixStream, Peer)>)> = Vec::new();
    for socket in sockets {
        // Here it does not wait if a queue is full; the thread reports sockets that are not trusted.
        match socket.connect(Instant::now()) {
            Err(error) if matches!(error.kind(), ErrorKind::ConnectionRefused | ErrorKind::NotFound) => {}
            _ if live.len() == MAX_SOCKETS => {
                note(format!(
                    "more than {MAX_SOCKETS} servers are running, the others are skipped; use --control PATH for one of them"
                ));
                break;
            }
            connected => live.push((socket, connected.ok())),
        }
    }
    let (answered, answers) = mpsc::channel();
    let total = Arc::new(AtomicUsize::new(0));
    let mut results = Vec::with_capacity(live.len());
    let mut last = Instant::now();
    for (number, (socket, connected)) in live.into_iter().enumerate() {
        results.push((socket.clone(), None));
        let deadline = Instant::now() + patience(connected.as_ref().map(|(_, peer)| peer));
        last = last.max(deadline);
        let (answered, total, request) = (answered.clone(), Arc::clone(&total), request.clone());
        thread::spawn(move || {
            let connected = connected.map_or_else(|| socket.connect(deadline), Ok);
            let answer = connected.and_then(|to| exchange_until(&socket, to, &request, deadline, &total));
            // The receiver has timed out.
            let _ = answered.send((number, answer));
        });
    }
    drop(answered);
    while let Ok((number, answer)) = answers.recv_timeout(last.saturating_duration_since(Instant::now())) {
        results[number].1 = Some(answer);
    }
    let late = || Err(io::Error::new(ErrorKind::TimedOut, "it did not respond in time"));
    results.into_iter().map(|(socket, answer)| (socket, answer.unwrap_or_else(late))).collect()
}

/// The minimum number of values in JSON text, determined without reading it into memory.
fn values_in(line: &[u8]) -> usize {
    let (mut is_text, mut is_escaped, mut values) = (false, false, 1);
    for byte in line {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' if is_text => is_escaped = true,
            b'"' => is_text = !is_text,
            b',' | b':' | b'[' | b'{' if !is_text => values += 1,
            _ => {}
        }
    }
    values
}

/// Replaces characters that would control a terminal, and truncates long texts.
fn strip_controls(value: &mut Value) {
    match value {
        Value::String(text) => {
            if text.len() > MAX_TEXT_BYTES {
                text.truncate(text.floor_char_boundary(MAX_TEXT_BYTES));
            }
            if printable(text) != *text {
                *text = printable(text);
            }
        }
        Value::Array(values) => values.iter_mut().for_each(strip_controls),
        Value::Object(fields) => {
            // Names of operations are printed too.
            if fields.keys().any(|name| printable(name) != **name) {
                *fields = std::mem::take(fields).into_iter().map(|(name, value)| (printable(&name), value)).collect();
            }
            fields.values_mut().for_each(strip_controls);
        }
        _ => {}
    }
}

/// Removes characters from an untrusted text that control a terminal or change the direction of writing.
pub fn printable(text: &str) -> String {
    sealblock_stack::printable(text).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::protocol::TargetRef;
    use std::io::{BufRead, BufReader};
    use std::os::unix::net::UnixListener;
    use std::path::Path;

    fn request() -> ControlRequest {
        ControlRequest::new(&TargetRef::default(), ControlCommand::Status)
    }

    /// A socket that handles each connection like this after reading its request, because a connection that is closed
    /// too early could not be sent a response.
    fn answering(path: &Path, answer: impl Fn(UnixStream) + Send + 'static) -> FoundSocket {
        let listener = UnixListener::bind(path).unwrap();
        let after_request = move |stream: UnixStream| {
            let _ = BufReader::new(&stream).read_line(&mut String::new());
            answer(stream);
        };
        thread::spawn(move || listener.incoming().flatten().for_each(after_request));
        FoundSocket::named(path)
    }

    fn why(socket: &FoundSocket) -> String {
        exchange(socket, None, &request(), Duration::from_secs(60)).unwrap_err().to_string()
    }

    #[test]
    fn answers_do_nothing_to_a_terminal() {
        let mut value =
            serde_json::json!({"why": "a\u{1b}[2Jb\nc", "runs": [{"text": "\u{7}"}], "n": 1, "good": "a b"});
        strip_controls(&mut value);
        assert_eq!(
            value,
            serde_json::json!({"why": "a\\u{1b}[2Jb\\nc", "runs": [{"text": "\\u{7}"}], "n": 1, "good": "a b"})
        );
        let mut value = serde_json::json!({"\u{1b}c": "v\u{202e}txt", "long": "x".repeat(MAX_TEXT_BYTES + 9)});
        strip_controls(&mut value);
        assert_eq!(
            (&value["\\u{1b}c"], value["long"].as_str().unwrap().len()),
            (&"v\\u{202e}txt".into(), MAX_TEXT_BYTES)
        );
    }

    #[test]
    fn an_endless_answer_is_cut_off_by_bytes() {
        let folder = tempfile::tempdir().unwrap();
        let endless = |mut stream: UnixStream| while stream.write_all(&[b'x'; 1 << 16]).is_ok() {};
        let socket = answering(&folder.path().join("s"), endless);
        assert!(why(&socket).contains("larger than 33554432 bytes"), "{}", why(&socket));
    }

    #[test]
    fn an_answer_of_many_values_is_refused_before_it_takes_memory() {
        let folder = tempfile::tempdir().unwrap();
        let many = |mut stream: UnixStream| {
            let line = format!("{{\"version\":2,\"server\":[{}0]}}\n", "[],".repeat(MAX_VALUES));
            let _ = stream.write_all(line.as_bytes());
        };
        let socket = answering(&folder.path().join("s"), many);
        assert!(why(&socket).contains("values"), "{}", why(&socket));
        assert_eq!(values_in(br#"{"a":"[,,,\",[","b":[1,2]}"#), 7);
        let deep = |mut stream: UnixStream| drop(stream.write_all(format!("{}\n", "[".repeat(100_000)).as_bytes()));
        let socket = answering(&folder.path().join("deep"), deep);
        assert!(why(&socket).contains("recursion"), "{}", why(&socket));
    }

    #[test]
    fn a_silent_server_and_one_that_trickles_take_no_longer_than_is_allowed() {
        let folder = tempfile::tempdir().unwrap();
        let _silent = UnixListener::bind(folder.path().join("silent")).unwrap();
        let trickle = |mut stream: UnixStream| {
            while stream.write_all(b" ").is_ok() {
                thread::sleep(Duration::from_millis(20));
            }
        };
        let trickling = answering(&folder.path().join("trickling"), trickle);
        let gone = folder.path().join("gone");
        drop(UnixListener::bind(&gone).unwrap());
        let sockets = vec![FoundSocket::named(&folder.path().join("silent")), trickling, FoundSocket::named(&gone)];
        let answers = ask_all(sockets, &request(), |_| Duration::from_millis(300));
        assert_eq!(answers.len(), 2, "the one that is gone is left out");
        for (socket, answer) in answers {
            let error = answer.unwrap_err();
            let is_late = matches!(error.kind(), ErrorKind::TimedOut | ErrorKind::WouldBlock);
            assert!(is_late, "{}: {error}", socket.path.display());
        }
    }

    #[test]
    fn no_more_servers_are_asked_than_there_may_be() {
        let folder = tempfile::tempdir().unwrap();
        let at = |number: usize| folder.path().join(format!("{number}.sock"));
        // A thousand sockets of servers that have ended, and more than enough of servers that have not.
        (0..1000).for_each(|number| drop(UnixListener::bind(at(number)).unwrap()));
        let listeners: Vec<_> =
            (1000..1000 + MAX_SOCKETS + 6).map(|number| UnixListener::bind(at(number)).unwrap()).collect();
        let sockets = (0..1000 + listeners.len()).map(|number| FoundSocket::named(&at(number))).collect();
        assert_eq!(ask_all(sockets, &request(), |_| Duration::from_millis(300)).len(), MAX_SOCKETS);
    }

    #[test]
    fn nothing_is_said_to_another_process_than_the_one_that_was_found() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let listener = UnixListener::bind(&path).unwrap();
        let socket = FoundSocket::named(&path);
        let (_, peer) = socket.connect(Instant::now()).unwrap();
        drop(listener.accept().unwrap());
        let other = Peer { uid: 4_000_000_000, ..peer };
        let error = exchange(&socket, Some(other), &request(), Duration::from_secs(60)).unwrap_err();
        assert!(error.to_string().contains("another process of"), "{error}");
        let mut said = Vec::new();
        listener.accept().unwrap().0.read_to_end(&mut said).unwrap();
        assert_eq!(said, b"");
    }
}
