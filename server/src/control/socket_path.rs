//! Control sockets of servers: how they are created.
//!
//! The folder is `$XDG_RUNTIME_DIR/sealblock`, or `/run/user/UID/sealblock`, or `/tmp/sealblock-UID`: the first one
//! whose parent exists and (except for `/tmp`) belongs to this user. It has mode 0700. In it each server has `PID.sock`
//! with mode 0600, or `PID-RANDOM.sock` if a server in another container has that name. A folder that belongs to
//! another user, or that other users can enter, is not used.
//!
//! Invariants: a socket gets its name only when it already listens and has its mode. So if a socket refuses
//! connections, its server has ended, and any process may remove it. The socket is created in a folder with a random
//! name, so that leftovers of a killed process are not in the way. That name contains the process and its start time,
//! so that leftovers of a process that has ended can be removed.

use std::ffi::OsStr;
use std::fs::{self, DirBuilder, File, Permissions};
use std::io::{self, Read};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use rustix::fs::{CWD, RenameFlags, renameat_with};

use super::folder::{SocketFolder, candidates};
use super::peer::{Peer, connect_until, start_of, user};

/// The prefix of the folders in which sockets are created.
const DRAFT: &str = ".sealblock-";
/// The minimum age of another process's leftovers before they are removed. If that process is in another container, its
/// number means nothing here.
const STALE_AFTER: Duration = Duration::from_secs(60);
/// How long to wait for the socket of a process that has ended: the kernel closes what io_uring uses only some time
/// after the end of the process. And the interval between checks.
const CLOSES_WITHIN: Duration = Duration::from_secs(1);
const LOOKS_EVERY: Duration = Duration::from_millis(20);
/// How often to try a name that another process takes or removes at the same time.
const TRIES: usize = 8;

/// The place of the control socket.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ControlSocket {
    /// There is no control socket.
    None,
    /// At this path.
    Path(PathBuf),
}

impl FromStr for ControlSocket {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> Result<ControlSocket, Self::Err> {
        Ok(if text == "none" { ControlSocket::None } else { ControlSocket::Path(text.into()) })
    }
}

/// A listening socket; dropping it removes its file.
#[derive(Debug)]
pub struct Socket {
    /// The socket.
    pub listener: UnixListener,
    path: PathBuf,
    inode: (u64, u64),
}

impl Socket {
    /// Listens in this user's folder, and removes sockets of servers that have ended.
    ///
    /// # Errors
    /// If no folder can be used, or no socket can be created in it.
    pub fn in_folder() -> io::Result<Socket> {
        let folder = candidates(user()?).next().ok_or_else(|| io::Error::other("there is no directory for it"))?;
        Socket::in_private(&folder, std::process::id())
    }

    fn in_private(path: &Path, pid: u32) -> io::Result<Socket> {
        let folder = make_private(path)?;
        for name in folder.names() {
            let path = folder.at(&name);
            // Other kinds of files refuse connections too, and must not be removed.
            let is_socket = fs::symlink_metadata(&path).is_ok_and(|about| about.file_type().is_socket());
            if is_socket && path.extension() == Some(OsStr::new("sock")) {
                remove_if_dead(&path);
            }
        }
        let mut name = format!("{pid}.sock");
        for _ in 0..TRIES {
            match make(&folder, path, &name, RenameFlags::NOREPLACE) {
                // A server in another container has the same process number.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                    name = format!("{pid}-{:08x}.sock", random()? as u32);
                }
                made => return made,
            }
        }
        Err(io::ErrorKind::AlreadyExists.into())
    }

    /// Listens at a path, even if there is a socket of a server that has ended.
    ///
    /// # Errors
    /// If something else is there, or a server listens on it.
    pub fn at(path: &Path) -> io::Result<Socket> {
        match fs::symlink_metadata(path) {
            Ok(there) if !there.file_type().is_socket() => return Err(io::Error::other("something else is there")),
            Ok(_) if !remove_once_dead(path, || listener_of(path).and_then(start_of).is_some()) => {
                return Err(io::ErrorKind::AddrInUse.into());
            }
            _ => {}
        }
        let parent = path.parent().filter(|parent| *parent != Path::new("")).unwrap_or(Path::new("."));
        let name = path.file_name().ok_or_else(|| io::Error::other("it is not a file name"))?;
        // Here the folder may be a link, because the user named it.
        let folder = SocketFolder::open(&parent.canonicalize()?)?;
        make(&folder, parent, name, RenameFlags::NOREPLACE).map_err(|error| match error.kind() {
            io::ErrorKind::AlreadyExists => io::ErrorKind::AddrInUse.into(),
            _ => error,
        })
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Creates a socket in its own folder inside this one, and renames it when it is complete.
fn make(folder: &SocketFolder, path: &Path, name: impl AsRef<OsStr> + Copy, flags: RenameFlags) -> io::Result<Socket> {
    remove_stale_drafts(folder);
    let mut result = Err(io::ErrorKind::AlreadyExists.into());
    for _ in 0..TRIES {
        let pid = std::process::id();
        let started = start_of(pid).unwrap_or(0);
        let draft = folder.at(format!("{DRAFT}{pid}-{started}-{:016x}", random()?));
        DirBuilder::new().mode(0o700).create(&draft)?;
        result = make_in(&draft.join("s"), &folder.at(name), flags);
        // A failure to remove the folder would hide the first failure.
        let _ = fs::remove_file(draft.join("s"));
        let _ = fs::remove_dir(&draft);
        // A process in another container may have taken the draft for one of a process that has ended.
        if !result.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
            break;
        }
    }
    let (listener, inode) = result?;
    // A path without a folder stays without one.
    let path = if path == Path::new(".") { PathBuf::from(name.as_ref()) } else { path.join(name.as_ref()) };
    Ok(Socket { listener, path, inode })
}

fn make_in(draft: &Path, path: &Path, flags: RenameFlags) -> io::Result<(UnixListener, (u64, u64))> {
    let listener = UnixListener::bind(draft)?;
    fs::set_permissions(draft, Permissions::from_mode(0o600))?;
    let made = fs::symlink_metadata(draft)?;
    match renameat_with(CWD, draft, CWD, path, flags) {
        // The file system does not support that flag; the name was free a moment ago.
        Err(rustix::io::Errno::INVAL) => fs::rename(draft, path)?,
        renamed => renamed?,
    }
    Ok((listener, (made.dev(), made.ino())))
}

/// Removes folders in which killed processes were creating sockets.
fn remove_stale_drafts(folder: &SocketFolder) {
    for name in folder.names() {
        let Some(of) = name.to_str().and_then(|name| name.strip_prefix(DRAFT)) else { continue };
        let path = folder.at(&name);
        let mut numbers = of.split('-').map(|part| part.parse::<u64>().ok());
        let (pid, started) =
            (numbers.next().flatten().and_then(|pid| u32::try_from(pid).ok()), numbers.next().flatten());
        let is_alive = pid.and_then(start_of).is_some_and(|start| started.is_none_or(|started| started == start));
        let is_old = fs::symlink_metadata(&path)
            .and_then(|about| about.modified())
            .is_ok_and(|modified| SystemTime::now().duration_since(modified).is_ok_and(|age| age >= STALE_AFTER));
        if !is_alive && is_old {
            let _ = fs::remove_file(path.join("s"));
            // Fails if anything else is in the folder, which then is left alone.
            let _ = fs::remove_dir(&path);
        }
    }
}

fn random() -> io::Result<u64> {
    let mut bytes = [0; 8];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(u64::from_ne_bytes(bytes))
}

impl Drop for Socket {
    fn drop(&mut self) {
        // Another process may have taken the name since then.
        let is_ours = fs::symlink_metadata(&self.path).is_ok_and(|there| (there.dev(), there.ino()) == self.inode);
        if is_ours {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Creates the folder if it does not exist, and refuses one that other users can change.
fn make_private(path: &Path) -> io::Result<SocketFolder> {
    match DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    let user = user()?;
    SocketFolder::open(path).ok().filter(|folder| folder.is_private_of(user)).ok_or_else(|| {
        io::Error::other(format!("{} is not a private directory of this user (mode 0700)", path.display()))
    })
}

/// Removes a socket that refuses connections. Returns true if nothing is left of it.
fn remove_if_dead(path: &Path) -> bool {
    match connect_until(path, Instant::now()) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => fs::remove_file(path).is_ok(),
        Err(error) => error.kind() == io::ErrorKind::NotFound,
        Ok(_) => false,
    }
}

/// The same, but waits for what a process that has ended still has open.
fn remove_once_dead(path: &Path, is_held: impl Fn() -> bool) -> bool {
    let deadline = Instant::now() + CLOSES_WITHIN;
    loop {
        if remove_if_dead(path) {
            return true;
        }
        if is_held() || Instant::now() >= deadline {
            return false;
        }
        thread::sleep(LOOKS_EVERY);
    }
}

/// The process that listens on a socket, if there is one.
pub fn listener_of(path: &Path) -> Option<u32> {
    Peer::of(connect_until(path, Instant::now()).ok()?).ok()?.pid
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    fn mode(path: &Path) -> u32 {
        fs::symlink_metadata(path).unwrap().mode() & 0o777
    }

    #[test]
    fn a_socket_is_its_users_alone_and_goes_away() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("c");
        let socket = Socket::at(&path).unwrap();
        assert_eq!((mode(&path), socket.path()), (0o600, path.as_path()));
        assert!(UnixStream::connect(&path).is_ok());
        assert_eq!(Socket::at(&path).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "no draft is left");
        drop(socket);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_socket_that_a_dead_process_still_has_open_is_waited_for_and_that_of_a_living_one_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("c");
        let listener = UnixListener::bind(&path).unwrap();
        assert!(!remove_once_dead(&path, || true) && path.exists());
        let closing = thread::spawn(move || {
            thread::sleep(Duration::from_millis(100));
            drop(listener);
        });
        assert!(remove_once_dead(&path, || false) && !path.exists());
        closing.join().unwrap();
    }

    #[test]
    fn a_dead_socket_is_replaced_and_anything_else_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("c");
        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists());
        drop(Socket::at(&path).unwrap());
        fs::write(&path, "a diary").unwrap();
        assert!(Socket::at(&path).unwrap_err().to_string().contains("something else"));
        assert_eq!(fs::read(&path).unwrap(), b"a diary");
    }

    #[test]
    fn a_name_that_somebody_else_has_taken_is_not_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("c");
        let socket = Socket::at(&path).unwrap();
        fs::remove_file(&path).unwrap();
        fs::write(&path, "another").unwrap();
        drop(socket);
        assert_eq!(fs::read(&path).unwrap(), b"another");
    }

    #[test]
    fn what_a_killed_process_of_the_same_number_has_left_is_in_nobodys_way() {
        let folder = tempfile::tempdir().unwrap();
        fs::set_permissions(folder.path(), Permissions::from_mode(0o700)).unwrap();
        let old = rustix::fs::Timespec { tv_sec: 1, tv_nsec: 0 };
        let make_old = |path: &Path| {
            let times = rustix::fs::Timestamps { last_access: old, last_modification: old };
            rustix::fs::utimensat(CWD, path, &times, rustix::fs::AtFlags::empty()).unwrap();
        };
        let own = std::process::id();
        let started = start_of(own).unwrap();
        // Leftovers of earlier versions of this program, and of a process with this number that was started at another
        // time.
        let left = [format!("{DRAFT}{own}"), format!("{DRAFT}{own}-{}-0", started + 1), format!("{DRAFT}4000000-1-0")];
        for name in &left {
            fs::create_dir(folder.path().join(name)).unwrap();
            drop(UnixListener::bind(folder.path().join(name).join("s")).unwrap());
        }
        let busy = folder.path().join(format!("{DRAFT}{own}-{started}-0"));
        fs::create_dir(&busy).unwrap();
        drop(UnixListener::bind(folder.path().join(format!("{own}.sock"))).unwrap());
        fs::write(folder.path().join("1.sock"), "a diary").unwrap();
        let socket = Socket::in_private(folder.path(), own).unwrap();
        assert_eq!(socket.path(), folder.path().join(format!("{own}.sock")), "the dead one is replaced");
        drop(socket);
        assert_eq!(fs::read(folder.path().join("1.sock")).unwrap(), b"a diary");
        assert!(folder.path().join(&left[1]).exists(), "too young to be removed");
        for path in left.iter().map(|name| folder.path().join(name)).chain([busy.clone()]) {
            make_old(&path);
        }
        drop(Socket::in_private(folder.path(), own).unwrap());
        // A draft without a start time may belong to this process.
        assert!(folder.path().join(&left[0]).exists() && busy.exists(), "a process that is there keeps its own");
        assert!(!folder.path().join(&left[1]).exists() && !folder.path().join(&left[2]).exists());
    }

    #[test]
    fn servers_of_one_number_in_several_containers_share_a_folder() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sealblock");
        let first = Socket::in_private(&path, 1).unwrap();
        let second = Socket::in_private(&path, 1).unwrap();
        assert_eq!(first.path(), path.join("1.sock"));
        assert!(second.path() != first.path() && second.path().to_str().unwrap().contains("/1-"));
        for socket in [&first, &second] {
            UnixStream::connect(socket.path()).unwrap();
        }
        drop(second);
        UnixStream::connect(first.path()).unwrap();
    }

    #[test]
    fn a_folder_that_others_can_enter_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sealblock");
        make_private(&path).unwrap();
        assert_eq!(mode(&path), 0o700);
        make_private(&path).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o755)).unwrap();
        assert!(make_private(&path).unwrap_err().to_string().contains("mode 0700"));
        let elsewhere = folder.path().join("elsewhere");
        fs::create_dir(&elsewhere).unwrap();
        fs::set_permissions(&elsewhere, Permissions::from_mode(0o700)).unwrap();
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(&elsewhere, &link).unwrap();
        assert!(make_private(&link).is_err(), "a link is somebody's idea");
    }
}
