"""Spoken commands, in a folder and in the archive."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedloom.data.sets import speech_commands
from fedloom.errors import DataError
from tests.data.sets.writers import cut_off, put, read_published, tar, wav


def sound(seconds: float, tone: float = 440.0) -> np.ndarray:
    time = np.arange(int(16_000 * seconds)) / 16_000
    wave: np.ndarray = np.rint(8000 * np.sin(2 * np.pi * tone * time))
    return wave


def spoken(folder: Path) -> Path:
    for word, name, tone in (("yes", "s1_nohash_0", 300), ("yes", "s2_nohash_0", 500), ("go", "s1_nohash_1", 900)):
        put(folder / word / f"{name}.wav", wav(sound(1, tone)))
    put(folder / "no" / "s3_nohash_0.wav", wav(sound(0.4)))
    put(folder / "marvin" / "s3_nohash_0.wav", wav(sound(1.5)))
    put(folder / "_background_noise_" / "noise.wav", wav(sound(1)))
    put(folder / "testing_list.txt", b"yes/s2_nohash_0.wav\nmarvin/s3_nohash_0.wav\n")
    put(folder / "validation_list.txt", b"go/s1_nohash_1.wav\n")
    return folder


def check_ten(corpus: Any) -> None:
    assert corpus.train_x.shape == (3, 98, 40)
    assert corpus.train_x.dtype == np.float32
    assert [corpus.class_names[label] for label in corpus.train_y] == ["go", "no", "yes"]
    assert corpus.owners[corpus.owner].tolist() == ["s1", "s3", "s1"]
    assert corpus.owners[corpus.test_owner].tolist() == ["s2"]
    assert corpus.classes == 10


def test_speech_commands_in_a_folder(tmp_path: Path) -> None:
    folder = spoken(tmp_path / "speech_commands")
    check_ten(read_published("speech-commands", {"speech_commands": folder}))
    everything = read_published("speech-commands(words='all')", {"speech_commands": folder})
    assert everything.classes == 35
    assert everything.test_y is not None
    assert [everything.class_names[label] for label in everything.test_y] == ["marvin", "yes"]


def test_speech_commands_in_the_archive(tmp_path: Path) -> None:
    folder = spoken(tmp_path / "speech_commands")
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    contents = {f"./{path.relative_to(folder)}": path.read_bytes() for path in files[::-1]}
    archive = tar(tmp_path / "a.tar.gz", contents)
    packed_up = read_published("speech-commands", {"speech_commands_v0.02.tar.gz": archive})
    check_ten(packed_up)
    laid_out = read_published("speech-commands", {"speech_commands": folder})
    assert np.array_equal(packed_up.train_x, laid_out.train_x)


def test_log_mel_by_hand() -> None:
    """One band of one window in double precision, from the formulas."""
    waves = (sound(1, 1000)[None] / 32768).astype(np.float32)
    spectra = speech_commands.log_mel(waves)
    frame, band = 7, 15
    cut = waves[0, 160 * frame : 160 * frame + 400].astype(np.float64)
    cut = cut * (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(400) / 400))
    power = [abs(np.sum(cut * np.exp(-2j * np.pi * tone * np.arange(400) / 512))) ** 2 for tone in range(257)]
    lowest, highest = (2595 * np.log10(1 + tone / 700) for tone in (20, 8000))
    mels = [lowest + (highest - lowest) * n / 41 for n in range(42)]
    left, middle, right = (700 * (10 ** (mels[band + n] / 2595) - 1) for n in range(3))
    total = 0.0
    for number, strength in enumerate(power):
        tone = number * 16_000 / 512
        rise, fall = (tone - left) / (middle - left), (right - tone) / (right - middle)
        total += strength * max(0.0, min(rise, fall))
    assert spectra[0, frame, band] == pytest.approx(np.log(total + 1e-6), abs=1e-3)
    assert np.isfinite(speech_commands.log_mel(np.zeros((1, 16_000), np.float32))).all()


@pytest.mark.parametrize("damage", ["cut off", "rate", "header", "text"])
def test_a_sound_that_cannot_be_read(damage: str, tmp_path: Path) -> None:
    folder = spoken(tmp_path / "speech_commands")
    path = folder / "go" / "s1_nohash_1.wav"
    if damage == "cut off":
        cut_off(path)
    elif damage == "rate":
        put(path, wav(sound(1), rate=8000))
    else:
        put(path, path.read_bytes()[:20] if damage == "header" else b"no sound at all")
    with pytest.raises(DataError) as caught:
        read_published("speech-commands", {"speech_commands": folder})
    assert str(path) in str(caught.value)


def test_a_folder_without_sounds_or_test_list(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no testing_list\.txt or no sounds"):
        read_published("speech-commands", {"speech_commands": tmp_path})
