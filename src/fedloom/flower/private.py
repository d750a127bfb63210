"""The only file that reaches into Flower's private parts.

A deployment tells each process who it is before it builds a message; in process nobody does, so we do.
"""

from fedloom.flower.version import FLOWER

# isort: split
from flwr.app import Error, Message, Metadata, RecordDict
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

__all__ = ["FLOWER", "Run", "as_sent", "failure", "identify", "join_run", "mark"]


def identify() -> Run:
    """Let this process build messages, as the server; who it already is, it stays. The run that it belongs to."""
    for name, value in {"task_id": 1, "run_id": 1, "node_id": SUPERLINK_NODE_ID}.items():
        if getattr(TaskIdentity, f"_{name}") is None:
            setattr(TaskIdentity, name, value)
    return Run.create_empty(TaskIdentity.run_id)


def join_run(run: Run) -> None:
    """From now on this process builds messages of this run."""
    TaskIdentity.run_id = run.run_id


def mark(message: Message, message_id: str) -> None:
    """Give a message its id, which a link does when it takes it."""
    message.metadata.__dict__["_message_id"] = message_id


def as_sent(message: Message, content: RecordDict | None) -> Message:
    """The same message as it arrives elsewhere: its own metadata, and this content in place of the sender's."""
    metadata = message.metadata
    own = Metadata(
        run_id=metadata.run_id,
        message_id=metadata.message_id,
        src_node_id=metadata.src_node_id,
        dst_node_id=metadata.dst_node_id,
        reply_to_message_id=metadata.reply_to_message_id,
        group_id=metadata.group_id,
        created_at=metadata.created_at,
        ttl=metadata.ttl,
        message_type=metadata.message_type,
        src_task_id=metadata.src_task_id,
        dst_task_id=metadata.dst_task_id,
    )
    error = message.error if message.has_error() else None
    return Message(metadata=own, content=content, error=error)  # type: ignore[call-overload, no-any-return]


def failure(message: Message, error: Exception) -> Message:
    """What a node answers when its app raises: the code and the wording of Flower's own nodes."""
    reason = f"{type(error)}:<'{error}'>"
    return Message(Error(code=ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason=reason), reply_to=message)
