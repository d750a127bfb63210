"""Where a data set's files come from: the user's folder, the cache, the publisher. Nothing is read unchecked."""

import bz2
import gzip
import hashlib
import io
import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from fedloom.errors import DataError
from fedloom.untrusted import NotPlain, Unpacked, check_zip, is_folder, is_plain, open_plain, read_bytes

FOLDER, CACHE = "FEDLOOM_DATA", "FEDLOOM_CACHE"
SUMS = "SHA256SUMS"
LONGEST_SUMS = 16 << 20  # bytes
_READERS = ("zlib", "lzma", "_lzma", "tarfile", "json", "pyarrow", "pandas", "wave", "struct", "_csv", "tokenize")
_DAMAGE = (OSError, EOFError, ValueError, LookupError, ArithmeticError, MemoryError, RuntimeError, zipfile.BadZipFile)


@dataclass(frozen=True)
class Remote:
    """A file as its publisher has it. Without a checksum it is never downloaded, only read from the user's folder."""

    name: str
    url: str = ""
    checksum: str = ""  # "md5:..." or "sha256:..."


@dataclass(frozen=True)
class Source:
    """The files that were found for a data set, or the folder of its publisher's files, checked."""

    name: str  # of the data set
    plain: Path | None = None  # NAME.npz, NAME.csv.gz or NAME.jsonl.gz
    published: Mapping[str, Path] = field(default_factory=dict)  # the publisher's files by name
    clients: int | None = None  # how many clients are wanted, for data that are made up
    seed: int = 0

    @property
    def paths(self) -> list[Path]:
        return [path for _, path in self.named()]

    def named(self) -> list[tuple[str, Path]]:
        """Each file with its name in the catalogue, which may hold a folder."""
        return [(self.plain.name, self.plain)] if self.plain else list(self.published.items())


def cache_folder() -> Path:
    """Where Fedloom keeps what it can make again."""
    try:
        return Path(
            os.environ.get(CACHE) or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedloom"
        )
    except RuntimeError:  # nobody's home
        raise DataError(f"there is no home folder to keep the cache in; name a folder with {CACHE}") from None


@dataclass(frozen=True)
class Files:
    """The folders that are searched."""

    folder: Path | None
    cache: Path

    @classmethod
    def of(cls, data_dir: str | Path | None = None) -> "Files":
        given = data_dir or os.environ.get(FOLDER) or None
        if data_dir and not is_folder(Path(data_dir)):
            raise DataError(f"the data folder {data_dir} does not exist")
        return cls(Path(given) if given else None, cache_folder())

    def local(self, name: str) -> Path | None:
        """A file or folder of that name in the user's folder or among the downloads."""
        for folder in (self.folder, self.cache / "downloads"):
            if folder is not None and (is_plain(folder / name) or is_folder(folder / name)):
                return folder / name
        return None

    def find(self, name: str, plain: Sequence[str], published: Sequence[Sequence[Remote]], how: str) -> Source:
        """The first that is there: a plain file, a whole set of the publisher's files, a download."""
        found = self.present(name, plain, published)
        if found is not None:
            return found
        missing = self._missing(name, plain, published, how)
        for group in published:
            if all(remote.url and remote.checksum for remote in group):
                return Source(name, published={remote.name: self._download(remote, missing) for remote in group})
        raise DataError(missing)

    def present(self, name: str, plain: Sequence[str], published: Sequence[Sequence[Remote]]) -> Source | None:
        """What of it lies on this machine."""
        for file in plain:
            path = self.local(file)
            if path is not None:
                return Source(name, plain=path)
        for group in published:
            paths = {remote.name: self.local(remote.name) for remote in group}
            if paths and all(paths.values()):
                return Source(name, published={n: p for n, p in paths.items() if p})
        return None

    def verify(self, source: Source, published: Sequence[Sequence[Remote]]) -> None:
        """Compare with the publisher's checksums and with a list of SHA256SUMS beside the files."""
        known = {remote.name: remote.checksum for group in published for remote in group if remote.checksum}
        for name, path in source.named():
            wanted = known.get(name) or _listed(path)
            if wanted and path.is_file():
                _check(path, wanted)

    def _download(self, remote: Remote, missing: str) -> Path:
        try:
            import pooch
        except ImportError:
            raise DataError(f"{missing} (a download would need pooch)") from None
        pooch.get_logger().setLevel("WARNING")  # the bar says it
        try:
            with Download(remote.name) as bar:
                ways = pooch.HTTPDownloader(progressbar=bar)
                folder = self.cache / "downloads"
                return Path(pooch.retrieve(remote.url, remote.checksum, remote.name, folder, downloader=ways))
        except Exception as error:  # every failure of a network has another class
            reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
            reason = f"no connection to {remote.url}" if isinstance(error, ConnectionError | TimeoutError) else reason
            if type(error).__module__.startswith("requests"):
                reason = f"no answer from {remote.url} ({type(error).__name__})"
            raise DataError(f"{missing} (the download failed: {reason})") from None

    def _missing(self, name: str, plain: Sequence[str], published: Sequence[Sequence[Remote]], how: str) -> str:
        names = [*plain, *(" with ".join(remote.name for remote in group) for group in published)]
        where = f"in {self.folder} and {self.cache / 'downloads'}" if self.folder else f"in {self.cache / 'downloads'}"
        hint = "" if self.folder else f"; name your folder with --data-dir or {FOLDER}"
        return f"the data set {name} is not on this machine: looked {where} for {' or '.join(names)}{hint}. {how}"


class Download:
    """A bar for a download, as pooch wants it: `total` is set, `update` called with the bytes that came."""

    total = 0

    def __init__(self, name: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        self.bar = Progress(*columns, console=Console(stderr=True), transient=True)
        self.task = self.bar.add_task(f"downloading {name}", total=None)

    def __enter__(self) -> "Download":
        return self

    def __exit__(self, *ended: object) -> None:
        if self.bar.live.is_started:
            self.bar.stop()

    def update(self, size: int) -> None:
        if not self.bar.live.is_started:  # not before something comes
            self.bar.start()
        self.bar.update(self.task, advance=size, total=self.total or None)

    def reset(self) -> None:
        self.bar.reset(self.task)

    def close(self) -> None:
        """The bar is stopped on leaving, also after a failure."""


def _listed(path: Path) -> str:
    """The checksum that a SHA256SUMS beside the file gives it."""
    sums = path.parent / SUMS
    if not sums.is_file():
        return ""
    with reading(sums):
        lines = read_bytes(sums, LONGEST_SUMS).decode(errors="replace").splitlines()
    for line in lines:
        digest, _, name = line.partition(" ")
        if name.lstrip(" *").removeprefix("./") == path.name:
            return f"sha256:{digest.lower()}"
    return ""


def _check(path: Path, wanted: str) -> None:
    kind, _, digest = wanted.partition(":")
    with open_plain(path) as file:
        found = hashlib.file_digest(file, kind).hexdigest()
    if found != digest:
        raise DataError(f"{path} is damaged or altered: its {kind} is {found}, but {digest} was expected")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn whatever a damaged file raises into one sentence that names it."""
    try:
        yield
    except DataError:
        raise
    except NotPlain as error:
        raise DataError(f"{error.filename}: {error.strerror}") from None
    except _DAMAGE as error:
        raise DataError(_damaged(path, error)) from None
    except Exception as error:
        if type(error).__module__.split(".")[0] in _READERS:
            raise DataError(_damaged(path, error)) from None
        raise


def _damaged(path: Path, error: Exception) -> str:
    reason = next(iter(str(error).splitlines()), type(error).__name__)
    return f"{path} is damaged or of another format: {reason}"


def read_npz(path: Path, names: Sequence[str]) -> dict[str, np.ndarray]:
    """The named arrays of an .npz file; the zip's own checksums are compared on the way."""
    with reading(path), open_npz(path) as archive:
        missing = [name for name in names if name not in archive.files]
        if missing:
            raise DataError(f"{path} has no array {missing[0]!r}; it needs {', '.join(names)}")
        return {name: array_of(archive, name, path) for name in names}


@contextmanager
def open_npz(path: Path) -> Iterator[Any]:
    """An .npz file that does not unpack to far more than its size; nothing in it is ever unpickled."""
    check_zip(path)
    with open_plain(path) as file, np.load(file, allow_pickle=False) as archive:
        yield archive


def array_of(archive: Any, name: str, path: Path) -> np.ndarray:
    """One array of it: a member that is none comes as bytes."""
    found = archive[name]
    if not isinstance(found, np.ndarray):
        raise DataError(f"{path}: {name!r} is no array")
    return found


def unpack(path: Path) -> IO[bytes]:
    """The bytes of a file packed by gzip or bzip2, as far as they are not far more than its size."""
    file = open_plain(path)
    stream: io.BufferedIOBase = bz2.BZ2File(file) if path.suffix == ".bz2" else gzip.GzipFile(fileobj=file)
    return io.BufferedReader(Unpacked(stream, path, file))


def open_text(path: Path) -> IO[str]:
    """A text file, packed by gzip or not."""
    file = unpack(path) if path.suffix == ".gz" else open_plain(path)
    return io.TextIOWrapper(file, encoding="utf-8", newline="")
