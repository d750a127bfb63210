"""A partition in a file: index, offsets, names, remarks and the text, as plain NumPy arrays without pickles."""

import os
from pathlib import Path

import numpy as np

from fedloom.data.files import open_npz
from fedloom.data.partition.base import Deal
from fedloom.errors import DataError
from fedloom.untrusted import is_plain


def save(path: Path, text: str, deal: Deal, data: str) -> None:
    arrays = {
        "index": deal.index.astype(np.int64),
        "offsets": deal.offsets.astype(np.int64),
        "text": np.array(text, dtype=np.str_),
        "data": np.array(data, dtype=np.str_),
        "remarks": np.array(deal.remarks, dtype=np.str_),
    }
    if deal.names is not None:
        arrays["names"] = np.asarray(deal.names).astype(np.str_)
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        beside.unlink(missing_ok=True)
        with beside.open("xb") as file:
            np.savez_compressed(file, **arrays)  # type: ignore[arg-type]  # the stubs take the names for allow_pickle
        os.replace(beside, path)
    except OSError as error:
        raise DataError(f"the partition could not be written to {path}: {error.strerror or error}") from error


def load(path: Path) -> tuple[str, Deal, str]:
    """The partition's text, the deal, and the digest of what was dealt out; a damaged or other file is refused."""
    if not is_plain(path):
        raise DataError(f"there is no partition file {path}")
    try:
        with open_npz(path) as file:
            wanted = ("index", "offsets", "text", "data", "remarks", "names")
            arrays = {name: file[name] for name in wanted if name in file}
        text, remarks, data = arrays["text"], arrays["remarks"], str(arrays["data"])
        deal = Deal(arrays["index"], arrays["offsets"], arrays.get("names"), tuple(remarks.tolist()))
        wrong = _wrong(deal, text, remarks)
    except Exception as error:  # zipfile, zlib, tokenize and NumPy each have errors of their own for damage
        raise DataError(f"{path} is damaged or no partition saved by Fedloom") from error
    if wrong:
        raise DataError(f"{path} is damaged or no partition saved by Fedloom: {wrong}")
    return str(text), deal, data


def _wrong(deal: Deal, text: np.ndarray, remarks: np.ndarray) -> str:
    """What contradicts itself, if anything."""
    index, offsets, names = deal.index, deal.offsets, deal.names
    if text.shape != () or remarks.ndim != 1 or text.dtype.kind != "U" or (len(remarks) and remarks.dtype.kind != "U"):
        return "its text is no text"
    if index.ndim != 1 or offsets.ndim != 1 or index.dtype != np.int64 or offsets.dtype != np.int64:
        return "positions must be whole numbers"
    if len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != len(index) or np.any(np.diff(offsets) < 0):
        return "its offsets do not fit its samples"
    if np.any(index < 0) or len(np.unique(index)) < len(index):
        return "its samples are no distinct positions"
    if names is not None and (names.shape != (len(deal),) or names.dtype.kind != "U"):
        return "its names do not fit its clients"
    return ""
