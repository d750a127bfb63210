"""The tokens that a model knows: those of the training clients, and no others."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedloom.federation import NO_TARGET, Federation, Holdout

UNKNOWN = "<unknown>"
ROWS = 1 << 16  # at a time: ids as 64-bit numbers take eight times their place


def fit_vocabulary(
    federation: Federation, words: np.ndarray, *, padded: bool, predicts_tokens: bool, limit: int | None
) -> Federation:
    """Number the tokens anew: padding (where there is any) is 0, the next stands for all that training clients don't
    have, then theirs by falling frequency, ties in alphabetical order. `limit` keeps the most frequent only.

    Ids of `federation` point into `words`; so do its targets if `predicts_tokens`.
    """
    counts = np.zeros(len(words), dtype=np.int64)
    for ids in _chunks(federation.x, federation.index):
        counts += np.bincount(ids, minlength=len(words))
    if predicts_tokens:  # the last character of a text is a target only
        for ids in _chunks(federation.y, federation.index):
            counts += np.bincount(ids[ids != NO_TARGET], minlength=len(words))
    if padded:
        counts[0] = 0
    known = np.flatnonzero(counts)
    known = known[np.lexsort((words[known], -counts[known]))][:limit]
    first = 2 if padded else 1
    new = np.full(len(words), first - 1, dtype=np.int64)
    if padded:
        new[0] = 0
    new[known] = first + np.arange(len(known))
    vocabulary = (*(("",) if padded else ()), UNKNOWN, *words[known].tolist())
    table = torch.from_numpy(new)

    def renumber(part: Holdout | None) -> Holdout | None:
        return part and replace(part, x=_renumber(part.x, table), y=targets(part.y))

    def targets(y: Tensor) -> Tensor:
        return _renumber(y, table) if predicts_tokens else y

    return replace(
        federation,
        x=_renumber(federation.x, table),
        y=targets(federation.y),
        test=renumber(federation.test),
        validation=renumber(federation.validation),
        classes=len(vocabulary) if predicts_tokens else federation.classes,
        vocabulary=vocabulary,
        padded=padded,
    )


def _chunks(values: Tensor, index: Tensor) -> Iterator[np.ndarray]:
    return (values[part].numpy().ravel() for part in torch.split(index, ROWS))


def _renumber(ids: Tensor, table: Tensor) -> Tensor:
    """Bytes stay bytes where the new ids allow; targets that are none stay so."""
    if ids.dtype == torch.uint8 and int(table.max()) < 256:
        swap = table.to(torch.uint8).numpy().tobytes().ljust(256, b"\0")
        return torch.frombuffer(bytearray(ids.numpy().tobytes().translate(swap)), dtype=torch.uint8).reshape(ids.shape)
    new = torch.empty(ids.shape, dtype=torch.int64 if ids.dtype == torch.int64 else torch.int32)
    for done, part in zip(torch.split(new, ROWS), torch.split(ids, ROWS), strict=True):
        places = part.long()
        done.copy_(torch.where(places == NO_TARGET, places, table[places.clamp(min=0)]))
    return new
