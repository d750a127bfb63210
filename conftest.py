"""What needs Flower is not collected where it is missing; its apps under tests/flower are imported by Flower itself."""

from importlib.util import find_spec

collect_ignore_glob = ["tests/flower/apps/*"] if find_spec("flwr") else ["src/fedloom/flower/*", "tests/flower/*"]
