"""The model and the data: the file to make your own.

`model` is called at the server and at every client, `data` at each client, `test` at the server. They are called again
for every message, so that the same call must return the same.
"""

from functools import cache

import torch
from flwr.app import Context
from torch import nn

import fedloom as fl

MODEL = "mlp"  # `fedloom models` lists them
DATA = "digits"  # `fedloom data` lists them
PARTITION = "iid"


def model(context: Context) -> nn.Module:
    """Any nn.Module will do; its parameters are where training starts from."""
    return fl.model(MODEL, federation(context), int(context.run_config["seed"]))


def data(context: Context) -> fl.Federation:
    """This client's samples, and nobody else's. YOUR OWN DATA GO HERE: return a pair (x, y) of arrays."""
    return federation(context).only(torch.tensor([int(context.node_config["partition-id"])]))


def test(context: Context) -> fl.Federation:
    """What the server evaluates on: a federation's test set, a pair (x, y), or None."""
    return federation(context)


def federation(context: Context) -> fl.Federation:
    """A published data set in place of your own, dealt out as `fedloom run` deals it out."""
    return _dealt(int(context.run_config["clients"]), int(context.run_config["seed"]))


@cache
def _dealt(clients: int, seed: int) -> fl.Federation:
    return fl.load(DATA, PARTITION, clients, seed)
