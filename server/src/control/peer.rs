//! The process behind a Unix socket, as the kernel reports it, and connecting with a time limit.

use std::fs;
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use sealblock_runtime_reactor::net::peer_process;
use sealblock_stack::kernel::leaves::{Leaf, Storage};

/// The pause between two attempts to connect to a socket whose queue is full.
const PAUSE: Duration = Duration::from_millis(10);
/// The maximum number of descriptors of a process that are examined.
const MAX_DESCRIPTORS: usize = 1 << 16;
/// The maximum bytes of a file of users.
const MAX_USERS_BYTES: u64 = 1 << 20;

/// A process that listens on a socket.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Peer {
    /// Its user.
    pub uid: u32,
    /// Its number; `None` for a process in another PID namespace.
    pub pid: Option<u32>,
    /// When it was started, in ticks since boot, if that can be read; process numbers are reused.
    pub(super) started: Option<u64>,
}

impl Peer {
    /// The process at the other end of a socket.
    ///
    /// # Errors
    /// If the kernel does not know it.
    pub fn of(socket: impl AsFd) -> io::Result<Peer> {
        let (pid, uid) = peer_process(socket)?;
        let pid = Some(pid).filter(|pid| *pid > 0);
        Ok(Peer { uid, pid, started: pid.and_then(start_of) })
    }

    /// True if this process may trust it: it runs as root or as the same user.
    pub fn is_trusted(&self) -> bool {
        self.uid == 0 || user().is_ok_and(|user| user == self.uid)
    }

    /// Its user by name, if the system has one.
    pub fn user_text(&self) -> String {
        user_text(self.uid)
    }

    /// Whether the process has one of these files open. `None` if that cannot be determined, or if none of them is a
    /// file.
    pub fn has_open(&self, leaves: &[Leaf]) -> Option<bool> {
        let is_file = |leaf: &&Leaf| matches!(leaf.storage, Storage::File { .. });
        let wanted: Vec<Storage> = leaves.iter().filter(is_file).map(|leaf| leaf.storage).collect();
        let (pid, started) = (self.pid?, self.started?);
        if wanted.is_empty() {
            return None;
        }
        let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).ok()?;
        let has = |path: &Path| fs::metadata(path).is_ok_and(|about| wanted.contains(&Storage::of(&about)));
        let found = descriptors.take(MAX_DESCRIPTORS).filter_map(Result::ok).any(|open| has(&open.path()));
        // Another process may have got the same number while this was read.
        (start_of(pid) == Some(started)).then_some(found)
    }
}

/// When a process was started, in ticks since the boot (`proc_pid_stat(5)`, field 22).
pub fn start_of(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name of the program, in parentheses, may contain spaces and parentheses.
    stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()
}

/// This process' effective user: the owner of its own entry.
pub fn user() -> io::Result<u32> {
    use std::os::unix::fs::MetadataExt;
    Ok(fs::metadata("/proc/self")?.uid())
}

/// A user by name and number.
pub fn user_text(uid: u32) -> String {
    let mut users = String::new();
    let read = fs::File::open("/etc/passwd").and_then(|file| file.take(MAX_USERS_BYTES).read_to_string(&mut users));
    let name = read.ok().and_then(|_| {
        let mut fields = users.lines().map(|line| line.split(':').collect::<Vec<_>>());
        fields.find(|fields| fields.get(2).is_some_and(|id| id.parse() == Ok(uid))).map(|fields| fields[0].to_owned())
    });
    match name {
        Some(name) => format!("user {} ({uid})", sealblock_stack::printable(&name)),
        None => format!("user {uid}"),
    }
}

/// Connects to a socket until a deadline; if its queue is full, an ordinary connect would wait forever.
///
/// # Errors
/// The errors of `connect(2)`; [`io::ErrorKind::TimedOut`] if the queue stays full.
pub fn connect_until(path: &Path, deadline: Instant) -> io::Result<UnixStream> {
    let address = SocketAddrUnix::new(path)?;
    loop {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        match connect(&socket, &address) {
            Ok(()) => {
                let stream = UnixStream::from(socket);
                stream.set_nonblocking(false)?;
                return Ok(stream);
            }
            Err(rustix::io::Errno::AGAIN) if Instant::now() < deadline => thread::sleep(PAUSE),
            Err(rustix::io::Errno::AGAIN) => return Err(io::ErrorKind::TimedOut.into()),
            Err(error) => return Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    #[test]
    fn the_kernel_names_the_process_and_what_it_has_open() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let _listener = UnixListener::bind(&path).unwrap();
        let stream = connect_until(&path, Instant::now()).unwrap();
        let peer = Peer::of(&stream).unwrap();
        assert_eq!((peer.pid, peer.uid), (Some(std::process::id()), user().unwrap()));
        assert!(peer.is_trusted() && !Peer { uid: 4_000_000_000, ..peer }.is_trusted());
        let file = tempfile::NamedTempFile::new().unwrap();
        let leaf = |file: &std::fs::File| Leaf::whole(Storage::of(&file.metadata().unwrap()));
        let open = leaf(file.as_file());
        assert_eq!(peer.has_open(&[open]), Some(true));
        file.close().unwrap();
        assert_eq!(peer.has_open(&[open]), Some(false));
        assert_eq!(peer.has_open(&[]), None);
        let other = Peer { started: Some(1), ..peer };
        assert_eq!(other.has_open(&[open]), None, "the number is another process' by now");
    }

    #[test]
    fn a_socket_whose_queue_is_full_is_not_waited_for_without_end() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let listener = UnixListener::bind(&path).unwrap();
        rustix::net::listen(&listener, 0).unwrap();
        let mut streams = Vec::new();
        let error = loop {
            match connect_until(&path, Instant::now()) {
                Ok(stream) => streams.push(stream),
                Err(error) => break error,
            }
            assert!(streams.len() < 100_000);
        };
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }

    #[test]
    fn users_have_names_where_the_system_knows_them() {
        assert_eq!(user_text(4_000_000_000), "user 4000000000");
        assert!(user_text(0).contains("(0)") || user_text(0) == "user 0");
    }
}
