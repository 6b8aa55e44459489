# Uses the commands of a mount by ioctl(2), as filesystem/btrfs-fuse/README.md describes them.
import errno
import fcntl
import os
import struct
import sys
import time

SYNC, CLONE = 0xB700, 0x4020B701
CREATE, DELETE, SNAPSHOT = 0xC108B702, 0x4108B703, 0xC118B704
GET_FLAGS, SET_FLAGS, TRIM = 0x80086601, 0x40086602, 0xC0185879
NO_COW = 0x00800000

os.chdir(sys.argv[1])
top = os.open(".", os.O_RDONLY)


def named(name, *rest):
    return struct.pack("=Q256s", 0, name) + struct.pack("=%dQ" % len(rest), *rest)


def fails(error, call, *arguments):
    try:
        call(*arguments)
    except OSError as failed:
        assert failed.errno == error, failed
        return
    raise AssertionError("it did not fail")


def comes(condition):
    # The kernel drops what it had in its caches a moment after a command.
    deadline = time.time() + 20
    while not condition():
        assert time.time() < deadline, os.listdir(".")
        time.sleep(0.01)


assert not os.path.exists("sub")
(first,) = struct.unpack_from("=Q", fcntl.ioctl(top, CREATE, named(b"sub")))
fails(errno.EEXIST, fcntl.ioctl, top, CREATE, named(b"sub"))
comes(lambda: os.path.isdir("sub"))
with open("sub/file", "wb") as file:
    file.write(b"x" * 10000)
    file.flush()
    os.fsync(file.fileno())
source = os.stat("sub").st_ino
(second,) = struct.unpack_from("=Q", fcntl.ioctl(top, SNAPSHOT, named(b"snapshot", source, 1)))
assert second == first + 1
fcntl.ioctl(top, SNAPSHOT, named(b"other", source, 0))
with open("other/file", "ab") as file:
    file.write(b"y")
assert len(open("sub/file", "rb").read()) == 10000
assert open("snapshot/file", "rb").read() == b"x" * 10000
fails(errno.EROFS, open, "snapshot/file", "ab")
fails(errno.EROFS, os.mkdir, "snapshot/directory")
fails(errno.EXDEV, os.link, "sub/file", "link")
fails(errno.EXDEV, os.rename, "sub/file", "file")
fails(errno.ENOTEMPTY, os.rmdir, "other")
fails(errno.EINVAL, fcntl.ioctl, top, SNAPSHOT, named(b"more", os.stat("sub/file").st_ino, 0))
fails(errno.ENOTTY, fcntl.ioctl, top, 0xB7FF)

with open("clone", "w+b") as file:
    file.truncate(10000)
    os.fsync(file.fileno())
    fcntl.ioctl(file.fileno(), CLONE, struct.pack("=4Q", os.stat("sub/file").st_ino, 0, 0, 0))
    fails(errno.EINVAL, fcntl.ioctl, file.fileno(), CLONE,
          struct.pack("=4Q", os.stat("sub/file").st_ino, 0, 0, 4096))
fcntl.ioctl(top, SYNC)

with open("nocow", "wb") as file:
    fcntl.ioctl(file.fileno(), SET_FLAGS, struct.pack("=Q", NO_COW))
    (flags,) = struct.unpack("=Q", fcntl.ioctl(file.fileno(), GET_FLAGS, bytes(8)))
    assert flags == NO_COW, flags
    file.write(b"z" * 100000)
    file.flush()
    # Between files with and without checksums, bytes are copied.
    target = os.open("copy", os.O_RDWR | os.O_CREAT)
    reading = os.open("nocow", os.O_RDONLY)
    copied = 0
    while copied < 100000:
        copied += os.copy_file_range(reading, target, 100000 - copied, copied, copied)
assert open("copy", "rb").read() == b"z" * 100000

os.remove("other/file")
os.rmdir("other")
fcntl.ioctl(top, DELETE, named(b"sub"))
fails(errno.ENOENT, fcntl.ioctl, top, DELETE, named(b"sub"))
(empty,) = struct.unpack_from("=Q", fcntl.ioctl(top, CREATE, named(b"empty")))
trimmed = struct.unpack("=3Q", fcntl.ioctl(top, TRIM, struct.pack("=3Q", 0, 2**64 - 1, 0)))
assert trimmed[1] > 0
comes(lambda: sorted(os.listdir(".")) == ["clone", "copy", "empty", "nocow", "snapshot"])
