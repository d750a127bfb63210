"""What a run tells: to callbacks after each round, and when it is over."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from fedloom.stages import Updates

if TYPE_CHECKING:
    import pandas as pd


class Signal(Enum):
    """What a callback may return."""

    STOP = "stop"


STOP = Signal.STOP


@dataclass(frozen=True)
class Event:
    """What a callback is told after each round."""

    round: int  # rounds done
    rounds: int  # rounds planned; `round`, where patience ends here
    params: Tensor  # [P] the cloud model that the next round starts from
    metrics: Mapping[str, Any]  # the round's line of the history
    updates: Updates | None  # what was averaged; None: nothing was


Callback = Callable[[Event], Signal | None]


@dataclass(frozen=True, repr=False)
class Result:
    """What a run leaves behind."""

    params: Tensor  # [P] the final cloud model
    model: nn.Module  # the deployable model; with `patience`, the one with the best validation score
    history: list[dict[str, Any]]  # one dict a round; counts (works, local_steps, bytes, seconds) add up over rounds
    stopped: str = "rounds"  # why it ended: "rounds", "callback" or "patience"

    def __repr__(self) -> str:
        ended = "" if self.stopped == "rounds" else f", ended by {self.stopped}"
        return f"Result({in_short(self.history)}{ended}, parameters {len(self.params)})"

    def frame(self) -> "pd.DataFrame":
        """The history as a table, one line a round."""
        import pandas as pd

        return pd.DataFrame(self.history)


def in_short(history: Sequence[Mapping[str, Any]]) -> str:
    """How many rounds there were, and the scores of the last that was evaluated."""
    tested = [line for line in history if "test_loss" in line or "validation_loss" in line]
    scores = {name: value for name, value in tested[-1].items() if isinstance(value, float)} if tested else {}
    told = [f"{name} {value:.4g}" for name, value in scores.items() if name.startswith(("test_", "validation_"))]
    return ", ".join([f"rounds {len(history)}", *told])
