"""Randomness by key: who draws is part of the seed, so that no draw depends on what was drawn before.

A key is `numpy.random.SeedSequence(seed, spawn_key=...)`, drawn from by `numpy.random.default_rng` on the CPU:

| what is drawn | spawn key |
| --- | --- |
| the clients of Work w (sampler) | (w,) |
| the batches of client c, its i-th occurrence in Work w | (w, c, i) |
| whether that client answers: is it there, does it fail? (two uniform numbers) | (w, c, i, 0) |
| which old model Work w starts from (asynchronous schedules) | (w, 0) |
| augmentation and dropout of that client: two words for `hashed` | (w, c, i, 1) |
| whatever else its model draws: the seed of PyTorch's generators | (w, c, i, 2) |
| the noise that it sends instead of its update, if it is hostile (`attack`) | (w, c, i, 3) |

The noise of differential privacy has a secret key of 256 bits in place of the seed, and the number of the round as its
spawn key.

What happens before a run has keys of its own: a partition draws from `default_rng(seed)`, the choice of held-out
clients from `SeedSequence((seed, 1))`, and that of hostile clients from `SeedSequence((seed, 2))`.

A batch order can therefore be rebuilt outside Fedloom:

>>> import numpy
>>> order = numpy.random.default_rng(numpy.random.SeedSequence(0, spawn_key=(7, 3, 0))).permutation(5)
>>> bool((order == client_rng(0, work=7, client=3, occurrence=0).permutation(5)).all())
True
"""

import math
import secrets
from collections.abc import Sequence
from typing import Any

import torch
from numpy.random import Generator, SeedSequence, default_rng
from torch import Tensor

from fedloom.errors import ConfigError


def check_seed(seed: Any) -> None:
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 1 << 63:
        raise ConfigError(f"seed must be a whole number of at least 0, not {seed!r}")


def split_rng(seed: int) -> Generator:
    check_seed(seed)
    return default_rng(SeedSequence((seed, 1)))


def hostile_rng(seed: int) -> Generator:
    return default_rng(SeedSequence((seed, 2)))


def client_key(seed: int, work: int, client: int, occurrence: int) -> Any:
    """Two 32-bit words [2] for all that is drawn on the device in one client's local training."""
    return SeedSequence(seed, spawn_key=(work, client, occurrence, 1)).generate_state(2)


def module_seed(seed: int, work: int, client: int, occurrence: int) -> int:
    """For whatever a model draws from PyTorch's own generators."""
    low, high = SeedSequence(seed, spawn_key=(work, client, occurrence, 2)).generate_state(2).tolist()
    return int(high << 30 | low)


def hashed(key: Tensor, step: int | Tensor, draw: int, shape: Sequence[int]) -> Tensor:
    """Numbers in [0, 1) of a shape, a hash of (key [2], step, draw, place): on any device, in any cohort, the same."""
    places = torch.arange(math.prod(shape), device=key.device)
    mixed = _mix(_mix(_mix(_mix(key[0] ^ step) ^ key[1]) ^ places) ^ draw)
    return ((mixed >> 8).to(torch.float32) / (1 << 24)).reshape(shape)


def _mix(x: Tensor) -> Tensor:
    """A 32-bit hash, in 64-bit arithmetic that never overflows (both factors are below 2^31)."""
    x = ((x >> 16) ^ x) * 0x21F0AAAD & 0xFFFFFFFF
    x = ((x >> 15) ^ x) * 0x735A2D97 & 0xFFFFFFFF
    return (x >> 15) ^ x


def sampler_rng(seed: int, work: int) -> Generator:
    return default_rng(SeedSequence(seed, spawn_key=(work,)))


def noise_key(seed: int | None) -> list[int]:
    """Eight words of 32 bits: from the operating system's secrets, or from a seed."""
    if seed is None:
        return [secrets.randbits(32) for _ in range(8)]
    check_seed(seed)
    return [int(word) for word in SeedSequence(seed).generate_state(8)]


def noise_rng(key: Sequence[int], round: int) -> Generator:
    """Eight words of pool, so that none of the key's bits are lost; the default holds four."""
    return default_rng(SeedSequence(key, spawn_key=(round,), pool_size=8))


def schedule_rng(seed: int, work: int) -> Generator:
    return default_rng(SeedSequence(seed, spawn_key=(work, 0)))


def client_rng(seed: int, work: int, client: int, occurrence: int) -> Generator:
    return default_rng(SeedSequence(seed, spawn_key=(work, client, occurrence)))


def answer_rng(seed: int, work: int, client: int, occurrence: int) -> Generator:
    return default_rng(SeedSequence(seed, spawn_key=(work, client, occurrence, 0)))


def attack_rng(seed: int, work: int, client: int, occurrence: int) -> Generator:
    return default_rng(SeedSequence(seed, spawn_key=(work, client, occurrence, 3)))
