//! `sealblock serve` as a test has it: started, identified by its port, and stopped at the end; and as little of an NBD client as
//! tests need: one export, one request after the other, simple replies.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

use serde_json::Value;

use super::{Answer, Place, answer_of};

/// A server that accepts connections.
pub struct Server {
    child: Child,
    output: BufReader<ChildStdout>,
    /// What it said when it was ready.
    pub ready: Value,
}

/// How a server ended.
pub struct Ended {
    pub status: Option<i32>,
    /// What it said between being ready and its end.
    pub events: Vec<Value>,
    pub stderr: String,
}

/// The first event, but for what an earlier server has lost; or the line that is none.
fn first_event(output: &mut impl BufRead) -> Result<Value, String> {
    loop {
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        let event: Value = serde_json::from_str(&line).map_err(|_| line)?;
        if event["event"] != "answered_lost" {
            return Ok(event);
        }
    }
}

impl Server {
    /// Serves on a port that the system chooses.
    #[track_caller]
    pub fn start(place: &Place, arguments: &str) -> Server {
        Server::start_at(place, &format!("--listen 127.0.0.1:0 {arguments}"))
    }

    /// Serves where the arguments say.
    #[track_caller]
    pub fn start_at(place: &Place, arguments: &str) -> Server {
        Server::spawn(place.command(&format!("serve --json {arguments}")))
    }

    /// Serves on a port that the system chooses, and has it log to a file of this name; or what it said when it did not start.
    pub fn try_start(place: &Place, arguments: &str, log: &str) -> Result<Server, Answer> {
        let mut command = place.command(&format!("serve --json --listen 127.0.0.1:0 {arguments}"));
        let errors = File::create(place.path(log)).unwrap();
        let mut child = command.stdout(Stdio::piped()).stderr(errors).spawn().unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        if let Ok(ready) = first_event(&mut output) {
            return Ok(Server { child, output, ready });
        }
        let mut answer = answer_of(child);
        let log = String::from_utf8(place.read(log)).unwrap();
        let message = |line: &str| serde_json::from_str::<Value>(line).ok()?["message"].as_str().map(str::to_owned);
        let messages = log.lines().map(|line| message(line).unwrap_or_else(|| line.to_owned()));
        answer.stderr = messages.collect::<Vec<_>>().join("\n");
        Err(answer)
    }

    /// Serves as this command does, which prints JSON.
    #[track_caller]
    pub fn spawn(mut command: Command) -> Server {
        command.stderr(Stdio::piped());
        Server::spawn_without_errors(command)
    }

    /// As [`Server::spawn`], with standard error as the command has it, of which an [`Ended`] knows nothing if that is no pipe.
    #[track_caller]
    pub fn spawn_without_errors(mut command: Command) -> Server {
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let ready = first_event(&mut output).unwrap_or_else(|line| {
            let mut stderr = String::new();
            child.stderr.take().map(|mut errors| errors.read_to_string(&mut stderr).unwrap());
            panic!("{command:?} said '{line}':\n{stderr}");
        });
        assert_eq!(ready["event"], "ready");
        Server { child, output, ready }
    }

    /// The next event.
    #[track_caller]
    pub fn event(&mut self) -> Value {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("'{line}': {error}"))
    }

    /// The address that it listens on.
    pub fn address(&self) -> &str {
        self.ready["listeners"][0].as_str().unwrap()
    }

    /// The target that is namespace 1 of the subsystem with this name.
    pub fn target(&self, name: &str) -> String {
        format!("nvme+tcp://{}/nqn.2026-11.io.sealblock:{name}", self.address())
    }

    /// The process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal by its name.
    pub fn signal(&self, name: &str) {
        let pid = self.pid().to_string();
        let sent = Command::new("kill").args(["-s", name, &pid]).status().unwrap();
        assert!(sent.success(), "kill -s {name} {pid}");
    }

    /// Ends it in good order.
    #[track_caller]
    pub fn stop(self) -> Ended {
        self.signal("TERM");
        self.wait()
    }

    /// Ends it in the middle of whatever it does.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Waits until it has ended.
    #[track_caller]
    pub fn wait(mut self) -> Ended {
        let mut rest = String::new();
        self.output.read_to_string(&mut rest).unwrap();
        let mut stderr = String::new();
        self.child.stderr.take().map(|mut errors| errors.read_to_string(&mut stderr).unwrap());
        let status = self.child.wait().unwrap().code();
        assert!(!stderr.contains("panicked"), "the server panicked:\n{stderr}");
        let events = rest.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        Ended { status, events, stderr }
    }
}

impl Ended {
    /// Its log lines: each is one JSON object, since the server runs with `--json`.
    #[track_caller]
    pub fn told(&self) -> Vec<Value> {
        let parse = |line: &str| serde_json::from_str(line).unwrap_or_else(|error| panic!("'{line}': {error}"));
        self.stderr.lines().map(parse).collect()
    }

    /// The lines that say this.
    #[track_caller]
    pub fn told_of(&self, message: &str) -> Vec<Value> {
        self.told().into_iter().filter(|line| line["message"] == message).collect()
    }

    /// It drained, closed everything and said so.
    #[track_caller]
    pub fn is_clean(&self) -> &Ended {
        assert_eq!(self.status, Some(0), "{}", self.stderr);
        let names: Vec<_> = self.events.iter().map(|event| event["event"].as_str().unwrap()).collect();
        // A server that is stopped at once may still tell what it found when it opened its devices.
        assert!(names.contains(&"draining") && names.ends_with(&["stopped"]), "{names:?}");
        self
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // A server that ended by itself has nothing to be killed.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// Longer than anything takes.
const LATE: Duration = Duration::from_secs(60);

/// A connection to an export.
pub struct Nbd {
    stream: TcpStream,
    /// Bytes of the export.
    pub size: u64,
    /// What NBD calls transmission flags.
    pub flags: u16,
}

impl Nbd {
    /// Chooses an export; `None` when the server has none of this name, and so closes the connection.
    pub fn open(address: &str, name: &str) -> Option<Nbd> {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(LATE)).unwrap();
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting).unwrap();
        assert_eq!(&greeting[..16], b"NBDMAGICIHAVEOPT");
        let ask = [&[0, 0, 0, 3], &b"IHAVEOPT"[..], &1u32.to_be_bytes(), &(name.len() as u32).to_be_bytes()].concat();
        stream.write_all(&[&ask[..], name.as_bytes()].concat()).unwrap();
        let mut about = [0; 10];
        stream.read_exact(&mut about).ok()?;
        let (size, flags) = about.split_at(8);
        let (size, flags) = (size.try_into().unwrap(), flags.try_into().unwrap());
        Some(Nbd { stream, size: u64::from_be_bytes(size), flags: u16::from_be_bytes(flags) })
    }

    /// One request; its error.
    fn ask(&mut self, kind: u16, offset: u64, length: usize, data: &[u8]) -> std::io::Result<u32> {
        let head = [&0x2560_9513u32.to_be_bytes()[..], &[0; 2], &kind.to_be_bytes(), b"a cookie"].concat();
        let tail = [&offset.to_be_bytes()[..], &(length as u32).to_be_bytes(), data].concat();
        self.stream.write_all(&[head, tail].concat())?;
        let mut reply = [0; 16];
        self.stream.read_exact(&mut reply)?;
        assert_eq!((&reply[..4], &reply[8..]), (&0x6744_6698u32.to_be_bytes()[..], &b"a cookie"[..]));
        Ok(u32::from_be_bytes(reply[4..8].try_into().unwrap()))
    }

    /// Sends reads of this block size, and waits for no reply.
    pub fn begin_reads(&mut self, offsets: &[u64], length: u32) {
        for offset in offsets {
            let head = [&0x2560_9513u32.to_be_bytes()[..], &[0; 4], b"a cookie", &offset.to_be_bytes()].concat();
            self.stream.write_all(&[&head[..], &length.to_be_bytes()].concat()).unwrap();
        }
    }

    /// Sends a write, and waits for no reply.
    pub fn begin_write(&mut self, offset: u64, data: &[u8]) {
        let head = [&0x2560_9513u32.to_be_bytes()[..], &[0, 0, 0, 1], b"a cookie", &offset.to_be_bytes()].concat();
        self.stream.write_all(&[&head[..], &(data.len() as u32).to_be_bytes(), data].concat()).unwrap();
    }

    /// Flushes; the error, or 0.
    pub fn flush(&mut self) -> u32 {
        self.ask(3, 0, 0, &[]).unwrap()
    }

    /// Disconnects as the protocol has it.
    pub fn disconnect(mut self) {
        let head = [&0x2560_9513u32.to_be_bytes()[..], &[0, 0, 0, 2], b"a cookie", &[0; 12]].concat();
        self.stream.write_all(&head).unwrap();
        assert_eq!(self.stream.read(&mut [0]).unwrap(), 0, "the server closes it");
    }

    /// Its address, as the server sees it.
    pub fn local_address(&self) -> String {
        self.stream.local_addr().unwrap().to_string()
    }

    /// Reads; or the error, or the end of the connection.
    pub fn read(&mut self, offset: u64, length: usize) -> std::io::Result<Result<Vec<u8>, u32>> {
        let error = self.ask(0, offset, length, &[])?;
        let mut data = vec![0; if error == 0 { length } else { 0 }];
        self.stream.read_exact(&mut data)?;
        Ok(if error == 0 { Ok(data) } else { Err(error) })
    }

    /// Writes; the error, or 0.
    pub fn write(&mut self, offset: u64, data: &[u8]) -> u32 {
        self.ask(1, offset, data.len(), data).unwrap()
    }
}
