"""A method's trials: which points come next, and what became of those before, in Optuna's own storage.

Trials come in batches. The points of a batch are a function of the seed, their numbers and the trials of all earlier
batches, never of what has happened inside of the batch; so a study that was killed goes on as if it had not been. The
storage holds finished trials only: one that was under way is drawn and run again.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from numpy.random import SeedSequence, default_rng

from fedloom.errors import ConfigError, RunError
from fedloom.experiment.tune.search import Point, Template
from fedloom.experiment.tune.trial import Candidate

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler
    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial, Trial

Sampler = Literal["tpe", "random"]
SAMPLERS: tuple[Sampler, ...] = ("tpe", "random")
AT_RANDOM = 5  # trials before the sampler learns from them, and before any is pruned
WARM_UP = 4  # tenths of a trial before which it is never pruned
FEW_ENOUGH = 10_000  # points of a grid that are looked through for one that was not tried
STORAGE = "study.db"


def need_optuna() -> None:
    """Say what to install where it is missing, and keep it from telling of every trial."""
    try:
        import optuna
    except ModuleNotFoundError:
        raise ConfigError("tuning needs Optuna: pip install 'fedloom[tune]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)


def open_storage(folder: Path) -> "BaseStorage":
    from optuna.storages import RDBStorage
    from sqlalchemy.exc import SQLAlchemyError

    path = folder / STORAGE
    try:
        return RDBStorage(f"sqlite:///{path.resolve()}")
    except (SQLAlchemyError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise RunError(f"{path} can't be opened as a study: {reason}") from None


def _checked(trial: "FrozenTrial", distributions: Mapping[str, "BaseDistribution"]) -> "FrozenTrial":
    """A trial as `Trials.keep` writes it: a file that holds anything else is damaged, or somebody else's."""
    told = trial.user_attrs
    kinds = {"number": int, "state": str, "method": str, "rounds": int, "seconds": int | float, "note": str}
    wrong = [name for name, kind in kinds.items() if not isinstance(told[name], kind)]
    if wrong or told["number"] < 0 or trial.distributions != distributions:
        raise ValueError(f"a trial has another {wrong[0] if wrong else 'space to search'}")
    return trial


class Trials:
    """The trials of one method."""

    def __init__(self, storage: "BaseStorage", template: Template, *, count: int, seed: int, minimise: bool) -> None:
        import optuna
        from sqlalchemy.exc import SQLAlchemyError

        self.template, self.seed = template, seed
        self.enumerated = template.size <= count
        self.count = int(min(count, template.size))
        self.direction: Literal["minimize", "maximize"] = "minimize" if minimise else "maximize"
        self.worst = math.inf if minimise else -math.inf
        self.distributions = {name: search.distribution() for name, search in template.searches.items()}
        name = f"{template.text} {' '.join(f'{n}={s}' for n, s in template.local.items())}".strip()
        try:
            self.kept = optuna.create_study(
                storage=storage, study_name=name, direction=self.direction, load_if_exists=True
            )
            kept = {trial.user_attrs["number"]: _checked(trial, self.distributions) for trial in self.kept.get_trials()}
            self.finished: dict[int, FrozenTrial] = dict(sorted(kept.items()))  # by number
        except (SQLAlchemyError, RuntimeError, LookupError, ValueError, TypeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise RunError(f"{STORAGE} holds no trials of {name}; remove the folder to begin again: {reason}") from None

    @property
    def ranked(self) -> "list[FrozenTrial]":
        """Those that ran to their ends, the best first; of equal ones the first that was drawn."""
        ended = [trial for trial in self.finished.values() if trial.user_attrs["state"] == "complete"]
        sign = 1 if self.direction == "minimize" else -1
        return sorted(ended, key=lambda trial: sign * float(trial.value or 0.0))

    @property
    def best(self) -> "FrozenTrial | None":
        """None if all diverged."""
        return next(iter(self.ranked), None)

    def keep(self, candidate: Candidate) -> None:
        """Write down what became of a trial, in one transaction."""
        from optuna.trial import TrialState, create_trial

        pruned = candidate.state == "pruned"
        ended = candidate.value if candidate.state == "complete" else self.worst
        trial = create_trial(
            state=TrialState.PRUNED if pruned else TrialState.COMPLETE,
            value=candidate.value if pruned else ended,
            params=candidate.asked.params,
            distributions=self.distributions,
            intermediate_values=candidate.reported,
            user_attrs={
                "number": candidate.number,
                "state": candidate.state,
                "method": candidate.config.method,
                "rounds": candidate.config.rounds,
                "seconds": candidate.seconds,
                "note": candidate.note,
            },
        )
        self.kept.add_trial(trial)
        self.finished = dict(sorted({**self.finished, candidate.number: trial}.items()))

    def draw(self, first: int, size: int, sampler: Sampler) -> "list[Trial]":
        """The points of the batch that begins with number `first`."""
        import optuna

        before = self.finished
        pruner = optuna.pruners.MedianPruner(n_startup_trials=AT_RANDOM, n_warmup_steps=WARM_UP)
        study = optuna.create_study(direction=self.direction, pruner=pruner)  # in memory, for this batch only
        study.add_trials([before[number] for number in range(first)])
        tried = [before[number].params for number in range(first)]
        drawn = []
        for number in range(first, min(first + size, self.count)):
            study.sampler = self._sampler(sampler, number)
            drawn.append(self._next(study, number, tried))
            tried.append(drawn[-1].params)
        return drawn

    def _next(self, study: "Study", number: int, tried: Sequence[Point]) -> "Trial":
        from optuna.trial import TrialState

        if self.enumerated:
            study.enqueue_trial(next(itertools.islice(self._points(), number, None)))
            return study.ask(self.distributions)
        trial = study.ask(self.distributions)
        if math.isinf(self.template.size) or trial.params not in tried:
            return trial
        study.tell(trial, state=TrialState.FAIL)  # a point that was tried already: take another one
        left = [point for point in itertools.islice(self._points(), FEW_ENOUGH) if point not in tried]
        study.enqueue_trial(left[int(default_rng(self._key(number)).integers(len(left)))])
        return study.ask(self.distributions)

    def _points(self) -> Iterator[dict[str, Any]]:
        """Every point of a grid, in order."""
        for values in itertools.product(*(search.all for search in self.template.searches.values())):
            yield dict(zip(self.distributions, values, strict=True))

    def _sampler(self, kind: Sampler, number: int) -> "BaseSampler":
        """One that has drawn nothing yet, so that a point depends on its number and not on the process."""
        from optuna.samplers import RandomSampler, TPESampler

        seed = int(self._key(number).generate_state(1)[0])
        return TPESampler(n_startup_trials=AT_RANDOM, seed=seed) if kind == "tpe" else RandomSampler(seed=seed)

    def _key(self, number: int) -> SeedSequence:
        return SeedSequence((self.seed, 2), spawn_key=(number,))
