"""Files that a model begins with: where they are looked for, and reading them."""

import zipfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from fedloom.data.files import FOLDER, Files
from fedloom.errors import ModelError
from fedloom.untrusted import check_zip, is_plain


def find(names: Sequence[str], files: Files | None) -> Path | None:
    """The first that is there: as a path, in the user's folder, among the downloads."""
    places = files or Files.of()
    for name in filter(None, names):
        try:
            found = Path(name) if Path(name).exists() else places.local(name)
        except (OSError, ValueError):  # no file can have such a name
            continue
        if found is not None:
            return found
    return None


def missing(what: str, names: Sequence[str], files: Files | None, how: str = "") -> ModelError:
    """An error that says what is missing and where to put it."""
    places = files or Files.of()
    folders = [str(place) for place in (places.folder, places.cache / "downloads") if place is not None]
    hint = "" if places.folder else f", or into a folder that --data-dir or {FOLDER} names"
    return ModelError(f"{what} not on this machine: put {' or '.join(names)} into {' or '.join(folders)}{hint}{how}")


def read_weights(path: Path) -> dict[str, Tensor]:
    """Tensors by name, from .safetensors or from PyTorch's own format; no code in the file is run."""
    if not is_plain(path):
        raise ModelError(f"{path} is no file with weights")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            weights = load_file(path)
        else:
            if zipfile.is_zipfile(path):
                check_zip(path)
            weights = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file raises whatever its bytes happen to mean
        raise ModelError(f"{path} is damaged or holds no weights ({type(error).__name__})") from None
    if not isinstance(weights, dict) or not all(isinstance(value, Tensor) for value in weights.values()):
        raise ModelError(f"{path} holds no tensors by name, as a model's state_dict has them")
    return weights
