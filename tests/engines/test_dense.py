"""Dense nets on a CPU by compiled code: the same training, by every method, and only where it is the same one."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedloom as fl
from fedloom.data.transforms import Preparation, augmentations
from fedloom.engines import dense as dense_engine
from fedloom.engines.dense import Dense, dense, function, library, saved, widths_of
from fedloom.engines.plan import Batches
from fedloom.engines.threads import Threads
from fedloom.experiment.config import RunConfig
from fedloom.experiment.run import start_run
from fedloom.space import Space
from fedloom.task import Task
from fedloom.training import Training
from tests.engines.test_vector import SIZES, apart
from tests.examples import METHODS

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")
Array = np.ndarray


def net(*widths: int, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    pairs = pairwise(widths)
    layers = [layer for i, o in pairs for layer in (nn.Linear(i, o), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *layers[:-1]).to(dtype)


def federation(inputs: tuple[int, ...] = (6,), sizes: list[int] = SIZES) -> fl.Federation:
    """Half of all inputs are zero."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(sizes[-1], *inputs, generator=generator, dtype=torch.float64).clamp(min=0)
    y = torch.randint(0, 3, (sizes[-1],), generator=generator)
    return fl.Federation.from_tensor(x, y, sizes, test=(x, y), classes=3)


def gradient(flat: Array, widths: tuple[int, ...], x: Array, y: Array) -> tuple[Array, Array]:
    """Of the mean cross-entropy of a dense net, and the losses: by the chain rule, in NumPy."""
    layers, at, seen = [], 0, [x]
    for i, o in pairwise(widths):
        layers.append((flat[at : at + o * i].reshape(o, i), flat[at + o * i : at + o * i + o]))
        at += o * i + o
    for n, (weight, bias) in enumerate(layers):
        z = seen[-1] @ weight.T + bias
        seen.append(z if n == len(layers) - 1 else np.maximum(z, 0))
    shifted = seen[-1] - seen[-1].max(1, keepdims=True)
    logarithms = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    delta = (np.exp(logarithms) - np.eye(widths[-1])[y]) / len(x)
    found: list[Array] = []
    for n in range(len(layers) - 1, -1, -1):
        found = [(delta.T @ seen[n]).reshape(-1), delta.sum(0), *found]
        delta = (delta @ layers[n][0]) * (seen[n] > 0)
    return np.concatenate(found), -logarithms[np.arange(len(y)), y]


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "pull": {"pull": 0.3},
    "drift": {"drift": True},
    "decay": {"weight_decay": 0.01},
    "clip": {"clip_norm": 0.4},  # the largest gradient is longer
    "momentum": {"momentum": 0.9},
    "everything": {
        "pull": 0.3,
        "drift": True,
        "clip_norm": 0.4,
        "momentum": 0.9,
        "nesterov": True,
        "weight_decay": 0.01,
    },
}


@pytest.mark.parametrize("widths", [(6, 3), (6, 5, 3), (6, 40, 70, 3)])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("raw", [False, True])
def test_a_training_by_its_equations(widths: tuple[int, ...], settings: dict[str, Any], raw: bool) -> None:
    data, model = federation(), net(*widths)
    local = fl.Local(lr=0.1, **{k: v for k, v in settings.items() if k not in ("pull", "drift")})
    start = Space.of(model).flatten(model).numpy()
    rng = np.random.default_rng(2)
    drift = rng.normal(size=len(start)) / 10 if settings.get("drift") else None
    batches = Batches(rng.integers(20, 90, 23), np.array([8, 8, 1, 6]))
    rates = [0.1, 0.2, 0.05, 0.3]

    x, momentum, total, gradients = start.copy(), np.zeros_like(start), 0.0, np.zeros_like(start)
    norms: list[float] = []
    for rate, batch in zip(rates, batches.cut(), strict=True):
        g, losses = gradient(x, widths, data.x.numpy()[batch], data.y.numpy()[batch])
        gradients, total = gradients + g, total + losses.sum()
        g = g + settings.get("pull", 0.0) * (x - start) + (0 if drift is None else drift)
        norms.append(float(np.linalg.norm(g)))
        g = g * min(1.0, (local.clip_norm or np.inf) / norms[-1]) + local.weight_decay * x
        momentum = local.momentum * momentum + g
        x = x - rate * (g + local.momentum * momentum if local.nesterov else momentum)

    assert "clip_norm" not in settings or settings["clip_norm"] < max(norms)
    own = None if drift is None else torch.from_numpy(drift)
    pull = settings.get("pull")
    end, loss, summed = Dense(widths, local).train(data, torch.from_numpy(start), batches, rates, pull, own, raw)
    assert np.allclose(end.numpy(), x, rtol=1e-11, atol=1e-12)
    assert float(loss) == pytest.approx(total, rel=1e-12)
    assert (summed is not None) == raw
    if summed is not None:
        assert np.allclose(summed.numpy(), gradients, rtol=1e-11, atol=1e-12)


def test_squared_norms_by_their_equation() -> None:
    data, model = federation(), net(6, 5, 3)
    start = Space.of(model).flatten(model)
    batches = Batches(np.arange(20), np.array([8, 8, 4]))
    found = Dense((6, 5, 3), fl.Local(momentum=0.9, weight_decay=1.0)).squares(data, start, batches)
    for square, batch in zip(found.tolist(), batches.cut(), strict=True):
        g, _ = gradient(start.numpy(), (6, 5, 3), data.x.numpy()[batch], data.y.numpy()[batch])
        assert square == pytest.approx((g**2).sum(), rel=1e-12)


def both(
    model: nn.Module, data: fl.Federation, method: str = "fedavg", compiles: bool = True, **options: Any
) -> list[fl.Result]:
    """The same run without and with compiled code."""
    local = fl.Local(epochs=2, batch_size=8, lr=0.1)
    settings = {"rounds": 5, "clients_per_round": 5, "local": local, "engine": "loop", **options}
    runs = [Training(model, data, method, compile=compile, **settings) for compile in (False, True)]
    assert [run.simulation.engine.compile for run in runs] == [False, compiles]
    results = [run.run() for run in runs]
    for a, b in zip(results[0].history, results[1].history, strict=True):
        assert a["train_loss"] == pytest.approx(b["train_loss"], rel=1e-4)
    return results


@pytest.mark.parametrize("method", METHODS)
def test_every_method(method: str, caplog: pytest.LogCaptureFixture) -> None:
    local = fl.Local(steps=3 if method == "scaffold-m" else None, epochs=2, batch_size=8, lr=0.1)
    plain, compiled = both(net(6, 8, 3), federation(), method, local=local)
    assert apart(compiled.params, plain.params) < 1e-9
    assert "compile" not in caplog.text


LOCALS = {
    "momentum": fl.Local(epochs=2, batch_size=8, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "clipping": fl.Local(epochs=2, batch_size=8, lr=0.1, momentum=0.9, clip_norm=0.3),
    "steps": fl.Local(steps=5, batch_size=8, lr=0.1),
    "full": fl.Local(epochs=3, batch_size=None, lr=0.1),
    "bootstrap": fl.Local(epochs=2, batch_size=8, lr=0.1, last_batch="bootstrap"),
    "in order": fl.Local(epochs=2, batch_size=8, lr=0.1, shuffle=False),
}


@pytest.mark.parametrize("local", LOCALS.values(), ids=LOCALS)
@pytest.mark.parametrize(("dtype", "most"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
def test_every_local_setting(local: fl.Local, dtype: torch.dtype, most: float) -> None:
    plain, compiled = both(net(6, 17, 33, 3, dtype=dtype), federation(), local=local)
    assert apart(compiled.params, plain.params) < most


def test_pixels_are_prepared() -> None:
    pixels = torch.randint(0, 256, (90, 2, 6, 6), generator=torch.Generator().manual_seed(3)).byte()
    data = fl.Federation.from_tensor(pixels, torch.arange(90) % 3, SIZES)
    plain, compiled = both(net(72, 9, 3), replace(data, preparation=Preparation(True, (0.5, 0.4), (0.2, 0.3))))
    assert apart(compiled.params, plain.params) < 1e-9


def test_a_client_that_diverges_is_known() -> None:
    data = federation()
    spoilt = data.x.clone()
    spoilt[7] = torch.inf  # the first sample of client 1
    data = replace(data, x=spoilt)
    found = []
    for compile in (False, True):
        run = Training(net(6, 5, 3), data, "fedavg", rounds=1, clients_per_round=7, engine="loop", compile=compile)
        heard: list[Tensor] = []
        train = run.simulation.engine.train

        def listen(work: Any, train: Any = train, heard: list[Tensor] = heard) -> Any:
            updates = train(work)
            heard.append(updates.finite[updates.clients.argsort()])
            return updates

        object.__setattr__(run.simulation.engine, "train", listen)
        run.run()
        found.append(heard[0].tolist())
    assert found[0] == found[1]
    assert found[0].count(False) == 1


def test_cores_share_clients_and_change_nothing() -> None:
    settings: dict[str, Any] = {"rounds": 4, "clients_per_round": 5, "engine": "loop", "compile": True}
    alone = fl.fit(net(6, 5, 3), federation(), "adabest+importance", **settings)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        run = Training(net(6, 5, 3), federation(), "adabest+importance", **settings)
        assert isinstance(run.simulation.engine, Threads)
        assert run.simulation.engine.compile
        assert torch.equal(run.run().params, alone.params)
    finally:
        torch.set_num_threads(threads)


class Own(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * self[0](x)  # type: ignore[no-any-return]


FROZEN = nn.Linear(6, 4).requires_grad_(False)
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "another activation": ("more than dense", {"model": nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))}),
    "no bias": ("more than dense", {"model": nn.Sequential(nn.Linear(6, 4, bias=False), nn.ReLU(), nn.Linear(4, 3))}),
    "two in a row": ("more than dense", {"model": nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))}),
    "ends with ReLU": ("more than dense", {"model": nn.Sequential(nn.Linear(6, 3), nn.ReLU())}),
    "its own forward": ("more than dense", {"model": Own(nn.Linear(6, 3))}),
    "frozen": ("more than dense", {"model": nn.Sequential(FROZEN, nn.ReLU(), nn.Linear(4, 3))}),
    "another loss": ("cross-entropy", {"loss": "hinge"}),
    "Adam": ("SGD", {"local": fl.Local(optimizer="adam")}),
    "bf16": ("float32 nor float64", {"precision": "bf16"}),
}


@pytest.mark.parametrize(("why", "options"), REFUSED.values(), ids=REFUSED)
def test_what_it_can_not_train_is_trained_without_it(
    why: str, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    model = options.pop("model", None) or net(6, 4, 3)
    data = federation()
    if next(model.parameters()).dtype == torch.float32:
        data = replace(data, x=data.x.float())
    run = Training(model, data, "fedavg", rounds=1, engine="loop", compile=True, **options)
    assert not run.simulation.engine.compile
    assert why in caplog.text
    run.run()


def test_a_layer_over_parts_of_a_sample_is_trained_without_it(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Flatten(), nn.ReLU(), nn.Linear(15, 3)).double()
    data = federation((3, 4))
    run = Training(model, data, "fedavg", rounds=1, engine="loop", compile=True)
    assert not run.simulation.engine.compile
    assert "more than dense" in caplog.text
    run.run()


def test_augmented_samples_are_trained_without_it(caplog: pytest.LogCaptureFixture) -> None:
    pixels = torch.randint(0, 256, (90, 1, 6, 6), generator=torch.Generator().manual_seed(3)).byte()
    data = fl.Federation.from_tensor(pixels, torch.arange(90) % 3, SIZES)
    data = replace(data, preparation=Preparation(True, (0.5,), (0.2,), augmentations("flip")))
    run = Training(net(36, 3), data, "fedavg", rounds=1, engine="loop", compile=True)
    assert not run.simulation.engine.compile
    assert "augmented" in caplog.text


def test_samples_on_disk_are_trained_without_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = federation()
    np.savez(tmp_path / "a.npz", x=data.x.numpy(), y=data.y.numpy(), offsets=SIZES)
    there = fl.Federation.from_folder(tmp_path, lazy=True)
    run = Training(net(6, 3), there, "fedavg", rounds=1, engine="loop", compile=True)
    assert not run.simulation.engine.compile
    assert "on disk" in caplog.text


def test_a_step_that_is_another_one_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    """A hook makes more of the net than its layers say."""
    model = net(6, 4, 3)
    model[1].register_forward_hook(lambda module, inputs, outputs: outputs * 2)
    plain, compiled = both(model, federation(), compiles=False)
    assert torch.equal(plain.params, compiled.params)
    assert "another one" in caplog.text


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path))
    for known in (library, function):
        known.cache_clear()
    yield tmp_path / "compiled"
    for known in (library, function):
        known.cache_clear()


def test_the_code_is_kept_on_disk(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library()
    (kept,) = fresh.iterdir()
    library.cache_clear()
    monkeypatch.setattr("fedloom.engines.dense.subprocess.run", None)  # nobody compiles again
    library()
    assert list(fresh.iterdir()) == [kept]
    monkeypatch.undo()
    monkeypatch.setenv("FEDLOOM_CACHE", str(fresh.parent))
    monkeypatch.setattr(dense_engine, "processor", lambda: ["another"])
    library.cache_clear()
    library()
    assert len(list(fresh.iterdir())) == 2


@pytest.mark.parametrize("way", ["flags", "missing"])
def test_a_compiler_that_fails_costs_a_warning(
    way: str, fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if way == "flags":
        monkeypatch.setattr(dense_engine, "FLAGS", ("-fno-such-flag",))
    else:
        monkeypatch.setattr("fedloom.engines.dense.shutil.which", lambda name: None)
    plain, compiled = both(net(6, 4, 3), federation(), compiles=False)
    assert torch.equal(plain.params, compiled.params)
    assert ("no-such-flag" if way == "flags" else "no C++ compiler") in caplog.text
    assert not fresh.exists() or not list(fresh.iterdir())


def test_only_long_runs_are_compiled() -> None:
    local = fl.Local(epochs=10, batch_size=4)
    for rounds, compiles in ((1, False), (100_000, True)):
        run = Training(net(6, 4, 3), federation(), "fedavg", rounds=rounds, local=local, device="cpu")
        assert run.simulation.engine.compile is compiles
        assert (run.simulation.engine.name == "loop") is compiles
    never = Training(net(6, 4, 3), federation(), "fedavg", rounds=100_000, local=local, device="cpu", compile=False)
    assert not never.simulation.engine.compile


def gain(widths: tuple[int, ...], x: Tensor, size: int, vector: bool, **settings: Any) -> float:
    """Saved for each client of a hundred of one size."""
    data = fl.Federation.from_tensor(x, torch.zeros(len(x)).long(), [0, len(x)], classes=widths[-1])
    model, local = net(*widths, dtype=torch.float32), fl.Local(**settings)
    setup = Training(model, data, "fedavg", rounds=1, local=local, device="cpu").simulation.setup
    setup = replace(setup, sizes=torch.full((100,), size), per_round=100)
    return saved(Dense(widths, local), data, setup, vector)


def test_where_it_pays() -> None:
    """As measured: not for many clients of a step or two, which share their calls in one matrix; not where arithmetic
    is all, for large batches without zeros.
    """
    wide, small = (784, 200, 200, 10), (60, 10)
    full, empty, few = torch.ones(64, 784), torch.zeros(64, 784), torch.ones(64, 60)
    assert gain(wide, full, 600, False, batch_size=10) > 0
    assert gain(wide, full, 600, False, batch_size=512) < 0 < gain(wide, empty, 600, False, batch_size=512)
    assert gain(small, few, 20, True, batch_size=20) < 0 < gain(small, few, 20, False, batch_size=20)
    assert gain(small, few, 2000, True, batch_size=20, epochs=5) > 0


def test_the_choice_is_written_down_and_repeated(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"rounds": 200, "per_round": 3, "batch_size": 4, "epochs": 8, "device": "cpu"}
    config = RunConfig(data="digits", model="mlp(hidden=[16])", **settings)
    for name, compile in (("first", None), ("again", True)):
        start_run(replace(config, compile=compile, engine="auto" if compile is None else "loop"), tmp_path / name)
    first = fl.load_run(tmp_path / "first").config
    assert (first.engine, first.compile) == ("loop", True)
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("first", "again")]
    assert models[0] == models[1]


def test_widths_are_those_of_the_layers() -> None:
    model = net(6, 5, 4, 3)
    assert widths_of(model, Space.of(model)) == (6, 5, 4, 3)
    task = Task.of(model, None, torch.device("cpu"), "auto")
    assert isinstance(dense(task, federation(), fl.Local()), Dense)
