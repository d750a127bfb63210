"""What a study is: everything that decides which points are tried and how they are judged, as tune.yaml keeps it."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fedloom.errors import ConfigError, FedloomError, RunError, nearest
from fedloom.experiment.config import MOST_SEEDS, RunConfig, is_count, is_texts
from fedloom.experiment.folder import STUDY
from fedloom.experiment.run import FREE
from fedloom.experiment.tune.grids import find_grid, lay_over
from fedloom.experiment.tune.objective import Objective, choose_objective, hold_out, rounds_of, without_test
from fedloom.experiment.tune.search import Template, read_local
from fedloom.experiment.tune.study import SAMPLERS, Sampler
from fedloom.experiment.tune.trial import REPORTS
from fedloom.experiment.yaml_file import read_yaml
from fedloom.simulation import cohort_size

TRIALS = 20
OWN = ("methods", "search", "objective", "trials", "seeds", "sampler", "prune", "together")  # beside those of a run
CORNERS = 512  # combinations of extreme values that are looked at before anything is trained


@dataclass(frozen=True)
class Plan:
    """A study of one or several methods on equal terms."""

    config: RunConfig  # what is not searched
    templates: tuple[Template, ...]
    objective: Objective
    trials: int
    seeds: int = 1
    sampler: Sampler = "tpe"
    prune: bool = True
    together: int = 1

    @classmethod
    def of(
        cls,
        config: RunConfig,
        methods: Sequence[str],
        *,
        search: Sequence[str] = (),
        grid: str | None = None,
        objective: str | None = None,
        trials: int | None = None,
        seeds: int = 1,
        sampler: str = "tpe",
        prune: bool = True,
    ) -> "Plan":
        """Settled and checked as far as that goes without training."""
        for name, value in (("trials", trials), ("seeds", seeds)):
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}")
        chosen = next((known for known in SAMPLERS if known == sampler), None)
        if chosen is None:
            raise ConfigError(f"unknown sampler {sampler!r}: {nearest(sampler, SAMPLERS)}")
        local = read_local(search)
        templates = tuple(Template.read(method, local) for method in methods)
        config = config.settled()
        aim = choose_objective(objective, config, bool(local))
        config = hold_out(config, aim)
        federation = without_test(config, aim)
        if grid is not None:
            share = cohort_size(config.per_round, len(federation)) / len(federation)
            values = find_grid(grid, text=federation.tokens is not None, share=share)
            templates = tuple(lay_over(template, grid, values) for template in templates)
        plan = cls(config, templates, aim, trials or _enough(templates, grid), seeds, chosen, prune)
        plan.check(len(federation))
        return plan

    def check(self, clients: int) -> None:
        """Refuse what no trial could do."""
        texts = [template.text for template in self.templates]
        twice = next((text for text in texts if texts.count(text) > 1), None)
        if twice is not None:
            raise ConfigError(f"{twice} is to be tuned twice")
        if not any(template.searches for template in self.templates):
            raise ConfigError("nothing is searched; write a search for a value, as in 'fedadam(lr=log(1e-4, 0.1))'")
        for template in self.templates:
            self._check_ends(template, clients)

    def _check_ends(self, template: Template, clients: int) -> None:
        """A value that is refused whatever the others are is refused now, not in the middle of the study."""
        ends = {name: search.values for name, search in template.searches.items()}
        refusals: dict[tuple[str, Any], FedloomError | None] = {}
        for values in itertools.islice(itertools.product(*ends.values()), CORNERS):
            point = dict(zip(ends, values, strict=True))
            refusal = None
            try:
                rounds_of(template.fill(point, self.config), self.objective, clients)
            except FedloomError as error:
                refusal = error
                if not point:
                    raise
            for name, value in point.items():
                refusals[name, value] = refusals.get((name, value), refusal) and refusal
        for (name, value), found in refusals.items():
            if found is not None:
                raise ConfigError(f"{name} can't be {value!r}: {found}")

    def at(self, template: Template, point: Mapping[str, Any], clients: int) -> RunConfig:
        """The settings of a trial's runs, with the rounds that it plays."""
        filled = template.fill(point, self.config)
        rounds = rounds_of(filled, self.objective, clients)
        return replace(filled, rounds=rounds, eval_every=max(filled.eval_every, rounds // REPORTS))

    @property
    def score_name(self) -> str:
        """What a trial's value is, in words."""
        return "train loss" if self.objective == "train-loss" else f"validation {self.config.metric}"

    @property
    def data(self) -> dict[str, Any]:
        """For YAML."""
        first = self.templates[0]
        own = {
            "methods": [template.text for template in self.templates],
            "search": [f"{name}={search}" for name, search in first.local.items()],
            **{name: getattr(self, name) for name in OWN if name not in ("methods", "search")},
        }
        settings = {name: value for name, value in asdict(self.config).items() if name != "method"}
        return {**own, **settings}

    def continues(self, folder: Path) -> None:
        """Refuse a study that differs from the one in the folder; only the number of trials may grow."""
        then, now = asdict(RunConfig()) | read_plan(folder), self.data  # a newer setting had its default
        free = {*FREE, "trials"}
        changed = [f"{n} was {then.get(n)}, now {now[n]}" for n in now if n not in free and then.get(n) != now[n]]
        before = int(then["trials"])
        if self.trials < before:
            changed.append(f"trials was {before}, now {self.trials}")
        if any(before < template.size <= self.trials for template in self.templates):
            changed.append(f"{before} trials were drawn, {self.trials} are the whole grid")
        if changed:
            raise RunError(f"{folder} holds another study: {'; '.join(changed)}")


def _enough(templates: Sequence[Template], grid: str | None) -> int:
    """Without a wish: 20, and the whole of a paper's grid."""
    sizes = [int(template.size) for template in templates if math.isfinite(template.size)]
    return max([1, *sizes]) if grid is not None and len(sizes) == len(templates) else TRIALS


def read_plan(folder: Path) -> dict[str, Any]:
    """What a folder's tune.yaml holds."""
    path = folder / STUDY
    try:
        found, _ = read_yaml(path, links=False)
    except ConfigError as error:
        raise _no_plan(path, str(error)) from None
    wrong = [
        *(name for name in OWN if name not in found),
        *(name for name in ("methods", "search") if not is_texts(found.get(name))),
        *(name for name in ("trials", "seeds", "together") if not is_count(found.get(name), MOST_SEEDS)),
        *(name for name in ("objective", "sampler") if not isinstance(found.get(name), str)),
        *(["prune"] if not isinstance(found.get("prune"), bool) else []),
    ]
    if wrong:
        raise _no_plan(path, f"{wrong[0]} is missing or of another type")
    return found


def _no_plan(path: Path, why: str) -> RunError:
    return RunError(f"{path} can't be read as the plan of a study; remove the folder to begin again: {why}")
