"""Files that anyone may have written: opened only where they are plain files, read and unpacked only up to a bound."""

import errno
import io
import os
import stat
import zipfile
from pathlib import Path
from typing import IO

UNPACKED = 256 << 20  # bytes that any packed file may come to,
RATIO = 100  # or so many times its own size: a table of text comes to 20 times, a bomb to a thousand


class NotPlain(OSError):
    """A pipe, a device, a folder, or too much."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(errno.EINVAL, why, str(path))


def open_plain(path: Path, *, links: bool = True) -> io.BufferedReader:
    """A regular file, to be read: a pipe would wait for ever, and a device never ends. Without `links` it must be the
    file itself.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if links else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except ValueError:  # a name with a zero byte, or half a pair of surrogates
        raise NotPlain(path, "no file can have this name") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotPlain(path, "this is no plain file")
    return open(descriptor, "rb")


def read_bytes(path: Path, most: int, *, links: bool = True) -> bytes:
    """All of a small file."""
    with open_plain(path, links=links) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise NotPlain(path, f"this is longer than {most / (1 << 20):.2g} MB")
    return content


def is_plain(path: Path, *, links: bool = True) -> bool:
    """Is there a regular file, or with `links` a link to one? A name that no file can have is none."""
    try:
        return path.is_file() and (links or not path.is_symlink())
    except (OSError, ValueError):
        return False


def is_folder(path: Path) -> bool:
    """Is there a folder?"""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def most_unpacked(path: Path) -> int:
    """How many bytes this packed file may come to."""
    return max(UNPACKED, RATIO * path.stat().st_size)


class Unpacked(io.RawIOBase):
    """What comes out of a packed stream, as long as that is not far more than the file is large."""

    def __init__(
        self, stream: io.BufferedIOBase | IO[bytes], path: Path, file: io.BufferedReader | None = None
    ) -> None:
        """`file` is what the stream is unpacked from, to be closed with it."""
        self.stream, self.path, self.file = stream, path, file
        self.left = most_unpacked(path)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        content = self.stream.read(len(buffer))
        self.left -= len(content)
        if self.left < 0:
            raise too_much(self.path)
        buffer[: len(content)] = content
        return len(content)

    def close(self) -> None:
        self.stream.close()
        if self.file is not None:
            self.file.close()
        super().close()


def too_much(path: Path) -> NotPlain:
    return NotPlain(path, f"this unpacks to more than {most_unpacked(path) >> 20:,} MB; unpack it, if it is not a bomb")


def check_zip(path: Path) -> None:
    """Refuse a zip whose members say that they come to too much; a member never gives more than it says."""
    with open_plain(path) as file, zipfile.ZipFile(file) as archive:
        if sum(member.file_size for member in archive.infolist()) > most_unpacked(path):
            raise too_much(path)
