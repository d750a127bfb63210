"""What a partition came to: sizes, labels per client, how far from iid, and what was left out or repaired."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedloom.data.partition import heatmap, stored
from fedloom.data.partition.base import Deal
from fedloom.errors import DataError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CHUNK = 4_000_000  # samples counted at once


@dataclass(frozen=True, eq=False, repr=False)
class PartitionReport:
    """A partition of labelled data, to print, plot and save.

    >>> deal = Deal.of([np.array([0, 1]), np.array([2, 3, 4])])
    >>> print(PartitionReport("iid", deal, np.array([0, 0, 1, 1, 0])))
    partition   iid
    clients     2 with 5 samples
    sizes       2 to 3, mean 2.5, sd 0.5
    C-score     0.67
    classes     1.5 of 2 per client (above 1%)
    """

    text: str  # of the partition
    deal: Deal
    labels: np.ndarray | None = None  # [n] whole numbers from 0; None where the targets are no class labels
    class_names: tuple[str, ...] = ()
    data: str = ""  # a digest of the samples that were dealt out

    @property
    def sizes(self) -> np.ndarray:
        """[N]"""
        return self.deal.sizes

    @property
    def remarks(self) -> tuple[str, ...]:
        return self.deal.remarks

    @property
    def classes(self) -> int:
        """How many classes there are."""
        labels = self._known()
        return max(len(self.class_names), int(labels.max()) + 1 if len(labels) else 0)

    @property
    def histogram(self) -> np.ndarray:
        """[N, classes] samples per client and class."""
        table = np.zeros((len(self.deal), self.classes), dtype=np.int64)
        for k, c, count in self._pairs():
            table[k, c] = count
        return table

    @property
    def c_score(self) -> float:
        """(1/N) sum_k sum_c |r_c^k - R_c|: 0 is iid, near 2 is one class of many per client (nan without labels).

        r^k are the label shares of client k, R those of all samples dealt out.
        """
        if self.labels is None or not len(self.deal.index):
            return math.nan
        R = np.bincount(self.labels[self.deal.index], minlength=self.classes) / len(self.deal.index)
        score = 0.0
        for k, c, count in self._pairs():
            # classes that a client lacks add their R_c: all of R, 1 per client, less that of the classes it has
            score += float(np.sum(np.abs(count / self.sizes[k] - R[c]) - R[c]))
        return 1 + score / len(self.deal)

    def classes_per_client(self, share: float = 0.01) -> float:
        """The mean number of classes that make up more than this share of a client (nan without labels)."""
        if self.labels is None or not len(self.deal):
            return math.nan
        return sum(int(np.sum(count > share * self.sizes[k])) for k, _, count in self._pairs()) / len(self.deal)

    def _pairs(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Client, class and number of samples of every pair that occurs; some clients at a time."""
        labels, K, offsets = self._known(), self.classes, self.deal.offsets
        first = 0
        while first < len(self.deal):
            end = max(first + 1, int(np.searchsorted(offsets, offsets[first] + CHUNK, side="right")) - 1)
            client = np.repeat(np.arange(first, end), np.diff(offsets[first : end + 1]))
            label = labels[self.deal.index[offsets[first] : offsets[end]]]
            pair, count = np.unique(client * K + label, return_counts=True)
            yield pair // K, pair % K, count
            first = end

    def _known(self) -> np.ndarray:
        if self.labels is None:
            raise DataError(f"the data of partition {self.text} have no class labels to count")
        return self.labels

    def __repr__(self) -> str:
        sizes = self.sizes
        lines = [("partition", self.text), ("clients", f"{len(self.deal):,} with {len(self.deal.index):,} samples")]
        if self.labels is not None and len(self.labels) > len(self.deal.index):
            lines.append(("left out", f"{len(self.labels) - len(self.deal.index):,} samples"))
        if len(sizes):
            lines.append(
                ("sizes", f"{sizes.min():,} to {sizes.max():,}, mean {sizes.mean():,.4g}, sd {sizes.std():,.4g}")
            )
        if self.labels is not None:
            lines.append(("C-score", f"{self.c_score:.2f}"))
            lines.append(("classes", f"{self.classes_per_client():.1f} of {self.classes} per client (above 1%)"))
        lines += [("remark", remark) for remark in self.remarks]
        return "\n".join(f"{name:<12}{value}" for name, value in lines)

    def plot(self, path: str | Path | None = None) -> "Figure":
        """A heat map, client x class, written to a PNG, SVG or PDF file if a path is given."""
        clients = heatmap.chosen(len(self.deal))
        labels = self._known()
        table = np.stack([np.bincount(labels[self.deal.client(k)], minlength=self.classes) for k in clients])
        figure = heatmap.draw(self.text, clients, len(self.deal), table, self.class_names)
        if path is not None:
            heatmap.write(figure, Path(path))
        return figure

    def save(self, path: str | Path) -> None:
        """Write who owns which sample (not the labels) to a file such as partition.npz."""
        stored.save(Path(path), self.text, self.deal, self.data)

    @classmethod
    def load(cls, path: str | Path) -> "PartitionReport":
        """A saved partition, as yet without labels."""
        text, deal, data = stored.load(Path(path))
        return cls(text, deal, data=data)
