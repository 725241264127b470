"""`kimi-eagle logs`: show what a run, or one stage of it, has printed."""

from __future__ import annotations

import argparse
import sys

from kimi_eagle.commands.parsing import DONE, Subparsers, add_run, command


def add(commands: Subparsers) -> None:
    parser = command(
        commands, "logs", run, "show what a run, or one stage of it, has printed", json=False
    )
    add_run(parser)
    parser.add_argument("stage", nargs="?", metavar="STAGE", help="a stage, by its name")
    parser.add_argument(
        "-f", "--follow", action="store_true", help="go on until the stage, or the run, ends"
    )


def run(options: argparse.Namespace) -> int:
    from kimi_eagle.batch import Batch
    from kimi_eagle.follow import follow_text
    from kimi_eagle.progress import PlainReporter
    from kimi_eagle.terminal import while_read

    with Batch(options.root) as batch:
        found = batch.run(options.run)
        submit_log = batch.submit_log(found)
        if options.stage is not None:
            log = batch.stage_log(found, options.stage)
            if log.made_by is not None:
                print(f"{options.stage} was made by run {log.made_by}; its log:", file=sys.stderr)
            elif not log.path.exists() and not options.follow:
                print(f"{options.stage} has not begun", file=sys.stderr)
            text = log.text(follow=options.follow)
        elif submit_log is not None:
            text = follow_text(submit_log, lambda: not options.follow or batch.over(found))
        else:
            with while_read(sys.stdout):
                batch.tell(found, PlainReporter(sys.stdout), follow=options.follow)
            return DONE
        with while_read(sys.stdout):
            for part in text:
                sys.stdout.write(part)
                sys.stdout.flush()
    return DONE
