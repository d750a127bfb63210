"""A method in a real federation: Flower's server and client apps.

    client = client_app(model, data)             # trains with the simulator's own client step
    server = server_app(model, method="adabest+fedglad", clients=3, test=test)

`LocalGrid` is Flower's grid in one process: it runs such apps, or anybody's Flower strategy, without a network.
See docs/flower.md.
"""

from fedloom.flower.version import FLOWER  # isort: split

from fedloom.flower.client import client_app
from fedloom.flower.grid import LocalGrid
from fedloom.flower.server import serve, server_app

__all__ = ["FLOWER", "LocalGrid", "client_app", "serve", "server_app"]
