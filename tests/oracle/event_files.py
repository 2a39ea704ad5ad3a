"""Reads the event files of TensorBoard in a folder, in the order of their names, without TensorBoard: the frames of its
records with their CRC-32C, and the fields of `Event` that hold scalars. Prints a list for each file, of records: its
step with the file's version, with the start of a session, or with its scalars."""

import json
import pathlib
import struct
import sys


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def check(data, masked):
    rotated = (masked - 0xA282EAD8) & 0xFFFFFFFF
    crc = (rotated >> 17 | rotated << 15) & 0xFFFFFFFF
    assert crc == crc32c(data), "a checksum is wrong"


def records(data):
    while data:
        (length,) = struct.unpack_from("<Q", data)
        check(data[:8], struct.unpack_from("<I", data, 8)[0])
        content, rest = data[12 : 12 + length], data[12 + length :]
        check(content, struct.unpack_from("<I", rest)[0])
        yield content
        data = rest[4:]


def varint(data):
    number = 0
    for place, byte in enumerate(data):
        number |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return number, data[place + 1 :]
    raise ValueError("a varint does not end")


def fields(data):
    while data:
        tag, data = varint(data)
        kind = tag & 7
        if kind == 0:
            value, data = varint(data)
        else:
            length, data = varint(data) if kind == 2 else ({1: 8, 5: 4}[kind], data)
            value, data = data[:length], data[length:]
            assert len(value) == length
        yield tag >> 3, value


def event(data):
    known = dict(fields(data))
    (time,) = struct.unpack("<d", known[1])
    assert time > 1.6e9, "seconds since 1970"
    read = {"step": known.get(2, 0)}
    if 3 in known:
        read["version"] = known[3].decode()
    if 7 in known:
        read["session"] = dict(fields(known[7]))[1]
    if 5 in known:
        values = [dict(fields(value)) for field, value in fields(known[5]) if field == 1]
        read["scalars"] = [[value[1].decode(), struct.unpack("<f", value[2])[0]] for value in values]
    return read


files = sorted(path for path in pathlib.Path(sys.argv[1]).iterdir() if "tfevents" in path.name)
print(json.dumps([[event(record) for record in records(path.read_bytes())] for path in files]))
