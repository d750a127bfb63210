"""Commands for real federations: `fedloom flower init` and `fedloom flower simulate`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from fedloom.cli.app import app, err, out, with_settings

flower = typer.Typer(
    help="A method in a real federation: write a Flower app, and rehearse it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(flower, name="flower")
LEFT_OUT = (  # settings of a run that an app has no use for, or that its author writes into task.py
    *("data_dir", "pooled", "validation", "samples", "fold", "augment", "standardise", "steps", "loss", "patience"),
    *("eval_last", "eval_between", "nesterov", "clip_norm", "last_batch", "shuffle", "diagnose", "engine"),
    *("ray_address", "actors", "compile", "max_memory", "device", "precision", "availability", "dropout_rate"),
    *("max_diverged", "checkpoint_every"),
)


@flower.command()
@with_settings(*LEFT_OUT)
def init(
    written: dict[str, Any],
    folder: Annotated[Path, typer.Argument(metavar="APP", help="Folder to write; its name is that of the app.")],
    publisher: Annotated[str, typer.Option(help="Who publishes the app, as Flower wants to know.")] = "my-organisation",
) -> None:
    """Write a Flower app that serves a method: small, complete, and yours to change. --data may be the path of a folder
    with one file (.csv, .parquet, .npz) for each site: an example of what the sites have.
    """
    from fedloom.flower.scaffold import write_app

    write_app(folder, written, publisher)
    said = f"wrote {folder}: {folder / 'README.md'} says how to rehearse and deploy it"
    out.print(said, soft_wrap=True, highlight=False)


@flower.command()
def simulate(
    folder: Annotated[Path, typer.Argument(metavar="APP", help="Folder of a Flower app.")] = Path("."),
    changes: Annotated[
        list[str] | None, typer.Argument(metavar="SETTING=VALUE", help="Settings of the app to change: lr=0.05.")
    ] = None,
    nodes: Annotated[int | None, typer.Option(help="Nodes.", show_default="`clients` of the app", min=1)] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds.", show_default="as the app says", min=1)] = None,
    node_config: Annotated[
        list[str] | None, typer.Option(help="What node 0 is told, then node 1...: 'data=\"/path\"'. Repeatable.")
    ] = None,
    kept: Annotated[Path | None, typer.Option("--out", help="Keep the run and the clients' memory here.")] = None,
) -> None:
    """Run any Flower app in this process: its server and its clients, without a network. Clients train one after the
    other; keys, time limits and nodes that come and go are not rehearsed. A setting `folder` and the nodes' `memory`
    are temporary, unless they are given.
    """
    from fedloom.flower.rehearsal import rehearse

    with err.status("loading the app") as status:
        done = rehearse(
            folder,
            nodes=nodes,
            rounds=rounds,
            changes=changes or (),
            node_configs=node_config or (),
            out=kept,
            tell=status.update,
        )
    out.print(str(done), soft_wrap=True, highlight=False)
