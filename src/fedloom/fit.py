"""`fit`: train a model over a federation."""

from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from torch import nn

from fedloom.engines.ray import session
from fedloom.evaluate import Score, find_metric
from fedloom.federation import Federation
from fedloom.local import Local
from fedloom.method import Method
from fedloom.population import Availability
from fedloom.progress import Watch
from fedloom.result import Callback, Result
from fedloom.task import Loss, Precision
from fedloom.training import Training


@session()
def fit(
    model: nn.Module,
    federation: Federation,
    method: str | Method = "fedavg",
    rounds: int = 50,
    clients_per_round: int | float | None = None,
    local: Local | None = None,
    *,
    loss: str | Loss | None = None,
    metric: str | Score = "accuracy",
    eval_every: int = 1,
    eval_last: int = 1,
    eval_between: bool = False,
    patience: int | None = None,
    min_gain: float = 0.0,
    engine: str = "auto",
    compile: bool | None = None,
    max_memory: int | str | None = None,
    ray_address: str | None = None,
    actors: int | None = None,
    device: str | torch.device = "auto",
    precision: Precision = "auto",
    seed: int = 0,
    availability: Availability = None,
    dropout_rate: float = 0.0,
    callbacks: Sequence[Callback] = (),
    checkpoint: str | Path | None = None,
    checkpoint_every: int | None = None,
    resume: bool = False,
    max_diverged: int | None = None,
    diagnose: str | Sequence[str] | None = None,
    progress: bool | None = None,
) -> Result:
    """Train a model over a federation.

    The model is the starting point and stays as it is. `clients_per_round` is a count or a fraction in (0, 1] (10
    if not given, or all where there are fewer). `loss(outputs, targets)` gives one value per sample; "cross-entropy"
    and "hinge" are known by name, and None is what the model brings (svm: hinge) or else cross-entropy. `metric` is
    "accuracy", "f1", "auc" or a function of (outputs, targets); higher is better. It is measured every `eval_every`
    rounds and in each of the `eval_last` last ones; with `eval_between` also on the mean of models that travel (RADFed)
    between two averages, as lists `between_test_*` and `between_validation_*` in the round's line.
    With `patience`, the run ends after so many evaluations, those between two averages included, in which the
    validation score gained no more than `min_gain` of the best one, and the result is the model of the best one.
    `checkpoint` is a folder to save to every `checkpoint_every` rounds (None: every half minute, if that takes little
    time, and at the end; also on Ctrl-C and SIGTERM) and to `resume` from. A client whose loss or update is not finite
    is left out, and named in the log and in the round's line; once there were more than `max_diverged` the run ends
    with a RunError. `diagnose` names what is measured beside it, such as "gsi,similarity" (see `fedloom.diagnosis`).
    `progress` shows how rounds come along, on stderr; None does it where somebody looks on, in a terminal and in a
    notebook.

    `engine` is "loop" (client by client), "vector" (the cohort as one matrix) or "auto", a fixed rule. `compile` says
    whether a cohort's step, or on a CPU the training of a dense net, is compiled; None does it where a run is long
    enough to gain from it. `max_memory` is how many bytes of the device (or "8GB") cohorts and what clients remember
    may take, half each; None is half of what the device has. A cohort that does not fit is trained in pieces, and what
    clients remember moves to the host and then to the disk.

    "ray" splits every cohort over the workers of a Ray cluster: that at `ray_address` ("auto", or "10.0.0.1:6379"), or
    a local one that is started and stopped. There are as many workers as `actors` says, or one per GPU, or per core.
    Each trains its share by the same rule; "ray-loop" and "ray-vector" say how. See docs/cluster.md.

    >>> import torch, fedloom as fl
    >>> x = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    >>> federation = fl.Federation.from_arrays([(x[:4], [0, 1, 0, 1]), (x[4:], [1, 1, 0, 0])])
    >>> result = fl.fit(nn.Linear(3, 2), federation, "fedprox(mu=0.1)", rounds=2)
    >>> [row["round"] for row in result.history]
    [1, 2]
    """
    training = Training(
        model,
        federation,
        method,
        rounds=rounds,
        clients_per_round=clients_per_round,
        local=local or Local(),
        loss=loss,
        metric=metric,
        eval_every=eval_every,
        eval_last=eval_last,
        eval_between=eval_between,
        patience=patience,
        min_gain=min_gain,
        engine=engine,
        compile=compile,
        max_memory=max_memory,
        ray_address=ray_address,
        actors=actors,
        device=device,
        precision=precision,
        seed=seed,
        availability=availability,
        dropout_rate=dropout_rate,
        checkpoint=checkpoint,
        checkpoint_every=checkpoint_every,
        resume=resume,
        max_diverged=max_diverged,
        diagnose=diagnose,
    )
    console = Console(stderr=True)
    if not (console.is_terminal or console.is_jupyter if progress is None else progress):
        return training.run(callbacks)
    with Watch(rounds, console) as watch:
        return training.run([watch.callback(Method(method).text, find_metric(metric)[0], rounds), *callbacks])
