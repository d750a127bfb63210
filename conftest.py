"""What needs Flower or Triton is not collected where it is missing; the apps under tests/flower are imported by Flower
itself.
"""

from importlib.util import find_spec

collect_ignore_glob = ["tests/flower/apps/*"] if find_spec("flwr") else ["src/fedloom/flower/*", "tests/flower/*"]
if not find_spec("triton"):
    collect_ignore_glob += ["src/fedloom/engines/fused_kernels.py", "src/fedloom/recurrence_kernels.py"]
    collect_ignore_glob += ["tests/models/interpreted.py"]
