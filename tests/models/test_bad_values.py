"""Sizes and data that a model can't be built from are refused in one sentence with the model's name."""

import pytest

from fedloom.errors import ModelError
from fedloom.models.catalogue import Shape
from tests.models.making import make

IMAGE, TABLE, SEQUENCE = Shape((1, 28, 28), 10), Shape((49,), 2), Shape((9, 5), 3)
TEXT = Shape((12,), 4, tokens=50)
PER_WORD = Shape((12,), 50, tokens=50, per_position=True)


@pytest.mark.parametrize(
    ("text", "shape", "words"),
    [
        ("mlp(hidden=[10, 0])", TABLE, "mlp: every hidden layer must be at least 1, not 0"),
        ("mlp(hidden=[-3])", TABLE, "not -3"),
        ("mlp(init='zeros')", TABLE, "init must be 'default' or 'truncated'"),
        ("logistic(zeros=1)", TABLE, "zeros must be True or False"),
        ("resnet56(variant='wide')", IMAGE, "variant must be 'bottleneck' or 'basic'"),
        ("char-lstm(embedding=0)", TEXT, "char-lstm: embedding must be at least 1, not 0"),
        ("char-lstm(layers=-1)", TEXT, "layers must be at least 1"),
        ("char-lstm(layers=1000000000)", TEXT, "layers must be at most 1000"),
        ("lstm(layers=1000000000)", TEXT, "layers must be at most 1000"),
        ("transformer(layers=1000000000000000)", TEXT, "layers must be at most 1000"),
        ("lstm(hidden=0)", TEXT, "lstm: hidden must be at least 1"),
        ("bilstm(hidden=-5)", TEXT, "bilstm: hidden must be at least 1"),
        ("bilstm(dropout=1.0)", TEXT, "bilstm: dropout must be at least 0 and below 1, not 1.0"),
        ("bilstm(dropout=-0.1)", TEXT, "dropout"),
        ("stackoverflow-lstm(hidden=0)", PER_WORD, "hidden must be at least 1"),
        ("transformer(width=0)", TEXT, "width must be at least 1"),
        ("transformer(width=10, heads=4)", TEXT, "width=10 can't be divided among heads=4"),
        ("transformer(dropout=2)", TEXT, "dropout must be"),
        ("mobilenetv2(weights='random')", IMAGE, "three channels, not of 1"),
        ("mobilenetv2(weights='')", Shape((3, 32, 32), 10), "mobilenetv2: weights is an empty text"),
        ("bilstm(vectors=' ')", TEXT, "bilstm: vectors is an empty text"),
        ("distilbert(weights='')", TEXT, "distilbert: weights is an empty text"),
        ("mobilenetv2(weights=3)", Shape((3, 32, 32), 10), "weights must be a text"),
    ],
)
def test_values(text: str, shape: Shape, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        make(text, shape)


@pytest.mark.parametrize("text", ["cnn-reddi", "cnn-mcmahan", "cnn-dgt", "lenet5", "resnet56", "mobilenetv2"])
@pytest.mark.parametrize("shape", [TABLE, SEQUENCE, TEXT])
def test_images_only(text: str, shape: Shape) -> None:
    with pytest.raises(ModelError, match=f"{text} reads images"):
        make(text, shape)


@pytest.mark.parametrize("text", ["logistic", "svm", "mlp"])
def test_numbers_only(text: str) -> None:
    with pytest.raises(ModelError, match=f"{text} reads numbers, not token ids"):
        make(text, TEXT)


@pytest.mark.parametrize("text", ["char-lstm", "stackoverflow-lstm", "bilstm", "transformer", "distilbert"])
@pytest.mark.parametrize("shape", [IMAGE, TABLE])
def test_texts_only(text: str, shape: Shape) -> None:
    with pytest.raises(ModelError, match=f"{text} reads token ids"):
        make(text, shape)


@pytest.mark.parametrize("shape", [IMAGE, TABLE])
def test_lstm_reads_sequences(shape: Shape) -> None:
    with pytest.raises(ModelError, match=r"lstm reads token ids or samples \(time, features\)"):
        make("lstm", shape)


@pytest.mark.parametrize("text", ["char-lstm", "lstm", "bilstm", "distilbert"])
def test_one_answer(text: str) -> None:
    with pytest.raises(ModelError, match=f"{text} answers once per text"):
        make(text, PER_WORD)


def test_answers_at_every_position() -> None:
    with pytest.raises(ModelError, match="stackoverflow-lstm answers at every position"):
        make("stackoverflow-lstm", TEXT)


@pytest.mark.parametrize(
    ("text", "side"), [("cnn-reddi", 5), ("cnn-mcmahan", 15), ("cnn-dgt", 9), ("lenet5", 11), ("lenet5", 1)]
)
def test_small_images(text: str, side: int) -> None:
    with pytest.raises(ModelError, match=f"{text}: images of {side}x{side} are too small"):
        make(text, Shape((3, side, side), 10))
