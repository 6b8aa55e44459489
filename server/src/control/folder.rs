//! Folders of control sockets: where they are, and which of them a command may search.
//!
//! A folder is opened once, and then checked and used through its descriptor, so that it cannot be replaced between
//! check and use. A search queries sockets only in folders of this user and of root that no other user can change, and
//! there only processes of these two users.

use std::collections::BTreeSet;
use std::env;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use rustix::fs::{Mode, OFlags};

use super::peer::{Peer, connect_until, user, user_text};

/// The maximum number of sockets in a folder that are queried.
pub const MAX_SOCKETS: usize = 64;
/// The maximum number of entries in a folder that are examined.
const MAX_ENTRIES: usize = 4096;
/// The extension of a socket's name.
const SUFFIX: &str = "sock";
/// The folder of a service.
const SERVICE: &str = "/run/sealblock";

/// An open folder.
#[derive(Debug)]
pub struct SocketFolder {
    path: PathBuf,
    file: File,
    owner: u32,
    mode: u32,
}

/// A socket in a folder, or one that the user named.
#[derive(Clone, Debug)]
pub struct FoundSocket {
    /// Its path, for messages.
    pub path: PathBuf,
    folder: Option<Arc<SocketFolder>>,
}

impl SocketFolder {
    /// Opens a folder; a symbolic link is not followed.
    ///
    /// # Errors
    /// If it cannot be opened.
    pub fn open(path: &Path) -> io::Result<SocketFolder> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = File::from(rustix::fs::open(path, flags, Mode::empty())?);
        let about = file.metadata()?;
        Ok(SocketFolder { path: path.to_owned(), file, owner: about.uid(), mode: about.mode() })
    }

    /// True if only its owner can create entries in it.
    fn is_owners_alone(&self) -> bool {
        self.mode & 0o022 == 0
    }

    /// True if only this user can enter it.
    pub fn is_private_of(&self, user: u32) -> bool {
        self.owner == user && self.mode & 0o077 == 0
    }

    /// True if its content was put there by this user or by root.
    fn is_trusted(&self, user: u32) -> bool {
        self.is_owners_alone() && (self.owner == user || self.owner == 0)
    }

    /// A path in it that leads through its descriptor, even if the folder was renamed; if that is not possible, a path
    /// through its name.
    pub fn at(&self, name: impl AsRef<OsStr>) -> PathBuf {
        let through = PathBuf::from(format!("/proc/self/fd/{}", self.file.as_raw_fd()));
        let folder = if through.exists() { through } else { self.path.clone() };
        folder.join(name.as_ref())
    }

    /// The names of its entries, in order.
    pub fn names(&self) -> Vec<OsString> {
        let entries = fs::read_dir(self.at("")).into_iter().flatten().take(MAX_ENTRIES).filter_map(Result::ok);
        let names: BTreeSet<OsString> = entries.map(|entry| entry.file_name()).collect();
        names.into_iter().collect()
    }

    /// The sockets in it. Anything else is left out: a FIFO, for instance, would block its reader.
    fn sockets(self: &Arc<Self>) -> Vec<FoundSocket> {
        let is_socket = |name: &OsString| {
            Path::new(name).extension() == Some(OsStr::new(SUFFIX))
                && fs::symlink_metadata(self.at(name)).is_ok_and(|about| about.file_type().is_socket())
        };
        let names = self.names().into_iter().filter(is_socket);
        names.map(|name| FoundSocket { path: self.path.join(name), folder: Some(Arc::clone(self)) }).collect()
    }
}

impl FoundSocket {
    /// A socket that the user named: it is queried whatever process listens there.
    pub fn named(path: &Path) -> FoundSocket {
        FoundSocket { path: path.to_owned(), folder: None }
    }

    /// Connects. If the user did not name the socket, its process must belong to root or this user, and to the folder's
    /// owner.
    ///
    /// # Errors
    /// If it cannot connect; the error has the reason.
    pub fn connect(&self, deadline: Instant) -> io::Result<(UnixStream, Peer)> {
        let Some((folder, name)) = self.folder.as_ref().zip(self.path.file_name()) else {
            let stream = connect_until(&self.path, deadline)?;
            let peer = Peer::of(&stream)?;
            return Ok((stream, peer));
        };
        let stream = connect_until(&folder.at(name), deadline)?;
        let peer = Peer::of(&stream)?;
        if peer.uid != folder.owner || !peer.is_trusted() {
            let why = format!("{} listens in a directory of {}", peer.user_text(), user_text(folder.owner));
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
        }
        Ok((stream, peer))
    }
}

/// The sockets that a search queries: those of this user's servers and of root's, some of which may have ended.
pub fn trusted() -> Vec<FoundSocket> {
    let Ok(user) = user() else { return Vec::new() };
    let mut paths: Vec<PathBuf> = candidates(user).collect();
    paths.push(PathBuf::from(SERVICE));
    paths.dedup();
    let folders = paths.iter().filter_map(|path| SocketFolder::open(path).ok());
    folders.filter(|folder| folder.is_trusted(user)).flat_map(|folder| Arc::new(folder).sockets()).collect()
}

/// Sockets of other users, with the owner of each folder. They are not queried; only root, who can reach all of them,
/// gets their names. At most `limit` of them.
pub fn foreign(limit: usize) -> Vec<(PathBuf, u32)> {
    if user().ok() != Some(0) {
        return Vec::new();
    }
    let entries = |folder: &str| {
        let entries = fs::read_dir(folder).into_iter().flatten().take(MAX_ENTRIES).filter_map(Result::ok);
        entries.map(|entry| entry.path()).collect::<Vec<_>>()
    };
    let named = |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("sealblock-"));
    let users = entries("/run/user").into_iter().map(|user| user.join("sealblock"));
    // The folder that a service manager gives to a service with its own user may be a link, which only root can create
    // there.
    let service = fs::canonicalize(SERVICE).ok();
    let paths = users.chain(entries("/tmp").into_iter().filter(named)).chain(service);
    let folders = paths.filter_map(|path| SocketFolder::open(&path).ok()).filter(|folder| folder.owner != 0);
    let sockets = folders.flat_map(|folder| {
        let owner = folder.owner;
        Arc::new(folder).sockets().into_iter().take(limit).map(move |socket| (socket.path, owner))
    });
    sockets.take(limit).collect()
}

/// Folders that may be used, the preferred one first, whether or not they exist.
pub fn candidates(user: u32) -> impl Iterator<Item = PathBuf> {
    let from_environment = env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|path| path.is_absolute());
    let usual = PathBuf::from(format!("/run/user/{user}"));
    let is_own = move |path: &PathBuf| fs::metadata(path).is_ok_and(|there| there.is_dir() && there.uid() == user);
    let own = from_environment.into_iter().chain([usual]).filter(is_own).map(|path| path.join("sealblock"));
    own.chain([PathBuf::from(format!("/tmp/sealblock-{user}"))])
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::Permissions;
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::os::unix::net::UnixListener;

    fn names_of(folder: &Path) -> Vec<PathBuf> {
        let open = SocketFolder::open(folder).ok().filter(|folder| folder.is_trusted(user().unwrap()));
        open.map_or_else(Vec::new, |folder| Arc::new(folder).sockets()).into_iter().map(|found| found.path).collect()
    }

    #[test]
    fn sockets_are_looked_for_where_only_one_user_can_make_them() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("1.sock");
        let _listener = UnixListener::bind(&socket).unwrap();
        fs::write(folder.path().join("diary"), "").unwrap();
        fs::write(folder.path().join("2.sock"), "a file").unwrap();
        symlink("1.sock", folder.path().join("3.sock")).unwrap();
        assert!(std::process::Command::new("mkfifo").arg(folder.path().join("4.sock")).status().unwrap().success());
        for (mode, is_asked) in [(0o700, true), (0o755, true), (0o770, false), (0o777, false), (0o1777, false)] {
            fs::set_permissions(folder.path(), Permissions::from_mode(mode)).unwrap();
            let wanted: Vec<PathBuf> = is_asked.then(|| socket.clone()).into_iter().collect();
            assert_eq!(names_of(folder.path()), wanted, "{mode:o}");
        }
        fs::set_permissions(folder.path(), Permissions::from_mode(0o700)).unwrap();
        let elsewhere = tempfile::tempdir().unwrap();
        let link = elsewhere.path().join("link");
        symlink(folder.path(), &link).unwrap();
        assert_eq!(names_of(&link), [] as [PathBuf; 0], "a link is somebody's idea");
    }

    #[test]
    fn a_folder_that_was_exchanged_after_its_check_is_not_used() {
        let place = tempfile::tempdir().unwrap();
        let (checked, moved) = (place.path().join("folder"), place.path().join("moved"));
        fs::create_dir(&checked).unwrap();
        let _good = UnixListener::bind(checked.join("1.sock")).unwrap();
        let [found] = &Arc::new(SocketFolder::open(&checked).unwrap()).sockets()[..] else { panic!("one socket") };
        fs::rename(&checked, &moved).unwrap();
        fs::create_dir(&checked).unwrap();
        let other = UnixListener::bind(checked.join("1.sock")).unwrap();
        other.set_nonblocking(true).unwrap();
        found.connect(Instant::now()).unwrap();
        assert_eq!(other.accept().unwrap_err().kind(), io::ErrorKind::WouldBlock, "nobody asked the other one");
    }

    #[test]
    fn a_process_of_another_user_than_the_folders_is_not_asked() {
        let folder = tempfile::tempdir().unwrap();
        let _listener = UnixListener::bind(folder.path().join("1.sock")).unwrap();
        let open = SocketFolder { owner: 4_000_000_000, ..SocketFolder::open(folder.path()).unwrap() };
        let [found] = &Arc::new(open).sockets()[..] else { panic!("one socket") };
        let error = found.connect(Instant::now()).unwrap_err();
        assert!(error.to_string().contains("in a directory of user 4000000000"), "{error}");
        let named = FoundSocket::named(&folder.path().join("1.sock"));
        assert_eq!(named.connect(Instant::now()).unwrap().1.uid, user().unwrap(), "one that was named is asked");
    }
}
