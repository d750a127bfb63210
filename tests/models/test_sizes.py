"""Parameter counts as printed in the papers and their code, outputs by kind of data, and what models begin with."""

import pytest
import torch
from torch import nn

from fedloom.models.catalogue import REGISTRY, Shape, load_models
from tests.models.making import make, parameters, samples

DIGIT, LETTER = Shape((1, 28, 28), 10), Shape((1, 28, 28), 62)
CIFAR10, CIFAR100 = Shape((3, 32, 32), 10), Shape((3, 32, 32), 100)
COVERTYPE = Shape((49,), 2)
SHAKESPEARE = Shape((80,), 80, tokens=80, padded=False)
STACKOVERFLOW = Shape((20,), 10_004, tokens=10_004, per_position=True)
NEWS, SPEECH = Shape((12,), 4, tokens=50), Shape((9, 5), 10)


@pytest.mark.parametrize(
    ("text", "shape", "count"),
    [
        ("mlp(hidden=[100, 100])", DIGIT, 89_610),
        ("mlp(hidden=[200, 200])", DIGIT, 199_210),
        ("mlp(hidden=[64, 64], init='truncated')", COVERTYPE, 7_490),
        ("logistic", DIGIT, 7_850),
        ("svm", CIFAR10, 30_730),
        ("cnn-reddi", DIGIT, 1_199_882),
        ("cnn-reddi", LETTER, 1_206_590),
        ("cnn-mcmahan", CIFAR10, 797_962),
        ("cnn-mcmahan", CIFAR100, 815_332),
        ("cnn-dgt", DIGIT, 225_034),
        ("lenet5", DIGIT, 61_706),
        ("lenet5", CIFAR10, 62_006),
        ("resnet56", CIFAR10, 591_322),
        ("resnet56(variant='basic')", CIFAR10, 855_770),
        ("mobilenetv2(weights='random')", Shape((3, 32, 32), 1000), 3_504_872),  # torchvision's count
        ("char-lstm", SHAKESPEARE, 817_872),
        ("stackoverflow-lstm", STACKOVERFLOW, 4_050_748),
    ],
)
def test_parameters_are_as_many_as_printed(text: str, shape: Shape, count: int) -> None:
    assert parameters(make(text, shape)) == count


def test_resnet56_has_176_tensors() -> None:
    assert len(list(make("resnet56", CIFAR10).parameters())) == 176


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("logistic", DIGIT),
        ("svm", DIGIT),
        ("mlp(hidden=[])", SPEECH),
        ("cnn-reddi", Shape((3, 9, 11), 7)),
        ("cnn-mcmahan", Shape((1, 28, 28), 7)),
        ("cnn-dgt", Shape((1, 28, 20), 7)),
        ("lenet5", Shape((1, 12, 12), 7)),
        ("lenet5", CIFAR10),
        ("resnet56", Shape((1, 8, 8), 7)),
        ("resnet56(variant='basic')", Shape((3, 9, 7), 7)),
        ("char-lstm(hidden=5)", SHAKESPEARE),
        ("lstm", NEWS),
        ("lstm(layers=2)", SPEECH),
        ("bilstm(hidden=5)", NEWS),
        ("stackoverflow-lstm(embedding=4, hidden=5)", Shape((6,), 30, tokens=30, per_position=True)),
        ("transformer(width=8, heads=2, feedforward=9, layers=1)", Shape((6,), 30, tokens=30, per_position=True)),
        ("transformer(width=9, heads=3, feedforward=9, layers=1, dropout=0.1)", NEWS),
    ],
)
@pytest.mark.parametrize("kind", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_outputs_fit_the_data(text: str, shape: Shape, kind: torch.dtype) -> None:
    x = samples(shape, 3)
    answer = make(text, shape)(x if shape.tokens is None else x.to(kind))
    assert answer.shape == ((3, shape.outputs, *shape.inputs) if shape.per_position else (3, shape.outputs))
    assert answer.isfinite().all()


def test_a_seed_gives_the_same_weights() -> None:
    first, again, other = (make("lstm", NEWS, seed) for seed in (1, 1, 2))
    for one, same, different in zip(first.parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, same)
        assert not torch.equal(one, different)


def test_truncated_weights_stay_within_two_deviations() -> None:
    for name, value in make("mlp(hidden=[64, 64], init='truncated')", COVERTYPE).named_parameters():
        if name.endswith("bias"):
            assert not value.any()
        else:
            assert value.abs().max() <= 0.04
            assert 0.01 < value.std() < 0.02  # a normal of 0.02 that is cut at two deviations has 0.0176


def test_logistic_can_begin_at_zero() -> None:
    assert not any(value.any() for value in make("logistic(zeros=True)", DIGIT).parameters())
    assert all(value.any() for value in make("logistic", DIGIT).parameters())


def test_svm_names_its_loss() -> None:
    assert getattr(make("svm", DIGIT), "fedloom_loss", None) == "hinge"


def test_originals_in_tensorflow_begin_with_open_forget_gates() -> None:
    model = make("char-lstm(hidden=3)", SHAKESPEARE)
    biases = [value.tolist() for name, value in model.named_parameters() if name.startswith("lstm") and "bias" in name]
    assert biases == [[0.0] * 3 + [1.0] * 3 + [0.0] * 6] * 2


def test_every_model_says_what_it_is() -> None:
    load_models()
    for entry in REGISTRY.entries():
        assert entry.about.endswith("."), entry.name
        assert entry.signature.startswith(entry.name)


def test_resnet_convolutions_are_drawn_by_fan_out() -> None:
    convolutions = [m for m in make("resnet56(variant='basic')", CIFAR10).modules() if isinstance(m, nn.Conv2d)]
    for layer in convolutions[1:]:
        wanted = (2 / (layer.out_channels * layer.kernel_size[0] * layer.kernel_size[1])) ** 0.5
        assert layer.weight.std().item() == pytest.approx(wanted, rel=0.1)
