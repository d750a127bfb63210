"""Commands that show: recipes, methods, data, models, runs, and what this machine can do."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from fedloom.cli.app import DataDir, app, err, out
from fedloom.errors import ConfigError, DataError, RunError
from fedloom.experiment.folder import load_run, write_model


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
        out.print(recipe_page(find_recipe(name)), highlight=False, soft_wrap=True)
        return
    out.print(listed([find_recipe(known) for known in recipe_names()], cost, data_dir, err))


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
        out.print(method_page(name), highlight=False, soft_wrap=True)
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
        out.print(data_page(name, data_dir), highlight=False, soft_wrap=True)
        return
    found = load(name, partition, clients, seed, pooled=pooled, data_dir=data_dir).report
    if found is None:
        raise DataError(f"{name} stays on disk and is not dealt out; leave lazy out to look at it")
    out.print(str(found), highlight=False, soft_wrap=True)
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
        out.print(line, soft_wrap=True, highlight=False)

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
