"""Everything that a run needs, as one record that reads from and writes to YAML."""

import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from fedloom.data.catalogue import FACTS, find_dataset
from fedloom.data.standardise import Standardisation
from fedloom.diagnosis import named
from fedloom.errors import ConfigError, nearest
from fedloom.experiment.yaml_file import Places, read_yaml
from fedloom.local import LastBatch, Local, Optimizer
from fedloom.method import Method
from fedloom.registry import MISFIT, describe, fit_value
from fedloom.spec import parse_one
from fedloom.task import Precision

MOST_SEEDS = 1_000_000


def _setting(default: Any, about: str) -> Any:
    return field(default=default, metadata={"about": about})


@dataclass(frozen=True)
class RunConfig:
    """The settings of one run. Each is a line of a config file and an option of the command line."""

    data: str = _setting("digits", "Name of the data set (`fedloom data` lists them).")
    data_dir: str | None = _setting(None, "Folder of data files and weights, in place of FEDLOOM_DATA.")
    partition: str | None = _setting(
        None, "How samples are dealt out to clients: 'classes(per_client=2)', or 'natural' where data have clients."
    )
    clients: int | None = _setting(None, "Number of clients: 20, or all that the data have of their own.")
    pooled: bool = _setting(False, "Deal out training and test samples together.")
    validation: int = _setting(0, "Further clients to hold out for validation.")
    samples: int | None = _setting(None, "Use so many training samples only, and at most so many for the test.")
    fold: int | None = _setting(None, "Split clients 60/20/20 into training, validation and test: fold 0 to 4.")
    augment: str | None = _setting(None, "Augmentation of images, such as 'crop+flip+cutout'.")
    standardise: Standardisation | None = _setting(None, "Columns of tables to mean 0, deviation 1: global or local.")
    per_round: int | float | None = _setting(
        None, "Clients in a round: a count, or a fraction such as 0.1; left out 10, or all where there are fewer."
    )
    model: str = _setting("mlp", "Name of the model (`fedloom models` lists them).")
    method: str = _setting("fedavg", "The method, such as 'fedprox(mu=0.1)+fedadam' (`fedloom methods` lists them).")
    rounds: int = _setting(50, "Rounds; in a comparison, Works per client slot.")
    epochs: int = _setting(1, "Passes over the local data in a round.")
    steps: int | None = _setting(None, "Exact number of local steps, in place of epochs.")
    batch_size: int | None = _setting(32, "Samples in a batch; 'none' is the full batch.")
    lr: float = _setting(0.1, "Local learning rate.")
    momentum: float = _setting(0.0, "Local momentum.")
    nesterov: bool = _setting(False, "Nesterov's momentum.")
    weight_decay: float = _setting(0.0, "Local weight decay.")
    optimizer: Optimizer = _setting("sgd", "Local optimiser: sgd, adam or adamw.")
    clip_norm: float | None = _setting(None, "Clip local gradients to this norm.")
    last_batch: LastBatch = _setting("keep", "A short last batch: keep, drop or bootstrap.")
    shuffle: bool = _setting(True, "A new order of a client's samples in each epoch; else the stored one.")
    loss: str | None = _setting(None, "cross-entropy or hinge; left out, what the model wants.")
    metric: str = _setting("accuracy", "accuracy, f1 or auc.")
    eval_every: int = _setting(1, "Rounds between evaluations.")
    eval_last: int = _setting(1, "So many of the last rounds are evaluated, each of them.")
    eval_between: bool = _setting(False, "Evaluate the mean of models that travel, too, after each of a round's Works.")
    patience: int | None = _setting(None, "Stop after so many evaluations without a better validation score.")
    diagnose: str | None = _setting(
        None, "Measure: gsi, similarity, labels, divergence, twin, fairness, probe (several with commas)."
    )
    seed: int = _setting(0, "Seed of data, model and run; the first one of a comparison.")
    engine: str = _setting(
        "auto", "How cohorts are trained: auto, loop (client by client), vector (all at once) or ray (on a cluster)."
    )
    ray_address: str | None = _setting(None, "Of a Ray cluster: auto, or host:port; left out, a local one is started.")
    actors: int | None = _setting(None, "Workers of a Ray cluster; left out, one per GPU, or per core.")
    compile: bool | None = _setting(None, "Compile local steps: true, false, or left out for runs that gain by it.")
    max_memory: int | str | None = _setting(None, "Of the device, for cohorts and what clients remember: '8GB'.")
    device: str = _setting("auto", "auto, cpu or cuda.")
    precision: Precision = _setting("auto", "auto (TF32 on a GPU), fp32 or bf16.")
    availability: float | str | None = _setting(None, "Share of the time that clients are there, or a trace file.")
    dropout_rate: float = _setting(0.0, "Share of the asked clients that fail to answer.")
    max_diverged: int | None = _setting(None, "End the run when more updates than this have diverged.")
    checkpoint_every: int | None = _setting(None, "Rounds between checkpoints; left out, by time.")

    @property
    def dealing(self) -> dict[str, Any]:
        """What `load` needs to know: the data, and how clients get them."""
        names = ("partition", "clients", "seed", "pooled", "validation", "samples", "fold", "augment", "standardise")
        return {"name": self.data, "data_dir": self.data_dir, **{name: getattr(self, name) for name in names}}

    def settled(self) -> "RunConfig":
        """With the choices made that depend on the data set, and paths that hold from everywhere."""
        call = find_dataset(self.data)
        try:
            paths = {name: str(Path(call.named[name]).resolve()) for name in ("path", "test") if call.named.get(name)}
        except (OSError, ValueError, RuntimeError) as error:  # a zero byte; links in a circle
            raise ConfigError(f"data={_brief(self.data)}: no file can have this name ({error})") from None
        data = str(replace(call, named={**call.named, **paths})) if paths else self.data
        natural = FACTS[call.name].natural
        partition = self.partition or ("natural" if natural else "classes(per_client=2)")
        everyone = partition.endswith(".npz") or parse_one(partition).name == "natural"
        clients = 20 if self.clients is None and not everyone else self.clients
        return replace(self, data=data, partition=partition, clients=clients)

    @property
    def setting(self) -> str:
        """In a few words."""
        clients = "all" if self.clients is None else self.clients
        share = "at most 10" if self.per_round is None else self.per_round
        return f"{self.data}, {self.partition}, {clients} clients, {share} a round"

    @property
    def local(self) -> Local:
        return Local(**{name: getattr(self, name) for name in Local.names()})

    def change(self, changes: Mapping[str, Any], where: Mapping[str, str] | None = None) -> "RunConfig":
        """These settings with others in their place, checked; `where` says for each where it was read."""
        hints = _hints()
        checked = {}
        for name, value in changes.items():
            place = (where or {}).get(name, "")
            if name not in hints:
                raise ConfigError(f"{place}unknown setting {name!r}: {nearest(str(name), hints)}")
            if name == "method" and isinstance(value, list):
                value = Method(value).text
            checked[name] = fit_value(_number(value), hints[name])
            if checked[name] is MISFIT:
                checked[name] = fit_value(value, hints[name])
            if checked[name] is MISFIT or _too_large(checked[name]):
                raise ConfigError(f"{place}{name} must be {describe(hints[name])}, not {_brief(value)}")
        changed = replace(self, **checked)
        Method(changed.method)
        changed = replace(changed, diagnose=",".join(named(changed.diagnose)) or None)
        _ = changed.local
        return changed

    def yaml(self) -> str:
        import yaml

        return yaml.safe_dump(asdict(self), sort_keys=False)


@cache
def _hints() -> dict[str, Any]:
    return typing.get_type_hints(RunConfig)


def _number(value: Any) -> Any:
    """YAML reads 1e-3 as a text."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _too_large(value: Any) -> bool:
    return isinstance(value, int) and abs(value) >= 1 << 63


def _brief(value: Any) -> str:
    try:
        return repr(value)[:80]
    except ValueError:  # a whole number of thousands of digits
        return f"a huge {type(value).__name__}"


def read_config(path: Path, *, links: bool = True) -> dict[str, Any]:
    """The settings in a YAML file; whatever is wrong with it is told with its line."""
    values, places = read_yaml(path, links=links)
    RunConfig().change(values, where=lines_of(places))
    return values


def lines_of(places: Places, *above: str) -> dict[str, str]:
    """Where each of the keys below a place stands."""
    return {at[-1]: line for at, line in places.items() if at[:-1] == above}


def read_comparison(path: Path) -> dict[str, Any]:
    """The settings of a comparison, with its `methods`, `seeds` and `target`."""
    values, places = read_yaml(path, links=False)
    own = ("methods", "seeds", "target")
    RunConfig().change({name: value for name, value in values.items() if name not in own}, where=lines_of(places))
    methods, seeds, target = (values.get(name) for name in own)
    if not is_texts(methods) or not is_count(seeds, MOST_SEEDS):
        raise ConfigError(f"{path} does not say which methods it compares over how many seeds")
    if target is not None and (isinstance(target, bool) or not isinstance(target, int | float)):
        raise ConfigError(f"{path}: target must be a number, not {_brief(target)}")
    return values


def is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def is_count(value: Any, most: int) -> bool:
    """A whole number from 1 on."""
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most
