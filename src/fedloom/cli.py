"""The command line: `fedloom run`, `compare`, `reproduce` and the rest."""

import dataclasses
import functools
import inspect
import io
import logging
import shlex
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import click
import typer
from rich.console import Console
from rich.table import Table

from fedloom.errors import ConfigError, DataError, FedloomError, RunError
from fedloom.experiment.config import RunConfig, read_comparison, read_config
from fedloom.experiment.folder import COMPARISON, CONFIG, STUDY, is_finished, load_run, write_model, write_text
from fedloom.stopping import why, within

app = typer.Typer(
    help="Federated learning on client data that differ.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # they would print the data
)
INTERRUPTED = 130
out, err = Console(), Console(stderr=True)

ConfigFile = Annotated[Path | None, typer.Option("--config", help="YAML file of settings; written options win.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the folder if it exists.")]
DataDir = Annotated[Path | None, typer.Option(help="Folder of data files and weights, in place of FEDLOOM_DATA.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue what the folder holds.")]
Figures = Annotated[bool, typer.Option("--figures", help="Write figures for a paper too: PNG and SVG.")]
TimeBudget = Annotated[str | None, typer.Option(help="Stop in time, resumable: '90m', '1h30m'.", show_default="none")]
Track = Annotated[
    str | None, typer.Option("--track", help="Also log every round to tensorboard, mlflow or wandb, or several: 'a,b'.")
]


def with_settings(*without: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command one option per setting of a run; it receives those that were written as a dict."""
    hints = typing.get_type_hints(RunConfig)
    settings = {field.name: field for field in dataclasses.fields(RunConfig) if field.name not in without}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def wrapper(**options: Any) -> None:
            written = {name: options.pop(name) for name in settings}
            read = {name: _read(value) for name, value in written.items() if value is not None}
            command(read, **options)

        own = [p for p in inspect.signature(command).parameters.values() if p.name != "written"]
        shared = []
        for name, field in settings.items():
            option = typer.Option(help=field.metadata["about"], show_default=str(field.default))
            plain: Any = {int: int | None, float: float | None, bool: bool | None}.get(hints[name], str | None)
            hint: Any = Annotated[plain, option]
            shared.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hint))
        own = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
        wrapper.__signature__ = inspect.Signature([*own, *shared])  # type: ignore[attr-defined]
        wrapper.__annotations__ = {p.name: p.annotation for p in [*own, *shared]}
        return wrapper

    return decorate


def _read(value: Any) -> Any:
    """What was written, as a config file would read it: a number, none, true, false, or a text."""
    if not isinstance(value, str):
        return value
    for read in (int, float):
        try:
            return read(value)
        except ValueError:
            pass
    return {"none": None, "true": True, "false": False}.get(value.lower(), value)


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
    from fedloom.experiment.progress import Watch
    from fedloom.experiment.run import start_run
    from fedloom.experiment.track import read_trackers, tracked

    trackers = read_trackers(track)
    begun = read_config(folder / CONFIG, links=False) if resume and (folder / CONFIG).is_file() else {}
    settings = _settings(begun, written, config, overwrite, resume)
    if resume and is_finished(folder):
        done = start_run(settings, folder, resume=True)
        out.print(f"{folder} holds a finished run: nothing is left to do", soft_wrap=True)
        if figures or not (folder / "report.html").exists():
            _write_page(folder, "run_page", done, figures)
        return
    known = dataclasses.asdict(settings.settled())
    telling = tracked(trackers, folder, known, title=settings.method, resume=resume)
    with within(time_budget), Watch(settings.rounds, err) as watch, telling as tell:
        show = watch.callback(settings.method, settings.metric)
        done = start_run(settings, folder, overwrite=overwrite, resume=resume, callbacks=[show, *tell])
    last = done.kept
    names = [name for name in (f"test_{settings.metric}", "test_loss") if last.get(name) is not None]
    if "test_loss" not in last:  # there is no test set
        names = [name for name in ("validation_loss", "train_loss") if last.get(name) is not None]
    shown = ", ".join(f"{name} {last[name]:.4f}" for name in names) or "diverged"
    out.print(f"{settings.method}: round {last['round']}, {shown}", soft_wrap=True, highlight=False)
    _write_page(folder, "run_page", done, figures)


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
    lockstep: Annotated[
        bool, typer.Option("--lockstep/--one-by-one", help="Train runs of the same model as one cohort.")
    ] = True,
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
    settings = _settings(begun, written, config, overwrite, resume)
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
            track=trackers,
        )
    out.print(table(done))
    for remark in remarks(done):
        out.print(remark, soft_wrap=True, highlight=False, markup=False)
    write_tables(done, folder)
    _write_page(folder, "comparison_page", done, figures)


@app.command()
def recipes(
    name: Annotated[str | None, typer.Argument(help="One recipe, to read about it.", show_default="all")] = None,
    cost: Annotated[bool, typer.Option(help="Measure how long each would take here (once, then remembered).")] = True,
    data_dir: DataDir = None,
) -> None:
    """List the papers' tables and figures that can be reproduced, and how long each would take on this machine."""
    from fedloom.experiment.recipe import find_recipe, recipe_names
    from fedloom.report.recipe_page import listed, recipe_page

    if name is not None:
        out.print(recipe_page(find_recipe(name)), markup=False, highlight=False, soft_wrap=True)
        return
    out.print(listed([find_recipe(known) for known in recipe_names()], cost, data_dir, err))


@app.command()
def reproduce(
    name: Annotated[str, typer.Argument(metavar="RECIPE", help="A name of `fedloom recipes`, or a YAML file.")],
    rows: Annotated[
        list[str] | None, typer.Option(help="Only these rows: a name or parts of it, 'cifar10/10%'.")
    ] = None,
    scale: Annotated[
        str, typer.Option(help="paper, quick (a tenth of the rounds, one seed) or smoke (does it run?).")
    ] = "paper",
    seeds: Annotated[int | None, typer.Option(help="How many seeds.", show_default="as in the paper")] = None,
    folds: Annotated[
        int | None, typer.Option(help="How many folds of clients.", show_default="as in the paper")
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="Works per client slot.", show_default="as in the paper")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    engine: Annotated[str, typer.Option(help="auto, loop or vector.")] = "auto",
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

    with within(time_budget):
        found = run_recipe(
            find_recipe(name),
            folder,
            console=err,
            scale=scale,
            rows=rows or (),
            seeds=seeds,
            folds=folds,
            rounds=rounds,
            settings={"device": device, "engine": engine, "data_dir": None if data_dir is None else str(data_dir)},
        )
    out.print(reproduction.table(found))
    for remark in reproduction.remarks(found):
        out.print(remark, soft_wrap=True, highlight=False, markup=False)
    written = reproduction.write(found, shlex.join(["fedloom", *sys.argv[1:]]), figures)
    names = [path.name for path in written if path.parent == found.folder]
    out.print(f"in {found.folder}: {', '.join(names)}{' and figures' * figures}", soft_wrap=True, highlight=False)
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
    settings = _settings(begun, written, config, overwrite, resume)
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
        out.print(f"next: {command}", soft_wrap=True, highlight=False, markup=False)


@app.command()
def bench(
    seconds: Annotated[float, typer.Option(help="For each measurement.", min=0.01)] = 0.5,
    keep: Annotated[bool, typer.Option(help="Write what was found, for all later runs with --engine auto.")] = True,
) -> None:
    """Measure when a cohort is faster as one matrix on this machine's CPU, and set the rule for --engine auto by it."""
    from fedloom.engines.rule import Measured, measure, rule, save

    def show(one: Measured) -> None:
        faster = "vector" if one.vector > one.loop else "loop"
        line = f"{one.clients:>3} clients x {one.parameters:>6,} parameters: loop {one.loop:>10,.0f} samples/s, "
        out.print(f"{line}vector {one.vector:>10,.0f}: {faster}", highlight=False, soft_wrap=True)

    before, found = rule(), measure(show, seconds)
    if found.vector_below:
        said = f"vector from {found.vector_from} clients a round, for models below {found.vector_below:,} parameters"
    else:
        said = "never vector"
    out.print(f"dense models on this CPU: {said}", highlight=False, soft_wrap=True)
    if keep:
        out.print(f"wrote {save(found)} (it was: {before})", highlight=False, soft_wrap=True)


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(help="One method, to read about it.", show_default="all")] = None,
) -> None:
    """List the methods: the stages that each fills, its parameters with defaults, its paper."""
    from fedloom.method import filled_by, list_methods
    from fedloom.report.method_page import method_page

    if name is not None:
        out.print(method_page(name), markup=False, highlight=False, soft_wrap=True)
        return
    shown = Table("method", "fills", "what it does", "paper", box=None, pad_edge=False)
    shown.columns[0].overflow = "fold"
    for entry in list_methods():
        fills = ", ".join(filled_by(entry)) or "what is written"
        shown.add_row(entry.signature, fills, entry.about, entry.paper)
    out.print(shown)


@app.command()
def data(
    name: Annotated[
        str | None, typer.Argument(help="One data set, to look at its samples.", show_default="all")
    ] = None,
    data_dir: DataDir = None,
    partition: Annotated[str | None, typer.Option(help="Deal it out, and describe what clients get.")] = None,
    clients: Annotated[int | None, typer.Option(help="To so many clients.", show_default="100, or all")] = None,
    pooled: Annotated[bool, typer.Option("--pooled", help="Deal out training and test samples together.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the partition.")] = 0,
    plot: Annotated[Path | None, typer.Option(help="Write a heat map of client x class: .png, .svg or .pdf.")] = None,
) -> None:
    """List the data sets and the partitions, or look at one data set and how it would be dealt out."""
    from fedloom.data.load import load
    from fedloom.report.data_page import catalogue, data_page, ways

    if name is None:
        out.print(catalogue(data_dir))
        out.print()
        out.print(ways())
        return
    if partition is None and plot is None and clients is None:
        out.print(data_page(name, data_dir), markup=False, highlight=False, soft_wrap=True)
        return
    found = load(name, partition, clients, seed, pooled=pooled, data_dir=data_dir).report
    if found is None:
        raise DataError(f"{name} was not dealt out")
    out.print(str(found), markup=False, highlight=False, soft_wrap=True)
    if plot is not None:
        found.plot(plot)
        out.print(f"wrote {plot}", soft_wrap=True, highlight=False)


@app.command()
def models() -> None:
    """List the models."""
    from fedloom.models.catalogue import REGISTRY, load_models

    load_models()
    shown = Table("model", "what it is", "paper", box=None, pad_edge=False)
    shown.columns[0].overflow = "fold"
    for entry in REGISTRY.entries():
        shown.add_row(entry.signature, entry.about, entry.paper)
    out.print(shown)


@app.command()
def evaluate(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    metric: Annotated[str | None, typer.Option(help="accuracy, f1 or auc.", show_default="as in the run")] = None,
    export: Annotated[
        Path | None, typer.Option(help="Write the deployable model: .safetensors (weights) or .pt2 (a program).")
    ] = None,
) -> None:
    """Measure a run's deployable model on the test set, and export it."""
    import torch

    from fedloom.evaluate import Evaluator, find_metric
    from fedloom.simulation import find_device
    from fedloom.space import buffers_of
    from fedloom.task import Task

    found = load_run(run_folder)
    federation, model = found.federation(), found.model()
    name, score = find_metric(metric or found.config.metric)
    task = Task.of(model, found.config.loss, find_device("cpu"), "auto")
    if federation.test is None:
        raise RunError(f"{found.config.data} has no test set")
    test = federation.test.to(find_device("cpu"), task.space.dtype)
    evaluator = Evaluator(task, federation.preparation, name, score)
    measured = evaluator.measure(task.space.flatten(model), buffers_of(model), test, "test")
    for key, value in measured.items():
        out.print(f"{key} {value:.6f}", highlight=False)
    if export is not None:
        example = federation.to(find_device("cpu"), task.space.dtype).batch(torch.arange(2), task.space.dtype)[0]
        _export(model, example, export)
        out.print(f"wrote {export}", soft_wrap=True, highlight=False)


@app.command()
def ui(
    folder: Annotated[Path, typer.Argument(help="Where the runs are, at any depth.")] = Path("runs"),
    host: Annotated[str, typer.Option(help="Address to serve at; others than this machine's open it to all.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.", min=0, max=65535)] = 8765,
    show: Annotated[bool, typer.Option("--open", help="Open a browser.")] = False,
) -> None:
    """Look at runs while they train: the report's page, live."""
    from fedloom.report.live import serve

    def say(line: str) -> None:
        out.print(line, soft_wrap=True, highlight=False, markup=False)

    serve(folder, host, port, say=say, show=show)


def _export(model: Any, example: Any, path: Path) -> None:
    import torch

    from fedloom.models.recurrent import set_fused

    if path.suffix == ".safetensors":
        write_model(path, model)
    elif path.suffix == ".pt2":
        set_fused(model, False)  # the fused kernel fixes the size of a batch
        try:
            batch = torch.export.Dim("batch")
            program = torch.export.export(model.eval(), (example,), dynamic_shapes=({0: batch},))
        except Exception as error:  # a model may do what no program can hold
            reason = " ".join(str(error).split())[:200]
            raise RunError(f"this model can't be exported as a program, only as .safetensors: {reason}") from None
        try:
            torch.export.save(program, path)
        except (OSError, RuntimeError) as error:
            raise RunError(f"{path} can't be written: {error}") from None
    else:
        raise ConfigError(f"--export {path}: the name must end in .safetensors or .pt2")


def _settings(
    begun: dict[str, Any], written: dict[str, Any], config: Path | None, overwrite: bool, resume: bool
) -> RunConfig:
    """Defaults, then what a resumed folder was begun with, then the config file, then what was written."""
    if overwrite and resume:
        raise ConfigError("--overwrite and --resume exclude each other")
    base = RunConfig().change(begun)
    if config is not None:
        base = base.change(read_config(config))
    return base.change(written)


def _write_page(folder: Path, kind: str, content: Any, with_figures: bool = False) -> None:
    from fedloom.report import figures, page

    try:
        text = getattr(page, kind)(content)
    except ModuleNotFoundError as error:
        out.print(f"no report.html was written: it needs {error.name}", soft_wrap=True, highlight=False)
        return
    write_text(folder / "report.html", text)
    out.print(f"report: {folder / 'report.html'}", soft_wrap=True, highlight=False)
    if with_figures:
        written = figures.write(content, folder / "figures")
        out.print(f"figures: {len(written)} in {folder / 'figures'}", soft_wrap=True, highlight=False)


def main() -> None:
    """Exit codes: 0 done, 2 bad input, 130 interrupted."""
    _log_to_stderr()
    for stream in (sys.stdout, sys.stderr):  # a terminal without ± shall not end a run
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        code = app(standalone_mode=False) or 0
    except FedloomError as error:
        _complain(str(error))
        code = 2
    except OSError as error:
        _complain(f"{error.filename or 'a file'}: {error.strerror or error}")
        code = 2
    except click.exceptions.NoArgsIsHelpError as error:
        out.print(error.format_message(), markup=False)
        code = 0
    except click.ClickException as error:
        _complain(error.format_message())
        code = 2
    except (KeyboardInterrupt, click.Abort):
        code = INTERRUPTED
    if code == INTERRUPTED:  # typer catches the signal itself inside of a command
        resumable = len(sys.argv) > 1 and sys.argv[1] in ("run", "compare", "tune")
        _complain(f"{why()}; {'continue with --resume' if resumable else 'the same command goes on'}")
    sys.exit(code)


class _Stderr(logging.Handler):
    """What Fedloom has to say; what is no warning once, since the runs of a comparison would repeat it."""

    said: typing.ClassVar[set[str]] = set()

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.levelno >= logging.WARNING or text not in self.said:
            sys.stderr.write(f"{text}\n")
        self.said.add(text)


def _log_to_stderr() -> None:
    log = logging.getLogger("fedloom")
    log.handlers = [_Stderr()]
    log.setLevel(logging.INFO)


def _complain(message: str) -> None:
    sys.stderr.write(f"fedloom: {' '.join(message.split())}\n")
