"""What travels between a server and its clients, as Flower's records, and the refusal of what does not belong there.

Nothing that arrives is trusted: names, types, shapes and sizes are compared with what was to be expected before any
memory is taken for them, and numbers are looked at before they are used.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from io import BytesIO
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor, nn

from fedloom.errors import ConfigError, FedloomError
from fedloom.local import Local

PROTOCOL = 1
ACTION = "fedloom"
TRAIN, EVALUATE, QUERY = f"train.{ACTION}", f"evaluate.{ACTION}", f"query.{ACTION}"
PULL = "pull"  # a record that a mod of the client's own adds: FedProx's mu
NUMPY = "numpy.ndarray"
MOST_CLIENTS = 10_000_000  # a client keeps a number for each that comes before it
HEADER = 4096  # bytes of an array beyond its numbers, at most
SENT = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool)  # beside a model
TOLD = 500  # characters of a message from outside that are repeated


class Refused(FedloomError):
    """Something arrived that is not what was asked for."""


class Kind(NamedTuple):
    """What an array must be."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "Kind":
        return cls(tuple(tensor.shape), tensor.dtype)

    @property
    def carried(self) -> np.dtype[Any]:
        """NumPy has no bfloat16: its bits travel as whole numbers."""
        return np.dtype(np.int16) if self.dtype == torch.bfloat16 else torch.empty(0, dtype=self.dtype).numpy().dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.carried.itemsize


def pack(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    """Tensors as arrays of a record."""
    return ArrayRecord({name: Array(_numpy(tensor)) for name, tensor in tensors.items()})


def _numpy(tensor: Tensor) -> np.ndarray:
    there = tensor.detach().cpu().contiguous()
    return (there.view(torch.int16) if there.dtype == torch.bfloat16 else there).numpy()


def unpack(record: Any, expected: Mapping[str, Kind], what: str) -> dict[str, Tensor]:
    """Exactly these arrays; whatever else there is, or is missing, is refused."""
    if not isinstance(record, ArrayRecord):
        raise Refused(f"{what} is missing")
    if set(record) != set(expected):
        odd = sorted(set(record) ^ set(expected))
        raise Refused(f"{what} has other arrays than was asked for: {brief(odd[0])}")
    return {name: _tensor(record[name], kind, f"{what}, {brief(name)}") for name, kind in expected.items()}


def _tensor(array: Array, kind: Kind, what: str) -> Tensor:
    """The numbers of an array. Its own header is read first: one that promises more than is there takes no memory."""
    if array.stype != NUMPY:
        raise Refused(f"{what} is no NumPy array")
    if len(array.data) > kind.bytes + HEADER:
        raise Refused(f"{what} has {len(array.data):,} bytes in place of {kind.bytes:,}")
    if tuple(array.shape) != kind.shape:
        raise Refused(f"{what} has the shape {brief(tuple(array.shape))} in place of {kind.shape}")
    stream = BytesIO(array.data)
    try:
        version = np.lib.format.read_magic(stream)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
        shape, fortran, dtype = read(stream, max_header_size=HEADER)
    except Exception:  # a header is parsed as Python is, and fails in as many ways
        raise Refused(f"{what} has no header of a NumPy array") from None
    if dtype != kind.carried:
        raise Refused(f"{what} is {brief(dtype)} in place of {kind.carried}")
    data = array.data[stream.tell() :]
    if shape != kind.shape or (fortran and len(shape) > 1) or len(data) != kind.bytes:
        raise Refused(f"{what} does not hold what its description says")
    found = torch.from_numpy(np.frombuffer(data, dtype=dtype).reshape(shape).copy())
    return found.view(torch.bfloat16) if kind.dtype == torch.bfloat16 else found


def anything(record: Any, most: int, what: str) -> dict[str, Tensor]:
    """Whatever arrays there are, of floating-point numbers or whole ones, of so many bytes together at most."""
    if not isinstance(record, ArrayRecord):
        raise Refused(f"{what} is missing")
    if sum(len(array.data) for array in record.values()) > most + HEADER * len(record):
        raise Refused(f"{what} is larger than {most:,} bytes")
    known = {str(Kind((), dtype).carried): dtype for dtype in SENT}
    found = {}
    for name, array in record.items():
        if array.dtype not in known:
            raise Refused(f"{what}, {brief(name)} is {brief(array.dtype)}")
        found[name] = _tensor(array, Kind(tuple(array.shape), known[array.dtype]), f"{what}, {brief(name)}")
    return found


def check_finite(tensors: Mapping[str, Tensor], what: str) -> None:
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise Refused(f"{what}, {brief(name)} holds NaN or infinity")


def plain_record(values: Mapping[str, Any]) -> ConfigRecord:
    """Plain values as a record of their own."""
    return ConfigRecord(dict(values))


def read_fields(content: RecordDict, name: str, kinds: Mapping[str, type]) -> dict[str, Any]:
    """The plain values of a record: exactly these, each of its type."""
    record = content.get(name)
    if not isinstance(record, ConfigRecord):
        raise Refused(f"there is no {name}")
    if set(record) != set(kinds):
        raise Refused(f"{name} has other fields than was asked for: {brief(sorted(set(record) ^ set(kinds))[0])}")
    for field, kind in kinds.items():
        if type(record[field]) is not kind:
            raise Refused(f"{name}, {field} is no {kind.__name__}")
    return dict(record)


def brief(value: Any) -> str:
    """Of what came from outside, as much as may be repeated: printable, and short."""
    text = str(value)[:TOLD]
    return "".join(c if c.isprintable() else "?" for c in text)


def model_digest(model: nn.Module) -> str:
    """What a server's and a client's model must have in common: names, shapes and kinds of all that travels, and the
    values of what is frozen and does not.
    """
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        travels = tensor.requires_grad or not isinstance(tensor, nn.Parameter)
        digest.update(json.dumps([name, list(tensor.shape), str(tensor.dtype), travels]).encode())
        if not travels:
            digest.update(_numpy(tensor).tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class Order:
    """What a client must know of a Work beside tensors."""

    run: str  # whose memory of earlier Works counts
    session: int  # how often the server has begun or resumed
    work: int
    client: int
    clients: int  # in the federation
    occurrence: int
    count: int
    seed: int
    method: str
    local: str  # JSON
    max_steps: int  # -1: no limit
    wants: str  # JSON
    commit: bool
    accepted: int  # the Work of this client's last accepted answer, whose memory it is to go on with; -1: there is none
    settled: int  # no server will ever go back to before this Work

    def record(self) -> ConfigRecord:
        return plain_record({"protocol": PROTOCOL, **asdict(self)})

    @classmethod
    def read(cls, content: RecordDict) -> "Order":
        found = read_fields(content, "order", {"protocol": int, **cls.__annotations__})
        if found.pop("protocol") != PROTOCOL:
            raise Refused(f"the server speaks another protocol than {PROTOCOL}; install the same release of Fedloom")
        order = cls(**found)
        counts = (order.session, order.work, order.client, order.occurrence, order.seed)
        in_range = min(counts) >= 0 and order.client < min(order.clients, MOST_CLIENTS) and order.count >= 1
        if not in_range or not run_name(order.run):
            raise Refused("the order is out of range")
        return order

    @property
    def settings(self) -> Local:
        return read_local(self.local)


def run_name(text: str) -> bool:
    """Names of runs are hexadecimal: they become names of files."""
    return len(text) == 32 and set(text) <= set("0123456789abcdef")


def write_local(local: Local) -> str:
    """What differs from the defaults, so that a release which does not know a setting reads what does without it. A
    default that changes needs another PROTOCOL: both sides fill in their own.
    """
    usual = asdict(Local())
    return json.dumps({name: value for name, value in asdict(local).items() if value != usual[name]})


def read_local(text: str) -> Local:
    try:
        return Local(**json.loads(text))
    except (ValueError, TypeError, OverflowError, RecursionError, ConfigError):
        raise Refused("the settings of local training can't be read") from None


def read_names(text: str, known: Iterable[str]) -> frozenset[str]:
    try:
        names = frozenset(json.loads(text))
    except (ValueError, TypeError, RecursionError):
        raise Refused("the order can't be read") from None
    if not names <= set(known):
        raise Refused(f"the server wants what this release can't report: {brief(sorted(names - set(known))[0])}")
    return names


def nested(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}/{name}": tensor for name, tensor in tensors.items()}


def under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose name begins so, without that."""
    return {n.removeprefix(f"{prefix}/"): t for n, t in tensors.items() if n.startswith(f"{prefix}/")}
