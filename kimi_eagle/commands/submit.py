"""`kimi-eagle submit`: run a manifest; what is unchanged is reused."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING

from kimi_eagle.commands.parsing import DONE, Subparsers, add_manifest, code_of, command

if TYPE_CHECKING:
    from kimi_eagle.outcome import Reporter, RunOutcome
    from kimi_eagle.progress import PlainReporter


# As `manifest.execution` has them, which takes longer to import than to parse a command line.
KINDS = ("local", "ray", "slurm")


def add(commands: Subparsers) -> None:
    parser = command(commands, "submit", run, "run a manifest; what is unchanged is reused")
    add_manifest(parser)
    parser.add_argument(
        "--executor",
        choices=KINDS,
        help="where stages run, in place of what the manifest says; its settings are given as "
        "--set executor.address=… and so on",
    )
    parser.add_argument(
        "--detach",
        action="store_true",
        help="go on without the terminal; print the run's id once it is in the registry",
    )


def run(options: argparse.Namespace) -> int:
    if options.detach:
        return _detach(options)
    from kimi_eagle.progress import reporter

    with reporter() as told, _telling_of_the_stop(told):
        outcome = _submit(options, told)
    return _show(options, outcome)


def _submit(options: argparse.Namespace, reporter: Reporter) -> RunOutcome:
    from kimi_eagle import app

    overrides = app.placed(options.manifest, options.overrides, options.executor)
    return app.submit(options.root, options.manifest, overrides, reporter)


def _show(options: argparse.Namespace, outcome: RunOutcome) -> int:
    from kimi_eagle import render

    with render.while_read(sys.stdout):
        render.outcome(outcome, as_json=options.json)
    return code_of(outcome.status)


@contextmanager
def _telling_of_the_stop(reporter: PlainReporter) -> Iterator[None]:
    """Say on the first ctrl-c what it does, and what another one does."""

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if reporter.begun:
            # It may come in the midst of a line being written, which Python refuses to nest.
            with suppress(RuntimeError):
                reporter.note("stopping in good order; ctrl-c again ends the stage at once")
        signal.default_int_handler(number, frame)

    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _detach(options: argparse.Namespace) -> int:
    """Submit in a child with a session of its own, which no terminal can end or interrupt."""
    from kimi_eagle import render

    run_id, code = detached(lambda reporter: _show(options, _submit(options, reporter)))
    if run_id:
        with render.while_read(sys.stdout):
            render.detached(run_id, options.root, as_json=options.json)
    return code


def detached(coordinate: Callable[[Reporter], int]) -> tuple[str, int]:
    """Coordinate a run in a child with a session of its own.

    Returns the run's id as soon as it has begun, or nothing and the child's exit code, which has
    said why by then.
    """
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        os.close(reader)
        sys.exit(_apart(coordinate, writer))
    os.close(writer)
    try:
        with open(reader, encoding="utf-8") as pipe:
            run_id = pipe.read()
        if not run_id:
            return "", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    except KeyboardInterrupt:
        os.kill(child, signal.SIGTERM)
        os.waitpid(child, 0)
        raise
    return run_id, DONE


def _apart(coordinate: Callable[[Reporter], int], announce: int) -> int:
    """The child's part: up to the run's beginning it speaks where its parent would."""
    from kimi_eagle.progress import DetachedReporter

    os.setsid()
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    return coordinate(DetachedReporter(announce))
