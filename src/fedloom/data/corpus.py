"""A data set before it is dealt out: plain arrays, and what is known about them."""

import hashlib
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Corpus:
    """Samples and targets as one array each, training and test.

    Images are uint8 [n, channels, height, width] and stay so until a batch is made of them. Texts are token ids
    [n, length] into `words`, which lists every token that occurs anywhere; the vocabulary that a model sees is cut out
    of it later, from the training clients' texts alone. Tables are float32 [n, columns].
    """

    train_x: np.ndarray
    train_y: np.ndarray
    test_x: np.ndarray | None = None  # None: the publisher has no test set
    test_y: np.ndarray | None = None
    classes: int | None = None  # None: targets are tokens or numbers
    class_names: tuple[str, ...] = ()
    owner: np.ndarray | None = None  # of each training sample: a position in `owners`
    test_owner: np.ndarray | None = None
    owners: np.ndarray | None = None  # names of the natural clients: writers, roles, hospitals
    words: np.ndarray | None = None  # token id -> token; id 0 is padding where `padded`
    padded: bool = True
    predicts_tokens: bool = False  # the targets are ids into `words` too
    vocabulary: int | None = None  # keep only so many of the most frequent words; None: all that training data hold
    mean: tuple[float, ...] = ()  # of each channel of images in [0, 1]; empty: no normalisation
    std: tuple[float, ...] = ()
    columns: tuple[str, ...] = ()  # names of a table's columns
    numeric: int = 0  # that many leading columns of a table may be standardised
    notes: tuple[str, ...] = field(default=())  # what a user should know about this copy

    def arrays(self) -> dict[str, np.ndarray]:
        return {name: value for name, value in self._items() if isinstance(value, np.ndarray)}

    def facts(self) -> dict[str, Any]:
        """What is not an array, fit for JSON."""
        return {name: value for name, value in self._items() if not isinstance(value, np.ndarray)}

    @classmethod
    def of(cls, arrays: dict[str, np.ndarray], facts: dict[str, Any]) -> "Corpus":
        plain: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in facts.items()}
        return cls(**{**plain, **arrays})

    def check(self) -> None:
        """A ValueError where the arrays do not go together, as in a cache that was damaged."""
        for x, y, owner in ((self.train_x, self.train_y, self.owner), (self.test_x, self.test_y, self.test_owner)):
            if x is None or y is None:
                continue
            if not x.ndim or not y.ndim or len(x) != len(y) or (owner is not None and owner.shape != (len(y),)):
                raise ValueError("samples, targets and owners differ in number")
            if owner is not None and len(owner):
                names = 0 if self.owners is None else len(self.owners)
                if owner.dtype.kind not in "iu" or owner.min() < 0 or owner.max() >= names:
                    raise ValueError("samples belong to nobody")

    @property
    def digest(self) -> str:
        """Tells other data to be dealt out: all targets, and enough of the samples."""
        few = np.ascontiguousarray(self.train_x[:: max(1, len(self.train_x) // 1000)])
        kinds = [f"{a.dtype} {a.shape}" for a in (self.train_x, self.train_y)]
        found = hashlib.sha256(" ".join(kinds).encode())
        for array in (self.train_y, few):
            found.update(np.ascontiguousarray(array).tobytes())
        return found.hexdigest()[:32]

    def pooled(self) -> "Corpus":
        """Training and test samples together, to be dealt out as one (RADFed)."""
        if self.test_x is None or self.test_y is None:
            return self
        both = None if self.owner is None or self.test_owner is None else np.concatenate([self.owner, self.test_owner])
        return replace(
            self,
            train_x=np.concatenate([self.train_x, self.test_x]),
            train_y=np.concatenate([self.train_y, self.test_y]),
            owner=both,
            test_x=None,
            test_y=None,
            test_owner=None,
        )

    def fewer(self, samples: int) -> "Corpus":
        """At most so many training and so many test samples, by chance but the same ones every time."""
        found = self
        for part in ("train", "test"):
            targets = getattr(self, f"{part}_y")
            if targets is None or len(targets) <= samples:
                continue
            kept = np.sort(np.random.default_rng(samples).permutation(len(targets))[:samples])
            owner = "owner" if part == "train" else "test_owner"
            names = [name for name in (f"{part}_x", f"{part}_y", owner) if getattr(self, name) is not None]
            changes: dict[str, Any] = {name: getattr(self, name)[kept] for name in names}
            found = replace(found, **changes)
        return found

    def _items(self) -> list[tuple[str, Any]]:
        return [(f.name, getattr(self, f.name)) for f in fields(self)]
