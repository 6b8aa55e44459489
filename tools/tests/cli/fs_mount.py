# Uses the commands of a mount by ioctl(2), as filesystem/btrfs-fuse/README.md describes them.
import errno
import fcntl
import os
import struct
import sys
import time

SYNC, CLONE = 0xB700, 0x4020B701
WRITE_ZEROES = 0x4010B705
CREATE, DELETE, SNAPSHOT = 0xC108B702, 0x4108B703, 0xC118B704
GET_FLAGS, SET_FLAGS, TRIM = 0x80086601, 0x40086602, 0xC0185879
NO_COW, APPEND, IMMUTABLE = 0x00800000, 0x20, 0x10

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

# Written zeroes are for files without checksums, and within the file.
with open("nocow", "r+b") as file:
    os.fsync(file.fileno())
    fcntl.ioctl(file.fileno(), WRITE_ZEROES, struct.pack("=2Q", 5000, 50000))
    fails(errno.EINVAL, fcntl.ioctl, file.fileno(), WRITE_ZEROES, struct.pack("=2Q", 5000, 95001))
    fails(errno.EINVAL, fcntl.ioctl, file.fileno(), WRITE_ZEROES, struct.pack("=2Q", 1 << 63, 1 << 63))
    fails(errno.EINVAL, fcntl.ioctl, file.fileno(), WRITE_ZEROES, struct.pack("=2Q", 0, 0))
fails(errno.EOPNOTSUPP, fcntl.ioctl, target, WRITE_ZEROES, struct.pack("=2Q", 0, 4096))
fails(errno.EISDIR, fcntl.ioctl, top, WRITE_ZEROES, struct.pack("=2Q", 0, 4096))
comes(lambda: open("nocow", "rb").read() == b"z" * 5000 + bytes(50000) + b"z" * 45000)

# A snapshot has what was written before it, also what only the kernel had.
late = os.open("late", os.O_RDWR | os.O_CREAT)
os.write(late, b"before")
fcntl.ioctl(top, SNAPSHOT, named(b"whole", os.stat(".").st_ino, 1))
comes(lambda: os.path.exists("whole/late"))
assert open("whole/late", "rb").read() == b"before"
fcntl.ioctl(top, DELETE, named(b"whole"))
comes(lambda: not os.path.exists("whole"))
# Also what is on its way when the command begins.
large = os.urandom(20 << 20)
for number in range(5):
    os.pwrite(late, large, 4096 * number)
    fcntl.ioctl(top, SNAPSHOT, named(b"whole", os.stat(".").st_ino, 1))
    comes(lambda: os.path.exists("whole/late"))
    assert open("whole/late", "rb").read()[4096 * number :] == large
    fcntl.ioctl(top, DELETE, named(b"whole"))
    comes(lambda: not os.path.exists("whole"))
os.close(late)

# What may be written to a file is decided when it is opened, and then it is written.
log = os.open("log", os.O_RDWR | os.O_CREAT)
os.write(log, b"one")
fcntl.ioctl(log, SET_FLAGS, struct.pack("=Q", APPEND))
os.pwrite(log, b"ONE", 0)
os.fsync(log)
with open("log", "ab") as file:
    file.write(b"two")
    file.flush()
    os.fsync(file.fileno())
assert open("log", "rb").read() == b"ONEtwo"
fails(errno.EPERM, os.open, "log", os.O_WRONLY)
fails(errno.EPERM, os.open, "log", os.O_WRONLY | os.O_APPEND | os.O_TRUNC)
fails(errno.EPERM, os.truncate, "log", 0)
fcntl.ioctl(log, SET_FLAGS, struct.pack("=Q", IMMUTABLE))
fails(errno.EPERM, os.open, "log", os.O_RDWR | os.O_APPEND)
os.close(log)
log = os.open("log", os.O_RDONLY)
fcntl.ioctl(log, SET_FLAGS, struct.pack("=Q", 0))
os.close(log)
os.remove("log")
os.remove("late")

# A subvolume stays while a file of it is open.
held = os.open("other/held", os.O_RDWR | os.O_CREAT)
os.write(held, b"x" * 5000)
fails(errno.EBUSY, fcntl.ioctl, top, DELETE, named(b"other"))
os.remove("other/file")
os.remove("other/held")
fails(errno.EBUSY, os.rmdir, "other")
os.fsync(held)
os.close(held)


def is_removed(name):
    # The kernel tells a moment later that a file was closed.
    try:
        os.rmdir(name)
    except OSError as failed:
        assert failed.errno == errno.EBUSY, failed
        return False
    return True


comes(lambda: is_removed("other"))
# Who only reads does not keep it, and can go on.
reading = open("sub/file", "rb", buffering=0)
fcntl.ioctl(top, DELETE, named(b"sub"))
assert reading.read() == b"x" * 10000
reading.close()
fails(errno.ENOENT, fcntl.ioctl, top, DELETE, named(b"sub"))
(empty,) = struct.unpack_from("=Q", fcntl.ioctl(top, CREATE, named(b"empty")))
trimmed = struct.unpack("=3Q", fcntl.ioctl(top, TRIM, struct.pack("=3Q", 0, 2**64 - 1, 0)))
assert trimmed[1] > 0
comes(lambda: sorted(os.listdir(".")) == ["clone", "copy", "empty", "nocow", "snapshot"])
