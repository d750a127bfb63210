"""What the commands share: the application, options, one option per setting of a run, the page at the end."""

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fedloom.errors import ConfigError
from fedloom.experiment.config import RunConfig, read_config
from fedloom.experiment.folder import write_text

app = typer.Typer(
    help="Federated learning on client data that differ.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # they would print the data
)
# names may have [brackets] and :colons:
out, err = Console(markup=False, emoji=False), Console(stderr=True, markup=False, emoji=False)

ConfigFile = Annotated[Path | None, typer.Option("--config", help="YAML file of settings; written options win.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the folder if it exists.")]
DataDir = Annotated[Path | None, typer.Option(help="Folder of data files and weights, in place of FEDLOOM_DATA.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue what the folder holds.")]
Figures = Annotated[bool, typer.Option("--figures", help="Write figures for a paper too: PNG and SVG.")]
TimeBudget = Annotated[str | None, typer.Option(help="Stop in time, resumable: '90m', '1h30m'.", show_default="none")]
Lockstep = Annotated[bool, typer.Option("--lockstep/--one-by-one", help="Train runs of the same model as one cohort.")]
Processes = Annotated[
    int | None, typer.Option(help="So many processes play the runs side by side.", show_default="in lockstep")
]
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


def settings_of(
    begun: dict[str, Any], written: dict[str, Any], config: Path | None, overwrite: bool, resume: bool
) -> RunConfig:
    """Defaults, then what a resumed folder was begun with, then the config file, then what was written."""
    if overwrite and resume:
        raise ConfigError("--overwrite and --resume exclude each other")
    base = RunConfig().change(begun)
    if config is not None:
        base = base.change(read_config(config))
    return base.change(written)


def write_page(folder: Path, kind: str, content: Any, with_figures: bool = False) -> None:
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
