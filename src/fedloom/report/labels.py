"""Which labels each client has, for the page: from partition.npz and the data, if those are here."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from fedloom.data.catalogue import FACTS, find_dataset
from fedloom.data.files import Files
from fedloom.data.partition.report import PartitionReport
from fedloom.errors import FedloomError
from fedloom.experiment.folder import PARTITION, Run
from fedloom.report.describe import group_of

CLIENTS = 200  # more would be narrower than a line
CLASSES = 200


def describe_labels(runs: Iterable[Run]) -> list[dict[str, Any]]:
    """One table for each setting, of its first run: another seed deals the data out anew."""
    first: dict[str, Run] = {}
    for run in runs:
        first.setdefault(group_of(run.config), run)
    return [{"group": group, "seed": run.config.seed, **_table(run)} for group, run in first.items()]


def _table(run: Run) -> dict[str, Any]:
    if not (run.folder / PARTITION).is_file():
        return {"missing": f"The run's folder holds no {PARTITION}, so that its labels can't be counted."}
    try:
        if not _here(run):
            return {"missing": f"The data of {run.config.data} are not here, so that its labels can't be counted."}
        report = run.federation().report
    except (FedloomError, OSError, MemoryError) as error:  # the page is worth having without them
        return {"missing": f"The labels can't be counted: {error or 'too little memory'}."}
    if report is None or report.labels is None:
        return {"missing": f"The targets of {run.config.data} are no class labels to count."}
    return _shares(report)


def _here(run: Run) -> bool:
    """A page must not start a download."""
    call = find_dataset(run.config.data)
    facts = FACTS[call.name]
    files = Files.of(run.config.data_dir)
    return facts.embedded or files.present(call.name, facts.plain, facts.published) is not None


def _shares(report: PartitionReport) -> dict[str, Any]:
    """The share of each class among a client's samples: [classes, clients]."""
    N, L = min(len(report.deal), CLIENTS), min(report.classes, CLASSES)
    assert report.labels is not None  # nosec B101  # for the type checker
    counts = [np.bincount(report.labels[report.deal.client(k)], minlength=report.classes) for k in range(N)]
    table = np.stack(counts)[:, :L]
    shares = table / np.maximum(report.sizes[:N, None], 1)
    named = report.class_names if len(report.class_names) == report.classes else range(report.classes)
    few = [f"the first {CLIENTS} of {len(report.deal):,} clients are shown"] if len(report.deal) > CLIENTS else []
    few += [f"the first {CLASSES} of {report.classes:,} classes are shown"] if report.classes > CLASSES else []
    return {
        "partition": report.text,
        "classes": [str(name)[:60] for name in list(named)[:L]],
        "shares": shares.T.round(3).tolist(),
        "sizes": report.sizes[:N].tolist(),
        "c_score": round(report.c_score, 3),
        "per_client": round(report.classes_per_client(), 2),
        "notes": few,
    }
