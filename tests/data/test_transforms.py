"""Normalisation and augmentation, against NumPy written from their description; and the hash that drives them."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedloom as fl
from fedloom.data.transforms import Draws, Preparation, augmentations
from fedloom.keys import client_key, hashed

KEY = (123456789, 4000000001)


Words = npt.NDArray[np.uint32]


def mix(x: Words) -> Words:
    """The 32-bit hash, in unsigned arithmetic that wraps."""
    with np.errstate(over="ignore"):
        x = ((x >> np.uint32(16)) ^ x) * np.uint32(0x21F0AAAD)
        x = ((x >> np.uint32(15)) ^ x) * np.uint32(0x735A2D97)
        mixed: Words = (x >> np.uint32(15)) ^ x
        return mixed


def reference_uniform(key: tuple[int, int], step: int, samples: int, draw: int) -> np.ndarray:
    first = mix(mix(np.array([key[0]], np.uint32) ^ np.uint32(step)) ^ np.uint32(key[1]))
    mixed = mix(mix(first ^ np.arange(samples, dtype=np.uint32)) ^ np.uint32(draw))
    return np.asarray((mixed >> np.uint32(8)) / 2.0**24)


def images(n: int = 40, channels: int = 3, side: int = 8) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (n, channels, side, side)).astype(np.uint8)


def prepared(
    x: np.ndarray, augment: str, step: int = 5, mean: tuple[float, ...] = (), std: tuple[float, ...] = ()
) -> np.ndarray:
    way = Preparation(True, mean, std, augmentations(augment))
    return way.train(torch.from_numpy(x), torch.float64, Draws(torch.tensor(KEY), step)).numpy()


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(0, 10**6), st.integers(0, 100))
def test_the_hash_is_the_32_bit_one(a: int, b: int, step: int, draw: int) -> None:
    found = hashed(torch.tensor([a, b]), step, draw, (7,)).double().numpy()
    assert (found == reference_uniform((a, b), step, 7, draw)).all()


def test_the_numbers_are_uniform_and_independent() -> None:
    drawn = np.stack([hashed(torch.tensor(KEY), step, 0, (256,)).double().numpy() for step in range(400)])
    counts = np.histogram(drawn, 50, (0, 1))[0]
    assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() < 100  # chi-squared, 49 degrees: p < 1e-5
    other = np.stack([hashed(torch.tensor(KEY), step, 1, (256,)).double().numpy() for step in range(400)])
    for a, b in ((drawn, other), (drawn[1:], drawn[:-1]), (drawn[:, 1:], drawn[:, :-1])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.016  # 5 standard errors


def test_bytes_become_normalised_numbers() -> None:
    x, mean, std = images(), (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)
    expected = (x / 255 - np.reshape(mean, (3, 1, 1))) / np.reshape(std, (3, 1, 1))
    assert np.allclose(Preparation(True, mean, std).clean(torch.from_numpy(x), torch.float64), expected, atol=1e-14)
    assert np.allclose(Preparation(True).clean(torch.from_numpy(x), torch.float64), x / 255, atol=1e-15)


def test_what_is_no_image_stays_as_it_is() -> None:
    tokens = torch.tensor([[3, 7]])
    assert Preparation().clean(tokens, torch.float32) is tokens


def test_flip() -> None:
    x = images()
    flipped = reference_uniform(KEY, 5, len(x), 0) < 0.5
    expected = np.where(flipped[:, None, None, None], x[..., ::-1], x) / 255
    assert 5 < flipped.sum() < 35
    assert np.array_equal(prepared(x, "flip"), expected)


@pytest.mark.parametrize("fill", ["black", "mean"])
def test_crop(fill: str) -> None:
    x, mean, std = images(), (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)
    normal = (x / 255 - np.reshape(mean, (3, 1, 1))) / np.reshape(std, (3, 1, 1))
    border = -np.divide(mean, std) if fill == "black" else np.zeros(3)
    chosen, down, right = (reference_uniform(KEY, 5, len(x), draw) for draw in range(3))
    expected = normal.copy()
    for i in range(len(x)):
        if chosen[i] < 0.7:
            padded = np.broadcast_to(border[:, None, None], (3, 12, 12)).copy()
            padded[:, 2:10, 2:10] = normal[i]
            top, left = int(down[i] * 5), int(right[i] * 5)
            expected[i] = padded[:, top : top + 8, left : left + 8]
    found = prepared(x, f"crop(padding=2, p=0.7, fill={fill})", mean=mean, std=std)
    assert np.allclose(found, expected, atol=1e-12)


def test_cutout() -> None:
    x = images(side=9)
    down, right = (reference_uniform(KEY, 5, len(x), draw) for draw in range(2))
    expected = x / 255
    for i in range(len(x)):
        top, left = int(down[i] * 9) - 2, int(right[i] * 9) - 2
        expected[i, :, max(top, 0) : top + 4, max(left, 0) : left + 4] = 0
    assert np.array_equal(prepared(x, "cutout(size=4)"), expected)


def test_flip_crop_is_a_flip_and_half_of_the_time_a_crop() -> None:
    x = images(side=32)
    in_steps = prepared(prepared_bytes := x, "flip-crop")
    flipped = reference_uniform(KEY, 5, len(x), 0) < 0.5
    chosen, down, right = (reference_uniform(KEY, 5, len(x), 1 + i) for i in range(3))
    for i in range(len(x)):
        picture = (prepared_bytes[i, :, :, ::-1] if flipped[i] else prepared_bytes[i]) / 255
        if chosen[i] < 0.5:
            top, left = int(down[i] * 9), int(right[i] * 9)
            picture = np.pad(picture, ((0, 0), (4, 4), (4, 4)))[:, top : top + 32, left : left + 32]
        assert np.allclose(in_steps[i], picture, atol=1e-15)


def test_several_use_different_numbers() -> None:
    x = images(400)
    twice = prepared(x, "flip + flip")
    unchanged = (twice == x / 255).all((1, 2, 3)).mean()
    assert 0.4 < unchanged < 0.6  # with the same numbers it would be 1


def test_the_step_and_the_client_matter_and_the_cohort_does_not() -> None:
    a = client_key(0, 3, 7, 0)
    assert (a == np.random.SeedSequence(0, spawn_key=(3, 7, 0, 1)).generate_state(2)).all()
    assert (a != client_key(0, 3, 8, 0)).any()
    assert not np.array_equal(prepared(images(), "flip", step=0), prepared(images(), "flip", step=1))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("flop", "unknown augmentation 'flop'"),
        ("flip(p=2)", "p must lie between 0 and 1"),
        ("crop(padding=0)", "padding must be at least 1"),
        ("crop(fill=red)", "fill must be 'black' or 'mean'"),
        ("cutout(size=0)", "size must be at least 1"),
    ],
)
def test_bad_augmentations(text: str, message: str) -> None:
    with pytest.raises(fl.FedloomError, match=message):
        augmentations(text)


def test_only_images_are_augmented() -> None:
    with pytest.raises(fl.DataError, match="only images can be augmented"):
        Preparation(False, augment=augmentations("flip"))


def federation(augment: str | None) -> fl.Federation:
    x = torch.from_numpy(images(60, 1, 6))
    y = torch.arange(60) % 3
    made = fl.Federation.from_tensor(x, y, [0, 10, 25, 60], test=(x, y))
    return replace(made, preparation=Preparation(True, (0.5,), (0.25,), augmentations(augment)))


def model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, 3)).double()


def test_training_equals_gradient_descent_on_pictures_made_by_numpy() -> None:
    """One client, two steps of the full batch: the whole way from bytes to the model, by hand."""
    made = federation("flip")
    one = made.only(torch.tensor([1]))
    result = fl.fit(model(), one, rounds=1, local=fl.Local(batch_size=None, epochs=2, lr=0.5), seed=4)
    x, y = images(60, 1, 6)[10:25], np.arange(10, 25) % 3
    weight, bias = (parameter.detach().numpy().copy() for parameter in model().parameters())
    key = client_key(4, 0, 0, 0).tolist()
    for step in range(2):
        flipped = reference_uniform((key[0], key[1]), step, 15, 0) < 0.5
        picture = np.where(flipped[:, None, None, None], x[..., ::-1], x)
        rows = ((picture / 255 - 0.5) / 0.25).reshape(15, 36)
        scores = rows @ weight.T + bias
        share = np.exp(scores - scores.max(1, keepdims=True))
        share /= share.sum(1, keepdims=True)
        share[np.arange(15), y] -= 1
        weight -= 0.5 * share.T @ rows / 15
        bias -= 0.5 * share.mean(0)
    found = torch.cat([weight_or_bias.reshape(-1) for weight_or_bias in (torch.tensor(weight), torch.tensor(bias))])
    assert torch.allclose(result.params, found, atol=1e-12)


def test_evaluation_sees_clean_pictures() -> None:
    made = federation("cutout(size=6)")
    result = fl.fit(model(), made, rounds=1, local=fl.Local(lr=0.0))
    x = torch.from_numpy((images(60, 1, 6) / 255 - 0.5) / 0.25)
    expected = torch.nn.functional.cross_entropy(model()(x), torch.arange(60) % 3).detach()
    assert result.history[-1]["test_loss"] == pytest.approx(float(expected), rel=1e-12)


def test_augmentation_does_not_depend_on_the_cohort() -> None:
    """A client's update is the same alone and among others."""
    rows = {}
    for cohorts in ([[1]], [[0, 1, 2]]):
        seen: list[fl.Event] = []
        method = f"fixed(cohorts={cohorts})"
        fl.fit(
            model(),
            federation("flip-crop"),
            method,
            rounds=1,
            engine="loop",
            local=fl.Local(batch_size=4),
            callbacks=[seen.append],
        )
        updates = seen[0].updates
        assert updates is not None
        rows[len(cohorts[0])] = updates.rows.matrix[updates.clients.tolist().index(1)]
    assert torch.equal(rows[1], rows[3])
