"""Recipes for the terminal: the list with what each costs here, and one of them in words."""

from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from fedloom.errors import FedloomError
from fedloom.experiment.compare import rounds_for
from fedloom.experiment.config import RunConfig
from fedloom.experiment.cost import alike, clients_of, duration, seconds_for
from fedloom.experiment.recipe import Recipe
from fedloom.experiment.reproduce import scaled
from fedloom.method import Method


def recipe_page(recipe: Recipe) -> str:
    """What a recipe is about, its methods and its rows."""
    repeats = f"{recipe.seeds} seed{'s' * (recipe.seeds > 1)}" + (f" x {recipe.folds} folds" if recipe.folds else "")
    lines = [f"{recipe.name}: {recipe.title} ({recipe.paper})", "", recipe.about, "", f"repeated: {repeats}"]
    lines += [f"score {name}: {score.text}" for name, score in recipe.scores.items()]
    for row in recipe.rows:
        cases = [case for case in recipe.cases if case.row == row]
        config = cases[0].config.settled()
        lines += ["", f"row {row}: {config.setting}, model {config.model}, {config.rounds} rounds"]
        for case in cases:
            told = [f"{name} {p.mean:g}" + (f" ± {p.sd:g}" if p.sd else "") for name, p in case.printed.items()]
            lines.append(f"  {case.label}: {case.config.method}" + (f"  (printed: {', '.join(told)})" if told else ""))
    return "\n".join(lines)


def listed(recipes: list[Recipe], cost: bool, data_dir: Path | None, console: Console) -> Table:
    """Every recipe: its rows, how many of them can be run here, and how long all of those would take."""
    shown = Table("recipe", "what it is", "rows", "runs", "cost here", "not to be had here", box=None, pad_edge=False)
    shown.columns[0].no_wrap = True
    failed: dict[RunConfig, FedloomError] = {}
    for recipe in recipes:
        repeats = recipe.seeds * (recipe.folds or 1)
        told = [
            recipe.name,
            f"{recipe.title} ({recipe.paper})",
            str(len(recipe.rows)),
            str(len(recipe.cases) * repeats),
        ]
        shown.add_row(*told, *(_cost(recipe, data_dir, console, failed) if cost else ("", "")))
    return shown


def _cost(
    recipe: Recipe, data_dir: Path | None, console: Console, failed: dict[RunConfig, FedloomError]
) -> tuple[str, str]:
    """Of all rows that can be run, and why the others can't. What `failed` once is not tried for every recipe again."""
    repeats = recipe.seeds * (recipe.folds or 1)
    total, missing = 0.0, {}
    for case in recipe.cases:
        if case.row in missing:
            continue
        config = scaled(recipe, case, "paper").change({"data_dir": None if data_dir is None else str(data_dir)})
        config = replace(config, fold=0 if recipe.folds else None)
        like = alike(config)
        if like not in failed:
            try:
                total += repeats * _seconds(config, console)
                continue
            except FedloomError as error:
                failed[like] = error
        missing[case.row] = " ".join(str(failed[like]).split()).partition(": ")[0]
    reasons = [
        f"{', '.join(r for r in missing if missing[r] == why)}: {why}" for why in dict.fromkeys(missing.values())
    ]
    return ("-" if len(missing) == len(recipe.rows) else duration(total)), "; ".join(reasons)


def _seconds(config: RunConfig, console: Console) -> float:
    with console.status(f"measuring {config.data}, {config.model}"):
        clients = clients_of(config)
    return seconds_for(replace(config, rounds=rounds_for(Method(config.method), config, clients)))
