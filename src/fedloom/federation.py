"""The clients' data: one tensor for all, a slice of an index vector per client, batches by gather."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from fedloom.data.partition.report import PartitionReport
from fedloom.data.shards import Shards
from fedloom.data.transforms import Draws, Preparation, augmentations
from fedloom.errors import DataError

if TYPE_CHECKING:
    import pandas as pd

NO_TARGET = -100  # in a sequence of targets: nothing is to be predicted here

Pair = tuple[Any, Any]  # x and y, tensors or anything that NumPy reads


@dataclass(frozen=True, repr=False)
class Holdout:
    """Data to evaluate on: one set (`offsets` is None), or held-out clients, each a slice between two offsets."""

    x: Tensor
    y: Tensor
    offsets: Tensor | None = None

    @classmethod
    def of(cls, data: Pair | Sequence[Pair], what: str) -> "Holdout":
        """A pair (x, y) is one set; a list of pairs is one client each."""
        if isinstance(data, tuple) and len(data) == 2 and not isinstance(data[0], tuple):
            return cls(*_pair(data, what))
        pairs = [_pair(pair, f"{what} client {k}") for k, pair in enumerate(data)]
        if not pairs:
            raise DataError(f"the list of {what} clients is empty; leave it out instead")
        x, y = _join(pairs, what)
        return cls(x, y, _offsets(len(px) for px, _ in pairs))

    def __repr__(self) -> str:
        own = "" if self.offsets is None else f"clients {len(self.offsets) - 1}, "
        return f"Holdout({own}samples {len(self.x)} of shape {tuple(self.x.shape[1:])})"

    def to(self, device: torch.device, dtype: torch.dtype) -> "Holdout":
        return Holdout(_cast(self.x, device, dtype), _cast(self.y, device, dtype), self.offsets)


class Held(NamedTuple):
    """The clients of a federation whose samples are in memory, and where in the index each one's begin."""

    clients: Tensor  # [K] rising
    begins: Tensor  # [K]


@dataclass(frozen=True, repr=False)
class Federation:
    """Many clients' training data, and what is held out.

    Client k owns the samples `index[offsets[k] : offsets[k + 1]]` of `x` and `y`. Images are kept as bytes; what the
    model reads is made of a batch by `preparation`.

    With `shards` the clients' samples stay on disk: `x` and `y` are then the first few of them, to try a model on, and
    `holding` reads those of some clients.

    >>> federation = Federation.from_arrays(clients=[([[0.0], [1.0]], [0, 1]), ([[2.0]], [1])])
    >>> len(federation), federation.sizes.tolist()
    (2, [2, 1])
    >>> federation
    Federation(arrays: clients 2, samples 3 of shape (1,), classes 2)
    """

    x: Tensor
    y: Tensor
    index: Tensor
    offsets: Tensor
    classes: int | None = None  # None: targets are no class labels
    test: Holdout | None = None
    validation: Holdout | None = None
    name: str = field(default="arrays", compare=False)
    preparation: Preparation = field(default_factory=Preparation)
    vocabulary: tuple[str, ...] | None = None  # of token ids, where they stand for words or characters
    padded: bool = True  # token 0 fills up short texts
    names: np.ndarray | None = field(default=None, compare=False)  # of the clients
    class_names: tuple[str, ...] = ()
    report: PartitionReport | None = field(default=None, compare=False)  # how the data were dealt out
    shards: Shards | None = None  # the samples on disk; None: they are here
    held: Held | None = None  # None: those of all clients are

    @classmethod
    def from_arrays(
        cls,
        clients: Sequence[Pair],
        test: Pair | Sequence[Pair] | None = None,
        validation: Pair | Sequence[Pair] | None = None,
        classes: int | None = None,
    ) -> "Federation":
        """A federation of one (x, y) pair per client.

        `test` and `validation` are a pair (one set) or a list of pairs (held-out clients, whose scores are averaged
        with equal weight). Integer targets are class labels below `classes`, which is found from the data if not given.
        """
        pairs = [_pair(pair, f"client {k}") for k, pair in enumerate(clients)]
        if not pairs:
            raise DataError("a federation needs at least one client")
        x, y = _join(pairs, "training")
        return cls.from_tensor(x, y, _offsets(len(px) for px, _ in pairs), test, validation, classes)

    @classmethod
    def from_tensor(
        cls,
        x: Any,
        y: Any,
        offsets: Any,
        test: Pair | Sequence[Pair] | None = None,
        validation: Pair | Sequence[Pair] | None = None,
        classes: int | None = None,
    ) -> "Federation":
        """A federation whose samples lie one client after the other in one array: client k has those from
        `offsets[k]` to `offsets[k + 1]`. A million clients cost no Python list.

        >>> federation = Federation.from_tensor(torch.zeros(5, 2), [0, 1, 1, 0, 1], offsets=[0, 2, 5])
        >>> federation.sizes.tolist()
        [2, 3]
        """
        x, y = _pair((x, y), "the training data")
        bounds = _tensor(offsets, "offsets")
        if bounds.dim() != 1 or bounds.is_floating_point():
            kind = f"{bounds.dtype} of shape {tuple(bounds.shape)}"
            raise DataError(f"offsets must be a row of whole numbers, not {kind}")
        return cls.build(
            x,
            y,
            torch.arange(len(x)),
            bounds.to("cpu", torch.int64),
            test=None if test is None else Holdout.of(test, "test"),
            validation=None if validation is None else Holdout.of(validation, "validation"),
            classes=classes,
        )

    @classmethod
    def from_folder(
        cls, folder: str | Path, *, label: str = "label", client: str | None = None, lazy: bool = False
    ) -> "Federation":
        """A federation from files: one per client (.npz with x and y, .csv, .parquet), or shards that hold many.

        `label` is the column of targets; `client` the column of client names, if the tables are shards. The layout is
        described in `fedloom.data.own`. `lazy` leaves the samples on disk; those of a client are read when it trains,
        so that there may be more of them than memory holds.
        """
        from fedloom.data.lazy import open_folder
        from fedloom.data.load import own_federation
        from fedloom.data.own import folder_corpus

        if lazy:
            return open_folder(Path(folder), label=label, client=client)
        return own_federation(folder_corpus(Path(folder), label=label, client=client), "folder")

    @classmethod
    def from_table(
        cls,
        table: "pd.DataFrame | str | Path",
        *,
        client: str,
        label: str,
        features: Sequence[str] | None = None,
        test: "pd.DataFrame | str | Path | None" = None,
    ) -> "Federation":
        """A federation from a table (a data frame, .csv or .parquet): each value of the column `client` is a client.

        `features` are the columns that the model reads (None: all others, which must be numbers). Targets that are
        texts become class labels in sorted order (`class_names`). `test` is a table to evaluate on.

        >>> import pandas as pd
        >>> table = pd.DataFrame({"ward": ["a", "a", "b"], "age": [50, 60, 70], "died": [0, 1, 0]})
        >>> federation = Federation.from_table(table, client="ward", label="died")
        >>> federation.names.tolist(), federation.sizes.tolist()
        (['a', 'b'], [2, 1])
        """
        from fedloom.data.load import own_federation
        from fedloom.data.own import table_corpus

        return own_federation(table_corpus(table, client=client, label=label, features=features, test=test), "table")

    @classmethod
    def build(
        cls,
        x: Tensor,
        y: Tensor,
        index: Tensor,
        offsets: Tensor,
        *,
        test: Holdout | None = None,
        validation: Holdout | None = None,
        classes: int | None = None,
        name: str = "arrays",
    ) -> "Federation":
        """A federation over shared tensors, checked: no empty client, all finite, every label below `classes`."""
        _check_slices(index, offsets, len(x))
        _tensor(x, "training samples")
        _tensor(y, "training targets")
        held = {"test": test, "validation": validation}
        for what, part in held.items():
            if part is not None:
                _check_held_out(part, x, y, what)
        sets = {"training": y, **{what: part.y for what, part in held.items() if part is not None}}
        return cls(x, y, index, offsets, _count_classes(sets, classes), test, validation, name)

    @classmethod
    def elsewhere(cls, sizes: Tensor, like: "Federation | None" = None) -> "Federation":
        """A federation whose samples stay with its clients; what `like` holds out is here, to evaluate on."""
        held = None if like is None else like.test or like.validation
        x, y = (torch.empty(0), torch.empty(0)) if held is None else (held.x[:2], held.y[:2])
        nobody = torch.empty(0, dtype=torch.int64)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
        parts: dict[str, Any] = {"x": x, "y": y, "index": torch.arange(len(x)), "offsets": offsets}
        parts |= {"held": Held(nobody, nobody), "name": "elsewhere", "names": None, "report": None, "shards": None}
        return cls(**parts) if like is None else replace(like, **parts)

    @classmethod
    def on_disk(
        cls, shards: Shards, x: Tensor, y: Tensor, classes: int | None, test: Holdout | None, name: str
    ) -> "Federation":
        """A federation whose samples stay in files; `x` and `y` are the first of them."""
        if test is not None:
            _check_held_out(test, x, y, "test")
        index, offsets = torch.arange(len(x)), torch.from_numpy(shards.offsets)
        return cls(x, y, index, offsets, classes, test, name=name, names=shards.names, shards=shards)

    def images(self, mean: Sequence[float] = (), std: Sequence[float] = (), augment: str | None = None) -> "Federation":
        """The same samples, bytes [n, channels, height, width], read as images: scaled to [0, 1], normalised by the
        channels' mean and std, and augmented in training.

        >>> pictures = torch.zeros(4, 3, 8, 8, dtype=torch.uint8)
        >>> federation = Federation.from_tensor(pictures, [0, 1, 0, 1], offsets=[0, 2, 4]).images(augment="flip")
        """
        if self.x.dtype != torch.uint8 or self.x.dim() != 4:
            raise DataError(f"images are bytes [n, channels, height, width], not {self.x.dtype} {list(self.x.shape)}")
        if len(mean) != len(std) or len(mean) not in (0, self.x.shape[1]) or any(s <= 0 for s in std):
            raise DataError(f"mean and std must have {self.x.shape[1]} numbers each, those of std above 0")
        return replace(self, preparation=Preparation(True, tuple(mean), tuple(std), augmentations(augment)))

    @property
    def tokens(self) -> int | None:
        """Samples are token ids below this number; None: they are no tokens."""
        if self.vocabulary is not None:
            return len(self.vocabulary)
        if self.preparation.pixels or self.x.is_floating_point() or self.x.dim() != 2:
            return None
        parts = [part.x for part in (self.test, self.validation) if part is not None]
        own = int(self.x.max()) if self.shards is None else self.shards.largest
        return 1 + max([own, *(int(part.max()) for part in parts)])

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __repr__(self) -> str:
        name = self.name if self.report is None else f"{self.name}, {self.report.text}"
        told = [f"clients {len(self)}, samples {int(self.offsets[-1])} of shape {tuple(self.x.shape[1:])}"]
        told += [] if self.shards is None else ["on disk"]
        told += [] if self.classes is None else [f"classes {self.classes}"]
        held = {"test": self.test, "validation": self.validation}
        told += [f"{use} {len(part.x)}" for use, part in held.items() if part is not None]
        return f"Federation({name}: {', '.join(told)})"

    @property
    def sizes(self) -> Tensor:
        """How many samples each client has [N]."""
        return self.offsets[1:] - self.offsets[:-1]

    def sizes_of(self, clients: Tensor) -> Tensor:
        """How many samples each of these has [K]; the others, who may be a million, are not looked at."""
        return self.offsets[clients + 1] - self.offsets[clients]

    def client(self, k: int) -> tuple[Tensor, Tensor]:
        """The samples and targets of client k, as they are stored."""
        if not 0 <= k < len(self):
            raise DataError(f"there is no client {k}: the clients are 0 to {len(self) - 1}")
        here = self.holding(torch.tensor([k]))
        mine = torch.from_numpy(here.positions([k])[0])
        return here.x[mine], here.y[mine]

    def holding(self, clients: Tensor) -> "Federation":
        """A federation in which these clients' samples are in memory, under the same numbers: itself, unless they stay
        on disk; then they are read, each client's once.
        """
        if self.shards is None:
            return self
        chosen = torch.unique(clients.cpu())
        x, y = self.shards.read(chosen.numpy())
        sizes = self.sizes_of(chosen)
        return replace(
            self,
            x=torch.from_numpy(x).to(self.x.device, self.x.dtype),
            y=torch.from_numpy(y).to(self.y.device, self.y.dtype),
            index=torch.arange(len(x)),
            shards=None,
            held=Held(chosen, sizes.cumsum(0) - sizes),
        )

    def positions(self, clients: Sequence[int]) -> list[np.ndarray]:
        """Where in `x` and `y` the samples of each of these clients are."""
        chosen, index = torch.as_tensor(clients, dtype=torch.int64), self.index.numpy()
        sizes, begins = self.sizes_of(chosen).tolist(), self._begins(chosen).tolist()
        return [index[begin : begin + size] for begin, size in zip(begins, sizes, strict=True)]

    def batch(self, chosen: Tensor, dtype: torch.dtype, draws: Draws | None = None) -> tuple[Tensor, Tensor]:
        """Samples as the model reads them, augmented where `draws` are given, and their targets."""
        return self.preparation.train(self.x[chosen], dtype, draws), self.y[chosen]

    def held_out(self, clients: Tensor) -> Holdout:
        """Some clients' data, as stored, to evaluate on."""
        here = self.holding(clients)
        index, offsets = here._slices(clients)
        return Holdout(here.x[index], here.y[index], offsets)

    def only(self, clients: Tensor) -> "Federation":
        """Some of the clients, in that order; the samples are shared."""
        names = None if self.names is None else self.names[clients.numpy()]
        if self.shards is not None:
            return replace(self, offsets=self._bounds(clients), names=names, shards=self.shards.only(clients.numpy()))
        index, offsets = self._slices(clients)
        return replace(self, index=index, offsets=offsets, names=names, held=None)

    def _slices(self, clients: Tensor) -> tuple[Tensor, Tensor]:
        offsets = self._bounds(clients)
        begin = torch.repeat_interleave(self._begins(clients) - offsets[:-1], self.sizes_of(clients))
        return self.index[begin + torch.arange(len(begin))], offsets

    def _bounds(self, clients: Tensor) -> Tensor:
        """Offsets of these clients alone."""
        return torch.cat([torch.zeros(1, dtype=torch.int64), self.sizes_of(clients).cumsum(0)])

    def _begins(self, clients: Tensor) -> Tensor:
        """Where in the index the samples of each client begin."""
        if self.shards is not None:
            raise DataError("the clients' samples are on disk: ask a federation that is `holding` them")
        if self.held is None:
            return self.offsets[clients]
        missing = clients[~torch.isin(clients, self.held.clients)].tolist()
        if missing:
            raise DataError(f"the samples of client {missing[0]} are not here")
        return self.held.begins[torch.searchsorted(self.held.clients, clients)]

    def to(self, device: torch.device, dtype: torch.dtype) -> "Federation":
        """The same federation on a device; floating-point numbers take the model's dtype, integers stay."""
        return replace(
            self,
            x=_cast(self.x, device, dtype),
            y=_cast(self.y, device, dtype),
            test=self.test and self.test.to(device, dtype),
            validation=self.validation and self.validation.to(device, dtype),
        )


def has_target(y: Tensor) -> Tensor:
    """Where a sequence of targets says something."""
    return y.long() != NO_TARGET


def _offsets(sizes: Iterable[int]) -> Tensor:
    return torch.tensor(np.cumsum([0, *sizes]), dtype=torch.int64)


def _tensor(values: Any, what: str) -> Tensor:
    try:
        tensor = values if isinstance(values, Tensor) else torch.as_tensor(np.asarray(values))
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"the {what} can't be read as one array of numbers: {error}") from None
    if tensor.dtype in (torch.uint16, torch.uint32, torch.uint64):  # PyTorch computes with none of them
        tensor = tensor.to(torch.int64)
    if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
        row = int((~torch.isfinite(tensor)).reshape(len(tensor), -1).any(1).nonzero()[0]) if tensor.dim() else 0
        raise DataError(f"the {what} hold a NaN or an infinity, first in sample {row}")
    return tensor.detach()


def _check_slices(index: Tensor, offsets: Tensor, samples: int) -> None:
    sizes = offsets[1:] - offsets[:-1]
    if len(sizes) < 1 or int(offsets[0]) != 0 or int(offsets[-1]) != len(index) or int(sizes.min()) < 0:
        raise DataError("offsets must rise from 0 to the length of the index, one step for each client")
    if int(sizes.min()) == 0:
        raise DataError(f"client {int(sizes.argmin())} has no samples; leave empty clients out")
    if int(index.min()) < 0 or int(index.max()) >= samples:
        raise DataError(f"the index must point to samples 0 to {samples - 1}")


def _check_held_out(part: Holdout, x: Tensor, y: Tensor, what: str) -> None:
    for values, clients, kind in ((part.x, x, "samples"), (part.y, y, "targets")):
        _tensor(values, f"{what} {kind}")
        _check_alike(values, clients, f"{what} {kind}")


def _check_alike(part: Tensor, clients: Tensor, what: str) -> None:
    """What is held out must look like what is trained on."""
    if part.shape[1:] != clients.shape[1:]:
        shapes = f"{tuple(part.shape[1:])}, but those of the clients {tuple(clients.shape[1:])}"
        raise DataError(f"the {what} have shape {shapes}")
    if part.is_floating_point() != clients.is_floating_point():
        raise DataError(f"the {what} have dtype {part.dtype}, but those of the clients {clients.dtype}")


def _pair(pair: Pair, what: str) -> tuple[Tensor, Tensor]:
    try:
        x, y = pair
    except (TypeError, ValueError):
        raise DataError(f"{what}: expected a pair (x, y), got {type(pair).__name__}") from None
    x, y = _tensor(x, f"samples of {what}"), _tensor(y, f"targets of {what}")
    if x.dim() == 0 or y.dim() == 0 or len(x) != len(y):
        shapes = f"{tuple(x.shape)} and {tuple(y.shape)}"
        raise DataError(f"{what}: x and y must have one entry per sample, but their shapes are {shapes}")
    if len(x) == 0:
        raise DataError(f"{what} has no samples; leave empty clients out")
    return x, y


def _join(pairs: Sequence[tuple[Tensor, Tensor]], what: str) -> tuple[Tensor, Tensor]:
    for part, name in ((0, "x"), (1, "y")):
        shapes = {tuple(pair[part].shape[1:]) for pair in pairs}
        if len(shapes) > 1:
            raise DataError(f"the {what} clients disagree about the shape of one {name}: {sorted(shapes)}")
        kinds = {pair[part].dtype for pair in pairs}
        if len(kinds) > 1:
            raise DataError(f"the {what} clients disagree about the dtype of {name}: {sorted(map(str, kinds))}")
    return torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs])


def _count_classes(targets: dict[str, Tensor], classes: int | None) -> int | None:
    if any(y.is_floating_point() for y in targets.values()):
        if classes is not None:
            raise DataError(f"classes={classes} was given, but the targets are floating-point numbers")
        return None
    targets = {what: y[has_target(y)] if y.dim() > 1 else y for what, y in targets.items()}
    if not all(y.numel() for y in targets.values()):
        raise DataError("a set holds no target at all")
    found = 1 + max(int(y.max()) for y in targets.values())
    if classes is None and any(int(y.min()) < 0 for y in targets.values()):
        return None  # whole numbers, but no labels: a loss of the user's own will know
    for what, y in targets.items():
        if int(y.min()) < 0:
            raise DataError(f"the {what} labels go down to {int(y.min())}; classes are counted from 0")
        if classes is not None and int(y.max()) >= classes:
            raise DataError(f"the {what} labels go up to {int(y.max())}, but there are {classes} classes (0 first)")
    return found if classes is None else classes


_MOVED: WeakValueDictionary[tuple[Any, ...], Tensor] = WeakValueDictionary()


def _cast(values: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The same values there; runs that live at the same time share them."""
    kind = dtype if values.is_floating_point() else values.dtype
    if values.dtype == kind and values.device == device:
        return values
    moved = values.to(device, kind)
    key = (values.data_ptr(), values.shape, values.stride(), values.dtype, device, kind)
    known = _MOVED.get(key)
    if known is not None and torch.equal(known, moved):  # the owner may have changed them since
        return known
    _MOVED[key] = moved
    return moved
