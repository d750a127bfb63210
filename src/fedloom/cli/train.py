"""Commands that train: `run`, `compare`, `reproduce`, `tune`."""

import dataclasses
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedloom.cli.app import (
    ConfigFile,
    DataDir,
    Figures,
    Lockstep,
    Overwrite,
    Processes,
    Resume,
    TimeBudget,
    Track,
    app,
    err,
    out,
    settings_of,
    with_settings,
    write_page,
)
from fedloom.errors import ConfigError, RunError
from fedloom.experiment.config import read_comparison, read_config
from fedloom.experiment.folder import COMPARISON, CONFIG, STUDY
from fedloom.stopping import within

if TYPE_CHECKING:
    from fedloom.experiment.findings import Reproduction


@app.command()
@with_settings()
def run(
    written: dict[str, Any],
    config: ConfigFile = None,
    track: Track = None,
    folder: Annotated[Path, typer.Option("--out", help="Folder for the run.")] = Path("runs/run"),
    overwrite: Overwrite = False,
    resume: Resume = False,
    figures: Figures = False,
    time_budget: TimeBudget = None,
) -> None:
    """Train one model with one method."""
    from fedloom.experiment.run import is_over, start_run
    from fedloom.experiment.track import read_trackers, tracked
    from fedloom.progress import Watch

    trackers = read_trackers(track)
    begun = read_config(folder / CONFIG, links=False) if resume and (folder / CONFIG).is_file() else {}
    settings = settings_of(begun, written, config, overwrite, resume)
    if resume and not begun and not written and config is None:
        raise RunError(f"{folder} holds no run to resume; repeat the command that was to begin it")
    if resume and is_over(folder, settings.rounds):
        done = start_run(settings, folder, resume=True)
        out.print(f"{folder} holds a finished run: nothing is left to do", soft_wrap=True)
        if figures or not (folder / "report.html").exists():
            write_page(folder, "run_page", done, figures)
        return
    known = dataclasses.asdict(settings.settled())
    telling = tracked(trackers, folder, known, title=settings.method, resume=resume)
    with within(time_budget), Watch(settings.rounds, err) as watch, telling as tell:
        show = watch.callback(settings.method, settings.metric, settings.rounds)
        done = start_run(settings, folder, overwrite=overwrite, resume=resume, callbacks=[show, *tell])
    last = done.kept
    names = [name for name in (f"test_{settings.metric}", "test_loss") if last.get(name) is not None]
    if "test_loss" not in last:  # there is no test set
        names = [name for name in ("validation_loss", "train_loss") if last.get(name) is not None]
    shown = ", ".join(f"{name} {last[name]:.4f}" for name in names) or "diverged"
    out.print(f"{settings.method}: round {last['round']}, {shown}", soft_wrap=True, highlight=False)
    write_page(folder, "run_page", done, figures)


@app.command()
@with_settings("method")
def compare(
    written: dict[str, Any],
    methods: Annotated[list[str] | None, typer.Argument(help="The methods; the first is the baseline.")] = None,
    config: ConfigFile = None,
    seeds: Annotated[int | None, typer.Option(help="How many seeds.", show_default="3")] = None,
    target: Annotated[
        float | None, typer.Option(help="Metric to reach.", show_default="95% of the baseline's mean")
    ] = None,
    lockstep: Lockstep = True,
    processes: Processes = None,
    track: Track = None,
    folder: Annotated[Path, typer.Option("--out", help="Folder for the comparison.")] = Path("runs/compare"),
    overwrite: Overwrite = False,
    resume: Resume = False,
    figures: Figures = False,
    time_budget: TimeBudget = None,
) -> None:
    """Compare methods on equal terms: same data, same starting models, same number of Works."""
    from fedloom.experiment.compare import compare as run_all
    from fedloom.experiment.track import read_trackers
    from fedloom.report.table import remarks, table, write_tables

    trackers = read_trackers(track)
    begun = read_comparison(folder / COMPARISON) if resume and (folder / COMPARISON).is_file() else {}
    before = {name: begun.pop(name, None) for name in ("methods", "seeds", "target")}
    settings = settings_of(begun, written, config, overwrite, resume)
    chosen = methods or before["methods"]
    if not chosen:
        raise ConfigError("name at least one method, such as: fedloom compare fedavg adabest")
    with within(time_budget):
        done = run_all(
            settings,
            chosen,
            folder,
            seeds=seeds if seeds is not None else before["seeds"] or 3,
            console=err,
            target=before["target"] if target is None else target,
            overwrite=overwrite,
            resume=resume,
            lockstep=lockstep,
            processes=processes,
            track=trackers,
        )
    out.print(table(done))
    for remark in remarks(done):
        out.print(remark, soft_wrap=True, highlight=False)
    write_tables(done, folder)
    write_page(folder, "comparison_page", done, figures)


@app.command()
def reproduce(
    name: Annotated[str, typer.Argument(metavar="RECIPE", help="A name of `fedloom recipes`, or a YAML file.")],
    rows: Annotated[
        list[str] | None, typer.Option(help="Only these rows: a name or parts of it, 'cifar10/10%'.")
    ] = None,
    methods: Annotated[list[str] | None, typer.Option(help="Only these methods, as the recipe labels them.")] = None,
    scale: Annotated[
        str, typer.Option(help="paper, quick (a tenth of the rounds, one seed) or smoke (does it run?).")
    ] = "paper",
    seeds: Annotated[int | None, typer.Option(help="How many seeds.", show_default="as in the paper")] = None,
    folds: Annotated[
        int | None, typer.Option(help="How many folds of clients.", show_default="as in the paper")
    ] = None,
    fold: Annotated[list[int] | None, typer.Option(help="Only these folds, counted from 0.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Works per client slot.", show_default="as in the paper")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    engine: Annotated[str, typer.Option(help="auto, loop, vector or ray.")] = "auto",
    lockstep: Lockstep = True,
    processes: Processes = None,
    data_dir: DataDir = None,
    folder: Annotated[Path, typer.Option("--out", help="Folder for runs and results; what it holds is reused.")] = Path(
        "runs/reproduce"
    ),
    figures: Figures = False,
    time_budget: TimeBudget = None,
) -> None:
    """Run a paper's table or figure, going on where it stopped, and show what was measured beside what was printed."""
    from fedloom.experiment.recipe import find_recipe
    from fedloom.experiment.reproduce import reproduce as run_recipe
    from fedloom.report import reproduction

    reproduced = partial(
        run_recipe,
        find_recipe(name),
        folder,
        console=err,
        scale=scale,
        rows=rows or (),
        methods=methods or (),
        seeds=seeds,
        folds=folds,
        only_folds=fold or (),
        rounds=rounds,
        settings={"device": device, "engine": engine, "data_dir": None if data_dir is None else str(data_dir)},
        lockstep=lockstep,
        processes=processes,
    )

    def tell(found: "Reproduction") -> None:
        out.print(reproduction.table(found))
        for remark in reproduction.remarks(found):
            out.print(remark, soft_wrap=True, highlight=False)
        written = reproduction.write(found, shlex.join(["fedloom", *sys.argv[1:]]), figures)
        names = [path.name for path in written if path.parent == found.folder]
        out.print(f"in {found.folder}: {', '.join(names)}{' and figures' * figures}", soft_wrap=True, highlight=False)

    try:
        with within(time_budget):
            found = reproduced()
    except KeyboardInterrupt:
        so_far = reproduced(play=False)
        if any(cell.runs for cell in so_far.cells):
            tell(so_far)
        raise
    tell(found)
    if not any(cell.runs for cell in found.cells if cell.asked):
        raise RunError(f"no row of {name} could be run; the reasons stand above")


@app.command()
@with_settings("method")
def tune(
    written: dict[str, Any],
    methods: Annotated[
        list[str] | None, typer.Argument(help="The methods, with searches for values: 'fedadam(lr=log(1e-4, 0.1))'.")
    ] = None,
    config: ConfigFile = None,
    search: Annotated[
        list[str] | None, typer.Option(help="A local setting: 'lr=log(0.001, 1)', 'epochs=choice(1, 5)'. Repeatable.")
    ] = None,
    grid: Annotated[str | None, typer.Option(help="A paper's own grid: fedglad, radfed or adabest.")] = None,
    objective: Annotated[
        str | None, typer.Option(help="train-loss, validation or folds.", show_default="by what is held out")
    ] = None,
    trials: Annotated[
        int | None, typer.Option(help="For each method.", show_default="20, or all points of --grid")
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="Runs of a trial, averaged.", show_default="1")] = None,
    sampler: Annotated[str | None, typer.Option(help="tpe or random.", show_default="tpe")] = None,
    prune: Annotated[
        bool | None, typer.Option("--prune/--no-prune", help="Stop trials that are behind.", show_default="prune")
    ] = None,
    together: Annotated[
        int | None, typer.Option(help="Trials drawn and trained at once.", show_default="8, or 1 with engine loop")
    ] = None,
    folder: Annotated[Path, typer.Option("--out", help="Folder for the study.")] = Path("runs/tune"),
    overwrite: Overwrite = False,
    resume: Resume = False,
    time_budget: TimeBudget = None,
) -> None:
    """Search for good values of methods' parameters and local settings, without a look at the test set."""
    from fedloom.experiment.tune import tune as search_for
    from fedloom.experiment.tune.outcome import table
    from fedloom.experiment.tune.plan import OWN, read_plan

    begun = read_plan(folder) if resume and (folder / STUDY).is_file() else {}
    own = {name: begun.pop(name) for name in OWN if name in begun}
    settings = settings_of(begun, written, config, overwrite, resume)
    asked = {"objective": objective, "trials": trials, "seeds": seeds, "sampler": sampler, "prune": prune}
    own |= {name: value for name, value in {**asked, "together": together}.items() if value is not None}
    own |= {"methods": methods} if methods else {}
    own |= {"search": search} if search else {}
    if not own.get("methods"):
        raise ConfigError("name at least one method, such as: fedloom tune 'fedadam(lr=log(1e-4, 0.1))'")
    how: dict[str, Any] = {"grid": grid, "overwrite": overwrite, "resume": resume, "console": err}
    with within(time_budget):
        done = search_for(settings, own.pop("methods"), folder, **how, **own)
    out.print(table(done))
    out.print(f"trials: {folder / 'trials.csv'}", soft_wrap=True, highlight=False)
    for command in done.next_commands:
        out.print(f"next: {command}", soft_wrap=True, highlight=False)
