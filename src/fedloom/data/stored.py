"""Arrays in an .npz file that lie there unpacked: some rows of one are read without the rest."""

import math
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from fedloom.errors import DataError

LOCAL = struct.Struct("<4s22xHH")  # a member's own header: a mark, and how long its name and what follows that are
HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


@dataclass(frozen=True)
class Stored:
    """What an array says of itself, and where its numbers begin."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    begin: int | None  # byte of the file; None: packed, or not row after row

    def rows(self, file: IO[bytes], begin: int, end: int) -> np.ndarray:
        """Some of its rows."""
        if self.begin is None or not 0 <= begin <= end <= self.shape[0]:
            raise ValueError(f"rows {begin} to {end} can't be read alone")
        found = np.empty((end - begin, *self.shape[1:]), self.dtype)
        length = math.prod(self.shape[1:]) * self.dtype.itemsize
        file.seek(self.begin + begin * length)
        if length and file.readinto(found.reshape(-1).view(np.uint8)) != found.nbytes:  # type: ignore[attr-defined]
            raise EOFError("the file ends before its rows do")
        return found


def find_array(archive: zipfile.ZipFile, file: IO[bytes], name: str, path: Path) -> Stored:
    """An array of an .npz file, by its headers alone; what they say must agree with how long the member is."""
    member = archive.getinfo(f"{name}.npy")
    with archive.open(member) as stream:  # compares the member's own header with the zip's list
        version = np.lib.format.read_magic(stream)
        if version not in HEADERS:
            raise DataError(f"{path}: {name!r} is an array of an unknown version, {version}")
        shape, by_column, dtype = HEADERS[version](stream)
        header = stream.tell()
    if dtype.hasobject or min(shape, default=0) < 0:
        raise DataError(f"{path}: {name!r} holds {dtype}, but numbers were expected")
    if header + math.prod(shape) * dtype.itemsize != member.file_size:
        raise DataError(f"{path} is damaged: {name!r} says that its shape is {shape}, but it is not that long")
    by_row = not by_column or len(shape) < 2
    if member.compress_type != zipfile.ZIP_STORED or not by_row:
        return Stored(dtype, shape, None)
    file.seek(member.header_offset)
    mark, named, more = LOCAL.unpack(file.read(LOCAL.size))
    begin = member.header_offset + LOCAL.size + named + more
    whole = begin + member.file_size <= file.seek(0, 2)
    if mark != b"PK\x03\x04" or member.compress_size != member.file_size or not whole:
        raise DataError(f"{path} is damaged: {name!r} is not where the file says")
    return Stored(dtype, shape, begin + header)


def read_array(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    """All of an array; the zip's checksum is compared on the way, nothing is unpickled."""
    with archive.open(f"{name}.npy") as stream:
        found = np.lib.format.read_array(stream, allow_pickle=False)
        if stream.read(1):
            raise ValueError(f"something stands behind the array {name!r}")
        return found
