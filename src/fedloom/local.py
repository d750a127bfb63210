"""What a client does with its own data: the settings of local training, and the order of its batches."""

import math
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, Literal, get_args

import numpy as np
from numpy.random import Generator

from fedloom.errors import ConfigError, nearest

Optimizer = Literal["sgd", "adam", "adamw"]
LastBatch = Literal["keep", "drop", "bootstrap"]


def plain(value: Any) -> Any:
    """A NumPy number as the Python number that it is."""
    return value.item() if isinstance(value, np.generic) else value


@dataclass(frozen=True)
class Local:
    """Settings of local training.

    `steps` replaces `epochs` by an exact number of steps, going over the data as often as needed.
    `batch_size=None` is the full batch: one step an epoch.
    `last_batch` says what happens to a short last batch of an epoch: it is kept, dropped, or filled up by drawing
    with replacement from all of the client's samples.
    `shuffle=False`: batches go through a client's samples in their order, the same in every epoch.

    >>> Local(epochs=2, batch_size=32).count_steps(100)
    8
    """

    epochs: int = 1
    steps: int | None = None
    batch_size: int | None = 32
    lr: float = 0.01
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    optimizer: Optimizer = "sgd"
    clip_norm: float | None = None
    last_batch: LastBatch = "keep"
    shuffle: bool = True

    def __post_init__(self) -> None:
        for name in self.names():
            object.__setattr__(self, name, plain(getattr(self, name)))
        for name, least in (("epochs", 1), ("steps", 1), ("batch_size", 1)):
            value = getattr(self, name)
            if value is None and name != "epochs":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"{name} must be a whole number of at least {least}, not {value!r}")
        for name in ("lr", "momentum", "weight_decay", "clip_norm"):
            value = getattr(self, name)
            if value is None and name == "clip_norm":
                continue
            if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value < 0:
                raise ConfigError(f"{name} must be a finite number of at least 0, not {value!r}")
        if not isinstance(self.shuffle, bool):
            raise ConfigError(f"shuffle must be true or false, not {self.shuffle!r}")
        if self.momentum >= 1:
            raise ConfigError(f"momentum must be below 1, not {self.momentum!r}")
        if self.clip_norm == 0:
            raise ConfigError("clip_norm=0 would stop all training; leave it out to train without clipping")
        for name, kind in (("optimizer", Optimizer), ("last_batch", LastBatch)):
            value = getattr(self, name)
            if value not in get_args(kind):
                raise ConfigError(f"unknown {name} {value!r}: {nearest(str(value), get_args(kind))}")
        if self.momentum and self.optimizer != "sgd":
            raise ConfigError(f"momentum belongs to optimizer='sgd', not to {self.optimizer!r}, which has its own")
        if self.nesterov and not self.momentum:
            raise ConfigError("nesterov=True needs momentum above 0")

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(field.name for field in fields(cls))

    def batches_per_epoch(self, samples: int) -> int:
        if self.batch_size is None:
            return 1
        whole, rest = divmod(samples, self.batch_size)
        return whole + (rest > 0 and self.last_batch != "drop")

    def count_steps(self, samples: int) -> int:
        """How many steps a client with that many samples takes."""
        return self.steps if self.steps is not None else self.epochs * self.batches_per_epoch(samples)

    def batch_lengths(self, samples: int) -> set[int]:
        """The lengths that occur among a client's batches."""
        if self.batch_size is None:
            return {samples}
        whole, rest = divmod(samples, self.batch_size)
        lengths = {self.batch_size} if whole or (rest and self.last_batch == "bootstrap") else set()
        return lengths | ({rest} if rest and self.last_batch == "keep" else set())

    def batches_in_order(self, samples: int) -> list[np.ndarray]:
        """One epoch without shuffling; a short last batch is filled from the front under `last_batch="bootstrap"`."""
        size = self.batch_size or samples
        whole = [np.arange(i, min(i + size, samples)) for i in range(0, samples, size)]
        if len(whole[-1]) < size and self.last_batch == "drop":
            return whole[:-1]
        if len(whole[-1]) < size and self.last_batch == "bootstrap":
            return [*whole[:-1], np.arange(whole[-1][0], whole[-1][0] + size) % samples]
        return whole

    def batches(self, samples: int, rng: Generator, limit: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """The client's batches: positions among its own samples, batch after batch, and the batches' lengths.

        For each epoch a fresh `rng.permutation`, or without `shuffle` the samples as they are, cut into pieces; a short
        last one is filled by `rng.integers` under `last_batch="bootstrap"`.
        """
        lengths, epochs, whole, drawn = _lengths(self, samples, limit)
        if self.batch_size is None:
            return np.tile(np.arange(samples), len(lengths)), lengths
        parts = []
        for _ in range(epochs):
            parts.append((rng.permutation(samples) if self.shuffle else np.arange(samples))[:whole])
            if drawn:
                parts.append(rng.integers(0, samples, drawn))
        order = parts[0] if len(parts) == 1 else np.concatenate(parts or [np.empty(0, dtype=np.int64)])
        return order[: lengths.sum()], lengths


@lru_cache(maxsize=10_000)  # clients are many, their sizes few
def _lengths(local: Local, samples: int, limit: int | None) -> tuple[np.ndarray, int, int, int]:
    """Lengths of all batches; epochs begun; of an epoch, samples that are used and samples drawn beside them."""
    wanted = local.count_steps(samples)
    if limit is not None:
        wanted = min(wanted, limit)
    size = samples if local.batch_size is None else local.batch_size
    per_epoch = local.batches_per_epoch(samples)
    if not per_epoch:
        raise ConfigError(f"{samples} samples give no batch of {size} with last_batch='drop'")
    epoch = np.full(per_epoch, size)
    short = max(per_epoch * size - samples, 0)
    if local.last_batch == "keep":
        epoch[-1] -= short
    epochs = -(-wanted // per_epoch)
    lengths = np.tile(epoch, epochs)[:wanted]
    lengths.flags.writeable = False
    return lengths, epochs, per_epoch * size, short if local.last_batch == "bootstrap" else 0
