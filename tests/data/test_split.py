"""Held-out clients, the two standardisations, the vocabulary: from their description in NumPy."""

from itertools import pairwise

import numpy as np
import pytest
import torch

import fedloom as fl
from fedloom.data.vocabulary import UNKNOWN, fit_vocabulary


def federation(clients: int = 10, seed: int = 0) -> fl.Federation:
    rng = np.random.default_rng(seed)
    pairs = []
    for k in range(clients):
        n = int(rng.integers(1, 9))
        pairs.append((np.c_[np.full(n, k), rng.normal(k, 1 + k, (n, 3))], rng.integers(0, 2, n)))
    return fl.Federation.from_arrays(pairs)


def owners(part: fl.Holdout | None) -> list[int]:
    """Which clients a held-out part is made of: column 0 says whose a sample is."""
    assert part is not None
    assert part.offsets is not None
    found = []
    for a, b in pairwise(part.offsets.tolist()):
        assert len(set(part.x[a:b, 0].tolist())) == 1
        found.append(int(part.x[a, 0]))
    return found


def training(split: fl.Federation) -> list[int]:
    return [int(split.client(k)[0][0, 0]) for k in range(len(split))]


def test_validation_clients_are_further_clients() -> None:
    split = fl.split_clients(federation(11), validation=3, seed=1)
    order = np.random.default_rng(np.random.SeedSequence((1, 1))).permutation(11)
    assert owners(split.validation) == sorted(order[:3].tolist())
    assert training(split) == sorted(order[3:].tolist())
    assert split.test is None


@pytest.mark.parametrize(
    ("clients", "sizes"), [(100, (60, 20, 20)), (143, (85, 29, 29)), (164, (98, 33, 33)), (7, (3, 2, 2))]
)
def test_five_folds_by_client(clients: int, sizes: tuple[int, int, int]) -> None:
    """The sizes that RADFed prints; every client is in the test set of exactly one fold."""
    whole, tested = federation(clients), []
    for fold in range(5):
        split = fl.split_clients(whole, fold=fold, seed=3)
        parts = [training(split), owners(split.validation), owners(split.test)]
        assert sorted([*parts[0], *parts[1], *parts[2]]) == list(range(clients))
        tested += parts[2]
        if fold == 0:
            assert tuple(len(part) for part in parts) == sizes
    assert sorted(tested) == list(range(clients))


def test_the_validation_block_is_the_first_of_the_rest() -> None:
    order = np.random.default_rng(np.random.SeedSequence((0, 1))).permutation(10)
    for fold, block in ((0, order[2:4]), (1, order[:2]), (4, order[:2])):
        split = fl.split_clients(federation(), fold=fold)
        assert owners(split.validation) == sorted(block.tolist())
        assert owners(split.test) == sorted(order[2 * fold : 2 * fold + 2].tolist())
    turned = fl.split_clients(federation(), fold=0, inner=2)
    assert owners(turned.validation) == sorted(order[6:8].tolist())


def test_clients_keep_their_samples() -> None:
    whole = federation()
    split = fl.split_clients(whole, fold=2)
    for place, k in enumerate(training(split)):
        for mine, theirs in zip(split.client(place), whole.client(k), strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fold": 5}, "fold=5"),
        ({"fold": -1}, "fold=-1"),
        ({"fold": 0, "inner": 4}, "inner=4"),
        ({"inner": 1}, "say which fold"),
        ({"fold": 0, "validation": 2}, "validation clients of its own"),
        ({"validation": 10}, "nobody would train"),
        ({"validation": -1}, "must be a number of clients"),
        ({"fold": 0, "folds": 11}, "10 clients are too few for 11 folds"),
        ({"fold": 0, "folds": 2}, "leave nobody to train"),
    ],
)
def test_bad_splits(options: dict[str, int], message: str) -> None:
    with pytest.raises(fl.DataError, match=message):
        fl.split_clients(federation(), **options)


def moments(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    std = x.std(0)
    return x.mean(0), np.where(std == 0, 1, std)


def test_global_standardisation_uses_training_clients_only() -> None:
    split = fl.split_clients(federation(), fold=0)
    assert split.test is not None
    rows = torch.cat([split.client(k)[0] for k in range(len(split))]).numpy()
    mean, std = moments(rows[:, :2])
    done = fl.standardise(split, "global", columns=2)
    for k in range(len(split)):
        raw, new = split.client(k)[0].numpy(), done.client(k)[0].numpy()
        assert np.allclose(new[:, :2], (raw[:, :2] - mean) / std, atol=1e-12)
        assert np.array_equal(new[:, 2:], raw[:, 2:])
    assert done.test is not None
    assert np.allclose(done.test.x[:, :2], (split.test.x.numpy()[:, :2] - mean) / std, atol=1e-12)


def test_local_standardisation_uses_each_client_alone() -> None:
    split = fl.split_clients(federation(), fold=0)
    done = fl.standardise(split, "local")
    for k in range(len(split)):
        raw, new = split.client(k)[0].numpy(), done.client(k)[0].numpy()
        mean, std = moments(raw)
        assert np.allclose(new, (raw - mean) / std, atol=1e-9)
    assert split.test is not None
    assert split.test.offsets is not None
    assert done.test is not None
    for a, b in pairwise(split.test.offsets.tolist()):
        mean, std = moments(split.test.x[a:b].numpy())
        assert np.allclose(done.test.x[a:b], (split.test.x[a:b].numpy() - mean) / std, atol=1e-9)


def test_a_column_without_variation_becomes_zero() -> None:
    x = np.full((6, 1), 1e6 + 0.1)
    done = fl.standardise(fl.Federation.from_arrays([(x, [0, 1, 0, 1, 0, 1])]), "global")
    assert (done.x == 0).all()


def test_bad_standardisation() -> None:
    whole = fl.Federation.from_arrays([(np.zeros((2, 3)), [0, 1])], test=(np.zeros((2, 3)), [0, 1]))
    with pytest.raises(fl.DataError, match="belongs to no client"):
        fl.standardise(whole, "local")
    with pytest.raises(fl.DataError, match="unknown way to standardise 'locale'"):
        fl.standardise(whole, "locale")  # type: ignore[arg-type]
    with pytest.raises(fl.DataError, match="have 3 columns"):
        fl.standardise(whole, "global", columns=4)
    with pytest.raises(fl.DataError, match="only a table of numbers"):
        fl.standardise(fl.Federation.from_arrays([(np.zeros((2, 3), int), [0, 1])]), "global")


WORDS = np.array(["", "cat", "the", "dog", "a", "zebra"])


def texts() -> fl.Federation:
    """Client 0: the cat the, client 1: a dog; the test knows a zebra."""
    clients = [([[2, 1, 2]], [0]), ([[4, 3, 0]], [1])]
    return fl.Federation.from_arrays(clients, test=([[5, 1, 3]], [0]))


def test_the_vocabulary_is_that_of_the_training_clients() -> None:
    done = fit_vocabulary(texts(), WORDS, padded=True, predicts_tokens=False, limit=None)
    assert done.vocabulary == ("", UNKNOWN, "the", "a", "cat", "dog")  # by frequency, then by the alphabet
    assert done.x.tolist() == [[2, 4, 2], [3, 5, 0]]
    assert done.test is not None
    assert done.test.x.tolist() == [[1, 4, 5]]
    assert done.tokens == 6
    only = fit_vocabulary(texts().only(torch.tensor([0])), WORDS, padded=True, predicts_tokens=False, limit=None)
    assert only.vocabulary == ("", UNKNOWN, "the", "cat")
    few = fit_vocabulary(texts(), WORDS, padded=True, predicts_tokens=False, limit=1)
    assert few.vocabulary == ("", UNKNOWN, "the")
    assert few.x.tolist() == [[2, 1, 2], [1, 1, 0]]


def test_targets_that_are_tokens_are_renumbered_too() -> None:
    x, y = torch.tensor([[0, 1], [1, 2]], dtype=torch.uint8), torch.tensor([[1, 2], [2, -100]])
    made = fl.Federation.from_tensor(x, y, [0, 1, 2])
    done = fit_vocabulary(made, np.array(["b", "a", "c"]), padded=False, predicts_tokens=True, limit=None)
    assert done.vocabulary == (UNKNOWN, "a", "c", "b")  # a: 3 times, c: 3 times, b: once
    assert done.x.tolist() == [[3, 1], [1, 2]]
    assert done.y.tolist() == [[1, 2], [2, -100]]
    assert done.classes == 4
    assert done.x.dtype == torch.uint8
