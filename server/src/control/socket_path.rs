//! Paths of control sockets: one rule for servers, which create them, and commands, which find them.
//!
//! The folder is `$XDG_RUNTIME_DIR/sealblock`, or `/run/user/UID/sealblock`, or `/tmp/sealblock-UID`: the first whose parent is
//! there and, but for `/tmp`, belongs to this user. It has mode 0700. In it each server has `PID.sock` with mode 0600. A folder
//! of another user, or that other users can enter, is not used.
//!
//! Invariants: a socket gets its name when it listens already and has its mode, so one that refuses connections is that of a
//! server which is gone, and any process may remove it.

use std::env;
use std::ffi::OsStr;
use std::fs::{self, DirBuilder, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// Where the control socket is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ControlSocket {
    /// Nowhere: there is none.
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
    /// Listens in this user's folder, and removes sockets of servers that are gone.
    ///
    /// # Errors
    /// When there is no folder that can be used, or no socket can be made in it.
    pub fn in_folder() -> io::Result<Socket> {
        let folder = candidates(user()?).next().ok_or_else(|| other("there is no folder for it"))?;
        make_private(&folder)?;
        for path in sockets_in(&folder) {
            remove_if_dead(&path);
        }
        let path = folder.join(format!("{}.sock", std::process::id()));
        // A socket with this process number is stale.
        let _ = fs::remove_file(&path);
        Socket::make(&path)
    }

    /// Listens at a path, where a socket of a server that is gone may be.
    ///
    /// # Errors
    /// When something else is there, or a server listens on it.
    pub fn at(path: &Path) -> io::Result<Socket> {
        match fs::symlink_metadata(path) {
            Ok(there) if !there.file_type().is_socket() => return Err(other("something else is there")),
            Ok(_) if !remove_if_dead(path) => return Err(io::ErrorKind::AddrInUse.into()),
            _ => {}
        }
        Socket::make(path)
    }

    /// Creates it in a private folder, and renames it when it is complete.
    fn make(path: &Path) -> io::Result<Socket> {
        let parent = path.parent().filter(|parent| *parent != Path::new("")).unwrap_or(Path::new("."));
        let draft = parent.join(format!(".sealblock-{}", std::process::id()));
        DirBuilder::new().mode(0o700).create(&draft)?;
        let made = make_in(&draft.join("s"), path);
        // A failure to remove the folder would hide the first failure.
        let _ = fs::remove_file(draft.join("s"));
        let _ = fs::remove_dir(&draft);
        made
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

fn make_in(draft: &Path, path: &Path) -> io::Result<Socket> {
    let listener = UnixListener::bind(draft)?;
    fs::set_permissions(draft, Permissions::from_mode(0o600))?;
    let made = fs::symlink_metadata(draft)?;
    fs::rename(draft, path)?;
    Ok(Socket { listener, path: path.to_owned(), inode: (made.dev(), made.ino()) })
}

impl Drop for Socket {
    fn drop(&mut self) {
        // Another process may have taken the name since.
        let is_ours = fs::symlink_metadata(&self.path).is_ok_and(|there| (there.dev(), there.ino()) == self.inode);
        if is_ours {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// A control socket of a server.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FoundSocket {
    /// Where it is.
    pub path: PathBuf,
    /// The user that the server has to run as, if another one: no other user could have created the socket.
    pub owner: Option<u32>,
}

/// The sockets of servers of other users and of services, some of which may be gone: nothing but for root, who alone can reach
/// them all.
pub fn others() -> Vec<FoundSocket> {
    if user().ok() != Some(0) {
        return Vec::new();
    }
    let own = own();
    let in_folder =
        |folder: &str| fs::read_dir(folder).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()));
    let named = |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("sealblock-"));
    let users = in_folder("/run/user").map(|user| user.join("sealblock"));
    // What a service manager gives to a service of a user of its own may be a link, which root alone can make there.
    let services = fs::canonicalize("/run/sealblock").ok();
    let folders = users.chain(in_folder("/tmp").filter(named)).chain(services);
    folders
        .flat_map(|folder| sockets_of_owner(&folder))
        .filter(|found| own.iter().all(|own| own.path != found.path))
        .collect()
}

/// The sockets in a folder that only its owner can change.
fn sockets_of_owner(folder: &Path) -> Vec<FoundSocket> {
    let Ok(there) = fs::symlink_metadata(folder) else { return Vec::new() };
    if !there.is_dir() || there.mode() & 0o022 != 0 {
        return Vec::new();
    }
    sockets_in(folder).into_iter().map(|path| FoundSocket { path, owner: Some(there.uid()) }).collect()
}

/// The sockets of this user's servers, some of which may be gone.
pub fn own() -> Vec<FoundSocket> {
    let Ok(user) = user() else { return Vec::new() };
    let folders = candidates(user).filter(|folder| is_private(folder, user));
    folders.flat_map(|folder| sockets_in(&folder)).map(|path| FoundSocket { path, owner: None }).collect()
}

/// The sockets of all servers that this user may query.
pub fn all() -> Vec<FoundSocket> {
    [own(), others()].concat()
}

fn sockets_in(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()));
    let mut paths: Vec<_> = entries.filter(|path| path.extension() == Some(OsStr::new("sock"))).collect();
    paths.sort();
    paths
}

/// Folders that may be used, best first, whether or not they are there.
fn candidates(user: u32) -> impl Iterator<Item = PathBuf> {
    let from_environment = env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|path| path.is_absolute());
    let usual = PathBuf::from(format!("/run/user/{user}"));
    let is_own = move |path: &PathBuf| fs::metadata(path).is_ok_and(|there| there.is_dir() && there.uid() == user);
    let own = from_environment.into_iter().chain([usual]).filter(is_own).map(|path| path.join("sealblock"));
    own.chain([PathBuf::from(format!("/tmp/sealblock-{user}"))])
}

/// Creates the folder if it does not exist, and refuses one that other users can change.
fn make_private(folder: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(0o700).create(folder) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    if is_private(folder, user()?) {
        return Ok(());
    }
    Err(other(&format!("{} is not a folder of this user alone (mode 0700)", folder.display())))
}

fn is_private(folder: &Path, user: u32) -> bool {
    let is_private = |there: fs::Metadata| there.is_dir() && there.uid() == user && there.mode() & 0o077 == 0;
    fs::symlink_metadata(folder).is_ok_and(is_private)
}

/// Removes a socket that refuses connections. Whether nothing is left of it.
fn remove_if_dead(path: &Path) -> bool {
    match UnixStream::connect(path) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => fs::remove_file(path).is_ok(),
        Err(error) => error.kind() == io::ErrorKind::NotFound,
        Ok(_) => false,
    }
}

/// The process that listens on a socket, if there is one.
pub fn listener_of(path: &Path) -> Option<u32> {
    let peer = rustix::net::sockopt::socket_peercred(&UnixStream::connect(path).ok()?).ok()?;
    u32::try_from(peer.pid.as_raw_nonzero().get()).ok()
}

/// This process' effective user: the owner of its own entry.
pub fn user() -> io::Result<u32> {
    Ok(fs::metadata("/proc/self")?.uid())
}

fn other(why: &str) -> io::Error {
    io::Error::other(why.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn sockets_are_looked_for_where_only_one_user_can_make_them() {
        let folder = tempfile::tempdir().unwrap();
        let socket = Socket::at(&folder.path().join("1.sock")).unwrap();
        fs::write(folder.path().join("diary"), "").unwrap();
        let found = [FoundSocket { path: socket.path().to_owned(), owner: user().ok() }];
        for (mode, found) in [(0o700, &found[..]), (0o755, &found[..]), (0o770, &[]), (0o777, &[])] {
            fs::set_permissions(folder.path(), Permissions::from_mode(mode)).unwrap();
            assert_eq!(sockets_of_owner(folder.path()), found, "{mode:o}");
        }
        let elsewhere = tempfile::tempdir().unwrap();
        let link = elsewhere.path().join("link");
        std::os::unix::fs::symlink(folder.path(), &link).unwrap();
        assert_eq!(sockets_of_owner(&link), [], "a link is somebody's idea");
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
