"""The grid in one process: what a wire guarantees, it guarantees too."""

from importlib.metadata import PackageNotFoundError

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedloom.errors import ConfigError, FedloomError
from fedloom.flower import version
from fedloom.flower.grid import LocalGrid


def _messages(grid: LocalGrid, content: RecordDict, kind: str = "train") -> list[Message]:
    return [Message(content, node, kind) for node in grid.get_node_ids()]


def _content(values: list[float]) -> RecordDict:
    return RecordDict(
        {
            "arrays": ArrayRecord({"w": Array(np.array(values))}),
            "config": ConfigRecord({"server-round": 1, "list": [1]}),
        }
    )


def test_every_node_knows_its_partition_and_both_configs() -> None:
    app = ClientApp()

    @app.query()
    def tell(message: Message, context: Context) -> Message:
        told = {**context.node_config, **context.run_config, "node": context.node_id}
        return Message(RecordDict({"told": ConfigRecord(told)}), reply_to=message)  # type: ignore[arg-type]

    grid = LocalGrid.of_app(app, 3, node_config=lambda k: {"city": f"c{k}"}, run_config={"lr": 0.5})
    replies = grid.send_and_receive(_messages(grid, RecordDict(), "query"))
    told = [dict(reply.content.config_records["told"].items()) for reply in replies]
    assert [t["partition-id"] for t in told] == [0, 1, 2]
    assert [t["city"] for t in told] == ["c0", "c1", "c2"]
    assert all(t["num-partitions"] == 3 and t["lr"] == 0.5 for t in told)
    assert [t["node"] for t in told] == grid.get_node_ids() == [r.metadata.src_node_id for r in replies]
    assert not set(grid.get_node_ids()) & {0, 1, 2}


def test_state_lasts_over_messages_and_belongs_to_one_node() -> None:
    app, kept = ClientApp(), []

    @app.train()
    def count(message: Message, context: Context) -> Message:
        seen = context.state.metric_records.get("seen", MetricRecord({"times": 0}))
        context.state["seen"] = MetricRecord({"times": int(seen["times"]) + 1})  # type: ignore[arg-type]
        kept.append(context.state)
        reply = Message(RecordDict({"seen": context.state.metric_records["seen"]}), reply_to=message)
        return reply

    grid = LocalGrid.of_app(app, 2)
    first, second = grid.get_node_ids()
    for _ in range(2):
        grid.send_and_receive([Message(RecordDict(), first, "train")])
    kept[-1]["seen"] = MetricRecord({"times": 100})  # a process that is gone can't change what its node keeps
    replies = grid.send_and_receive([Message(RecordDict(), node, "train") for node in (first, second)])
    assert [reply.content.metric_records["seen"]["times"] for reply in replies] == [3, 1]


def test_what_an_app_raises_is_an_error_reply_and_its_state_is_kept() -> None:
    app = ClientApp()

    @app.train()
    def fail(message: Message, context: Context) -> Message:
        context.state["tried"] = MetricRecord({"yes": 1})
        if context.node_config["partition-id"] == 1:
            raise ZeroDivisionError("no data")
        return Message(RecordDict(), reply_to=message)

    @app.query()
    def tried(message: Message, context: Context) -> Message:
        return Message(RecordDict(dict(context.state.items())), reply_to=message)

    grid = LocalGrid.of_app(app, 2)
    good, bad = grid.send_and_receive(_messages(grid, RecordDict()))
    assert good.has_content()
    assert bad.error.code == 2  # CLIENT_APP_RAISED_EXCEPTION, as a SuperNode answers
    assert bad.error.reason == "<class 'ZeroDivisionError'>:<'no data'>"
    assert all("tried" in reply.content for reply in grid.send_and_receive(_messages(grid, RecordDict(), "query")))


@pytest.mark.parametrize("returned", ["nothing", "itself", "unregistered"])
def test_an_app_that_does_not_reply_is_an_error_reply(returned: str) -> None:
    app = ClientApp()

    @app.train()
    def wrong(message: Message, context: Context) -> Message:
        return None if returned == "nothing" else message  # type: ignore[return-value]

    grid = LocalGrid.of_app(app, 2)
    kind = "train.other" if returned == "unregistered" else "train"
    replies = grid.send_and_receive(_messages(grid, RecordDict(), kind))
    assert [reply.error.code for reply in replies] == [2, 2]


def test_messages_share_nothing_that_can_change() -> None:
    app, seen, sent = ClientApp(), [], []

    @app.train()
    def spoil(message: Message, context: Context) -> Message:
        arrays, config = message.content.array_records["arrays"], message.content.config_records["config"]
        seen.append((arrays["w"].numpy().tolist(), list(config["list"])))  # type: ignore[arg-type]
        arrays["w"].data = Array(np.zeros(2)).data
        config["list"].append(2)  # type: ignore[union-attr, arg-type]
        config["server-round"] = 99
        reply = Message(RecordDict({"arrays": ArrayRecord({"w": Array(np.ones(2))})}), reply_to=message)
        sent.append(reply)
        return reply

    grid = LocalGrid.of_app(app, 2)
    content = _content([1.0, 2.0])  # one RecordDict in all messages, as Flower's strategies send it
    replies = grid.send_and_receive(_messages(grid, content))
    assert seen == [([1.0, 2.0], [1])] * 2
    assert content.array_records["arrays"]["w"].numpy().tolist() == [1.0, 2.0]
    assert dict(content.config_records["config"].items()) == {"server-round": 1, "list": [1]}
    sent[0].content.array_records["arrays"]["w"].data = b"spoiled"
    assert replies[0].content.array_records["arrays"]["w"].numpy().tolist() == [1.0, 1.0]


def test_replies_are_pulled_once_and_by_their_message() -> None:
    app = ClientApp()

    @app.train()
    def echo(message: Message, context: Context) -> Message:
        return Message(message.content, reply_to=message)

    grid = LocalGrid.of_app(app, 3)
    messages = _messages(grid, _content([1.0]))
    ids = grid.push_messages(iter(messages))
    assert len(set(ids)) == 3
    assert ids == [message.metadata.message_id for message in messages]
    (second,) = grid.pull_messages([ids[1], ids[1]])
    assert second.metadata.reply_to_message_id == ids[1]
    assert [reply.metadata.reply_to_message_id for reply in grid.pull_messages(ids)] == [ids[0], ids[2]]
    assert grid.pull_messages(ids) == []


def test_another_run_starts_with_empty_states() -> None:
    app = ClientApp()

    @app.query()
    def known(message: Message, context: Context) -> Message:
        before = len(context.state)
        context.state["here"] = ConfigRecord({"run": context.run_id})
        return Message(RecordDict({"known": MetricRecord({"before": before})}), reply_to=message)

    grid = LocalGrid.of_app(app, 1)
    own, found = grid.run, []
    other = grid.run
    other.run_id = own.run_id + 1
    for run in (own, own, other, own):
        grid.set_run(run)
        (reply,) = grid.send_and_receive(_messages(grid, RecordDict(), "query"))
        assert reply.metadata.run_id == grid.run.run_id == run.run_id
        found.append(reply.content.metric_records["known"]["before"])
    assert found == [0, 1, 0, 1]


def test_unknown_nodes_and_counts_are_refused() -> None:
    grid = LocalGrid.of_app(ClientApp(), 2)
    with pytest.raises(ConfigError, match=r"node 7, but the nodes are .* get_node_ids"):
        grid.push_messages([Message(RecordDict(), 7, "train")])
    with pytest.raises(ConfigError, match="at least 1, not 0"):
        LocalGrid.of_app(ClientApp(), 0)
    created = grid.create_message(RecordDict(), "train", grid.get_node_ids()[0], "1")
    assert grid.send_and_receive([created])[0].has_error()


@pytest.mark.parametrize("found", ["1.40.3", "1.43.0", "2.0.0"])
def test_other_versions_of_flower_are_refused(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version, "version", lambda name: found)
    with pytest.raises(FedloomError, match=rf"Flower {found} is installed.*>= 1\.41 and < 1\.43"):
        version.flower_version()


def test_a_missing_flower_is_told_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(version, "version", missing)
    with pytest.raises(FedloomError, match=r"needs Flower: pip install 'fedloom\[flower\]'"):
        version.flower_version()
