"""Hands the points of one stage to MLflow or wandb: `python -m kimi_eagle.tracker SPOOL`.

A process of its own, so that whatever these packages do (import for seconds, start threads, wait
for a network, fail) happens beside the run and not in it. It reads the spool, JSON lines that the
coordinator appends:

    {"tracker": "mlflow", "options": {…}, "folder": "…", "name": "RUN/STAGE", "parameters": {…}}
    {"step": 1, "at": 1764576000.5, "values": {"train/loss": 8.03}}
    {"end": "done"}

and ends with the run's coordinator, whether or not that came to write the end.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

_POLL_SECONDS = 0.2
_LONGEST_PARAMETER = 500  # what MLflow takes


class Tracker(Protocol):
    """Where points go."""

    def log(self, step: int, at: float, values: Mapping[str, float]) -> None: ...

    def end(self, *, done: bool) -> None: ...


class Mlflow:
    """One MLflow run."""

    def __init__(self, start: Mapping[str, Any]):
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        options = start["options"]
        store = options.get("tracking_uri") or (Path(start["folder"]) / "store").as_uri()
        if "://" not in store or store.startswith("file:"):
            # Files are all that a run without a server or a database can have; MLflow reads and
            # writes them, and only asks to be told that they are meant.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric = Metric
        self._client = MlflowClient(store)
        experiment = options.get("experiment") or start["manifest"]
        found = self._client.get_experiment_by_name(experiment)
        number = found.experiment_id if found else self._client.create_experiment(experiment)
        self._run = self._client.create_run(
            number, run_name=start["name"], tags={"kimi_eagle.key": start["key"]}
        ).info.run_id
        self._client.log_batch(
            self._run,
            params=[
                Param(name, str(value)[:_LONGEST_PARAMETER])
                for name, value in start["parameters"].items()
            ],
        )

    def log(self, step: int, at: float, values: Mapping[str, float]) -> None:
        milliseconds = int(at * 1000)
        found = [self._metric(tag, value, milliseconds, step) for tag, value in values.items()]
        self._client.log_batch(self._run, metrics=found)

    def end(self, *, done: bool) -> None:
        self._client.set_terminated(self._run, "FINISHED" if done else "FAILED")


class Wandb:
    """One wandb run."""

    def __init__(self, start: Mapping[str, Any]):
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        options = start["options"]
        self._run = wandb.init(
            project=options.get("project") or start["manifest"],
            entity=options.get("entity"),
            mode=options["mode"],
            dir=start["folder"],
            name=start["name"],
            config={**start["parameters"], "key": start["key"]},
            settings=wandb.Settings(silent=True, console="off", disable_git=True),
        )

    def log(self, step: int, at: float, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def end(self, *, done: bool) -> None:
        self._run.finish(exit_code=0 if done else 1)


TRACKERS: Mapping[str, Callable[[Mapping[str, Any]], Tracker]] = {
    "mlflow": Mlflow,
    "wandb": Wandb,
}


def follow(spool: Path, alive: Callable[[], bool]) -> Iterator[dict[str, Any]]:
    """The lines of a spool as they come, up to its end, or to that of who writes it."""
    rest = b""
    with spool.open("rb") as file:
        while True:
            writer_lives = alive()  # asked before the read: what it wrote last is read
            data = file.read()
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                value = json.loads(line)
                yield value
                if "end" in value:
                    return
            if not data:
                if not writer_lives:
                    return
                time.sleep(_POLL_SECONDS)


def main(arguments: list[str]) -> int:
    parent = os.getppid()
    lines = follow(Path(arguments[0]), lambda: os.getppid() == parent)
    start = next(lines)
    tracker = TRACKERS[start["tracker"]](start)
    done = False
    for line in lines:
        if "end" in line:
            done = line["end"] == "done"
        else:
            tracker.log(line["step"], line["at"], line["values"])
    tracker.end(done=done)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
