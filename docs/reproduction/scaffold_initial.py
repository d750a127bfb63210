"""SCAFFOLD as FedDyn's code forms its control variates: the change of a client's model, divided by the rate of the
first round, also when the rate has decayed since. It adds the method `scaffold-initial` to the command line:

    python docs/reproduction/scaffold_initial.py reproduce docs/reproduction/scaffold-initial.yaml --processes 2
"""

from dataclasses import dataclass

import fedloom as fl
from fedloom.cli import main
from fedloom.methods.scaffold import Scaffold
from fedloom.stages import Info, State, Updates


@fl.register("scaffold-initial")
@dataclass(frozen=True)
class Initial(Scaffold):
    """Control variates from the change of the model, divided by the rate of the first round."""

    wants = frozenset()
    rate: float = 0.1

    def end(self, memory: State, sent: State, info: Info, updates: Updates) -> tuple[State, State]:
        steps = updates.steps.to(updates.rows.matrix)[:, None]
        new = memory["c"] - sent["c"] + updates.rows.matrix / (self.rate * steps)
        return {"c": new}, {"dc": new - memory["c"]}


if __name__ == "__main__":
    main()
