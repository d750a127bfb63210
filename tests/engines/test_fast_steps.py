"""Faster forms of the local step are the same step: products for convolutions, compiled code, smaller pieces."""

import copy
import logging
import shutil
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import fedloom as fl
from fedloom.data.transforms import Preparation, augmentations
from fedloom.engines import choose, graph, vector
from fedloom.engines.bands import banded
from fedloom.engines.choose import Wishes, bytes_of, usual_steps, worth_compiling
from fedloom.engines.cohort import Asked, Cohort
from fedloom.engines.convolution import form, is_traced
from fedloom.engines.kernels import faster
from fedloom.engines.plan import Batches, plan
from fedloom.engines.pointwise import pointwise
from fedloom.engines.rule import Rule
from fedloom.engines.trial import trial as trial_step
from fedloom.engines.vector import Vector
from fedloom.errors import ConfigError, RunError
from fedloom.lockstep import run_together
from fedloom.training import Training
from tests.engines.test_vector import apart, both, dense, federation

CONVOLUTIONS: dict[str, tuple[nn.Conv2d, bool]] = {
    "colours": (nn.Conv2d(3, 5, 5), True),
    "grey, padded": (nn.Conv2d(1, 4, 3, padding=1), True),
    "strided": (nn.Conv2d(2, 4, (3, 2), stride=(2, 3), padding=(0, 2), bias=False), True),
    "same": (nn.Conv2d(3, 4, 3, padding="same"), False),
    "dilated": (nn.Conv2d(3, 4, 3, dilation=2), False),
    "grouped": (nn.Conv2d(4, 4, 3, groups=2), False),
    "wide": (nn.Conv2d(5, 4, 3), False),
    "one pixel": (nn.Conv2d(6, 4, 1), True),
    "one pixel, strided": (nn.Conv2d(6, 4, 1, stride=(2, 3), bias=False), True),
    "one pixel, padded": (nn.Conv2d(6, 4, 1, padding=1), False),
}


@pytest.mark.parametrize(("layer", "replaced"), CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_a_narrow_convolution_is_a_product(layer: nn.Conv2d, replaced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer = layer.double()
    x = torch.randn(4, layer.in_channels, 11, 12, dtype=torch.float64, requires_grad=True)
    products: list[Any] = []
    multiply = torch.bmm

    def counted(*pair: Tensor) -> Tensor:
        products.append(pair)
        return multiply(*pair)

    monkeypatch.setattr(torch, "bmm", counted)
    wanted = layer(x)
    with faster(layer):
        found = layer(x)
    assert bool(products) == replaced
    inputs = [x, *layer.parameters()]
    pairs = [torch.autograd.grad(out.square().sum(), inputs) for out in (wanted, found)]
    assert torch.allclose(found, wanted, atol=1e-12)
    for a, b in zip(*pairs, strict=True):
        assert torch.allclose(a, b, atol=1e-10)


@pytest.mark.parametrize("padding", [(0, 0), (2, 1)])
@pytest.mark.parametrize("shape", [(5, 2, 3, 3, 3), (3, 4, 5, 2, 5), (1, 1, 1, 3, 1), (2, 3, 8, 9, 6)])
def test_a_product_by_bands_is_a_convolution(shape: tuple[int, ...], padding: tuple[int, int]) -> None:
    """By its definition; and its gradients, of a cohort, are those of PyTorch's. The last kernel fills the image."""
    outputs, channels, tall, wide, width = shape
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 4, channels, 8, width + 3, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, outputs, channels, tall, wide, generator=generator, dtype=torch.float64, requires_grad=True)
    found = torch.func.vmap(lambda x, weight: banded(x, weight, padding))(x, weight)

    (down, right), kernel = padding, weight.detach().numpy()
    image = np.pad(x.detach().numpy(), [(0, 0)] * 3 + [(down, down), (right, right)])
    h, w = image.shape[3] - tall + 1, image.shape[4] - wide + 1
    by_definition = np.zeros((3, 4, outputs, h, w))
    for i, j in np.ndindex(h, w):
        patch = image[..., i : i + tall, j : j + wide]
        by_definition[..., i, j] = np.einsum("kbcyx,kocyx->kbo", patch, kernel)
    np.testing.assert_allclose(found.detach().numpy(), by_definition, atol=1e-12)

    wanted = torch.stack([nn.functional.conv2d(x[k], weight[k], padding=padding) for k in range(3)])
    pairs = [torch.autograd.grad(out.sin().sum(), [x, weight]) for out in (found, wanted)]
    for a, b in zip(*pairs, strict=True):
        assert torch.allclose(a, b, atol=1e-11)


FORMS = {
    "LeNet-5's first": (nn.Conv2d(3, 6, 5), 32, "_bands", "_patches"),
    "LeNet-5's second": (nn.Conv2d(6, 16, 5), 14, "_bands", None),
    "many channels behind": (nn.Conv2d(3, 64, 5), 32, "_patches", "_patches"),
    "many channels before": (nn.Conv2d(64, 3, 5), 32, None, None),
    "a large image": (nn.Conv2d(3, 6, 5), 64, "_patches", "_patches"),
    "ResNet-56's first": (nn.Conv2d(16, 16, 3), 34, None, None),
    "strided": (nn.Conv2d(3, 6, 5, stride=2), 32, "_patches", "_patches"),
    "one pixel": (nn.Conv2d(6, 16, 1), 8, "_points", "_points"),
    "one pixel, few channels": (nn.Conv2d(3, 6, 1), 32, "_patches", "_patches"),
}


@pytest.mark.parametrize(("layer", "side", "on_gpu", "on_cpu"), FORMS.values(), ids=FORMS)
def test_the_form_of_a_convolution(layer: nn.Conv2d, side: int, on_gpu: str | None, on_cpu: str | None) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, layer.in_channels, side, side, dtype=torch.float64)
    weight = layer.weight.detach().double()
    sizes = (layer.stride[0], layer.stride[1]), (0, 0)
    for bands, wanted in ((True, on_gpu), (False, on_cpu)):
        product = form(x.shape, weight.shape, *sizes, bands=bands)
        assert (product and product.__name__) == wanted
        if product is not None:
            assert torch.allclose(product(x, weight, *sizes), nn.functional.conv2d(x, weight, None, layer.stride))


def test_a_step_that_is_traced_knows_it() -> None:
    seen: list[bool] = []

    def step(x: Tensor) -> Tensor:
        seen.append(is_traced())
        return x + 1

    make_fx(step)(torch.zeros(2))
    assert seen == [True]
    assert not is_traced()


BLOCK = [nn.Conv2d(3, 6, 1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 8, 1, stride=2, bias=False), nn.BatchNorm2d(8)]


@pytest.mark.parametrize(("x_of_each", "weight_of_each"), [(True, True), (True, False), (False, True)])
def test_a_pointwise_convolution_of_a_cohort(x_of_each: bool, weight_of_each: bool) -> None:
    """What is the same for all clients has a gradient that is the sum over them."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, *([3] if x_of_each else []), 5, 7, 6, generator=generator, dtype=torch.float64)
    weight = torch.randn(*([3] if weight_of_each else []), 9, 5, 1, 1, generator=generator, dtype=torch.float64)
    inputs = [x.requires_grad_(), weight.requires_grad_()]
    over = (1 if x_of_each else None, 0 if weight_of_each else None)
    found = torch.func.vmap(pointwise, in_dims=over)(*inputs)
    wanted = torch.stack(
        [nn.functional.conv2d(x[:, k] if x_of_each else x, weight[k] if weight_of_each else weight) for k in range(3)]
    )
    assert torch.allclose(found, wanted, atol=1e-12)
    pairs = [torch.autograd.grad(out.sin().sum(), inputs) for out in (found, wanted)]
    for a, b in zip(*pairs, strict=True):
        assert torch.allclose(a, b, atol=1e-12)


def test_pointwise_convolutions_leave_the_memory_as_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a batch norm of the whole cohort to the next, without a copy."""
    x, weight = torch.randn(4, 3, 5, 7, 6, requires_grad=True), torch.randn(3, 9, 5, 1, 1)
    seen: list[int] = []
    multiply = torch.bmm

    def watched(*pair: Tensor) -> Tensor:
        seen.append(pair[1].data_ptr())
        return multiply(*pair)

    monkeypatch.setattr(torch, "bmm", watched)
    found = torch.func.vmap(pointwise, in_dims=(1, 0), out_dims=1)(x, weight)
    assert seen == [x.data_ptr()]
    assert found.is_contiguous()


def test_a_block_of_a_residual_network() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*BLOCK, nn.Flatten(), nn.Linear(8 * 16, 3)).double()
    local = fl.Local(epochs=2, batch_size=8, lr=0.1, last_batch="bootstrap")
    loop, vector = both(model, federation((3, 8, 8)), local=local, rounds=3)
    assert apart(vector.params, loop.params) < 1e-9


NORMS: dict[str, tuple[nn.Module, tuple[int, ...], set[str]]] = {
    "images": (nn.BatchNorm2d(5, eps=1e-3, momentum=0.3), (4, 5, 3, 2), set()),
    "vectors": (nn.BatchNorm1d(5), (4, 5), set()),
    "sequences": (nn.BatchNorm1d(5), (4, 5, 3), set()),
    "a frozen scale": (nn.BatchNorm2d(5), (4, 5, 3, 2), {"weight"}),
}


@pytest.mark.parametrize(("layer", "shape", "shared"), NORMS.values(), ids=NORMS)
@pytest.mark.parametrize("at", [0, 1])
def test_the_batch_norms_of_a_cohort_are_one(
    layer: nn.Module, shape: tuple[int, ...], shared: set[str], at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs, gradients and running statistics are those of each client alone, from one kernel for all."""
    generator = torch.Generator().manual_seed(0)
    layer = layer.double()
    x = torch.randn(3, *shape, generator=generator, dtype=torch.float64).movedim(0, at).requires_grad_()
    state = {name: values.detach() for name, values in layer.state_dict().items() if name != "num_batches_tracked"}
    clients = {
        name: values.clone() if name in shared else 1 + torch.rand(3, 5, generator=generator, dtype=torch.float64)
        for name, values in state.items()
    }
    for name in ("weight", "bias"):
        clients[name].requires_grad_()
    calls: list[torch.Size] = []
    norm = torch.batch_norm

    def counted(x: Tensor, *rest: Any) -> Tensor:
        calls.append(x.shape)
        return norm(x, *rest)

    def one(x: Tensor, own: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        own = {name: values.clone() if "running" in name else values for name, values in own.items()}
        return torch.func.functional_call(layer, own, (x,)), own

    monkeypatch.setattr(torch, "batch_norm", counted)
    with faster(layer):
        over = {name: None if name in shared else 0 for name in clients}
        found, after = torch.func.vmap(one, in_dims=(at, over))(x, clients)
    monkeypatch.undo()
    assert calls == [(4, 15, *shape[2:])]
    alone = [
        one(x.select(at, k), {name: v if name in shared else v[k] for name, v in clients.items()}) for k in range(3)
    ]
    wanted = torch.stack([out for out, _ in alone])
    assert torch.allclose(found, wanted, atol=1e-12)
    for name in ("running_mean", "running_var"):
        assert torch.allclose(after[name], torch.stack([own[name] for _, own in alone]), atol=1e-12)
    inputs = [x, clients["weight"], clients["bias"]]
    for a, b in zip(*(torch.autograd.grad(out.sin().sum(), inputs) for out in (found, wanted)), strict=True):
        assert torch.allclose(a, b, atol=1e-12)


@pytest.mark.parametrize(
    "layer", [nn.BatchNorm2d(4, affine=False), nn.BatchNorm2d(4, track_running_stats=False), nn.BatchNorm2d(4).eval()]
)
def test_other_batch_norms_are_left_to_vmap(layer: nn.Module) -> None:
    x = torch.randn(3, 2, 4, 5, 5)
    state = {name: values.expand(3, *values.shape).clone() for name, values in layer.state_dict().items()}

    def one(x: Tensor, own: dict[str, Tensor]) -> Any:
        return torch.func.functional_call(layer, own, (x,))

    with faster(layer):
        found = torch.func.vmap(one)(x, state)
    wanted = torch.stack([copy.deepcopy(layer)(own) for own in x])
    assert torch.allclose(found, wanted, atol=1e-5)


def watched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is compiled from now on."""
    found: list[Any] = []

    def counted(*given: Any) -> Any:
        found.append(given)
        return graph.compiled(*given)

    monkeypatch.setattr(vector, "compiled", counted)
    return found


needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")


@needs_compiler
@pytest.mark.parametrize("method", ["fedavg", "adabest+fedprox(mu=0.1)", "fednova", "2dlrd(c=0.5, window=1)"])
def test_a_compiled_step_is_the_same_step(
    method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Unequal sizes, so that compiled and plain steps follow each other in one Work."""
    local = fl.Local(epochs=2, batch_size=8, lr=0.1, momentum=0.5)
    data = federation()
    compilations = watched(monkeypatch)
    plain, compiled = (
        fl.fit(dense(), data, method, rounds=3, clients_per_round=5, local=local, engine="vector", compile=way)
        for way in (False, True)
    )
    assert compilations
    assert "torch.compile" not in caplog.text
    assert apart(compiled.params, plain.params) < 1e-9


@needs_compiler
def test_dropout_and_batch_norm_compile(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(0.3), nn.Linear(5, 3)]
    x = torch.randn(60, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    data = fl.Federation.from_tensor(x, torch.arange(60) % 3, [0, 16, 24, 40, 60])
    compilations = watched(monkeypatch)
    local = fl.Local(epochs=2, batch_size=8, lr=0.01)
    runs = [
        fl.fit(nn.Sequential(*layers).double(), data, rounds=2, local=local, engine=engine, compile=way)
        for engine, way in (("loop", None), ("vector", True))
    ]
    assert compilations
    assert "torch.compile" not in caplog.text
    assert apart(runs[1].params, runs[0].params) < 1e-9


@pytest.mark.long  # a C++ compiler is busy for minutes with what is drawn for the crops
@needs_compiler
def test_dropout_augmentation_and_batch_norm_compile(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(144, 3)]
    model = nn.Sequential(*layers).double()
    x = torch.randint(0, 256, (60, 3, 8, 8), generator=torch.Generator().manual_seed(0)).byte()
    y = torch.arange(60) % 3
    data = fl.Federation.from_tensor(x, y, [0, 16, 24, 40, 60], test=(x, y)).images(augment="crop(padding=1)+flip")
    assert data.preparation == Preparation(True, (), (), augmentations("crop(padding=1)+flip"))
    compilations = watched(monkeypatch)
    local = fl.Local(epochs=2, batch_size=8, lr=0.01, optimizer="adam")
    runs = [
        fl.fit(model, data, rounds=2, clients_per_round=4, local=local, engine=engine, compile=way)
        for engine, way in (("loop", None), ("vector", True))
    ]
    assert compilations
    assert "torch.compile" not in caplog.text
    assert apart(runs[1].params, runs[0].params) < 1e-9


def test_a_compiler_that_fails_is_done_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*given: Any) -> Any:
        raise RuntimeError("no compiler\nhere")

    monkeypatch.setattr(vector, "compiled", broken)
    local = fl.Local(epochs=2, batch_size=8, lr=0.1)
    plain, tried = (
        fl.fit(dense(), federation(), rounds=2, clients_per_round=5, local=local, engine="vector", compile=way)
        for way in (False, True)
    )
    assert "torch.compile failed, so steps run without it: no compiler here" in caplog.text
    assert apart(tried.params, plain.params) < 1e-12


WRONG = {
    "a bias that stays": lambda x, before: x[:, 24:28].copy_(before[:, 24:28]),
    "a layer that goes too far": lambda x, before: x[:, :24].add_(x[:, :24] - before[:, :24]),
    "numbers that are none": lambda x, before: x[:, -1].fill_(torch.nan),
}


@needs_compiler
@pytest.mark.parametrize("spoil", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_compiler_that_makes_another_step_of_it_is_done_without(
    spoil: Any, optimizer: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(step: Any, cohort: Any) -> Any:
        right, gradient = graph.compiled(step, cohort), cohort.optimizer.first if optimizer == "adam" else cohort.x

        def run() -> None:
            before = gradient.clone()
            right()
            spoil(gradient, before)

        return run

    monkeypatch.setattr(vector, "compiled", wrong)
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    local = fl.Local(epochs=2, batch_size=8, lr=0.01, optimizer=optimizer)
    plain, tried = (
        fl.fit(model, federation(), rounds=2, clients_per_round=5, local=local, engine="vector", compile=way)
        for way in (False, True)
    )
    assert "torch.compile made another step of it" in caplog.text
    assert apart(tried.params, plain.params) < 1e-12


def test_gradients_of_rounding_alone_are_no_difference() -> None:
    """A bias before a batch norm has none, up to rounding."""
    torch.manual_seed(0)
    sizes, rows = [50, 5, 10], 4
    x = torch.randn(rows, sum(sizes))
    steps = 0.1 * torch.randn(rows, sum(sizes))
    steps[:, 50:55] = 1e-8 * torch.randn(rows, 5)
    other = steps * (1 + 1e-4)
    other[:, 50:55] = 1e-8 * torch.randn(rows, 5)
    made = cohort_of(x)
    assert graph.difference(lambda: made.x.add_(other), lambda: made.x.add_(steps), made, sizes) < 1e-2
    assert torch.equal(made.x, x)
    other[:, 55:] = 0
    far = graph.difference(lambda: made.x.add_(other), lambda: made.x.add_(steps), made, sizes)
    assert far == pytest.approx(1, abs=0.1)


def recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, with steps for fewer rows; they are played again by being run again."""
    monkeypatch.setattr(vector, "recorded", lambda run, cohort, pool: run)


@needs_compiler
def test_what_is_played_often_is_compiled(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Clients of 4, 2, 1, 1, 1, 1 and 1 batches: a step of seven rows, one of two, two of one."""
    recording(monkeypatch)
    asked: list[tuple[int, int, int]] = []

    def gains(rows: int, width: int, room: int) -> bool:
        asked.append((rows, width, room))
        return rows == 2

    compilations = watched(monkeypatch)
    data = federation(sizes=[0, 7, 20, 26, 58, 65, 70, 76])  # 7, 13, 6, 32, 7, 5 and 6 samples
    settings: dict[str, Any] = {"rounds": 3, "clients_per_round": 7, "local": fl.Local(batch_size=8, lr=0.1)}
    plain = fl.fit(dense(), data, engine="loop", **settings)
    run = Training(dense(), data, "fedavg", engine="vector", **settings)
    engine = run.simulation.engine
    assert isinstance(engine, Vector)
    engine.graphs, engine.gains = True, gains
    found = run.run()
    assert asked == [(7, 8, 7), (2, 8, 7), (1, 8, 7)]
    assert len(compilations) == 1
    assert apart(found.params, plain.params) < 1e-9
    assert "torch.compile" not in caplog.text


def test_runs_in_lockstep_are_compiled_for_the_rows_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    recording(monkeypatch)
    asked: list[int] = []

    def gains(rows: int, width: int, room: int) -> bool:
        asked.append(rows)
        return False

    data, local = federation(sizes=[0, 7, 20, 26, 58, 65, 70, 83]), fl.Local(batch_size=8, lr=0.1)
    settings: dict[str, Any] = {"rounds": 2, "clients_per_round": 3, "local": local, "engine": "vector"}
    runs = [Training(dense(), data, "fedavg", seed=seed, **settings) for seed in range(4)]
    for run in runs:
        assert isinstance(run.simulation.engine, Vector)
        assert not run.simulation.engine.compile
        run.simulation.engine.graphs = True
        run.simulation.engine.gains = gains
    run_together(runs, [[] for _ in runs])
    assert max(asked) == 12


def test_runs_in_lockstep_keep_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some clients have less than half a batch, so that cohorts of each width differ from round to round; the client
    with the most samples is one of the second run alone. What was recorded in the first rounds serves the later ones.
    """
    recording(monkeypatch)
    made: list[tuple[int, int, int]] = []
    original = Cohort.of.__func__  # type: ignore[attr-defined]

    def of(cls: type[Cohort], local: fl.Local, like: Asked, rows: int, steps: int, width: int) -> Cohort:
        made.append((rows, steps, width))
        found: Cohort = original(cls, local, like, rows, steps, width)
        return found

    monkeypatch.setattr(Cohort, "of", classmethod(of))
    sizes = [3, 9, 16, 24] * 25 + [64]
    x, y = torch.randn(sum(sizes), 6, dtype=torch.float64), torch.randint(0, 3, (sum(sizes),))
    whole = fl.Federation.from_tensor(x, y, np.cumsum([0, *sizes]).tolist())
    pooled = [whole.only(torch.arange(100)), whole]
    settings: dict[str, Any] = {"rounds": 12, "clients_per_round": 40, "local": fl.Local(batch_size=8, lr=0.1)}
    runs = [Training(dense(), own, "fedavg", seed=i, engine="vector", **settings) for i, own in enumerate(pooled * 2)]
    for run in runs:
        assert isinstance(run.simulation.engine, Vector)
        run.simulation.engine.graphs = True
        assert run.simulation.federation.x is runs[0].simulation.federation.x
    run_together(runs, [[] for _ in runs])
    assert sorted(made) == [(64, 8, 4), (128, 8, 8)]


def test_recordings_of_a_recurrent_net(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients of one to five batches: no step has a row too many. In the second run only some of the clients are asked;
    the step of all that there is room for is recorded first all the same.
    """
    made: list[int] = []

    def recorded(run: Any, cohort: Cohort, pool: list[Any]) -> Any:
        made.append(run.keywords["n"])
        return run

    monkeypatch.setattr(vector, "recorded", recorded)
    sizes = np.cumsum([0, *([8] * 6), *([16, 24, 32, 40] * 2)]).tolist()
    x, y = torch.randn(sizes[-1], 5, 3, dtype=torch.float64), torch.arange(sizes[-1]) % 2
    data = fl.Federation.from_tensor(x, y, sizes)
    model = fl.model("lstm(hidden=4)", data).double()
    settings: dict[str, Any] = {"rounds": 2, "clients_per_round": 14, "local": fl.Local(batch_size=8, lr=0.1)}
    plain = fl.fit(model, data, engine="loop", **settings)
    run = Training(model, data, "fedavg", engine="vector", compile=False, **settings)
    assert isinstance(run.simulation.engine, Vector)
    run.simulation.engine.graphs = True
    assert apart(run.run().params, plain.params) < 1e-9
    assert made == [14, 8, 6, 4, 2]
    made.clear()
    few = Training(model, data, "bernoulli(rate=0.3)", engine="vector", compile=False, **settings)
    assert isinstance(few.simulation.engine, Vector)
    few.simulation.engine.graphs = True
    few.run()
    assert made[0] == 14
    assert max(made[1:]) < 14


def test_who_says_no_gets_no_compiled_step() -> None:
    long: dict[str, Any] = {"rounds": 10**9, "engine": "vector", "device": "cpu"}
    for compile, wanted in ((None, bool(shutil.which("g++"))), (False, False)):
        alike = federation(sizes=list(range(0, 92, 13)))  # seven clients of 13 samples, so of batches of 9 to 16
        engine = Training(dense(), alike, "fedavg", compile=compile, **long).simulation.engine
        assert isinstance(engine, Vector)
        assert engine.compile is wanted
        assert engine.gains(7, 16, 7) is wanted


def test_how_many_steps_a_part_of_a_cohort_takes() -> None:
    """Clients of 1, 2 and 4 batches, a half and two quarters: of 100 all take one step, 50 another and 25 two more. As
    many more, whose samples are less than half a batch, step beside them.
    """
    sizes = torch.tensor([8] * 50 + [16] * 25 + [32] * 25)
    setup = Training(dense(), federation(), "fedavg", rounds=1, local=fl.Local(batch_size=8)).simulation.setup
    setup = replace(setup, sizes=sizes[torch.randperm(100)])
    assert [usual_steps(setup, rows, 8, 100) for rows in (100, 64, 48, 32, 16)] == [1, 1, 0, 2, 0]
    assert [usual_steps(setup, rows, 8, 50) for rows in (50, 32, 16, 8)] == [1, 1, 2, 0]
    assert not any(usual_steps(setup, rows, 4, 100) for rows in (100, 64, 32))
    more = replace(setup, sizes=torch.cat([sizes, torch.full((100,), 3)])[torch.randperm(200)])
    assert [usual_steps(more, rows, 8, 200) for rows in (200, 128, 96, 64, 48, 32, 16)] == [0, 1, 0, 1, 0, 2, 0]
    assert [usual_steps(more, rows, 4, 200) for rows in (200, 128, 96)] == [0, 1, 0]


@pytest.mark.parametrize("room", [1, 2, 3, 7, 10, 33, 60, 100, 245, 270, 1000])
def test_recordings_for_fewer_rows(room: int) -> None:
    """No row too few, none twice; but for all rows at most twice as many as clients, above 32 half as many again."""
    found = graph.rows_of_recordings(room)
    assert list(found) == sorted(set(found))
    assert found[-1] == room
    for n in range(1, room + 1):
        rows = next(size for size in found if size >= n)
        assert rows <= (2 * n if rows <= 32 else 1.5 * n) or rows == room


@pytest.mark.parametrize("room", [1, 2, 3, 7, 10, 33, 60, 100, 245, 270, 1000])
def test_recordings_where_every_row_costs(room: int) -> None:
    found = graph.rows_of_recordings(room, heavy=True)
    assert list(found) == sorted(set(found))
    assert found[-1] == room
    for n in range(1, room + 1):
        rows = next(size for size in found if size >= n)
        assert rows <= 1.25 * n


@pytest.mark.parametrize(("name", "heavy"), [("lstm(hidden=4)", True), ("mlp(hidden=[4])", False)])
def test_of_recurrent_nets_every_row_costs(name: str, heavy: bool) -> None:
    federation = fl.Federation.from_arrays([(torch.randn(9, 5, 3), torch.arange(9) % 2) for _ in range(3)])
    run = Training(fl.model(name, federation), federation, "fedavg", rounds=1, engine="vector", compile=False)
    engine = run.simulation.engine
    assert isinstance(engine, Vector)
    assert engine._heavy == heavy


def test_how_far_rounding_carries_a_step() -> None:
    """In proportion to the rounding and to how steep the step is; of the nudge itself nothing is left in the model."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 20, generator=generator, dtype=torch.float64)
    for steepness in (1.0, 100.0):
        made = cohort_of(x)
        bend = 1 + steepness * torch.rand(20, generator=generator, dtype=torch.float64)

        def step(made: Cohort = made, bend: Tensor = bend) -> None:
            made.x.sub_(torch.sin(made.x * bend))

        near, far = (graph.difference(graph.nudged(step, made, unit), step, made, [20]) for unit in (1e-6, 1e-4))
        assert torch.equal(made.x, x)
        assert far == pytest.approx(100 * near, rel=0.05)
        assert 0.1e-6 * steepness < near < 1e-6 * (1 + steepness)


def test_a_step_that_rounding_decides_may_differ_by_as_much(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A compiler that is half a step away: wrong for a plain model, rounding for one that makes as much of it."""

    def rounding(step: Any, cohort: Any) -> Any:
        def run() -> None:
            before = cohort.x.clone()
            step(cohort)
            cohort.x += 0.5 * (cohort.x - before)

        return run

    monkeypatch.setattr(vector, "compiled", rounding)
    monkeypatch.setattr(vector, "nudged", lambda step, cohort, unit: lambda: (step(), cohort.x.mul_(1.01)))
    local = fl.Local(batch_size=8, lr=0.01)
    settings: dict[str, Any] = {"rounds": 1, "clients_per_round": 5, "local": local, "engine": "vector"}
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    fl.fit(model, federation(), compile=True, **settings)
    assert "another step" not in caplog.text
    monkeypatch.setattr(vector, "CHAOS", 0.4)
    fl.fit(model, federation(), compile=True, **settings)
    assert "torch.compile made another step of it (0.49 steps away)" in caplog.text  # 0.5 / 1.01


def cohort_of(x: Tensor) -> Cohort:
    none = torch.zeros(1, len(x), dtype=torch.int64)
    asked = Asked(x, {}, none.numpy(), None, None, None, False)
    made = Cohort.of(fl.Local(), asked, len(x), 1, 1)
    made.x.copy_(x)
    return made


def planned(rounds: int, device: str = "cuda") -> bool:
    """The rule for cnn-mcmahan as AdaBest trains it, without a GPU."""
    sizes = torch.full((100,), 500)
    model = nn.Sequential(*(nn.Linear(10, 10) for _ in range(5)))
    data = fl.Federation.from_arrays([(torch.zeros(2, 10), [0, 9])])
    small = Training(model, data, "fedavg", rounds=1, device="cpu").simulation.setup
    local = fl.Local(epochs=5, batch_size=45)
    setup = replace(small, sizes=sizes, clients=100, per_round=10, local=local, device=torch.device(device))
    return worth_compiling(setup, 700_000, rounds, rows=10, width=45, room=10)


def test_only_long_runs_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [planned(rounds) for rounds in (1, 50, 300, 1200)] == [False, False, False, True]
    assert [planned(rounds, "cpu") for rounds in (1, 200, 2000)] == [False, False, bool(shutil.which("g++"))]
    monkeypatch.setenv("PATH", "")
    assert not planned(100_000, "cpu")


@needs_compiler
def test_threads_compile_one_after_the_other(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(choose, "rule", lambda: Rule(shared_from=0))
    settings: dict[str, Any] = {"rounds": 3, "clients_per_round": 6, "engine": "vector"}
    settings["local"] = fl.Local(epochs=2, batch_size=4, lr=0.1)
    alone = fl.fit(dense(), federation(), **settings)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    compilations = watched(monkeypatch)
    shared = fl.fit(dense(), federation(), compile=True, **settings)
    assert len(compilations) >= 2
    assert "torch.compile failed" not in caplog.text
    assert apart(shared.params, alone.params) < 1e-9


def test_memory_that_runs_out_halves_the_pieces(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[int] = []
    gradients = Vector.gradients

    def tight(self: Vector, x: Tensor, *rest: Any, **more: Any) -> Any:
        if len(x) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        seen.append(len(x))
        return gradients(self, x, *rest, **more)

    monkeypatch.setattr(Vector, "gradients", tight)
    with caplog.at_level(logging.WARNING, "fedloom"):
        loop, halved = both(dense(), federation(), "adabest", clients_per_round=7)
    assert max(seen) == 2
    assert caplog.text.count("do not fit into memory together") == 2  # 7 to 4 to 2, and it is remembered
    assert apart(halved.params, loop.params) < 1e-9


def test_a_client_that_does_not_fit_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def tight(self: Vector, x: Tensor, *rest: Any, **more: Any) -> Any:
        if tried:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return gradients(self, x, *rest, **more)

    def trial(*given: Any) -> Any:
        outcome = trial_step(*given)
        tried.append(outcome)
        return outcome

    gradients, tried = Vector.gradients, list[Any]()
    monkeypatch.setattr(Vector, "gradients", tight)
    monkeypatch.setattr(choose, "trial", trial)
    with pytest.raises(RunError, match="a single client's training does not fit into the memory of cpu"):
        fl.fit(dense(), federation(), rounds=2, engine="vector")


@pytest.mark.parametrize(("text", "count"), [("8GB", 8 * 10**9), ("500 MB", 5 * 10**8), ("2kB", 2000), (77, 77)])
def test_sizes_of_memory(text: Any, count: int) -> None:
    assert bytes_of(text) == count


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "8 gigabytes", 0, -5, True, 1.5, "1e9"])
def test_bad_sizes_of_memory(text: Any) -> None:
    with pytest.raises(ConfigError, match="max_memory must be a number of bytes, or a text such as '8GB'"):
        fl.fit(dense(), federation(), rounds=1, max_memory=text)


def test_bad_wishes() -> None:
    with pytest.raises(ConfigError, match="compile must be True, False or None"):
        fl.fit(dense(), federation(), rounds=1, compile="yes")  # type: ignore[arg-type]
    assert Wishes(max_memory=100).budget(torch.device("cpu")) == 50


def test_the_plan_holds_every_batch() -> None:
    rng = np.random.default_rng(0)
    clients = [
        Batches(rng.integers(0, 1000, sum(lengths)), np.array(lengths))
        for lengths in ([4, 4, 1], [4, 4, 4, 4], [3], [4, 2, 4, 2, 4, 2])
    ]
    found = plan(clients)
    assert found.order.tolist() == [3, 1, 0, 2]
    for row, k in enumerate(found.order.tolist()):
        for s, batch in enumerate(clients[k].cut()):
            assert found.lengths[s, row] == len(batch)
            assert found.samples[s, row, : len(batch)].tolist() == batch.tolist()
            assert (found.samples[s, row, len(batch) :] == batch[0]).all()
        assert (found.lengths[len(clients[k].lengths) :, row] == 0).all()


class Viewing(nn.Module):
    """Calls `view`, which wants samples that lie channel by channel."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.last = nn.Conv2d(3, 4, 3), nn.Linear(144, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.convolution(x)
        return self.last(x.view(len(x), -1))  # type: ignore[no-any-return]


def test_channels_last_where_the_model_takes_it() -> None:
    torch.manual_seed(0)
    data = federation((3, 8, 8))
    reshaping = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 3)).double()
    viewing = Viewing().double()
    viewing.load_state_dict(dict(zip(viewing.state_dict(), reshaping.state_dict().values(), strict=True)))
    found = []
    for model, takes in ((reshaping, True), (viewing, False), (dense(), False)):
        given = data if takes or model is viewing else federation()
        run = Training(model, given, "fedavg", rounds=3, clients_per_round=5, engine="loop")
        assert run.simulation.task.channels_last == takes
        found.append(run.run().params)
    assert apart(found[0], found[1]) < 1e-12


def test_checkpoints_come_by_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Without a number of rounds: before the first, every half minute, and at the end."""
    for seconds, wanted in ((30.0, [0, 4]), (0.0, [0, 1, 2, 3, 4])):
        monkeypatch.setattr("fedloom.training.BETWEEN_CHECKPOINTS", seconds)
        monkeypatch.setattr("fedloom.training.WRITING", float("inf"))
        saved: list[int] = []
        run = Training(dense(), federation(), "fedavg", rounds=4, checkpoint=tmp_path / str(seconds))
        save = run.save
        monkeypatch.setattr(
            run, "save", lambda run=run, save=save, saved=saved: (saved.append(run.state.round), save())
        )
        run.run()
        assert saved == wanted


@pytest.mark.parametrize("name", ["cnn-mcmahan", "cnn-reddi", "lenet5"])
def test_narrow_convolutions_under_autocast(name: str) -> None:
    """bfloat16 keeps the matrix engine, and is as near to the loop as bfloat16 is."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(12, 3, 32, 32, generator=generator), torch.arange(12) % 3
    data = fl.Federation.from_tensor(x, y, [0, 4, 8, 12], classes=3)
    settings: dict[str, Any] = {"rounds": 1, "precision": "bf16", "local": fl.Local(steps=1, batch_size=4)}
    runs = [Training(fl.model(name, data), data, "fedavg", engine=e, **settings) for e in ("loop", "vector")]
    assert runs[1].simulation.engine.name == "vector"
    assert apart(*(run.run().params for run in runs)) < 1e-3


def test_batch_norms_under_autocast() -> None:
    """Products and norms of a cohort are in bfloat16, as a client's own are; parameters and statistics are not."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(48, 3, 8, 8, generator=generator), torch.arange(48) % 3
    data = fl.Federation.from_tensor(x, y, [0, 16, 32, 48], classes=3)
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 8, 1, bias=False), nn.BatchNorm2d(8)]
    net = nn.Sequential(*layers, nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(64, 3))
    settings: dict[str, Any] = {"rounds": 1, "precision": "bf16", "local": fl.Local(steps=2, batch_size=8, lr=0.1)}
    runs = [Training(net, data, "fedavg", engine=e, **settings) for e in ("loop", "vector")]
    assert runs[1].simulation.engine.name == "vector"
    loop, found = (run.run() for run in runs)
    assert apart(loop.params, found.params) < 5e-3
    for name, wanted in loop.model.named_buffers():
        torch.testing.assert_close(dict(found.model.named_buffers())[name], wanted, rtol=0.02, atol=0.02)

    def dtypes(images: Tensor, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16), faster(net):
            seen = nn.functional.batch_norm(layers[0](images), mean, var, weight, bias, training=True)
        assert seen.dtype == torch.bfloat16
        return seen.float()

    stacked = [torch.ones(2, 6), torch.ones(2, 6), torch.ones(2, 6), torch.zeros(2, 6)]
    found_images = torch.func.vmap(dtypes)(x[:8].reshape(2, 4, 3, 8, 8), *stacked)
    wanted_images = [
        nn.functional.batch_norm(layers[0](own), None, None, training=True) for own in torch.split(x[:8], 4)
    ]
    torch.testing.assert_close(found_images, torch.stack(wanted_images), rtol=0.02, atol=0.04)


def test_a_convolution_by_keyword() -> None:
    layer = nn.Conv2d(3, 4, 3).double()
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    with faster(layer):
        found = nn.functional.conv2d(input=x, weight=layer.weight, bias=layer.bias)
    assert torch.allclose(found, layer(x), atol=1e-12)


class Tiny(nn.Module):
    """Outputs far below 1 that depend on the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x)
        return 1e-6 * (out - out.mean(0))  # type: ignore[no-any-return]


def balanced(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss in which the samples of a batch touch each other."""
    counts = torch.nn.functional.one_hot(targets, 3).sum(0)
    return nn.functional.cross_entropy(outputs, targets, reduction="none") / counts[targets]


def hidden_norm() -> nn.Module:
    """Batch norm behind a last layer that begins at zero."""
    last = nn.Linear(8, 3)
    nn.init.zeros_(last.weight)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), last)


INSTANCES = [nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten(), nn.Linear(6, 3)]
MIXING = {
    "behind zeros": (hidden_norm(), None),
    "tiny outputs": (Tiny(), None),
    "in the loss": (nn.Linear(6, 3), balanced),
    "in a statistic": (nn.Sequential(*INSTANCES), None),
}


@pytest.mark.parametrize(("model", "loss"), MIXING.values(), ids=MIXING)
@pytest.mark.parametrize("twins", [False, True])
def test_samples_that_touch_each_other_are_noticed(model: nn.Module, loss: Any, twins: bool) -> None:
    """Also where the first two samples are the same."""
    data = federation(sizes=[0, 7, 20, 22, 54, 61, 64, 91])
    if twins:
        data.x[1] = data.x[0]
    local = fl.Local(epochs=2, batch_size=8, lr=0.1)
    runs = [
        fl.fit(model.double(), data, rounds=2, clients_per_round=5, local=local, loss=loss, engine=engine)
        for engine in ("loop", "vector")
    ]
    assert apart(runs[1].params, runs[0].params) < 1e-9
    for a, b in zip(runs[0].model.buffers(), runs[1].model.buffers(), strict=True):
        assert torch.allclose(a.double(), b.double(), atol=1e-12)
