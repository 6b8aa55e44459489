"""libnbd against a server: every option, command and flag that the packaged library has.

Arguments: the server's host and port, and of the export `protected` (blocks of 4096 bytes, 16 MiB) the number of a block that
is damaged, or - if none is. Ends with an exception at the first thing that is not as it should be.
"""

import sys
import nbd

HOST, PORT = sys.argv[1], sys.argv[2]
BLOCK, SIZE = 4096, 4096 * 4096


def handle(export, structured=True, meta=True, connect=True, flags=None):
    """A client, without any of the library's own refusals."""
    h = nbd.NBD()
    h.set_export_name(export)
    h.set_request_structured_replies(structured)
    if flags is not None:
        h.set_handshake_flags(flags)
    if meta and structured:
        h.add_meta_context(nbd.CONTEXT_BASE_ALLOCATION)
    h.set_full_info(True)
    h.set_strict_mode(0)
    if connect:
        h.connect_tcp(HOST, PORT)
    return h


def refused(errno, call, *arguments, **named):
    """The call has to fail with this errno."""
    try:
        call(*arguments, **named)
    except nbd.Error as error:
        assert error.errno == errno, f"{call.__name__}{arguments} {named}: {error.errno}, not {errno}: {error.string}"
        return
    raise AssertionError(f"{call.__name__}{arguments} {named} succeeded, and should be {errno}")


def pattern(seed, blocks=1):
    return bytearray((seed * 7 + i // 512 + i) & 0xFF for i in range(BLOCK * blocks))


def options():
    h = handle("", connect=False)
    h.set_opt_mode(True)
    h.connect_tcp(HOST, PORT)
    found = []
    assert h.opt_list(lambda name, about: found.append((name, about))) == 3
    assert [name for name, _ in found] == ["protected", "bare", "fixed"] and found[0][1] == "blocks with seals", found
    contexts = []
    h.set_export_name("bare")
    h.clear_meta_contexts()
    assert h.opt_list_meta_context(lambda name: contexts.append(name)) == 1 and contexts == ["base:allocation"], contexts
    h.add_meta_context("base:")
    assert h.opt_list_meta_context(lambda name: None) == 1
    h.clear_meta_contexts()
    h.add_meta_context("x-nobody:knows")
    assert h.opt_list_meta_context(lambda name: None) == 0
    h.clear_meta_contexts()
    h.opt_info()
    assert (h.get_size(), h.is_read_only(), h.get_canonical_export_name()) == (4096 * 512, False, "bare")
    h.set_export_name("fixed")
    h.opt_info()
    assert h.is_read_only() and h.get_size() == SIZE
    h.set_export_name("nothing")
    refused("ENOENT", h.opt_info)
    refused("ENOENT", h.opt_go)
    h.set_export_name("protected")
    if hasattr(h, "opt_set_meta_context"):
        h.add_meta_context(nbd.CONTEXT_BASE_ALLOCATION)
        assert h.opt_set_meta_context(lambda name: None) == 1
    h.add_meta_context(nbd.CONTEXT_BASE_ALLOCATION)
    h.opt_go()
    assert h.can_meta_context(nbd.CONTEXT_BASE_ALLOCATION) and h.get_export_description() == "blocks with seals"
    assert h.pread(BLOCK, 0) is not None
    h.shutdown()
    h = handle("", connect=False)
    h.set_opt_mode(True)
    h.connect_tcp(HOST, PORT)
    h.opt_abort()
    assert h.aio_is_closed() or h.aio_is_dead()
    h = handle("")
    assert h.get_canonical_export_name() == "protected", "the first is the default"
    h.shutdown()


def told(structured):
    h = handle("protected", structured)
    assert h.get_size() == SIZE and h.get_structured_replies_negotiated() == structured
    assert [h.get_block_size(i) for i in range(3)] == [1, BLOCK, 32 << 20]
    for can in (h.can_flush, h.can_fua, h.can_trim, h.can_zero, h.can_fast_zero, h.can_cache, h.can_multi_conn):
        assert can(), can.__name__
    assert h.can_df() == structured and not h.is_rotational() and h.get_protocol() == "newstyle-fixed"
    h.shutdown()


def commands(structured):
    h = handle("protected", structured)
    fua, df = nbd.CMD_FLAG_FUA, nbd.CMD_FLAG_DF if structured else 0
    h.pwrite(pattern(1, 8), 0)
    h.pwrite(pattern(2), 8 * BLOCK, fua)
    h.flush()
    assert h.pread(8 * BLOCK, 0) == pattern(1, 8) and h.pread(BLOCK, 8 * BLOCK, df) == pattern(2)
    if structured:
        chunks = []
        h.pread_structured(4 * BLOCK, 2 * BLOCK, lambda *chunk: chunks.append(chunk), df)
        assert [(at, kind) for _, at, kind, _ in chunks] == [(2 * BLOCK, nbd.READ_DATA)], "DF: one chunk"
        assert chunks[0][0] == pattern(1, 8)[2 * BLOCK : 6 * BLOCK]
        status(h)
    h.cache(8 * BLOCK, 0)
    h.zero(BLOCK, BLOCK)
    h.zero(BLOCK, 2 * BLOCK, nbd.CMD_FLAG_NO_HOLE)
    h.zero(BLOCK, 3 * BLOCK, nbd.CMD_FLAG_NO_HOLE | fua)
    assert h.pread(5 * BLOCK, 0) == pattern(1, 8)[:BLOCK] + bytes(3 * BLOCK) + pattern(1, 8)[4 * BLOCK : 5 * BLOCK]
    refused("ENOTSUP", h.zero, BLOCK, 4 * BLOCK, nbd.CMD_FLAG_FAST_ZERO | nbd.CMD_FLAG_NO_HOLE)
    assert h.pread(BLOCK, 4 * BLOCK) == pattern(1, 8)[4 * BLOCK : 5 * BLOCK], "nothing was changed"
    try:
        h.zero(BLOCK, 4 * BLOCK, nbd.CMD_FLAG_FAST_ZERO)
        assert h.pread(BLOCK, 4 * BLOCK) == bytes(BLOCK)
    except nbd.Error as error:
        assert error.errno == "ENOTSUP", error.errno
    h.trim(2 * BLOCK, 5 * BLOCK)
    h.trim(BLOCK, 7 * BLOCK, fua)
    assert h.pread(BLOCK, 8 * BLOCK) == pattern(2), "what lies behind is untouched"
    h.zero(SIZE, 0)
    assert h.pread(16 * BLOCK, 0) == bytes(16 * BLOCK)
    errors(h, structured)
    h.shutdown()


def status(h):
    def runs(length, offset, flags=0):
        found = []
        h.block_status(length, offset, lambda name, at, entries, error: found.append((name, at, entries)), flags)
        assert [name for name, _, _ in found] == ["base:allocation"] and found[0][1] == offset
        return found[0][2]

    whole = runs(SIZE, 0)
    assert len(whole) % 2 == 0 and sum(whole[::2]) >= SIZE and all(flags <= 3 for flags in whole[1::2])
    one = runs(16 * BLOCK, 4 * BLOCK, nbd.CMD_FLAG_REQ_ONE)
    assert len(one) == 2 and 0 < one[0] <= 16 * BLOCK, one
    first = runs(BLOCK, 0, nbd.CMD_FLAG_REQ_ONE)
    assert first == [BLOCK, 0], "what was just written is data"


def errors(h, structured):
    data = bytearray(BLOCK)
    for offset in (SIZE, SIZE - BLOCK, 1 << 62):
        refused("EINVAL", h.pread, 2 * BLOCK, offset)
        refused("EINVAL", h.trim, 2 * BLOCK, offset)
        refused("EINVAL", h.cache, 2 * BLOCK, offset)
        refused("ENOSPC", h.pwrite, bytearray(2 * BLOCK), offset)
        refused("ENOSPC", h.zero, 2 * BLOCK, offset)
    for offset in (0, 7, SIZE):
        assert h.pread(0, offset) == b""
        for call in (h.trim, h.zero, h.cache):
            call(0, offset)
        h.pwrite(bytearray(), offset)
    if structured:
        refused("EINVAL", h.block_status, BLOCK, SIZE, lambda *_: None)
    else:
        refused("EINVAL", h.pread, BLOCK, 0, nbd.CMD_FLAG_DF)
    h.pwrite(data, SIZE - BLOCK)
    assert h.pread(BLOCK, SIZE - BLOCK) == data, "the last block, on a connection that goes on"


def read_only():
    h = handle("fixed")
    assert h.is_read_only()
    for call in (lambda: h.pwrite(bytearray(BLOCK), 0), lambda: h.zero(BLOCK, 0), lambda: h.trim(BLOCK, 0)):
        refused("EPERM", call)
    h.flush()
    assert len(h.pread(BLOCK, 0)) == BLOCK
    h.shutdown()


def several():
    """Several connections to one export, and many requests in flight on each."""
    writer, other, reader = (handle("bare", structured) for structured in (True, False, True))
    for i in range(64):
        writer.pwrite(pattern(i), i * BLOCK)
    other.flush()
    for i in range(64):
        assert reader.pread(BLOCK, i * BLOCK) == pattern(i)
    buffers = [nbd.Buffer(BLOCK) for _ in range(64)]
    waiting = {reader.aio_pread(buffer, i * BLOCK): i for i, buffer in enumerate(buffers)}
    while waiting:
        reader.poll(-1)
        for cookie in [cookie for cookie in waiting if reader.aio_command_completed(cookie)]:
            i = waiting.pop(cookie)
            assert buffers[i].to_bytearray() == pattern(i)
    for h in (writer, other, reader):
        h.shutdown()


def defaults():
    """A client that is set to nothing, which is the library as programs use it: any offset and length."""
    h = nbd.NBD()
    h.set_export_name("protected")
    h.connect_tcp(HOST, PORT)
    assert (h.get_block_size(nbd.SIZE_MINIMUM), h.get_block_size(nbd.SIZE_PREFERRED)) == (1, BLOCK)
    assert h.pread(4, 0) == bytes(4)
    wanted = bytearray(4 * BLOCK)
    for offset, length in ((1, BLOCK), (512, BLOCK), (0, 512), (BLOCK, BLOCK + 1), (3 * BLOCK - 1, 2), (7, 3)):
        data = bytearray((offset + i) % 251 + 1 for i in range(length))
        h.pwrite(data, offset)
        wanted[offset : offset + length] = data
        assert h.pread(length, offset) == data
        assert h.pread(4 * BLOCK, 0) == wanted
        h.cache(length, offset)
    h.zero(BLOCK + 2, BLOCK - 1)
    wanted[BLOCK - 1 : 2 * BLOCK + 1] = bytes(BLOCK + 2)
    assert h.pread(4 * BLOCK, 0) == wanted
    h.trim(BLOCK + 2, 5 * BLOCK - 1)
    h.zero(16 * BLOCK, 0)
    h.shutdown()


def old_handshake():
    """A client that knows no fixed newstyle: EXPORT_NAME, and zeroes behind the answer or not."""
    for flags in (0, nbd.HANDSHAKE_FLAG_FIXED_NEWSTYLE, nbd.HANDSHAKE_FLAG_NO_ZEROES):
        h = handle("bare", structured=False, flags=flags)
        assert h.get_size() == 4096 * 512 and len(h.pread(512, 512)) == 512
        h.shutdown()


def damaged(lba):
    for structured in (True, False):
        h = handle("protected", structured)
        for block in range(lba - 2, lba + 3):
            if block == lba:
                refused("EIO", h.pread, BLOCK, block * BLOCK)
                refused("EIO", h.cache, BLOCK, block * BLOCK)
            else:
                h.pread(BLOCK, block * BLOCK)
        refused("EIO", h.pread, 4 * BLOCK, (lba - 2) * BLOCK)
        if structured:
            chunks = []
            def note(data, at, kind, error):
                chunks.append((len(data), at, kind))
            try:
                h.pread_structured(4 * BLOCK, (lba - 2) * BLOCK, note)
            except nbd.Error as error:
                assert error.errno == "EIO"
            good = (2 * BLOCK, (lba - 2) * BLOCK, nbd.READ_DATA)
            bad = (0, lba * BLOCK, nbd.READ_ERROR)
            assert chunks == [good, bad], chunks
        h.pread(BLOCK, 0)
        h.shutdown()


if sys.argv[3] == "-":
    options()
    for structured in (True, False):
        told(structured)
        commands(structured)
    read_only()
    several()
    defaults()
    old_handshake()
else:
    damaged(int(sys.argv[3]))
