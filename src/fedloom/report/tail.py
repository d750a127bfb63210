"""Lines of a file that grows: each is read once, and only when it is whole."""

import os
from pathlib import Path
from typing import BinaryIO

from fedloom.errors import RunError
from fedloom.experiment.folder import LONGEST_LINE
from fedloom.untrusted import open_plain

CHUNK = 1 << 20
REMEMBERED = 64  # bytes before the place that was reached


class Tail:
    """Follows one file. What it opens is a plain file where it stands: no link, no pipe."""

    def __init__(self, path: Path, longest: int = LONGEST_LINE) -> None:
        self.path, self.longest = path, longest
        self._start()

    def _start(self) -> None:
        self._offset, self._part, self._end, self._seen = 0, b"", b"", (0, 0, 0)

    def read(self) -> tuple[bool, list[bytes]]:
        """Whether the file begins anew, because another lies there or it was cut or written over, and the lines that
        were finished since the last time.
        """
        with open_plain(self.path, links=False) as file:
            now = os.fstat(file.fileno())
            seen = (now.st_ino, now.st_size, now.st_mtime_ns)
            if seen == self._seen:
                return False, []
            anew = self._offset > 0 and (seen[:2] == self._seen[:2] or not self._continues(file, now))
            if anew:
                self._start()
            self._seen = seen
            file.seek(self._offset)
            return anew, self._lines(file, now.st_size - self._offset)

    def _continues(self, file: BinaryIO, now: os.stat_result) -> bool:
        """Is this still the file that was read, with more behind it?"""
        if now.st_ino != self._seen[0] or now.st_size < self._offset:
            return False
        file.seek(self._offset - len(self._end))
        return file.read(len(self._end)) == self._end

    def _lines(self, file: BinaryIO, left: int) -> list[bytes]:
        lines: list[bytes] = []
        while left > 0 and (block := file.read(min(CHUNK, left))):
            left -= len(block)
            self._offset += len(block)
            self._end = (self._end + block)[-REMEMBERED:]
            first, *others = block.split(b"\n")
            whole = [self._part + first, *others]
            self._part = whole.pop()
            if max(map(len, (self._part, *whole))) > self.longest:
                raise RunError(f"{self.path.name} holds a line of more than {self.longest >> 20} MB")
            lines += whole
        return lines
