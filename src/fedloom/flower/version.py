"""Which Flower is installed, and is it one whose private parts were read? Asked before anything of it is imported."""

from importlib.metadata import PackageNotFoundError, version

from fedloom.errors import ConfigError

LEAST, BELOW = (1, 41), (1, 43)


def flower_version() -> str:
    """The version of the Flower that is installed, if it can be used."""
    try:
        found = version("flwr")
    except PackageNotFoundError:
        raise ConfigError("this needs Flower: pip install 'fedloom[flower]'") from None
    numbers = tuple(int(part) for part in found.split(".")[:2] if part.isdigit())
    if not LEAST <= numbers < BELOW:
        raise ConfigError(
            f"Flower {found} is installed, but Fedloom works with flwr >= {_text(LEAST)} and < {_text(BELOW)}: "
            "pip install 'fedloom[flower]'"
        )
    return found


def _text(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


FLOWER = flower_version()
