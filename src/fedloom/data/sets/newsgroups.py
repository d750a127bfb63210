"""20 Newsgroups: Lang: NewsWeeder, learning to filter netnews. ICML 1995. The split by date, headers included.

The first `length` tokens of each post: words and punctuation marks in lower case, or the pieces of a Hugging Face
`tokenizer` (the name of a folder or of one on the hub; then `vocabulary` is the tokenizer's own).
"""

from dataclasses import replace
from pathlib import Path, PurePosixPath

import numpy as np

from fedloom.data.catalogue import dataset
from fedloom.data.corpus import Corpus
from fedloom.data.files import Remote, Source
from fedloom.data.formats import Texts, csv_texts, size_notes, tar_files, text_corpus
from fedloom.errors import DataError

SAMPLES = (11_314, 7_532)
GROUPS = (
    "alt.atheism",
    "comp.graphics",
    "comp.os.ms-windows.misc",
    "comp.sys.ibm.pc.hardware",
    "comp.sys.mac.hardware",
    "comp.windows.x",
    "misc.forsale",
    "rec.autos",
    "rec.motorcycles",
    "rec.sport.baseball",
    "rec.sport.hockey",
    "sci.crypt",
    "sci.electronics",
    "sci.med",
    "sci.space",
    "soc.religion.christian",
    "talk.politics.guns",
    "talk.politics.mideast",
    "talk.politics.misc",
    "talk.religion.misc",
)
ARCHIVE = Remote(
    "20news-bydate.tar.gz",
    "https://ndownloader.figshare.com/files/5975967",
    "sha256:8f1b2514ca22a5ade8fbb9cfa5727df95fa587f4c87b786e15c759fa66d95610",
)


@dataset(
    "20newsgroups",
    samples=SAMPLES,
    classes=20,
    licence="not stated",
    plain=("20newsgroups.csv.gz",),
    published=[[ARCHIVE]],
    how=f"Get {ARCHIVE.url} as {ARCHIVE.name}, or save 20newsgroups.csv.gz with the columns split, label and text.",
)
def newsgroups(length: int = 128, vocabulary: int = 20_000, tokenizer: str | None = None, *, source: Source) -> Corpus:
    """posts to twenty newsgroups, split by date (Lang 1995)"""
    if source.plain is not None:
        train, test = csv_texts(source.plain, len(GROUPS))
    else:
        train, test = _published(source.published[ARCHIVE.name])
    corpus = text_corpus(train, test, GROUPS, length, vocabulary, tokenizer)
    return replace(corpus, notes=size_notes(len(train[1]), len(test[1]), SAMPLES))


def _published(path: Path) -> tuple[Texts, Texts]:
    """The publisher's folders, 20news-bydate-SPLIT/GROUP/NUMBER, in the order of their names."""
    posts: dict[str, list[tuple[int, str, str]]] = {"train": [], "test": []}
    for name, content in tar_files(path, lambda member: len(PurePosixPath(member).parts) >= 3):
        folder, group, number = PurePosixPath(name).parts[-3:]
        split = folder.rpartition("-")[2]
        if split not in posts or group not in GROUPS:
            raise DataError(f"{path}: {name} belongs to no split of the twenty groups")
        posts[split].append((GROUPS.index(group), number, content.decode("latin-1")))
    if not all(posts.values()):
        raise DataError(f"{path} has no posts in 20news-bydate-train or 20news-bydate-test")

    def texts(split: str) -> Texts:
        rows = sorted(posts[split])
        return [text for _, _, text in rows], np.array([label for label, _, _ in rows], dtype=np.int64)

    return texts("train"), texts("test")
