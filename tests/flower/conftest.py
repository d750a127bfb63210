"""The Flower apps in `apps` are imported by Flower's own processes; without Flower, nothing here is."""

from importlib.util import find_spec

collect_ignore_glob = ["apps/*"] if find_spec("flwr") else ["*"]
