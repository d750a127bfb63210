"""Every test trains on one thread: small steps on several wait for each other."""

import torch

torch.set_num_threads(1)
