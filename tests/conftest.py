"""Every test trains on one thread: small steps on several wait for each other."""

import os

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("ci", derandomize=True)  # a submission is judged by the same examples every time
if os.environ.get("CI"):
    settings.load_profile("ci")
