"""Beyond one machine: a run whose cohorts are trained by the workers of a Ray cluster.

`session` is what surrounds runs that share their workers; `spread_out` makes the two halves of a run on a cluster.
"""

from collections import Counter
from dataclasses import replace

import torch
from torch import nn

from fedloom.engines.choose import Wishes
from fedloom.engines.ray.engine import Ray
from fedloom.engines.ray.pool import pool_for, session
from fedloom.engines.ray.population import Scattered
from fedloom.engines.ray.worker import Brief, data_of
from fedloom.engines.site import Learning
from fedloom.federation import Federation
from fedloom.method import Pipeline
from fedloom.population import Absence
from fedloom.stages import Setup
from fedloom.task import Loss, Precision

__all__ = ["Ray", "session", "spread_out"]


def spread_out(
    model: nn.Module,
    loss: str | Loss | None,
    precision: Precision,
    federation: Federation,
    pipeline: Pipeline,
    setup: Setup,
    wishes: Wishes,
    absence: Absence,
    rounds: int,
    device: str,
) -> tuple[Ray, Scattered]:
    """An engine that trains on a cluster, and the clients' side of it."""
    pool = pool_for(wishes.ray_address, wishes.actors, gpus=not device.startswith("cpu"))
    local = {"ray": "auto", "ray-loop": "loop", "ray-vector": "vector"}[wishes.engine]
    cpu = torch.device("cpu")
    members = pool.alive()
    share = -(-setup.per_round // len(members))
    neighbours = max(Counter(member.node for member in members).values())
    own = Wishes(local, wishes.compile, wishes.max_memory)
    brief = Brief(
        learning=Learning(model, loss, precision, pipeline.clients, own, rounds, neighbours),
        device="auto" if pool.gpus else "cpu",
        setup=replace(setup, per_round=share, device=cpu, start=setup.start.cpu(), stages=()),
        carries=frozenset().union(*(p.stage.wants for p in pipeline.parts if p.stage.kind != "client")),
    )
    reads_rows = any(part.stage.reads_rows for part in pipeline.parts)
    engine = Ray(pool, brief, data_of(federation), setup, reads_rows)
    return engine, Scattered(engine, setup, absence)
