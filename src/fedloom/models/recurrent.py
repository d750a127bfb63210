"""Recurrent models. Hochreiter, Schmidhuber: Long Short-Term Memory. Neural Computation 1997.

char-lstm: Caldas et al.: LEAF: A Benchmark for Federated Settings. 2018; in RADFed for Shakespeare. 817,872 parameters
    for 80 characters.
stackoverflow-lstm: Reddi et al.: Adaptive Federated Optimization. ICLR 2021; in FedGLAD. 4,050,748 parameters for
    10,004 tokens.
bilstm: FedGLAD's appendix M, over GloVe (Pennington, Socher, Manning, EMNLP 2014), which its code keeps frozen; one
    layer, so that its dropout acts on the last state alone.
lstm: 2D-LRD trains "LSTM" on ag_news and on speech commands and prints no size. The sizes here are a choice.

Departures: every layer has one bias vector per gate, as TensorFlow's (PyTorch's have two that are only ever added).
Weights are drawn as PyTorch draws them; where the original is TensorFlow's, its forget gates begin at a bias of one.
Texts are padded at their right end, and the last state is that at the last token before the padding. Embeddings have no
`padding_idx`: under `vmap` PyTorch forgets it, and the row of the padding would be trained in one engine and not in the
other.
"""

import torch
from torch import Tensor, nn

from fedloom.errors import ModelError
from fedloom.models.catalogue import REGISTRY, Shape
from fedloom.models.checks import at_least_one, dropout_layer, not_empty, one_answer
from fedloom.models.recurrence import recurrence
from fedloom.models.word_vectors import vectors_of

UNPRINTED_EMBEDDING = 300  # of bilstm without vectors: as wide as GloVe's widest


class LSTMLayer(nn.Module):
    """One layer, [B, T, inputs] -> [B, T, hidden]: every state of a run that begins at zero.

    Fused, it calls PyTorch's own kernel, which `vmap` can't batch; otherwise it is one step of all clients after the
    other (`recurrence.py`), with the same numbers. The gates lie in PyTorch's order: input, forget, cell, output.
    """

    def __init__(self, inputs: int, hidden: int, forget_bias: float | None = None) -> None:
        super().__init__()
        bound = hidden**-0.5
        self.weight_ih = nn.Parameter(torch.empty(4 * hidden, inputs).uniform_(-bound, bound))
        self.weight_hh = nn.Parameter(torch.empty(4 * hidden, hidden).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(4 * hidden).uniform_(-bound, bound))
        if forget_bias is not None:
            with torch.no_grad():
                self.bias.zero_()[hidden : 2 * hidden] = forget_bias
        self.hidden = hidden
        self.fused = True

    def forward(self, x: Tensor) -> Tensor:
        return self._kernel(x) if self.fused else self._steps(x)

    def _kernel(self, x: Tensor) -> Tensor:
        start = self.bias.new_zeros(1, len(x), self.hidden)
        weights = [self.weight_ih, self.weight_hh, self.bias, torch.zeros_like(self.bias)]
        states, _, _ = torch.lstm(
            x,
            (start, start),
            _in_one_piece(weights) if x.is_cuda else weights,
            has_biases=True,
            num_layers=1,
            dropout=0.0,
            train=torch.is_grad_enabled(),  # there is no dropout; cuDNN has no gradients otherwise
            bidirectional=False,
            batch_first=True,
        )
        return states

    def _steps(self, x: Tensor) -> Tensor:
        # The states of a layer lie time by time already, as the next one reads them.
        states = recurrence(x.transpose(0, 1), self.weight_ih, self.weight_hh, self.bias)
        return states.transpose(0, 1)


def _in_one_piece(weights: list[Tensor]) -> list[Tensor]:
    """The same, side by side in memory: cuDNN would copy them likewise, and warn about it."""
    chunk = torch.cat([weight.reshape(-1) for weight in weights])
    pieces = torch.split(chunk, [weight.numel() for weight in weights])
    return [piece.view_as(weight) for piece, weight in zip(pieces, weights, strict=True)]


class LSTM(nn.Sequential):
    """Layers on top of each other."""

    def __init__(self, inputs: int, hidden: int, layers: int = 1, forget_bias: float | None = None) -> None:
        widths = [inputs] + [hidden] * (layers - 1)
        super().__init__(*(LSTMLayer(width, hidden, forget_bias) for width in widths))


def set_fused(model: nn.Module, fused: bool) -> None:
    """Let every LSTM in the model use PyTorch's kernel, or the steps that `vmap` can batch."""
    for module in model.modules():
        if isinstance(module, LSTMLayer):
            module.fused = fused


def is_recurrent(model: nn.Module) -> bool:
    return any(isinstance(module, LSTMLayer | nn.RNNBase | nn.RNNCellBase) for module in model.modules())


class LastState(nn.Module):
    """Token ids [B, T], or numbers [B, T, features], to one answer [B, outputs] from the last state."""

    def __init__(self, embedding: nn.Module, lstm: LSTM, head: nn.Module, padded: bool) -> None:
        super().__init__()
        self.embedding, self.lstm, self.head = embedding, lstm, head
        self.padded = padded

    def forward(self, x: Tensor) -> Tensor:
        lengths = lengths_of(x) if self.padded else None
        inputs = x if isinstance(self.embedding, nn.Identity) else self.embedding(x.long())
        answer: Tensor = self.head(last_state(self.lstm(inputs), lengths))
        return answer


class BothDirections(nn.Module):
    """Token ids [B, T] to one answer [B, outputs] from the last state of a forward and of a backward run."""

    def __init__(self, embedding: nn.Embedding, hidden: int, outputs: int, drop: nn.Module, padded: bool) -> None:
        super().__init__()
        self.embedding = embedding
        self.forwards = LSTM(embedding.embedding_dim, hidden)
        self.backwards = LSTM(embedding.embedding_dim, hidden)
        self.drop = drop
        self.head = nn.Linear(2 * hidden, outputs)
        self.padded = padded

    def forward(self, ids: Tensor) -> Tensor:
        ids = ids.long()
        lengths = lengths_of(ids) if self.padded else None
        onwards = last_state(self.forwards(self.embedding(ids)), lengths)
        back = last_state(self.backwards(self.embedding(backwards(ids, lengths))), lengths)
        answer: Tensor = self.head(self.drop(torch.cat([onwards, back], dim=1)))
        return answer


class EveryState(nn.Module):
    """Token ids [B, T] to one answer per position [B, outputs, T]."""

    def __init__(self, embedding: nn.Embedding, lstm: LSTM, head: nn.Module) -> None:
        super().__init__()
        self.embedding, self.lstm, self.head = embedding, lstm, head

    def forward(self, ids: Tensor) -> Tensor:
        answer: Tensor = self.head(self.lstm(self.embedding(ids.long())))
        return answer.transpose(1, 2)


def lengths_of(ids: Tensor) -> Tensor:
    """Tokens before the padding [B]."""
    return (ids != 0).sum(1)


def last_state(states: Tensor, lengths: Tensor | None) -> Tensor:
    """Of [B, T, H], the state at the last token [B, H]; of an empty text, the one after a first padding."""
    if lengths is None:
        return states[:, -1]
    place = (lengths - 1).clamp(min=0)[:, None, None].expand(-1, 1, states.shape[2])
    return states.gather(1, place).squeeze(1)


def backwards(ids: Tensor, lengths: Tensor | None) -> Tensor:
    """Every text turned round, its padding left at the right end: the last state needs no other care then."""
    if lengths is None:
        return ids.flip(1)
    place = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    turned = lengths[:, None] - 1 - place
    return ids.gather(1, torch.where(turned >= 0, turned, place))


@REGISTRY.add("char-lstm", paper="Caldas et al., 2018")
def char_lstm(embedding: int = 8, hidden: int = 256, layers: int = 2, *, shape: Shape) -> nn.Module:
    """The next character from the last state of a stacked LSTM: Shakespeare."""
    tokens = shape.text("char-lstm")
    one_answer("char-lstm", shape)
    at_least_one("char-lstm", embedding=embedding, hidden=hidden, layers=layers)
    lstm = LSTM(embedding, hidden, layers, forget_bias=1.0)
    head = nn.Linear(hidden, shape.outputs)
    return LastState(nn.Embedding(tokens, embedding), lstm, head, shape.padded)


@REGISTRY.add("stackoverflow-lstm", paper="Reddi et al., ICLR 2021")
def stackoverflow_lstm(embedding: int = 96, hidden: int = 670, *, shape: Shape) -> nn.Module:
    """The next word at every position, from an LSTM and two linear layers: StackOverflow."""
    tokens = shape.text("stackoverflow-lstm")
    if not shape.per_position:
        raise ModelError("stackoverflow-lstm answers at every position, but the data want one answer; choose lstm")
    at_least_one("stackoverflow-lstm", embedding=embedding, hidden=hidden)
    lstm = LSTM(embedding, hidden, forget_bias=1.0)
    head = nn.Sequential(nn.Linear(hidden, embedding), nn.Linear(embedding, shape.outputs))
    return EveryState(nn.Embedding(tokens, embedding), lstm, head)


@REGISTRY.add("lstm", paper="Hochreiter and Schmidhuber, 1997")
def lstm(hidden: int = 128, layers: int = 1, embedding: int = 100, *, shape: Shape) -> nn.Module:
    """One answer from the last state of an LSTM, over tokens (AG News) or over (time, features) (speech commands)."""
    one_answer("lstm", shape)
    at_least_one("lstm", hidden=hidden, layers=layers, embedding=embedding)
    head = nn.Linear(hidden, shape.outputs)
    if shape.tokens is None and len(shape.inputs) == 2:
        return LastState(nn.Identity(), LSTM(shape.inputs[1], hidden, layers), head, padded=False)
    if shape.tokens is None:
        raise ModelError(f"lstm reads token ids or samples (time, features), not samples of shape {shape.inputs}")
    words = nn.Embedding(shape.text("lstm"), embedding)
    return LastState(words, LSTM(embedding, hidden, layers), head, shape.padded)


@REGISTRY.add("bilstm", paper="Yang et al., TMLR 2023")
def bilstm(
    hidden: int = 300,
    vectors: str | None = None,
    dropout: float = 0.2,
    trainable_vectors: bool = False,
    *,
    shape: Shape,
) -> nn.Module:
    """One answer from the last states of an LSTM in both directions, over trained or GloVe word vectors.

    vectors: a text file of word vectors, or a .zip that holds it; None: an embedding of 300 numbers is trained.
    """
    tokens = shape.text("bilstm")
    one_answer("bilstm", shape)
    at_least_one("bilstm", hidden=hidden)
    drop = dropout_layer("bilstm", dropout)
    if vectors is None:
        words = nn.Embedding(tokens, UNPRINTED_EMBEDDING)
    else:
        not_empty("bilstm", vectors=vectors)
        rows = vectors_of(vectors, shape)
        words = nn.Embedding(rows.shape[0], rows.shape[1], _weight=rows)
        words.weight.requires_grad_(trainable_vectors)
    return BothDirections(words, hidden, shape.outputs, drop, shape.padded)
