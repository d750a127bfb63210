"""Early stopping: the best model so far, and how long a run goes on without a better one."""

import math
from dataclasses import dataclass, field

from torch import Tensor

from fedloom.space import Buffers


@dataclass
class Best:
    """The best validation score so far, and how long there was no gain."""

    patience: int | None
    min_gain: float
    score: float | None = None
    waited: int = 0
    theta: Tensor | None = None
    buffers: Buffers = field(default_factory=dict)

    def see(self, score: float, theta: Tensor, buffers: Buffers) -> None:
        """An undefined score is worse than any other."""
        score = -math.inf if math.isnan(score) else score
        needed = self.score
        if needed is not None and math.isfinite(needed):
            needed += self.min_gain * abs(needed)
        if needed is None or score > needed:
            self.score, self.waited, self.theta, self.buffers = score, 0, theta, buffers
        else:
            self.waited += 1

    @property
    def tired(self) -> bool:
        return self.patience is not None and self.waited >= self.patience
