"""What clients send beside their update, method by method: the table in docs/flower.md."""

import pytest

import fedloom as fl
from fedloom.engines.choose import Wishes
from fedloom.flower.replies import Replies
from fedloom.flower.roster import Member, Roster
from fedloom.simulation import Simulation
from tests.examples import EXAMPLES
from tests.flower.in_process import clients, mlp

BESIDE = {
    "adabest": {"up/adabest.client2/latest_change"},  # as in the examples: deploy=latest_of_all
    "scaffold": {"up/scaffold.client/dc"},
    "importance": {"extra/final_score"},
    "radfedi": {"extra/final_score"},
    "fednova": {"extra/step_norm"},
}
NAMES = [entry.name for entry in fl.list_methods()]


def revealed(method: str) -> tuple[set[str], bool]:
    """What a reply must hold beside the update, and whether one client's model goes to another."""
    data = clients()
    local = fl.Local(steps=3, batch_size=4)
    run = Simulation.of(mlp(), data, fl.Method(method), rounds=1, wishes=Wishes("loop"), local=local)
    roster = Roster("0" * 32, 1, [Member(k, n) for k, n in enumerate(data.sizes.tolist())])
    replies = Replies.of(run.pipeline, run.setup, roster, {})
    return set(replies.expected) - {"row"}, run.pipeline.schedule.stage.travels


@pytest.mark.parametrize("name", NAMES)
def test_no_method_reveals_more_than_the_table_says(name: str) -> None:
    beside, travels = revealed(EXAMPLES.get(name, name))
    assert beside == BESIDE.get(name, set())
    assert travels == name.startswith("radfed")


def test_adabest_alone_reveals_nothing_beside_its_update() -> None:
    assert revealed("adabest") == (set(), False)
