"""The vector engine equals the loop: every method, optimiser and family of models, clients of unequal size."""

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedloom as fl
from fedloom.data.transforms import Preparation, augmentations
from fedloom.engines import choose
from fedloom.engines import vector as vector_engine
from fedloom.engines.rule import Rule
from fedloom.engines.threads import Threads
from fedloom.engines.trial import mixes_samples
from fedloom.engines.vector import Vector
from fedloom.lockstep import run_together
from fedloom.models.catalogue import REGISTRY, Shape, load_models
from fedloom.spec import parse_one
from fedloom.task import Precision, Task
from fedloom.training import Training
from tests.examples import METHODS

load_models()
SIZES = [0, 7, 20, 21, 53, 60, 61, 90]  # offsets: 7, 13, 1, 32, 7, 1 and 29 samples


BATCHES = [0, 7, 20, 22, 54, 61, 64, 91]  # no batch of one among batches of 5 or 8: 2, 3, 5, 7 and so on


def apart(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def dense(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def federation(inputs: tuple[int, ...] = (6,), classes: int = 3, sizes: list[int] = SIZES) -> fl.Federation:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(sizes[-1], *inputs, generator=generator, dtype=torch.float64)
    y = torch.randint(0, classes, (sizes[-1],), generator=generator)
    return fl.Federation.from_tensor(x, y, sizes, test=(x, y), classes=classes)


def both(model: nn.Module, data: fl.Federation, method: str = "fedavg", **options: Any) -> list[fl.Result]:
    settings = {"rounds": 5, "clients_per_round": 5, "local": fl.Local(epochs=2, batch_size=8, lr=0.1), **options}
    results = [fl.fit(model, data, method, engine=engine, **settings) for engine in ("loop", "vector")]
    for a, b in zip(results[0].history, results[1].history, strict=True):
        assert a["train_loss"] == pytest.approx(b["train_loss"], rel=1e-4)
    return results


LOCALS = {
    "plain": fl.Local(epochs=2, batch_size=8, lr=0.1),
    "momentum": fl.Local(epochs=2, batch_size=8, lr=0.1, momentum=0.9, weight_decay=0.01),
    "nesterov": fl.Local(epochs=2, batch_size=8, lr=0.1, momentum=0.9, nesterov=True, clip_norm=0.3),
    "adam": fl.Local(epochs=2, batch_size=8, lr=0.01, optimizer="adam", weight_decay=0.01),
    "adamw": fl.Local(epochs=2, batch_size=8, lr=0.01, optimizer="adamw", weight_decay=0.01, clip_norm=0.3),
    "steps": fl.Local(steps=5, batch_size=8, lr=0.1),
    "full": fl.Local(epochs=3, batch_size=None, lr=0.1),
    "bootstrap": fl.Local(epochs=2, batch_size=8, lr=0.1, last_batch="bootstrap"),
    "in order": fl.Local(epochs=2, batch_size=8, lr=0.1, shuffle=False),
}


@pytest.mark.parametrize("method", METHODS)
def test_every_method(method: str) -> None:
    local = fl.Local(steps=3, batch_size=8, lr=0.1) if method == "scaffold-m" else LOCALS["plain"]
    loop, vector = both(dense(), federation(), method, local=local)
    assert apart(vector.params, loop.params) < 1e-9


@pytest.mark.parametrize("local", LOCALS.values(), ids=LOCALS)
@pytest.mark.parametrize(("dtype", "most"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
def test_every_local_setting(local: fl.Local, dtype: torch.dtype, most: float) -> None:
    loop, vector = both(dense(dtype), federation(), local=local)
    assert apart(vector.params, loop.params) < most


def test_the_last_batch_dropped() -> None:
    local = fl.Local(epochs=2, batch_size=8, lr=0.1, last_batch="drop")
    loop, vector = both(dense(), federation(sizes=[0, 9, 20, 44, 53, 61, 90]), local=local)
    assert apart(vector.params, loop.params) < 1e-9


FAMILIES = {
    "cnn-dgt": ("cnn-dgt", Shape((1, 12, 12), 3)),
    "lenet5": ("lenet5", Shape((1, 28, 28), 3)),
    "dropout": ("cnn-reddi", Shape((1, 12, 12), 3)),
    "lstm": ("lstm(hidden=5, embedding=4)", Shape((7,), 3, tokens=11)),
    "bilstm": ("bilstm(hidden=5, dropout=0.3)", Shape((7,), 3, tokens=11)),
    "transformer": ("transformer(width=8, heads=2, layers=1, feedforward=8, dropout=0.2)", Shape((7,), 3, tokens=11)),
}


@pytest.mark.parametrize(("name", "shape"), FAMILIES.values(), ids=FAMILIES)
def test_every_family(name: str, shape: Shape) -> None:
    torch.manual_seed(0)
    model = REGISTRY.make(REGISTRY.complete(parse_one(name)), shape=shape).double()
    data = federation(shape.inputs)
    if shape.tokens:
        ids = torch.randint(0, shape.tokens, (SIZES[-1], *shape.inputs), generator=torch.Generator().manual_seed(2))
        data = fl.Federation.from_tensor(ids, data.y, SIZES, test=(ids, data.y), classes=3)
    loop, vector = both(model, data, rounds=2)
    assert vector.history[-1]["train_loss"] != pytest.approx(vector.history[0]["train_loss"], rel=1e-6)
    assert apart(vector.params, loop.params) < 1e-9


def normed() -> nn.Module:
    """No bias before batch norm: its gradient is zero up to rounding, which Adam would blow up."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3)]
    return nn.Sequential(*layers).double()


@pytest.mark.parametrize("local", ["plain", "momentum", "adam", "bootstrap"])
def test_batch_norm_with_batches_of_different_length(local: str) -> None:
    data = federation(sizes=BATCHES)
    settings = replace(LOCALS[local], batch_size=5)
    loop, vector = both(normed(), data, local=settings)
    assert apart(vector.params, loop.params) < 1e-9
    ours, theirs = dict(vector.model.named_buffers()), dict(loop.model.named_buffers())
    assert all(torch.allclose(ours[name].double(), theirs[name].double(), rtol=1e-9) for name in theirs)


def test_pictures_are_augmented_the_same() -> None:
    pixels = torch.randint(0, 256, (90, 2, 6, 6), generator=torch.Generator().manual_seed(3)).byte()
    data = fl.Federation.from_tensor(pixels, torch.arange(90) % 3, SIZES)
    way = Preparation(True, (0.5, 0.4), (0.2, 0.3), augmentations("crop(padding=2, p=0.7)+flip+cutout(size=3)"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(72, 3)).double()
    loop, vector = both(model, replace(data, preparation=way))
    assert apart(vector.params, loop.params) < 1e-9


def test_a_client_is_the_same_alone_and_among_others() -> None:
    rows = []
    for cohort in ([3], [0, 1, 2, 3, 4]):
        seen: list[fl.Event] = []
        fl.fit(dense(), federation(), f"fixed(cohorts=[{cohort}])", rounds=1, engine="vector", callbacks=[seen.append])
        assert seen[0].updates is not None
        rows.append(seen[0].updates.rows.matrix[seen[0].updates.clients.tolist().index(3)])
    assert apart(rows[0], rows[1]) < 1e-12


def test_no_padding_touches_anything() -> None:
    """A batch is filled up with a sample of its own client; if it counted, a huge loss there would show."""
    data = federation()
    first = [int(data.index[int(a)]) for a in data.offsets[:-1]]
    x = data.x.clone()
    x[first] *= 50
    loop, vector = both(dense(), replace(data, x=x))
    assert apart(vector.params, loop.params) < 1e-9


def test_a_diverged_client_is_left_out_alone() -> None:
    data = federation()
    x = data.x.clone()
    x[int(data.offsets[3])] = 1e300
    runs = both(nn.Sequential(nn.Linear(6, 3)).double(), replace(data, x=x), clients_per_round=7, rounds=2)
    assert apart(runs[1].params, runs[0].params) < 1e-9
    assert [row["diverged"] for row in runs[1].history] == [row["diverged"] for row in runs[0].history]


class Peculiar(nn.Module):
    """Something that no batching rule allows: a decision that depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.linear(x) if bool(x.sum() > 0) else self.linear(-x)
        return answer


def test_a_model_that_vmap_refuses_is_trained_in_a_loop(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fedloom"):
        vector = fl.fit(Peculiar().double(), federation(), rounds=1, engine="vector")
    assert "one after the other instead" in caplog.text
    assert len(vector.history) == 1


class Centred(nn.Module):
    """Samples that touch each other without batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.linear(x - x.mean(0))
        return answer


def test_samples_that_touch_each_other_are_found() -> None:
    torch.manual_seed(0)
    loop, vector = both(Centred().double(), federation())
    assert apart(vector.params, loop.params) < 1e-9


def test_which_models_mix_samples() -> None:

    data = federation()
    task = Task.of(dense(), None, torch.device("cpu"), "auto")
    assert not mixes_samples(task, data)
    assert mixes_samples(Task.of(normed(), None, torch.device("cpu"), "auto"), data)
    huge = torch.full_like(data.x, torch.finfo(data.x.dtype).max)  # which overflows, for whatever reason
    assert not mixes_samples(task, replace(data, x=huge))


class OneByHalves(nn.Module):
    """Sums in another order where there is only one sample, as the kernels of products do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 1:
            whole: Tensor = self.linear(x)
            return whole
        weight = self.linear.weight
        return F.linear(x[:, :3], weight[:, :3]) + F.linear(x[:, 3:], weight[:, 3:]) + self.linear.bias


@pytest.mark.parametrize("precision", ["auto", "bf16"])
def test_rounding_does_not_look_like_mixing(precision: Precision) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(OneByHalves(), nn.Tanh(), nn.Linear(8, 3))
    data = federation()
    data = replace(data, x=data.x.float())
    assert not mixes_samples(Task.of(model, None, torch.device("cpu"), precision), data)


@pytest.mark.parametrize(("engine", "most"), [("loop", 0.0), ("vector", 1e-12)])
@pytest.mark.parametrize("method", ["fedavg", "scaffold+fedadam", "fednova", "importance"])
def test_shared_out_among_threads(engine: str, most: float, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same clients on two cores: the loop to the bit, the matrix up to its rounding."""
    settings: dict[str, Any] = {"rounds": 3, "clients_per_round": 5, "local": LOCALS["momentum"], "engine": engine}
    alone = fl.fit(normed(), federation(sizes=BATCHES), method, **settings)
    monkeypatch.setattr(choose, "rule", lambda: Rule(shared_from=0))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    seen: list[str] = []
    train = Threads.train

    def watched(self: Threads, work: Any) -> Any:
        seen.append(self.name)
        return train(self, work)

    monkeypatch.setattr(Threads, "train", watched)
    shared = fl.fit(normed(), federation(sizes=BATCHES), method, **settings)
    assert set(seen) == {engine}
    assert apart(shared.params, alone.params) <= most
    ours, theirs = dict(shared.model.named_buffers()), dict(alone.model.named_buffers())
    assert all(torch.allclose(ours[name].double(), theirs[name].double(), rtol=1e-9) for name in theirs)


def dropping() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3)).double()


@pytest.mark.parametrize("at_once", [1, 4, 64])
@pytest.mark.parametrize("model", [dense, normed, dropping])
def test_scores_of_all_batches(model: Any, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each batch counts once, whichever others it is scored with."""
    monkeypatch.setattr(vector_engine, "SCORED", at_once)
    answers: list[Any] = []
    both(model(), federation(sizes=BATCHES), "importance", rounds=1, callbacks=[lambda e: answers.append(e.updates)])
    loop, vector = (updates.extra["final_score"] for updates in answers)
    assert len(loop) == 5
    assert apart(vector, loop) < 1e-10


def test_only_runs_that_want_scores_are_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    scored: list[int] = []
    gradients = Vector.gradients

    def watched(self: Vector, x: Tensor, *rest: Any, **more: Any) -> Any:
        if more.get("clean"):
            scored.append(len(x))
        return gradients(self, x, *rest, **more)

    monkeypatch.setattr(Vector, "gradients", watched)
    answers: list[Any] = []
    settings: dict[str, Any] = {"rounds": 1, "clients_per_round": 3, "local": LOCALS["plain"], "engine": "vector"}
    runs = [Training(dense(), federation(), method, **settings) for method in ("fedavg", "importance", "scaffold")]
    run_together(runs, [[], [lambda event: answers.append(event.updates)], []])
    batches = [-(-int(federation().sizes[client]) // 8) for client in answers[0].clients]
    assert sum(scored) == sum(batches)


class Noisy(nn.Module):
    """Draws from PyTorch's own generator."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.linear(x + 0.1 * torch.randn(x.shape, dtype=x.dtype))
        return answer


def test_a_model_that_draws_itself_is_trained_in_a_loop_on_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Noisy().double()
    alone = fl.fit(model, federation(), rounds=3, engine="loop")
    monkeypatch.setattr(choose, "rule", lambda: Rule(shared_from=0))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    for engine in ("loop", "vector"):
        assert torch.equal(fl.fit(model, federation(), rounds=3, engine=engine).params, alone.params)


def test_a_cohort_that_does_not_fit_is_trained_in_pieces(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And says so."""
    seen: list[int] = []
    run = Vector._play

    def watched(self: Vector, cohort: Any, planned: Any) -> None:
        seen.append(len(cohort.x))
        run(self, cohort, planned)

    monkeypatch.setattr(Vector, "_play", watched)
    with caplog.at_level("INFO", "fedloom"):
        loop, vector = both(dense(), federation(), "scaffold", clients_per_round=7, max_memory="40kB")
    assert max(seen) == 2
    assert "2 clients are trained at a time, as many as max_memory has room for" in caplog.text
    assert apart(vector.params, loop.params) < 1e-9
