"""A user's own files under the same roof: everything that works on a published set works on them.

A folder with `lazy=true` stays on disk, and the samples of a client are read when it trains. What needs all samples at
once is refused then: partitions other than natural, `pooled`, `samples`, `fold`, `standardise`, counts of labels.
"""

from pathlib import Path

from fedloom.data.catalogue import dataset
from fedloom.data.corpus import Corpus
from fedloom.data.files import Source
from fedloom.data.own import folder_corpus, table_corpus
from fedloom.errors import DataError


@dataset("table", samples=None, classes=None, licence="yours", embedded=True, natural=True)
def table(
    path: str,
    client: str,
    label: str,
    features: tuple[str, ...] | None = None,
    test: str | None = None,
    *,
    source: Source,
) -> Corpus:
    """your own table (.csv, .parquet) with a column that says whose a row is"""
    return table_corpus(path, client=client, label=label, features=features, test=test)


@dataset("folder", samples=None, classes=None, licence="yours", embedded=True, natural=True)
def folder(path: str, label: str = "label", client: str | None = None, lazy: bool = False, *, source: Source) -> Corpus:
    """your own folder of files (.npz, .csv, .parquet), one per client or shards of many"""
    if lazy:  # `fl.load` opens it otherwise, and never asks for all of it
        raise DataError("the samples of a folder with lazy=True stay on disk; leave lazy out to look at them")
    return folder_corpus(Path(path), label=label, client=client)
