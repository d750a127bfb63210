"""Speech Commands v0.02: Warden: Speech Commands, a dataset for limited-vocabulary speech recognition.
arXiv:1804.03209, 2018.

One second of 16 kHz sound (cut, or filled up with silence) becomes the logarithm of 40 mel bands between 20 Hz and
8 kHz in 98 windows of 25 ms, 10 ms apart: float32 [98, 40]. A client is one speaker. `words` is "ten" (commands: yes,
no, up, down, left, right, on, off, stop, go) or "all" 35. The publisher's validation list counts as training.
"""

import io
import wave
from collections.abc import Iterator
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Literal

import numpy as np

from fedloom.data.catalogue import dataset
from fedloom.data.corpus import Corpus
from fedloom.data.files import Remote, Source, reading
from fedloom.data.formats import Owners, size_notes, tar_files
from fedloom.errors import DataError
from fedloom.untrusted import read_bytes

TEN = ("yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go")
_ALL = """
    backward bed bird cat dog down eight five follow forward four go happy house learn left marvin nine no off on one
    right seven sheila six stop three tree two up visual wow yes zero
"""
SAMPLES = {"ten": (34_472, 4_074), "all": (94_824, 11_005)}
FOLDER, TEST_LIST = "speech_commands", "testing_list.txt"
ARCHIVE = Remote(
    "speech_commands_v0.02.tar.gz",
    "https://storage.googleapis.com/download.tensorflow.org/data/speech_commands_v0.02.tar.gz",
    "sha256:af14739ee7dc311471de98f5f9d2c9191b18aedfe957f4a6ff791c709868ff58",
)
RATE, WINDOW, HOP, BANDS, FOURIER = 16_000, 400, 160, 40, 512
LOWEST, HIGHEST = 20.0, 8_000.0  # Hz
AT_ONCE = 256  # sounds, which bounds the memory
LONGEST = 16 << 20  # bytes of a file


@dataset(
    "speech-commands",
    samples=SAMPLES["ten"],
    classes=10,
    licence="CC BY 4.0",
    published=[[Remote(FOLDER)], [ARCHIVE]],
    how=f"Get {ARCHIVE.url}, or unpack it into a subfolder {FOLDER}.",
    natural=True,
)
def speech_commands(words: Literal["ten", "all"] = "ten", *, source: Source) -> Corpus:
    """spoken commands as log-mel spectra, one client per speaker (Warden 2018)"""
    path = source.paths[0]
    labels = {word: label for label, word in enumerate(TEN if words == "ten" else _ALL.split())}
    tested: set[str] = set()
    names: list[str] = []
    parts = list(_features(path, _sounds(path, set(labels), tested), names))
    if not parts or not tested:
        raise DataError(f"{path} has no {TEST_LIST} or no sounds WORD/SPEAKER_nohash_NUMBER.wav of these words")
    x, order = np.concatenate(parts), np.argsort(names)
    speakers = Owners()
    owner = np.zeros(len(names), dtype=np.int64)
    for place in order:
        owner[place] = speakers.place(PurePosixPath(names[place]).name.partition("_")[0])
    y = np.array([labels[PurePosixPath(name).parts[0]] for name in names], dtype=np.int64)
    test = np.array([name in tested for name in names])[order]
    train, held = order[~test], order[test]
    return Corpus(
        x[train],
        y[train],
        x[held],
        y[held],
        classes=len(labels),
        class_names=tuple(labels),
        owner=owner[train],
        test_owner=owner[held],
        owners=speakers.names(),
        notes=size_notes(len(train), len(held), SAMPLES[words]),
    )


def _sounds(path: Path, words: set[str], tested: set[str]) -> Iterator[tuple[str, bytes]]:
    """Name (WORD/FILE) and content of each sound of these words; the names on the test list go into `tested`."""

    def wanted(member: str) -> bool:
        parts = PurePosixPath(member).parts
        return parts[-1:] == (TEST_LIST,) or (len(parts) > 1 and parts[-2] in words and member.endswith(".wav"))

    if path.is_dir():
        names = [TEST_LIST] if (path / TEST_LIST).is_file() else []
        names += [f"{word}/{file.name}" for word in sorted(words) for file in sorted((path / word).glob("*.wav"))]
        found: Iterator[tuple[str, bytes]] = ((name, _content(path / name)) for name in names)
    else:
        found = tar_files(path, wanted)
    for name, content in found:
        if name.endswith(TEST_LIST):
            with reading(path):
                tested.update(content.decode("utf-8").split())
        else:
            yield "/".join(PurePosixPath(name).parts[-2:]), content


def _content(path: Path) -> bytes:
    with reading(path):
        return read_bytes(path, LONGEST)


def _features(path: Path, sounds: Iterator[tuple[str, bytes]], names: list[str]) -> Iterator[np.ndarray]:
    """Spectra of all sounds, a part at a time; their names go into `names`."""
    waves: list[np.ndarray] = []
    for name, content in sounds:
        names.append(name)
        waves.append(_one_second(Path(f"{path}/{name}"), content))
        if len(waves) == AT_ONCE:
            yield log_mel(np.stack(waves))
            waves.clear()
    if waves:
        yield log_mel(np.stack(waves))


def _one_second(path: Path, content: bytes) -> np.ndarray:
    """A mono 16-bit .wav of 16 kHz as numbers in [-1, 1)."""
    with reading(path), wave.open(io.BytesIO(content)) as sound:
        form = (sound.getnchannels(), sound.getsampwidth(), sound.getframerate())
        if form != (1, 2, RATE):
            raise DataError(f"{path} has (channels, bytes, Hz) {form}, but {(1, 2, RATE)} were expected")
        content = sound.readframes(sound.getnframes())
        if len(content) != 2 * sound.getnframes():
            raise DataError(f"{path} is cut off: {len(content) // 2} of {sound.getnframes()} samples")
    samples = np.frombuffer(content, dtype="<i2")[:RATE].astype(np.float32) / 32768
    return np.pad(samples, (0, RATE - len(samples)))


def log_mel(waves: np.ndarray) -> np.ndarray:
    """Sounds [n, 16000] to spectra [n, 98, 40]: Hann window, power of the Fourier transform, mel bands, logarithm."""
    frames = np.lib.stride_tricks.sliding_window_view(waves, WINDOW, axis=1)[:, ::HOP]
    window = np.hanning(WINDOW + 1)[:-1].astype(np.float32)
    power = np.abs(np.fft.rfft(frames * window, FOURIER)).astype(np.float32) ** 2
    spectra: np.ndarray = np.log(power @ _mel_bands() + np.float32(1e-6))
    return spectra


@cache
def _mel_bands() -> np.ndarray:
    """Triangles [257, 40], evenly spaced and half overlapping on the mel scale 2595 log10(1 + f/700)."""
    lowest, highest = (2595 * np.log10(1 + tone / 700) for tone in (LOWEST, HIGHEST))
    corners = 700 * (10 ** (np.linspace(lowest, highest, BANDS + 2) / 2595) - 1)
    tones = np.fft.rfftfreq(FOURIER, 1 / RATE)[:, None]
    left, middle, right = corners[:-2], corners[1:-1], corners[2:]
    rising, falling = (tones - left) / (middle - left), (right - tones) / (right - middle)
    bands: np.ndarray = np.clip(np.minimum(rising, falling), 0, None).astype(np.float32)
    return bands
