"""`fedloom flower init`: what it writes is whole and safe, what can't be trained is refused before it is written."""

import json
import re
import ssl
import stat
import subprocess
import sys
import tomllib
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any

import flwr
import numpy as np
import pandas as pd
import pytest
from flwr.cli.build import build_fab_from_disk
from flwr.cli.config_utils import load_and_validate

from tests.command_line import fedloom

DIGITS = ("--data", "digits", "--partition", "classes(per_client=4)", "--clients", "3", "--model", "mlp(hidden=[8])")


def init(folder: Path, *options: str, code: int = 0) -> str:
    """What the command says, of itself or of what is wrong."""
    done = fedloom("flower", "init", folder.name, *(options or DIGITS), cwd=folder.parent)
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


def config_of(app: Path) -> dict[str, Any]:
    config = tomllib.loads((app / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    assert isinstance(config, dict)
    return config


def contents(app: Path) -> dict[str, bytes]:
    return {str(file.relative_to(app)): file.read_bytes() for file in app.rglob("*") if file.is_file()}


def test_as_many_clients_as_a_run_would_take(tmp_path: Path) -> None:
    init(tmp_path / "few", *DIGITS, "--per-round", "none")
    assert config_of(tmp_path / "few")["clients-per-round"] == 3
    init(tmp_path / "many", "--data", "digits", "--clients", "20", "--model", "logistic", "--per-round", "none")
    assert config_of(tmp_path / "many")["clients-per-round"] == 10


def write_sites(folder: Path) -> pd.DataFrame:
    """Three hospitals, the last of which has never seen the third outcome."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    parts = []
    for number, name in enumerate(("north", "south", "west")):
        age, pulse = rng.normal(60, 15, 40), rng.normal(80, 10, 40)
        known = ["better", "same", "worse"][: 3 - (number == 2)]
        table = pd.DataFrame({"age": age, "pulse": pulse, "outcome": rng.choice(known, 40)})
        table.to_csv(folder / f"{name}.csv", index=False)
        parts.append(table)
    return pd.concat(parts)


def test_an_app_is_small_complete_and_always_the_same(tmp_path: Path) -> None:
    said = init(tmp_path / "myapp", *DIGITS, "--method", "adabest + fedglad", "--rounds", "7", "--lr", "0.05")
    app = tmp_path / "myapp"
    assert "myapp/README.md says how" in said
    assert sum(len(file.read_text().splitlines()) for file in app.rglob("*.py")) < 150
    config = config_of(app)
    expected = {"method": "adabest + fedglad", "clients": 3, "clients-per-round": 1.0, "rounds": 7, "lr": 0.05}
    assert expected.items() <= config.items()
    assert {"folder": "runs/myapp", "resume": True, "round-timeout": 3600.0, "min-replies": 1}.items() <= config.items()
    lines = (app / "pyproject.toml").read_text().partition("[tool.flwr.app.config]\n")[2].splitlines()
    assert len(lines) == len(config)
    assert all("  # " in line for line in lines)
    (tmp_path / "again").mkdir()
    init(tmp_path / "again" / "myapp", *DIGITS, "--method", "adabest + fedglad", "--rounds", "7", "--lr", "0.05")
    assert contents(app) == contents(tmp_path / "again" / "myapp")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_flower_takes_the_app_and_sends_nothing_private(tmp_path: Path) -> None:
    app = tmp_path / "my-app"
    init(app)
    subprocess.run([sys.executable, "certificates.py", "server", "localhost"], cwd=app, check=True, timeout=60)
    for private in ("runs/my-app/config.yaml", "runs/my-app/roster.json", "memory/0/x.json", "certificates/y.md"):
        (app / private).parent.mkdir(parents=True, exist_ok=True)
        (app / private).write_text("private")
    _, warnings = load_and_validate(app / "pyproject.toml")
    assert not warnings
    with zipfile.ZipFile(BytesIO(build_fab_from_disk(app))) as sent:
        names = {name for name in sent.namelist() if not name.startswith(".info")}
    package = {f"my_app/{name}.py" for name in ("__init__", "task", "server_app", "client_app")}
    assert names == package | {"pyproject.toml", "README.md", "certificates.py"}


def test_the_readme_is_safe_and_all_of_its_options_exist(tmp_path: Path) -> None:
    init(tmp_path / "myapp")
    text = (tmp_path / "myapp" / "README.md").read_text()
    assert "insecure" not in text
    assert "$name" not in text
    commands = re.findall(r"^flower-(superlink|supernode)((?:.*\\\n)*.*)$", text, flags=re.MULTILINE)
    assert [name for name, _ in commands] == ["superlink", *3 * ["supernode"], "superlink", "supernode"]
    for name, options in commands:
        written = set(re.findall(r"(?<=\s)--[a-z-]+", options))
        assert written
        needed = {"--enable-supernode-auth", "--ssl-keyfile", "--ssl-certfile", "--ssl-ca-certfile"}
        assert written >= (needed if name == "superlink" else {"--root-certificates", "--auth-supernode-private-key"})
        known = _options(name)
        assert written <= known


def _options(name: str) -> set[str]:
    """What Flower's command takes, read from its source: to import it takes seconds."""
    root = Path(str(flwr.__file__)).parent
    sources = [root / name / "cli" / f"flower_{name}.py", root / "common" / "args.py"]
    return {word for source in sources for word in re.findall(r'"(--[a-z-]+)"', source.read_text())}


def test_certificates_hold_for_their_names_only(tmp_path: Path) -> None:
    app = tmp_path / "myapp"
    init(app)

    def make(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "certificates.py", *arguments]
        return subprocess.run(command, cwd=app, capture_output=True, text=True, timeout=60)

    assert make("server", "fl.example.org", "127.0.0.1").returncode == 0
    assert make("node", "north").returncode == 0
    folder = app / "certificates"
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()}
    assert modes == {"ca.crt": 0o644, "server.pem": 0o644, "server.key": 0o600, "north.key": 0o600, "north.pub": 0o644}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    before = contents(folder)
    for again in (("server", "localhost"), ("node", "north")):
        refused = make(*again)
        assert refused.returncode == 1
        assert "exists already" in refused.stderr
    assert make("node", "../x").returncode == 1
    assert contents(folder) == before
    for host in ("fl.example.org", "127.0.0.1"):
        _shake_hands(folder, host)
    with pytest.raises(ssl.SSLCertVerificationError, match=r"[Hh]ostname mismatch"):
        _shake_hands(folder, "other.example.org")


def _shake_hands(folder: Path, host: str) -> None:
    """TLS in memory, with a client that trusts this authority alone."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / "server.pem", folder / "server.key")
    client = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_hostname=host),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    while ends:
        for end in list(ends):
            try:
                end.do_handshake()
                ends.remove(end)
            except ssl.SSLWantReadError:
                pass


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--method", "fedprx"), "did you mean fedprox"),
        (("--method", "fedadam+fedyogi"), "fedadam"),
        (("--model", "mlpp"), "did you mean mlp?"),
        (("--model", "lenet5"), "lenet5 reads images"),
        (("--data", "digit"), "did you mean digits?"),
        (("--data", "./nowhere"), "nowhere is no folder"),
        (("--data", "table(path='x.csv', client='ward', label='y')"), "each site has a file of its own"),
        (("--partition", "classes(per_client=1)"), "can't hold all 10 classes"),
        (("--clients", "0"), "clients"),
        (("--per-round", "4"), "clients_per_round=4 must be between 1 and the number of clients, 3"),
        (("--per-round", "0"), "clients_per_round=0 must be between 1 and the number of clients, 3"),
        (("--batch-size", "0"), "batch_size"),
        (("--lr", "-1"), "lr"),
        (("--rounds", "0"), "rounds"),
        (("--metric", "acuracy"), "accuracy"),
        (("--publisher", "a b"), "--publisher"),
    ],
)
def test_what_can_not_be_trained_is_not_written(tmp_path: Path, options: tuple[str, str], sentence: str) -> None:
    known = dict(zip(DIGITS[::2], DIGITS[1::2], strict=True)) | dict([options])
    said = init(tmp_path / "myapp", *(word for pair in known.items() for word in pair), code=2)
    assert sentence in said
    assert said.startswith("fedloom: ")
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["my_app", "1app", "app.v2", "class", "torch", "json", "a" * 33, "größe"])
def test_names_that_are_no_names(tmp_path: Path, name: str) -> None:
    assert repr(name) in init(tmp_path / name, code=2)
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_stays(tmp_path: Path) -> None:
    app = tmp_path / "myapp"
    app.mkdir()
    (app / "mine").write_text("mine")
    assert "exists already" in init(app, code=2)
    assert contents(app) == {"mine": b"mine"}
    assert list(tmp_path.iterdir()) == [app]


def test_an_app_for_the_files_of_sites(tmp_path: Path) -> None:
    table = write_sites(tmp_path / "sites")
    init(tmp_path / "icu", "--data", "folder(path='sites', label='outcome')", "--model", "logistic", "--rounds", "2")
    task = (tmp_path / "icu" / "icu" / "task.py").read_text()
    known: dict[str, Any] = {}
    exec(task, known)
    assert known["CLASSES"] == ["better", "same", "worse"]
    for name in ("age", "pulse"):
        np.testing.assert_allclose(known["COLUMNS"][name], (table[name].mean(), table[name].std(ddof=0)), rtol=1e-4)
    x, y = known["read"](tmp_path / "sites")  # all files of a folder
    np.testing.assert_allclose(x[:, 1], (table.pulse - table.pulse.mean()) / table.pulse.std(ddof=0), atol=1e-4)
    assert y.tolist() == [["better", "same", "worse"].index(name) for name in table.outcome]
    (tmp_path / "sites" / "north.csv").write_text("age,pulse,outcome\n50,70,dead\n")
    with pytest.raises(Exception, match="none of"):
        known["read"](tmp_path / "sites" / "north.csv")
    text = (tmp_path / "icu" / "README.md").read_text()
    assert """--node-config 'data="../sites/south.csv"'""" in text
    assert "certificates/south.pub" not in text  # by a loop over the names
    assert "for node in north south west; do" in text


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({"a.csv": "x,label\n1,0.5\n2,0.7\n"}, "no classes"),
        ({"a.csv": "x,y\n1,0\n"}, "has no column 'label'"),
        ({"a.txt": "x"}, "holds no file"),
        ({"a.csv": "x,label\n1,0\n2,1\n", "b.csv": "z,label\n1,0\n"}, "z"),
    ],
)
def test_examples_of_sites_that_are_none(tmp_path: Path, files: dict[str, str], sentence: str) -> None:
    (tmp_path / "sites").mkdir()
    for name, text in files.items():
        (tmp_path / "sites" / name).write_text(text)
    assert sentence in init(tmp_path / "icu", "--data", "./sites", "--model", "logistic", code=2)
    assert not (tmp_path / "icu").exists()


def test_settings_survive_their_way_through_toml(tmp_path: Path) -> None:
    method = "fedprox(mu=1e-05) + fedadam(lr=0.1)"
    init(tmp_path / "myapp", *DIGITS, "--method", method, "--lr", "1e-05", "--seed", "7")
    config = config_of(tmp_path / "myapp")
    assert (config["method"], config["lr"], config["seed"]) == (method, 1e-05, 7)
    assert json.loads(json.dumps(config)) == config
