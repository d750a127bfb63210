"""Randomness by key: who draws is part of the seed, so that no draw depends on what was drawn before.

A key is `numpy.random.SeedSequence(seed, spawn_key=...)`, drawn from by `numpy.random.default_rng` on the CPU:

| what is drawn | spawn key |
| --- | --- |
| the clients of Work w (sampler) | (w,) |
| the batches of client c, its i-th occurrence in Work w | (w, c, i) |
| whether that client answers: is it there, does it fail? (two uniform numbers) | (w, c, i, 0) |
| which old model Work w starts from (asynchronous schedules) | (w, 0) |
| the augmentation of that client's batches: two words for a hash (see `data/transforms.py`) | (w, c, i, 1) |

What happens before a run has keys of its own: a partition draws from `default_rng(seed)`, and the choice of held-out
clients from `SeedSequence((seed, 1))`.

A batch order can therefore be rebuilt outside Fedloom:

>>> import numpy
>>> order = numpy.random.default_rng(numpy.random.SeedSequence(0, spawn_key=(7, 3, 0))).permutation(5)
>>> bool((order == client_rng(0, work=7, client=3, occurrence=0).permutation(5)).all())
True
"""

from typing import Any

from numpy.random import Generator, SeedSequence, default_rng

from fedloom.errors import ConfigError


def check_seed(seed: Any) -> None:
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 1 << 63:
        raise ConfigError(f"seed must be a whole number of at least 0, not {seed!r}")


def split_rng(seed: int) -> Generator:
    check_seed(seed)
    return default_rng(SeedSequence((seed, 1)))


def augmentation_key(seed: int, work: int, client: int, occurrence: int) -> Any:
    """Two 32-bit words [2] for all augmentation of one client's local training."""
    return SeedSequence(seed, spawn_key=(work, client, occurrence, 1)).generate_state(2)


def sampler_rng(seed: int, work: int) -> Generator:
    return default_rng(SeedSequence(seed, spawn_key=(work,)))


def schedule_rng(seed: int, work: int) -> Generator:
    return default_rng(SeedSequence(seed, spawn_key=(work, 0)))


def client_rng(seed: int, work: int, client: int, occurrence: int) -> Generator:
    return default_rng(SeedSequence(seed, spawn_key=(work, client, occurrence)))


def answer_rng(seed: int, work: int, client: int, occurrence: int) -> Generator:
    return default_rng(SeedSequence(seed, spawn_key=(work, client, occurrence, 0)))
