"""`load`: a data set by name, dealt out to clients, as a federation."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from fedloom.data.catalogue import find_dataset, read_corpus
from fedloom.data.corpus import Corpus
from fedloom.data.files import Files
from fedloom.data.lazy import is_lazy, load_lazily
from fedloom.data.partition import Deal, PartitionReport, Pool
from fedloom.data.partition import partition as deal_out
from fedloom.data.split import split_clients
from fedloom.data.standardise import Standardisation
from fedloom.data.standardise import standardise as standardised
from fedloom.data.transforms import Preparation, augmentations
from fedloom.data.vocabulary import fit_vocabulary
from fedloom.errors import DataError
from fedloom.federation import Federation, Holdout
from fedloom.local import plain
from fedloom.spec import parse_one

CLIENTS = 100


def load(
    name: str,
    partition: str | Path | None = None,
    clients: int | None = None,
    seed: int = 0,
    *,
    pooled: bool = False,
    validation: int = 0,
    samples: int | None = None,
    fold: int | None = None,
    inner: int = 0,
    augment: str | None = None,
    standardise: Standardisation | None = None,
    data_dir: str | Path | None = None,
) -> Federation:
    """A data set, dealt out to clients; its test set is held out.

    `partition` is a text such as "dirichlet(alpha=0.3)", or the partition.npz of an earlier run; None is "natural"
    where the data have clients of their own (writers, roles, hospitals) and "iid" elsewhere. `clients` is their
    number; None is 100, or all natural ones. `pooled` deals out training and test samples together.
    `samples` keeps so many training samples, and at most so many for the test, by chance but always the same ones.
    `validation` holds that many further clients out; `fold` (0 to 4) splits the clients into those that train, 20% for
    validation and 20% for the test, `inner` says which block is for validation (see `split_clients`). `augment` is a
    text such as "crop + flip + cutout". `standardise` is "global" or "local", for tables. Files are looked for in
    `data_dir`, or the folder that the environment variable FEDLOOM_DATA names, then in the cache, then at their
    publisher.

    >>> federation = load("digits", partition="classes(per_client=2)", clients=20, seed=0)
    >>> len(federation), federation.classes
    (20, 10)
    """
    call = find_dataset(name)
    clients, validation, samples, fold, seed = map(plain, (clients, validation, samples, fold, seed))
    counts = {"clients": clients, "validation": validation, "samples": samples, "fold": fold}
    for what, count in counts.items():
        if (count is None and what == "validation") or not isinstance(count, int | None) or isinstance(count, bool):
            raise DataError(f"{what} must be a whole number, not {count!r}")
    if validation < 0:
        raise DataError(f"validation must be a number of clients, not {validation}")
    if samples is not None and samples < 1:
        raise DataError(f"samples must be at least 1, not {samples}")
    asked = clients if not clients else clients + validation
    if is_lazy(call):
        unfit = {"pooled": pooled, "samples": samples, "fold": fold, "inner": inner or None, "standardise": standardise}
        return load_lazily(call, partition, asked, seed, validation=validation, augment=augment, unfit=unfit)
    corpus = read_corpus(name, Files.of(data_dir), asked, seed)
    if pooled:
        corpus = corpus.pooled()
    if samples is not None:
        corpus = corpus.fewer(samples)
    report = _dealt(corpus, str(call), partition, asked, validation, seed)
    federation = _assembled(corpus, call.name, report, dropped_test=fold is not None)
    federation = split_clients(federation, validation=validation, fold=fold, inner=inner, seed=seed)
    if corpus.words is not None:
        federation = fit_vocabulary(
            federation,
            corpus.words,
            padded=corpus.padded,
            predicts_tokens=corpus.predicts_tokens,
            limit=corpus.vocabulary,
        )
    if standardise is not None:
        federation = standardised(federation, standardise, corpus.numeric or None)
    return replace(federation, preparation=_preparation(corpus, augment))


def _preparation(corpus: Corpus, augment: str | None) -> Preparation:
    pixels = corpus.train_x.dtype == np.uint8 and corpus.train_x.ndim == 4
    return Preparation(pixels, corpus.mean, corpus.std, augmentations(augment))


def own_federation(corpus: Corpus, name: str) -> Federation:
    """A user's own data, one client for each owner."""
    federation = _assembled(corpus, name, _dealt(corpus, name, "natural", None, 0, 0), dropped_test=False)
    return replace(federation, preparation=_preparation(corpus, None))


def _dealt(
    corpus: Corpus, name: str, partition: str | Path | None, clients: int | None, validation: int, seed: int
) -> PartitionReport:
    if partition is None:
        partition = "iid" if corpus.owner is None else "natural"
    labels = corpus.train_y if corpus.train_y.ndim == 1 and corpus.train_y.dtype.kind in "iu" else None
    if isinstance(partition, Path) or str(partition).endswith(".npz"):
        saved = PartitionReport.load(Path(partition))
        if saved.data != corpus.digest:
            raise DataError(f"{partition} deals out other data than {name} as it is now (other files, or --pooled)")
        if clients is not None and clients != len(saved.deal):
            raise DataError(f"{partition} deals out to {len(saved.deal)} clients, not to {clients}")
        return replace(saved, labels=labels, class_names=corpus.class_names)
    way = parse_one(partition).name
    if labels is None and way not in ("iid", "natural"):
        raise DataError(f"partition {partition}: the targets of {name} are no class labels; use natural or iid")
    if clients is None and way != "natural":
        clients = CLIENTS + validation
    pool = Pool(
        np.zeros(len(corpus.train_y), dtype=np.int64) if labels is None else labels,
        corpus.owner,
        corpus.owners,
        _categories(corpus),
    )
    deal = deal_out(partition, pool, clients, seed)
    return PartitionReport(partition, deal, labels, corpus.class_names, corpus.digest)


def _categories(corpus: Corpus) -> np.ndarray | None:
    """A table's columns that hold categories."""
    if not corpus.numeric or corpus.numeric == corpus.train_x.shape[1]:
        return None
    return corpus.train_x[:, corpus.numeric :].astype(np.int16)


def _test_set(corpus: Corpus, deal: Deal) -> Holdout | None:
    """The publisher's test set; where it has clients of its own too, that of the clients who were chosen."""
    if corpus.test_x is None or corpus.test_y is None:
        return None
    x, y = corpus.test_x, corpus.test_y
    if deal.names is not None and corpus.test_owner is not None and corpus.owners is not None:
        chosen = np.isin(corpus.owners, deal.names)[corpus.test_owner]
        if not chosen.all():
            x, y = x[chosen], y[chosen]
    return Holdout(torch.from_numpy(x), torch.from_numpy(y)) if len(y) else None


def _assembled(corpus: Corpus, name: str, report: PartitionReport, dropped_test: bool) -> Federation:
    """A federation over a data set's arrays, by the positions that each client owns."""
    deal: Deal = report.deal
    test = None if dropped_test else _test_set(corpus, deal)
    classes = len(corpus.words) if corpus.predicts_tokens and corpus.words is not None else corpus.classes
    federation = Federation.build(
        torch.from_numpy(corpus.train_x),
        torch.from_numpy(corpus.train_y),
        torch.from_numpy(deal.index),
        torch.from_numpy(deal.offsets),
        test=test,
        classes=classes,
        name=name,
    )
    return replace(federation, names=deal.names, report=report, class_names=corpus.class_names)
