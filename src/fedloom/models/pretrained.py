"""DistilBERT. Sanh, Debut, Chaumond, Wolf: DistilBERT, a distilled version of BERT. 2019; in FedGLAD for 20 Newsgroups
and AG News. The model is that of the transformers library, its weights a local folder or the hub's.

Departure: FedGLAD's code passes no attention mask, so that padding takes part in attention; here it does not.
"""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedloom.errors import ModelError
from fedloom.models.catalogue import REGISTRY, Shape
from fedloom.models.checks import DEEPEST, not_empty, one_answer
from fedloom.models.stored import find, missing
from fedloom.untrusted import read_bytes

LONGEST = 64 << 20  # bytes of vocab.txt
HEAD = ("pre_classifier.", "classifier.")  # what a model that was never a classifier begins at random


@REGISTRY.add("distilbert", paper="Sanh et al., 2019")
def distilbert(weights: str = "distilbert-base-uncased", *, shape: Shape) -> nn.Module:
    """DistilBERT with a classifier on top, all of it trained; needs the extra `text`.

    weights: a folder with config.json and model.safetensors, or a name on the hub.
    """
    tokens = shape.text("distilbert")
    one_answer("distilbert", shape)
    not_empty("distilbert", weights=weights)
    body, vocabulary = _load(weights, shape)
    config = body.config
    if tokens > config.vocab_size:
        raise ModelError(f"distilbert: the data have {tokens} tokens, but {weights} knows {config.vocab_size}")
    if shape.inputs[0] > config.max_position_embeddings:
        most = config.max_position_embeddings
        raise ModelError(f"distilbert: texts of {shape.inputs[0]} tokens are too long, {weights} reads {most}")
    if shape.words and vocabulary and tuple(shape.words) != vocabulary[: len(shape.words)]:
        raise ModelError(f"distilbert: the data's tokens are not those of {weights}; cut the texts with its tokenizer")
    return Classifier(body, config.pad_token_id or 0)


class Classifier(nn.Module):
    """Token ids [B, T] to one answer [B, outputs]; padding is masked."""

    def __init__(self, body: nn.Module, padding: int) -> None:
        super().__init__()
        self.body = body
        self.padding = padding

    def forward(self, ids: Tensor) -> Tensor:
        ids = ids.long()
        present = ids != self.padding
        first = torch.arange(ids.shape[1], device=ids.device) == 0  # a text of padding alone has something to see
        answer: Tensor = self.body(input_ids=ids, attention_mask=(present | first).long()).logits
        return answer


def _load(weights: str, shape: Shape) -> tuple[Any, tuple[str, ...]]:
    """The model and, where the folder has vocab.txt, its tokens."""
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError:
        raise ModelError("distilbert needs transformers, the extra `text`: pip install 'fedloom[text]'") from None
    folder = find([weights], shape.files)
    source = str(folder or weights)
    try:
        with _quiet(transformers.utils.logging):
            _check_depth(transformers.AutoConfig.from_pretrained(source, trust_remote_code=False), source)
            body, info = transformers.AutoModelForSequenceClassification.from_pretrained(
                source,
                num_labels=shape.outputs,
                dtype=torch.float32,
                ignore_mismatched_sizes=True,  # a classifier of other labels is drawn anew
                output_loading_info=True,
                use_safetensors=True,  # never a pickle,
                trust_remote_code=False,  # and no code of the publisher
            )
        listed = transformers.utils.cached_file(source, "vocab.txt", _raise_exceptions_for_missing_entries=False)
    except ModelError:
        raise
    except Exception as error:  # the hub, the network and the file each have errors of their own
        reason = str(error).strip().partition("\n")[0][:200] or type(error).__name__
        if folder is not None:
            raise ModelError(f"{folder} holds no model that transformers can read: {reason}") from None
        how = f", with config.json and model.safetensors in it; it did not come from the hub either ({reason})"
        raise missing(f"the weights of {weights} are", [f"a folder {weights}"], shape.files, how) from None
    _check_complete(source, info)
    return body, _tokens(Path(listed)) if listed else ()


def _check_depth(config: Any, source: str) -> None:
    """A file may say any number."""
    for name, value in config.to_dict().items():
        if "layers" in name and isinstance(value, int) and value > DEEPEST:
            raise ModelError(f"{source}: {name} is {value}, but {DEEPEST} are the most that a model may have here")


def _tokens(path: Path) -> tuple[str, ...]:
    try:
        return tuple(read_bytes(path, LONGEST).decode("utf-8").splitlines())
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} holds no tokens: {error}") from None


def _check_complete(source: str, info: dict[str, Any]) -> None:
    absent = [*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])]
    wanted = [key for key in absent if not key.startswith(HEAD)]
    if wanted:
        raise ModelError(f"{source} lacks weights of its own model, {sorted(wanted)[0]} and {len(wanted) - 1} more")


@contextmanager
def _quiet(logging: Any) -> Iterator[None]:
    """Without the remark that the classifier is new, which it should be, and without bars."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
