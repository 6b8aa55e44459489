#!/usr/bin/env python3
"""Writes guards.txt and combine.txt: guards as foreign implementations compute them.

    python3 -m venv /tmp/vectors && /tmp/vectors/bin/pip install -r requirements.txt
    /tmp/vectors/bin/python make.py

Each CRC comes from two packages that share no code; the script stops if they differ. The script itself only makes inputs.
"""

import pathlib

import awscrt.checksums
import crc32c
import crcmod
import dpkt
import fastcrc

HERE = pathlib.Path(__file__).resolve().parent
MASK = (1 << 64) - 1

# The parameters of crcmod: polynomial with its highest term, initial value XOR final XOR, reflected, final XOR.
CRCMOD_16 = crcmod.mkCrcFun(0x18BB7, initCrc=0, rev=False, xorOut=0)
CRCMOD_64 = crcmod.mkCrcFun(0x1AD93D23594C93659, initCrc=0, rev=True, xorOut=MASK)

GUARDS = {
    "crc16": (4, [fastcrc.crc16.t10_dif, CRCMOD_16]),
    "crc32c": (8, [crc32c.crc32c, awscrt.checksums.crc32c]),
    "crc64": (16, [awscrt.checksums.crc64nvme, CRCMOD_64]),
    # dpkt gives the RFC 1071 value over words in network byte order, inverted.
    "ip": (4, [dpkt.in_cksum]),
}


def noise(seed, length):
    """The top byte of each step of xorshift64* from an odd seed; README.md defines it."""
    state, out = seed | 1, bytearray()
    for _ in range(length):
        state ^= state >> 12
        state ^= state << 25 & MASK
        state ^= state >> 27
        out.append((state * 0x2545F4914F6CDD1D & MASK) >> 56)
    return bytes(out)


def inputs():
    yield "text:123456789", b"123456789"
    yield "text:a", b"a"
    for length in (512, 4096, 65536):
        yield f"byte:00*{length}", bytes(length)
        yield f"byte:ff*{length}", b"\xff" * length
        yield f"up*{length}", bytes(i & 255 for i in range(length))
        yield f"down*{length}", bytes(~i & 255 for i in range(length))
    lengths = [0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513, 520, 528]
    lengths += [1000, 4095, 4096, 4097, 4104, 4112, 65535, 65536, 65537]
    for seed, length in enumerate(lengths, start=1):
        yield f"noise:{seed}*{length}", noise(seed, length)


def guard(kind, data):
    digits, functions = GUARDS[kind]
    values = {function(data) for function in functions}
    assert len(values) == 1, f"{kind} of {len(data)} bytes: implementations differ: {values}"
    return f"{values.pop():0{digits}x}"


def write(name, head, lines):
    (HERE / name).write_text("\n".join([f"# {head}", "# Written by make.py; see README.md.", *lines]) + "\n")


def main():
    guards = [f"{kind} {name} {guard(kind, data)}" for name, data in inputs() for kind in GUARDS]
    write("guards.txt", "kind input guard", guards)

    combined = []
    foreign = {"crc32c": awscrt.checksums.combine_crc32c, "crc64": awscrt.checksums.combine_crc64nvme}
    for seed, (first, second) in enumerate([(1, 1), (512, 16), (4096, 16), (4096, 4096), (100, 65536), (65536, 3)], 1):
        one, two = noise(seed, first), noise(seed + 100, second)
        for kind, combine in foreign.items():
            a, b, whole = guard(kind, one), guard(kind, two), guard(kind, one + two)
            assert combine(int(a, 16), int(b, 16), second) == int(whole, 16)
            combined.append(f"{kind} {a} {b} {second} {whole}")
        combined.append(f"crc16 {guard('crc16', one)} {guard('crc16', two)} {second} {guard('crc16', one + two)}")
    # Lengths that no buffer can have: only the other implementation's combination can compute these.
    for length in (1 << 20, (1 << 32) - 1, 1 << 40, 4096 * 4103 + 5):
        for kind, combine in foreign.items():
            digits = GUARDS[kind][0]
            a, b = guard(kind, b"first"), guard(kind, b"second")
            combined.append(f"{kind} {a} {b} {length} {combine(int(a, 16), int(b, 16), length):0{digits}x}")
    write("combine.txt", "kind first second second_bytes whole", combined)


if __name__ == "__main__":
    main()
