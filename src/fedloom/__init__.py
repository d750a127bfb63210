"""Fedloom: federated learning on client data that differ.

>>> import fedloom as fl
>>> federation = fl.load("digits", partition="classes(per_client=2)", clients=20)
>>> result = fl.fit(fl.model("mlp", federation), federation, "fedprox(mu=0.1)", rounds=2)
"""

from fedloom import diagnose
from fedloom.data.load import load
from fedloom.data.split import split_clients
from fedloom.data.standardise import standardise
from fedloom.errors import ConfigError, DataError, FedloomError, MethodError, ModelError, RunError
from fedloom.experiment import track
from fedloom.experiment.folder import Run, load_run
from fedloom.federation import Federation, Holdout
from fedloom.fit import fit
from fedloom.local import Local
from fedloom.method import Method, list_methods, register
from fedloom.models.catalogue import model
from fedloom.result import STOP, Event, Result

__version__ = "0.1.0"

__all__ = [
    "STOP",
    "ConfigError",
    "DataError",
    "Event",
    "Federation",
    "FedloomError",
    "Holdout",
    "Local",
    "Method",
    "MethodError",
    "ModelError",
    "Result",
    "Run",
    "RunError",
    "__version__",
    "diagnose",
    "fit",
    "list_methods",
    "load",
    "load_run",
    "model",
    "register",
    "split_clients",
    "standardise",
    "track",
]
