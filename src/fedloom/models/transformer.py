"""A transformer. Vaswani, Shazeer, Parmar, Uszkoreit, Jones, Gomez, Kaiser, Polosukhin: Attention Is All You Need. NIPS
2017.

The sizes are those of Wang et al.: A Field Guide to Federated Optimization (2021) for StackOverflow: three layers of
width 96, eight heads, 1536 units between. Layers are normalised after the addition and positions are sines, as in the
paper; embeddings are drawn from N(0, 1), which equals its N(0, 1/width) times the root of the width.

Where the data want an answer at every position, a position sees itself and what is before it. Otherwise every position
sees all but the padding, and the answer comes from the mean over them.

Departures: the field guide drops out 10%; here it is an option, off by default, for local runs are short. Attention is
plain tensor code, since PyTorch's own has no batching rule on a CPU. Dropout acts on the sums, not inside attention.
"""

import math

import torch
from torch import Tensor, nn

from fedloom.errors import ModelError
from fedloom.models.catalogue import REGISTRY, Shape
from fedloom.models.checks import at_least_one, dropout_layer


@REGISTRY.add("transformer", paper="Vaswani et al., NIPS 2017")
def transformer(
    width: int = 96, layers: int = 3, heads: int = 8, feedforward: int = 1536, dropout: float = 0.0, *, shape: Shape
) -> nn.Module:
    """A transformer over tokens: the next word at every position, or one answer for a text."""
    tokens = shape.text("transformer")
    at_least_one("transformer", width=width, layers=layers, heads=heads, feedforward=feedforward)
    if width % heads:
        raise ModelError(f"transformer: width={width} can't be divided among heads={heads}")
    blocks = [Block(width, heads, feedforward, dropout) for _ in range(layers)]
    return Transformer(nn.Embedding(tokens, width), dropout_layer("transformer", dropout), blocks, shape)


class Attention(nn.Module):
    """Every position [B, T, width] reads the positions it may see."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, visible: Tensor) -> Tensor:
        """`visible` is true where a query (last but one dimension) may see a key (last)."""
        batch, time, width = x.shape
        split = self.queries_keys_values(x).view(batch, time, 3, self.heads, width // self.heads)
        queries, keys, values = split.permute(2, 0, 3, 1, 4).unbind(0)  # [B, heads, T, width / heads]
        scores = queries @ keys.transpose(2, 3) / math.sqrt(width // self.heads)
        # The least number instead of minus infinity: a text of nothing but padding then stays finite.
        scores = torch.where(visible, scores, torch.finfo(scores.dtype).min)
        read = scores.softmax(-1) @ values
        answer: Tensor = self.out(read.transpose(1, 2).reshape(batch, time, width))
        return answer


class Block(nn.Module):
    """Attention and two linear layers, each added to its input and normalised."""

    def __init__(self, width: int, heads: int, feedforward: int, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.attention_norm = nn.LayerNorm(width)
        self.feedforward = nn.Sequential(nn.Linear(width, feedforward), nn.ReLU(), nn.Linear(feedforward, width))
        self.feedforward_norm = nn.LayerNorm(width)
        self.drop = dropout_layer("transformer", dropout)

    def forward(self, x: Tensor, visible: Tensor) -> Tensor:
        x = self.attention_norm(x + self.drop(self.attention(x, visible)))
        answer: Tensor = self.feedforward_norm(x + self.drop(self.feedforward(x)))
        return answer


class Transformer(nn.Module):
    """Token ids [B, T] to [B, outputs, T], or to [B, outputs]."""

    def __init__(self, embedding: nn.Embedding, drop: nn.Module, blocks: list[Block], shape: Shape) -> None:
        super().__init__()
        self.embedding = embedding
        self.drop = drop
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(embedding.embedding_dim, shape.outputs)
        self.padded, self.per_position = shape.padded, shape.per_position

    def forward(self, ids: Tensor) -> Tensor:
        ids = ids.long()
        present = ids != 0 if self.padded else torch.ones_like(ids, dtype=torch.bool)
        visible = _earlier(ids.shape[1], ids.device) if self.per_position else present[:, None, None, :]
        embedded: Tensor = self.embedding(ids)
        x = self.drop(embedded + _sines(ids.shape[1], embedded))
        for block in self.blocks:
            x = block(x, visible)
        if self.per_position:
            answers: Tensor = self.head(x)
            return answers.transpose(1, 2)
        weights = present.to(x.dtype)[:, :, None]
        answer: Tensor = self.head((x * weights).sum(1) / weights.sum(1).clamp(min=1))
        return answer


def _earlier(time: int, device: torch.device) -> Tensor:
    """[T, T]: true where the key is not after the query; padding at the right end is never seen by a token then."""
    place = torch.arange(time, device=device)
    return place[None, :] <= place[:, None]


def _sines(time: int, like: Tensor) -> Tensor:
    """[T, width]: sine and cosine of the position in turn, at wavelengths from 2 pi to 10,000 times that."""
    width = like.shape[-1]
    place = torch.arange(time, device=like.device, dtype=like.dtype)[:, None]
    pairs = torch.arange((width + 1) // 2, device=like.device, dtype=like.dtype)
    angles = place * torch.exp(pairs * (-2 * math.log(10_000) / width))
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)[:, :width]
