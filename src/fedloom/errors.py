"""Errors that a user can act on: each message is one sentence that says what, where, and what to do."""

from collections.abc import Iterable
from difflib import get_close_matches


class FedloomError(Exception):
    """Every error that Fedloom raises on purpose."""


class MethodError(FedloomError):
    """A method text, a parameter or a combination of methods that has no meaning."""


class DataError(FedloomError):
    """Data, a partition or a federation that can't be trained on."""


class ConfigError(FedloomError):
    """A setting of a run that is missing, unknown or out of range."""


class ModelError(FedloomError):
    """A model or a loss that does not fit the data."""


class RunError(FedloomError):
    """A run folder or a checkpoint that can't be used, or a run that can't go on."""


def out_of_memory(error: BaseException) -> bool:
    """Was it memory that was missing, on a GPU or on the CPU?"""
    return type(error).__name__ == "OutOfMemoryError" or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


def nearest(word: str, choices: Iterable[str]) -> str:
    """The end of an error message: the nearest valid choices, or all of them when none is near.

    >>> nearest("fedprx", ["fedavg", "fedprox"])
    'did you mean fedprox?'
    """
    valid = sorted(choices)
    close = get_close_matches(word, valid, n=3, cutoff=0.6)
    if close:
        return f"did you mean {' or '.join(close)}?"
    return f"choose from {', '.join(valid)}" if valid else "there is none to choose from"
