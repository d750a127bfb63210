"""Who trains whom, and sums that do not depend on it."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedloom.engines.ray.placement import homes, rounded, share_out
from fedloom.engines.ray.spread import grid
from fedloom.engines.ray.there import exact_sum


def test_homes_are_even_and_stay() -> None:
    clients = np.arange(20_000)
    before, after = homes(clients, [0, 1, 2, 3]), homes(clients, [0, 1, 3])
    counts = np.bincount(before)
    assert counts.min() > 4800
    assert counts.max() < 5200
    assert (before[before != 2] == after[before != 2]).all()  # only those of the one who left have moved
    assert len(np.unique(after[before == 2])) == 3


COSTS = st.lists(st.integers(1, 100), min_size=1, max_size=30)


@given(COSTS, st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=1, max_size=6))
def test_shares_are_even(costs: list[int], speeds: list[float]) -> None:
    shares = share_out(costs, speeds)
    assert sorted(k for share in shares for k in share) == list(range(len(costs)))
    ends = [sum(costs[k] for k in share) / speed for share, speed in zip(shares, speeds, strict=True)]
    fastest = max(speeds)
    # Longest first on machines of different speed ends within twice the optimum (Gonzalez, Ibarra, Sahni 1977), which
    # is at least the mean load and the longest job on the fastest machine.
    assert max(ends) <= 2 * max(sum(costs) / sum(speeds), max(costs) / fastest) + 1e-9


@given(COSTS, st.data())
def test_whoever_is_near_takes_its_part_and_not_much_more(costs: list[int], data: st.DataObject) -> None:
    workers = data.draw(st.integers(1, 5))
    near = [data.draw(st.lists(st.integers(0, workers - 1), max_size=2)) for _ in costs]
    shares = share_out(costs, [1.0] * workers, near)
    owner = {k: worker for worker, share in enumerate(shares) for k in share}
    even = sum(costs) / workers
    ends = [sum(costs[k] for k in share) for share in shares]
    assert max(ends) <= max(2 * max(even, max(costs)), 1.25 * even)
    for k, known in enumerate(near):
        if known and owner[k] not in known:  # it would have been too much for every one of them
            assert all(ends[worker] + costs[k] > 1.25 * even for worker in known)


def test_equal_speeds_are_equal() -> None:
    assert rounded([100.0, 130.0, 75.0]) == [1.0, 1.0, 1.0]
    assert rounded([100.0, 100.0, 210.0, 24.0]) == [1.0, 1.0, 2.0, 0.25]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
def test_sums_do_not_depend_on_who_adds_up(dtype: torch.dtype, scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = (scale * torch.randn(40, 5000, generator=generator, dtype=torch.float64)).to(dtype)
    rows *= 10.0 ** torch.randint(-6, 6, (40, 1), generator=generator)
    weights = torch.rand(40, generator=generator, dtype=torch.float64)
    coarse = grid(weights, rows.double().abs().amax(1))
    whole = exact_sum([rows], weights, coarse)
    for cut in ([40], [7, 33], [1] * 40, [20, 1, 19]):
        order = torch.randperm(40, generator=generator)
        parts, first = [], 0
        for size in cut:
            own = order[first : first + size]
            parts.append(exact_sum([rows[own]], weights[own], coarse))
            first += size
        turned = [parts[k] for k in torch.randperm(len(parts), generator=generator).tolist()]
        assert torch.equal(sum(turned[1:], turned[0].clone()), whole)
    terms = (rows.double() * weights[:, None]).T.tolist()
    right = torch.tensor([math.fsum(column) for column in terms], dtype=torch.float64)
    most = float((weights[:, None] * rows.double().abs()).sum(0).max())
    assert float((whole - right).abs().max()) <= 40 * 2.0**-50 * most


def test_a_sum_of_nothing() -> None:
    rows = torch.zeros(3, 4)
    weights = torch.ones(3, dtype=torch.float64)
    assert torch.equal(exact_sum([rows], weights, grid(weights, rows.abs().amax(1).double())), torch.zeros(4).double())
