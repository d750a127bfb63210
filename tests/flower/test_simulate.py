"""`fedloom flower simulate`: the app as it is, the numbers of `fl.fit`, and nothing left behind."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app.user_config import UserConfig
from safetensors.torch import load_file

import fedloom as fl
from tests.command_line import fedloom
from tests.flower.deployment import Deployment
from tests.flower.test_scaffold import DIGITS, contents, init, write_sites

ECHO = Path(__file__).parent / "apps" / "echo"


def simulate(app: Path, *options: str, code: int = 0) -> str:
    """What the command says, of rounds and of what is wrong."""
    done = fedloom("flower", "simulate", str(app), *options, cwd=app.parent)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def app(tmp_path: Path) -> Path:
    init(tmp_path / "myapp", *DIGITS, "--method", "adabest", "--rounds", "3", "--epochs", "2", "--seed", "5")
    return tmp_path / "myapp"


def test_the_numbers_are_those_of_fit(app: Path, tmp_path: Path) -> None:
    said = simulate(app, "--out", "kept")
    federation = fl.load("digits", "classes(per_client=4)", 3, 5)
    local = fl.Local(epochs=2, batch_size=32, lr=0.1)
    fitted = fl.fit(
        fl.model("mlp(hidden=[8])", federation, 5),
        federation,
        "adabest",
        rounds=3,
        clients_per_round=1.0,
        local=local,
        seed=5,
        engine="loop",
        device="cpu",
    )
    last = fitted.history[-1]
    assert f"round 3 of 3: 3 of 3 answered, train loss {last['train_loss']:.4f}" in said
    ending = said.strip().splitlines()[-1]
    assert ending.startswith(f"round 3: test_loss {last['test_loss']:.4f}, test_accuracy {last['test_accuracy']:.4f}; ")
    assert ending.endswith(f"the run is in {tmp_path / 'kept' / 'run'}")
    played = load_file(tmp_path / "kept" / "run" / "model.safetensors")
    for name, value in fitted.model.state_dict().items():
        torch.testing.assert_close(played[name], value, rtol=1e-6, atol=1e-7)
    assert sorted(path.name for path in (tmp_path / "kept" / "memory").iterdir()) == ["0", "1", "2"]


def test_it_leaves_nothing_behind_and_changes_nothing(app: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = app / "runs" / "myapp"
    real.mkdir(parents=True)
    (real / "roster.json").write_text("the real deployment's")
    monkeypatch.chdir(app)
    before, modules, path = contents(app), set(sys.modules), list(sys.path)
    said = simulate(app, "--rounds", "1", "lr=0.05", "method=fedavg")
    assert "fedavg: 3 clients" in said
    assert "round 1 of 1" in said
    assert "nothing was kept" in said
    assert contents(app) == before
    assert not {name for name in set(sys.modules) - modules if name.partition(".")[0] in ("myapp", "certificates")}
    assert sys.path == path


def test_another_app_of_the_same_name_and_an_edited_one(app: Path, tmp_path: Path) -> None:
    first = simulate(app, "--rounds", "1")
    (tmp_path / "other").mkdir()
    init(tmp_path / "other" / "myapp", *DIGITS[:-1], "mlp(hidden=[4])", "--method", "fedavg")
    assert "fedavg: 3 clients" in simulate(tmp_path / "other" / "myapp", "--rounds", "1")
    assert _rounds(simulate(app, "--rounds", "1")) == _rounds(first)
    task = app / "myapp" / "task.py"
    task.write_text(task.read_text().replace("hidden=[8]", "hidden=[9]"))  # as long as before, in the same second
    assert _rounds(simulate(app, "--rounds", "1")) != _rounds(first)


def _rounds(said: str) -> list[str]:
    return re.findall(r"^round \d+ of .*$", said, flags=re.MULTILINE)


def test_an_app_of_flowers_own_kind() -> None:
    said = simulate(ECHO, "--nodes", "2", "--rounds", "2")
    assert said.count('"event": "reply"') == 4
    assert "the app has ended; 2 nodes, 4 messages" in said


SERVER = """
import numpy as np
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()

@app.main()
def main(grid, context):
    rounds = context.run_config["num-server-rounds"]
    done = FedAvg(fraction_evaluate=0.0).start(grid, ArrayRecord([np.zeros(3)]), rounds)
    print("ended with", done.arrays.to_numpy_ndarrays()[0])
"""
CLIENT = """
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()

@app.train()
def train(message, context):
    number = context.node_config["partition-id"]
    (w,) = message.content["arrays"].to_numpy_ndarrays()
    records = {"arrays": ArrayRecord([w + number]), "metrics": MetricRecord({"num-examples": 4 // number})}
    return Message(RecordDict(records), reply_to=message)
"""
MANIFEST = """
[tool.flwr.app.components]
serverapp = "server:app"
clientapp = "client:app"
[tool.flwr.app.config]
num-server-rounds = 5
"""


def test_an_app_with_flowers_own_strategy_and_one_client_that_fails(tmp_path: Path) -> None:
    for name, text in (("server.py", SERVER), ("client.py", CLIENT), ("pyproject.toml", MANIFEST)):
        (tmp_path / name).write_text(text)
    partitions = [word for number in (1, 2) for word in ("--node-config", f"partition-id={number}")]
    said = simulate(tmp_path, *partitions, "--rounds", "3")
    assert "ended with [4. 4. 4.]" in said  # three times the mean of 1 and 2, weighted by 4 and 2 examples
    assert "the app has ended; 2 nodes, 6 messages" in said
    assert "kept" not in said
    said = simulate(tmp_path, "--nodes", "3", "--rounds", "1", code=2)
    assert "fedloom: the ClientApp failed at 1 of 3 messages, first in client.py, line 11, in train: Zero" in said
    assert "how many nodes?" in simulate(tmp_path, code=2)


def test_the_files_of_sites(tmp_path: Path) -> None:
    table = write_sites(tmp_path / "sites")
    options = ("--data", "folder(path='sites', label='outcome')", "--model", "logistic", "--rounds", "3")
    init(tmp_path / "icu", *options)
    readme = (tmp_path / "icu" / "README.md").read_text()
    told = re.findall(r"^ {2}--node-config '(data=[^']*)'", readme, flags=re.MULTILINE)
    assert len(told) == 3
    command = [word for text in told for word in ("--node-config", text)]
    done = fedloom("flower", "simulate", ".", *command, "--out", "kept", cwd=tmp_path / "icu")
    assert done.returncode == 0, done.stderr
    assert "fedavg: 3 clients, 120 samples" in done.stdout
    x = ((table[["age", "pulse"]] - table[["age", "pulse"]].mean()) / table[["age", "pulse"]].std(ddof=0)).to_numpy()
    y = np.array(table.outcome.map({"better": 0, "same": 1, "worse": 2}))
    federation = fl.Federation.from_tensor(x.astype(np.float32), y, [0, 40, 80, 120], classes=3)
    model = fl.model("logistic", federation, 0)
    fitted = fl.fit(model, federation, rounds=3, clients_per_round=1.0, local=fl.Local(lr=0.1), engine="loop")
    played = load_file(tmp_path / "icu" / "kept" / "run" / "model.safetensors")
    for name, value in fitted.model.state_dict().items():
        torch.testing.assert_close(played[name], value, rtol=1e-4, atol=1e-5)


def test_arrays_of_sites(tmp_path: Path) -> None:
    (tmp_path / "sites").mkdir()
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        pixels = rng.integers(0, 256, (20, 1, 12, 12)).astype(np.uint8)
        np.savez(tmp_path / "sites" / f"{name}.npz", x=pixels, y=rng.integers(0, 3, 20))
    init(tmp_path / "eyes", "--data", "./sites", "--model", "lenet5", "--rounds", "1")
    told = [word for name in ("a", "b") for word in ("--node-config", f'data="{tmp_path}/sites/{name}.npz"')]
    said = simulate(tmp_path / "eyes", *told)
    assert "round 1 of 1: 2 of 2 answered" in said
    assert "this node was not told where its data are" in simulate(tmp_path / "eyes", code=2)


def edited(old: str, new: str, file: str = "myapp/task.py") -> Callable[[Path], None]:
    def edit(app: Path) -> None:
        text = (app / file).read_text()
        assert old in text
        (app / file).write_text(text.replace(old, new))

    return edit


OWN = 'federation(context).only(torch.tensor([int(context.node_config["partition-id"])]))'


@pytest.mark.parametrize(
    ("edit", "options", "sentences"),
    [
        (edited(OWN, "federation(context)"), (), ("has its own data only, but these are of 3 clients",)),
        (edited(OWN, "(torch.zeros(0, 64), torch.zeros(0))"), (), ("has no samples", "only 0 of 3 clients")),
        (
            edited("fl.model(MODEL", 'fl.model(MODEL if context.node_config else "mlp"'),
            (),
            ("another model than the server",),
        ),
        (edited(OWN, "1 / 0"), (), ("in myapp/task.py, line 27, in data: ZeroDivisionError",)),
        (edited("return federation(context)\n", "return 1 / 0\n"), (), ("ServerApp failed in myapp/task.py, line 32",)),
        (edited("MODEL =", "MODEL = ="), (), ("myapp/task.py, line 15: SyntaxError",)),
        (edited("import fedloom", "import fedlooom"), (), ("can't be imported in myapp/task.py", "fedlooom")),
        (edited("server_app:app", "server_app:ap", "pyproject.toml"), (), ("myapp.server_app has no ap",)),
        (edited("server_app:app", "client_app:app", "pyproject.toml"), (), ("is a ClientApp, not a ServerApp",)),
        (edited("clientapp =", "client =", "pyproject.toml"), (), ("has no clientapp",)),
        (edited("rounds = 3", "rounds = =", "pyproject.toml"), (), ("pyproject.toml can't be read",)),
        (edited("", ""), ("clients=5",), ("only 3 of 5 clients",)),
        (edited("", ""), ("--nodes", "2"), ("only 2 of 3 clients",)),
        (edited("", ""), ("round=5",), ("the app has no setting 'round': did you mean rounds?",)),
        (edited("", ""), ("method=fedavgg",), ("unknown method 'fedavgg'",)),
        (edited("", ""), ("lr",), ("'lr' is not of the form name=value",)),
        (edited("", ""), ("--node-config", "a=1", "--nodes", "3"), ("one --node-config for each node",)),
        (edited("", ""), ("--out", "."), ("exists already",)),
    ],
)
def test_what_users_get_wrong(
    app: Path, edit: Callable[[Path], None], options: tuple[str, ...], sentences: tuple[str, ...]
) -> None:
    edit(app)
    nodes = ("clients=5", "--nodes", "3") if options == ("clients=5",) else options
    done: Any = fedloom("flower", "simulate", str(app), *nodes, cwd=app.parent)
    assert done.returncode == 2, done.stdout
    assert done.stderr.count("fedloom: ") == 1
    for sentence in sentences:
        assert sentence in done.stdout + done.stderr


def test_no_app_at_all(tmp_path: Path) -> None:
    assert "is no Flower app" in simulate(tmp_path, code=2)


@pytest.mark.long
def test_a_deployment_of_the_app_ends_with_the_same_parameters(app: Path, tmp_path: Path) -> None:
    simulate(app, "--out", "kept")
    memories: dict[int, UserConfig] = {number: {"memory": str(tmp_path / f"memory-{number}")} for number in range(3)}
    with Deployment(tmp_path / "flower", nodes=3, node_configs=memories) as deployment:
        run = deployment.run(app, folder=str(tmp_path / "deployed"))
        assert deployment.wait(run, timeout=240) == "finished:completed", deployment.log(run)
    deployed = load_file(tmp_path / "deployed" / "model.safetensors")
    played = load_file(tmp_path / "kept" / "run" / "model.safetensors")
    assert deployed.keys() == played.keys()
    for name, value in played.items():
        torch.testing.assert_close(deployed[name], value, rtol=0, atol=0)
    assert all((tmp_path / f"memory-{number}").is_dir() for number in range(3))
