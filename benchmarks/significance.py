"""Which methods beat the baseline? Reads the table.csv of a comparison and prints a Markdown table.

    fedloom compare fedavg adabest ... --seeds 12 --out runs/many
    python benchmarks/significance.py runs/many/table.csv

Paired by seed: mean difference to the first method, Wilcoxon's signed-rank test (two-sided, exact), corrected by Holm
over all methods.
"""

import csv
import statistics
import sys
from pathlib import Path

from scipy.stats import wilcoxon


def holm(p_values: list[float]) -> list[float]:
    """Holm's step-down correction."""
    corrected = [0.0] * len(p_values)
    highest = 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[i]))
        corrected[i] = highest
    return corrected


def main() -> None:
    with Path(sys.argv[1]).open() as file:
        lines = list(csv.DictReader(file))
    score = next(name for name in lines[0] if name.startswith("test_"))
    scores: dict[str, list[float]] = {}
    for line in lines:
        scores.setdefault(line["method"], []).append(100 * float(line[score]))
    baseline, *others = scores
    gains = {m: [a - b for a, b in zip(scores[m], scores[baseline], strict=True)] for m in others}
    raw = [float(wilcoxon(gains[m]).pvalue) if any(gains[m]) else 1.0 for m in others]
    found = dict(zip(others, holm(raw), strict=True))
    print(f"| method | {score} %, mean ± sd | difference | wins | p (Holm) |")  # noqa: T201
    print("| --- | --- | --- | --- | --- |")  # noqa: T201
    for method, values in scores.items():
        spread = f"{statistics.fmean(values):.2f} ± {statistics.stdev(values):.2f}"
        if method == baseline:
            print(f"| {method} | {spread} | | | |")  # noqa: T201
            continue
        wins = sum(gain > 0 for gain in gains[method])
        row = f"{statistics.fmean(gains[method]):+.2f} | {wins}/{len(values)} | {found[method]:.4f}"
        print(f"| {method} | {spread} | {row} |")  # noqa: T201


if __name__ == "__main__":
    main()
