"""The command line: `fedloom run`, `compare`, `reproduce` and the rest."""

import io
import logging
import sys
import typing

import click

from fedloom.cli import flower, train, view
from fedloom.cli.app import app, out
from fedloom.errors import FedloomError
from fedloom.stopping import why

__all__ = ["app", "flower", "main", "train", "view"]
INTERRUPTED = 130


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
        out.print(error.format_message())
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
