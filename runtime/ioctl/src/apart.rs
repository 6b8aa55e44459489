//! Waiting for a filesystem that this process serves itself (FUSE).
//!
//! A thread that waits until the kernel has written pages cannot be killed. If the process that answers is killed
//! meanwhile, the kernel ends the connection, and with it the waiting, when the last descriptor of the connection is
//! closed; but a thread that waits keeps all descriptors of its process open. So such a thread needs descriptors of its
//! own, without that one: else both wait for ever.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::path::Path;
use std::sync::mpsc;
use std::thread;

/// The handle of an inode of FUSE: its number, whose high half comes first, and its generation
/// (`fs/fuse/inode.c`: 12 bytes of type 0x81).
const FUSE_HANDLE_TYPE: i32 = 0x81;
const FUSE_HANDLE_WORDS: usize = 3;

/// `struct file_handle` with a handle of FUSE (`open_by_handle_at(2)`).
#[repr(C)]
struct Handle {
    bytes: u32,
    kind: i32,
    words: [u32; FUSE_HANDLE_WORDS],
}

/// Runs work on a thread that has copies of the descriptors of this process, without those of this device file, and
/// waits until it tells its result; what it does then, nobody waits for. What the thread closes or opens is closed or
/// opened for it alone, so the work must own no descriptors when it begins, and tell none: numbers and paths can be moved.
///
/// # Errors
/// If there is no thread, it cannot have descriptors of its own, or it ends without a result.
pub fn run_apart<T: Send + 'static>(without: &Path, work: impl FnOnce(&dyn Fn(T)) + Send + 'static) -> io::Result<T> {
    let ((tell, told), without) = (mpsc::channel(), without.to_owned());
    let run = move || {
        // Whoever waits may be gone.
        let say = |result| drop(tell.send(result));
        match leave(&without) {
            Ok(()) => work(&|result| say(Ok(result))),
            Err(error) => say(Err(error)),
        }
    };
    thread::Builder::new().name("apart".to_owned()).spawn(run)?;
    told.recv().map_err(|_| io::Error::other("the thread ended without a result"))?
}

/// Gives this thread its own descriptors, without those of a device file.
fn leave(device: &Path) -> io::Result<()> {
    // SAFETY: only the table of descriptors of this thread becomes a copy. Numbers mean the same in it, and stay open in
    // the table of the other threads, whose objects own them.
    if unsafe { libc::unshare(libc::CLONE_FILES) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let of_device = |fd: &RawFd| fs::read_link(format!("/proc/thread-self/fd/{fd}")).is_ok_and(|path| path == device);
    let names = fs::read_dir("/proc/thread-self/fd")?.flatten().map(|entry| entry.file_name());
    let all: Vec<RawFd> = names.filter_map(|name| name.to_str()?.parse().ok()).collect();
    for fd in all.into_iter().filter(of_device) {
        // SAFETY: it belongs to no object of this thread, and the objects of other threads have another table.
        drop(unsafe { OwnedFd::from_raw_fd(fd) });
    }
    Ok(())
}

/// True if this process may use [`open_fuse_inode`]. Needs CAP_DAC_READ_SEARCH, which root need not have in a container.
pub fn can_open_fuse_inodes() -> bool {
    // The right is checked before the handle, which means nothing there.
    let refused = |root: File| open_fuse_inode(root.as_fd(), 0).err().and_then(|error| error.raw_os_error());
    File::open("/").is_ok_and(|root| refused(root) != Some(libc::EPERM))
}

/// Opens an inode of a mount of FUSE for reading, by its number for the kernel and generation 0. `mount` is any file of the
/// mount. Needs CAP_DAC_READ_SEARCH.
///
/// # Errors
/// ESTALE if the kernel does not know the inode; otherwise why it cannot be opened.
pub fn open_fuse_inode(mount: BorrowedFd<'_>, number: u64) -> io::Result<File> {
    let words = [(number >> 32) as u32, number as u32, 0];
    let mut handle = Handle { bytes: size_of_val(&words) as u32, kind: FUSE_HANDLE_TYPE, words };
    // SAFETY: the kernel reads `bytes` bytes behind the head of the structure, which are there, and keeps no address.
    let fd = unsafe {
        libc::open_by_handle_at(mount.as_raw_fd(), (&raw mut handle).cast(), libc::O_RDONLY | libc::O_CLOEXEC)
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: it was just opened, and nothing else owns it.
    Ok(File::from(unsafe { OwnedFd::from_raw_fd(fd) }))
}

/// Writes the pages of a file, and waits for those that are on their way. Takes no lock of the file, which may be held by a
/// program whose request waits for this.
///
/// # Errors
/// If they cannot be written.
pub fn write_pages(file: &File) -> io::Result<()> {
    let flags = libc::SYNC_FILE_RANGE_WAIT_BEFORE | libc::SYNC_FILE_RANGE_WRITE | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    // SAFETY: no address is passed. 0 bytes stand for all to the end.
    match unsafe { libc::sync_file_range(file.as_raw_fd(), 0, 0, flags) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};

    #[test]
    fn descriptors_are_left_by_the_thread_alone() {
        let mut zero = File::open("/dev/zero").unwrap();
        let full = File::open("/dev/full").unwrap();
        let numbers = [zero.as_raw_fd(), full.as_raw_fd()];
        let paths = run_apart(Path::new("/dev/zero"), move |tell| {
            tell(numbers.map(|fd| fs::read_link(format!("/proc/thread-self/fd/{fd}")).ok()));
        });
        let [of_zero, of_full] = paths.unwrap();
        assert!(
            of_zero.as_deref() != Some(Path::new("/dev/zero")) && of_full.as_deref() == Some(Path::new("/dev/full"))
        );
        // Here it is open.
        zero.read_exact(&mut [1]).unwrap();
    }

    #[test]
    fn a_thread_without_a_result_is_an_error() {
        assert!(run_apart::<()>(Path::new("/dev/zero"), |_| ()).is_err());
    }

    #[test]
    fn pages_of_a_file_are_written_and_a_device_has_none() {
        let file = tempfile::tempfile().unwrap();
        (&file).write_all(&[1; 10_000]).unwrap();
        write_pages(&file).unwrap();
        assert!(write_pages(&File::open("/dev/zero").unwrap()).is_err());
    }

    #[test]
    fn an_inode_of_another_filesystem_is_refused() {
        let mount = File::open("/proc").unwrap();
        assert!(open_fuse_inode(mount.as_fd(), 1).is_err());
    }
}
