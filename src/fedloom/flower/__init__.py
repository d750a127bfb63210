"""A method in a real federation: Flower's server and client apps.

    client = client_app(model, data)             # trains with the simulator's own client step
    server = server_app(model, method="adabest+fedglad", clients=3, test=test)

`LocalGrid` is Flower's grid in one process: it runs such apps, or anybody's Flower strategy, without a network.
See docs/flower.md.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedloom.flower.version import FLOWER

if TYPE_CHECKING:
    from fedloom.flower.client import client_app
    from fedloom.flower.grid import LocalGrid
    from fedloom.flower.mods import clip_mod, proximal_mod
    from fedloom.flower.server import serve, server_app
    from fedloom.flower.strategies import fit_strategy
    from fedloom.flower.table import side_by_side

__all__ = [
    "FLOWER",
    "LocalGrid",
    "client_app",
    "clip_mod",
    "fit_strategy",
    "proximal_mod",
    "serve",
    "server_app",
    "side_by_side",
]

_WHERE = {
    "LocalGrid": "grid",
    "client_app": "client",
    "clip_mod": "mods",
    "fit_strategy": "strategies",
    "proximal_mod": "mods",
    "serve": "server",
    "server_app": "server",
    "side_by_side": "table",
}


def __getattr__(name: str) -> Any:
    """A client's process, which lives for one message, imports no server."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"fedloom.flower.{_WHERE[name]}"), name)
