"""The parts of an app's README that depend on its data and clients."""

from collections.abc import Sequence

from fedloom.data.catalogue import FACTS, find_dataset
from fedloom.experiment.config import RunConfig
from fedloom.flower.sites import Sites

FIRST_PORT = 9091  # of the nodes on one machine, for their own apps
MANY = 5  # nodes that are started in a loop rather than one by one


def words(name: str, config: RunConfig, sites: Sites | None) -> dict[str, str]:
    """What README.md.in has places for, besides names."""
    clients = config.clients or 1
    names = [f"node-{number}" for number in range(clients)] if sites is None else sites.names
    paths = None if sites is None else sites.paths
    return {
        "clients": str(clients),
        "last": str(clients - 1),
        "model": config.model,
        "method": config.method,
        "folder": f"runs/{name}",
        "data_note": _data_note(config, sites),
        "data_everywhere": _everywhere(config),
        "rehearsal": _rehearsal(paths),
        "make_keys": f"for node in {' '.join(names)}; do python certificates.py node $node; done",
        "register_keys": f"for node in {' '.join(names)}; do\n"
        f"  flwr supernode register certificates/$node.pub {name}\ndone",
        "start_nodes": _nodes(names, paths),
        "site_config": _node_config("0", None if paths is None else "/path/of/this/site"),
    }


def _data_note(config: RunConfig, sites: Sites | None) -> str:
    if sites is None:
        return (
            f"The data set `{config.data}`, dealt out by `{config.partition}`, stands for data of your own: every\n"
            "client takes its part of it by the number of its node. Put your own in place of it: `data` in task.py."
        )
    ends = "the columns that task.py names" if sites.template == "task_table.py" else "arrays `x` and `y`"
    return (
        f"Each client reads its own file, or a folder of files, with {ends}. Which file that is, its node is\n"
        "told when it is started: `data` in its config. A node that is also told of a `test` scores the model on it,\n"
        "if `evaluate-clients` is true."
    )


def _everywhere(config: RunConfig) -> str:
    call = find_dataset(config.data)
    if FACTS[call.name].embedded:
        return ""
    return (
        f" The files of `{call.name}` must lie on every machine, the server's too, in the folder\n"
        "that the environment variable `FEDLOOM_DATA` names where the SuperLink or the node is started."
    )


def _rehearsal(paths: Sequence[str] | None) -> str:
    told = "" if paths is None else "".join(f" \\\n  --node-config 'data=\"{path}\"'" for path in paths)
    return f"fedloom flower simulate .{told}"


def _node_config(number: str, path: str | None) -> str:
    return f'partition-id={number} memory="memory/{number}"' + ("" if path is None else f' data="{path}"')


def _nodes(names: Sequence[str], paths: Sequence[str] | None) -> str:
    if len(names) > MANY and paths is None:
        config = _node_config("$k", None).replace('"', '\\"')
        return (
            f"for k in $(seq 0 {len(names) - 1}); do\n"
            f"  {_node('node-$k', f'$(({FIRST_PORT} + k))')}\n"
            f'    --node-config "{config}" > node-$k.log 2>&1 &\ndone'
        )
    commands = []
    for number, name in enumerate(names):
        config = _node_config(str(number), None if paths is None else paths[number])
        commands.append(f"{_node(name, str(FIRST_PORT + number))}\n  --node-config '{config}'")
    return "\n\n".join(commands)


def _node(name: str, port: str) -> str:
    return (
        "flower-supernode --root-certificates certificates/ca.crt --superlink 127.0.0.1:8000 \\\n"
        f"  --host 127.0.0.1 --port {port} --auth-supernode-private-key certificates/{name}.key \\"
    )
