"""AG News: Zhang, Zhao, LeCun: Character-level convolutional networks for text classification. NeurIPS 2015.

The first `length` tokens of title and description: words and punctuation marks in lower case, or the pieces of a
Hugging Face `tokenizer` (the name of a folder or of one on the hub; then `vocabulary` is the tokenizer's own).
"""

from dataclasses import replace
from pathlib import Path

import numpy as np

from fedloom.data.catalogue import dataset
from fedloom.data.corpus import Corpus
from fedloom.data.files import Remote, Source, open_text, reading
from fedloom.data.formats import Texts, checked_labels, csv_texts, size_notes, text_corpus
from fedloom.errors import DataError

SAMPLES = (120_000, 7_600)
NAMES = ("world", "sports", "business", "science and technology")
_MIRROR = "https://raw.githubusercontent.com/mhjabreel/CharCnn_Keras/master/data/ag_news_csv/"
TRAIN = Remote("agnews/train.csv", f"{_MIRROR}train.csv", "md5:b1a00f826fdfbd249f79597b59e1dc12")
TEST = Remote("agnews/test.csv", f"{_MIRROR}test.csv", "md5:d52ea96a97a2d943681189a97654912d")


@dataset(
    "agnews",
    samples=SAMPLES,
    classes=4,
    licence="non-commercial",
    plain=("agnews.csv.gz",),
    published=[[TRAIN, TEST]],
    how=f"Put train.csv and test.csv from {_MIRROR} into a subfolder agnews, or save agnews.csv.gz with the columns "
    "split, label and text.",
)
def agnews(length: int = 128, vocabulary: int = 20_000, tokenizer: str | None = None, *, source: Source) -> Corpus:
    """news in four sections (Zhang et al. 2015)"""
    if source.plain is not None:
        train, test = csv_texts(source.plain, len(NAMES))
    else:
        train, test = (_published(source.published[remote.name]) for remote in (TRAIN, TEST))
    corpus = text_corpus(train, test, NAMES, length, vocabulary, tokenizer)
    return replace(corpus, notes=size_notes(len(train[1]), len(test[1]), SAMPLES))


def _published(path: Path) -> Texts:
    """Without a header: the class, counted from 1, the title and the description."""
    import pandas as pd

    with reading(path):
        with open_text(path) as file:
            table = pd.read_csv(file, header=None, dtype=str, keep_default_na=False)
        if table.shape[1] != 3:
            raise DataError(f"{path} has {table.shape[1]} columns, but class, title and description were expected")
        labels = table[0].to_numpy().astype(np.int64) - 1
    return (table[1] + " " + table[2]).tolist(), checked_labels(path, "the class less 1", labels, len(NAMES))
