"""Progress of a run, told as it goes: a moving bar on a terminal, plain lines elsewhere.

draft  ━━━━━━━━━━━───────────────  120/400 steps  eta 0:31  loss 2.31  full_acc 0.61 0.42 0.30
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from kimi_eagle.outcome import StageOutcome
from kimi_eagle.plan import StagePlan
from kimi_eagle.records import ExecutionRecord
from kimi_eagle.terminal import (
    cells,
    coloured,
    columns,
    cut,
    human_seconds,
    human_size,
    paint,
    plain,
    while_read,
)

SUBMIT_LOG = "submit.log"
"""What the coordinator of a detached run prints, below the run's folder."""

# A line of progress where there is no terminal: at every tenth of the way, or after this long.
PROGRESS_SECONDS = 60.0

_ACCURACY = re.compile(r"full_acc_(\d+)(?:_epoch)?")
_BAR_FLOOR, _BAR_MOST = 8, 32
# Before this, the pace of a stage says little.
_PACE_SECONDS = 1.0

# Metrics that the table of a run shows, by kind, in order.
_HEADLINES: dict[str, tuple[str, ...]] = {
    "head": ("bytes",),
    "prepare": ("rows", "tokens", "supervised_tokens", "rejected"),
    "import_rows": ("rows", "rows_val", "tokens", "supervised_tokens", "rejected"),
    "import_states": ("rows", "rows_imported", "agreement", "rows_refused"),
    "regenerate": ("rows", "answers", "answers_generated", "supervised_tokens"),
    "extract": ("rows", "rows_extracted", "tokens_extracted", "agreement"),
    "vocab": ("size", "coverage"),
    "train": ("epoch", "val_loss", "full_acc_0", "steps"),
    "evaluate": ("acceptance_length", "outputs_identical", "speedup"),
    "export": ("bytes",),
}


def headline(kind: str, metrics: Mapping[str, Any]) -> str:
    """The figures of a stage that matter most, in one line."""
    shown = []
    for name in _HEADLINES.get(kind, ()):
        value = metrics.get(name)
        if value is not None:
            text = f"{value:.4g}" if isinstance(value, float) else str(value).lower()
            shown.append(f"{name}={text}")
    return " ".join(shown)


class Pace:
    """What the events of a stage under way say of it."""

    def __init__(self, name: str, at: float):
        """`at`: now, in seconds of any clock; so wherever it is asked for."""
        self.name = name
        self.started = at
        self.done: int | None = None
        self.total = 0
        self.unit = ""
        self._first: tuple[float, int] | None = None
        self._figures: dict[str, Any] = {}
        self._accuracies: dict[int, float] = {}

    def take(self, event: Mapping[str, Any], at: float) -> None:
        if event["event"] == "progress":
            if self.unit != event["unit"]:  # a stage does one thing after another
                self._first = (at, event["done"])
            self.done, self.total, self.unit = event["done"], event["total"], event["unit"]
            known = ("event", "done", "total", "unit")
            self._figures = {name: value for name, value in event.items() if name not in known}
        elif event["event"] == "metric" and event.get("split") == "train":
            for name, value in event.get("values", {}).items():
                found = _ACCURACY.fullmatch(name)
                if found and isinstance(value, int | float):
                    self._accuracies[int(found[1])] = float(value)

    def tenth(self) -> int:
        """How many tenths of the way are done."""
        return self.done * 10 // self.total if self.done is not None and self.total else 0

    def eta(self, at: float) -> float | None:
        """Seconds that are left at the pace so far; None while that is not known."""
        if self._first is None or self.done is None:
            return None
        since, before = self._first
        if self.done <= before or at - since < _PACE_SECONDS:
            return None
        return (at - since) / (self.done - before) * (self.total - self.done)

    def figures(self) -> list[str]:
        """The figures that the last events gave, as text, the most telling first."""
        shown = []
        loss = self._figures.get("loss")
        if isinstance(loss, int | float):
            shown.append(f"loss {loss:.4g}")
        if self._accuracies:
            ordered = [self._accuracies[step] for step in sorted(self._accuracies)]
            shown.append("full_acc " + " ".join(f"{value:.2f}" for value in ordered))
        for name, value in self._figures.items():
            if name != "loss" and value is not None:
                text = f"{value:.4g}" if isinstance(value, float) else str(value)
                shown.append(f"{name} {text}")
        return shown

    def text(self, at: float) -> str:
        """In words: `30 of 120 steps, eta 1:10, loss 2.1`."""
        eta = self.eta(at)
        parts = [f"{self.done} of {self.total} {self.unit}"]
        parts += [f"eta {human_seconds(eta)}"] if eta is not None else []
        return ", ".join([*parts, *self.figures()])

    def line(self, width: int, at: float) -> str:
        """As one line with a bar, no wider than `width`; what does not fit is left out."""
        name = cut(plain(self.name), max(width // 3, 1))
        if self.done is None or not self.total:
            return cut(f"{name}  running  {human_seconds(at - self.started)}", width)
        eta = self.eta(at)
        parts = [f"{self.done}/{self.total} {self.unit}"]
        parts += [f"eta {human_seconds(eta)}"] if eta is not None else []
        parts += self.figures()
        kept = parts[:1]
        used = cells(name) + 2 + _BAR_FLOOR + 2 + cells(parts[0])
        for part in parts[1:]:
            if used + 2 + cells(part) > width:
                break
            used += 2 + cells(part)
            kept.append(part)
        room = min(_BAR_FLOOR + width - used, _BAR_MOST)
        bar = [_bar(self.done / self.total, room)] if room > 0 else []
        return cut("  ".join([name, *bar, *kept]), width)


def _bar(share: float, width: int) -> str:
    filled = max(0, min(width, round(share * width)))
    return "━" * filled + "─" * (width - filled)


class PlainReporter:
    """Progress as plain lines: one for each start and end, every tenth of the way, or a minute."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.begun = False
        """Whether a run has begun."""
        self._stream = stream
        self._pace: Pace | None = None
        self._last = 0.0
        self._tenth = 0

    @property
    def stream(self) -> TextIO:
        """Where it goes: standard error as it is now, unless another was given."""
        return self._stream or sys.stderr

    def __enter__(self) -> PlainReporter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()

    def _stop(self) -> None:
        """Nothing to put away."""

    def _say(self, text: str) -> None:
        with while_read(self.stream):
            print(text, file=self.stream, flush=True)

    def _stage(self, name: str, what: str, style: str | None, rest: str = "") -> None:
        self._say(f"{name}: {paint(what, style, self.stream)}{rest}")

    def run_started(self, run_id: str, folder: Path) -> None:
        self.begun = True
        self._say(f"run {run_id} in {folder}")

    def stage_reused(self, stage: StagePlan, made: ExecutionRecord) -> None:
        self._stage(stage.name, "reused", "dim", f" from run {made.run_id}")

    def stage_started(self, stage: StagePlan) -> None:
        self._last = time.monotonic()
        self._tenth = 0
        self._pace = Pace(stage.name, self._last)
        why = f" ({'; '.join(stage.reasons)})" if stage.reasons else ""
        self._stage(stage.name, "running", "busy", why)

    def stage_event(self, stage: StagePlan, event: Mapping[str, Any]) -> None:
        if event["event"] == "note":
            self._say(f"{stage.name}: {event['text']}")
        elif self._pace is not None:
            now = time.monotonic()
            self._pace.take(event, now)
            if event["event"] == "progress":
                self._progressed(stage, self._pace, now)

    def _progressed(self, stage: StagePlan, pace: Pace, now: float) -> None:
        tenth = pace.tenth()
        if tenth > self._tenth or now - self._last >= PROGRESS_SECONDS:
            self._tenth, self._last = tenth, now
            self._say(f"{stage.name}: {pace.text(now)}")

    def stage_ended(self, outcome: StageOutcome) -> None:
        self._pace = None
        took = f"{outcome.seconds:.1f}s"
        if outcome.error is None and outcome.disposition not in ("failed", "interrupted", "lost"):
            written = outcome.resources.get("bytes_written")
            size = f", {human_size(written)}" if written else ""
            figures = headline(outcome.kind, outcome.metrics)
            rest = f" in {took}{size}  {figures}{_length(outcome)}"
            self._stage(outcome.name, "done", "good", rest)
        elif outcome.disposition in ("interrupted", "lost"):
            self._stage(outcome.name, outcome.disposition, "warn", f" after {took}")
        else:
            self._stage(outcome.name, "FAILED", "bad", f" after {took}: {outcome.error}")
            self._say(f"{outcome.name}: log {outcome.log}")

    def note(self, text: str) -> None:
        self._say(text)


def _length(outcome: StageOutcome) -> str:
    """The acceptance length that the accuracies of training give, with what it means."""
    value = outcome.metrics.get("simulated_acceptance_length")
    if outcome.kind != "train" or not isinstance(value, int | float):
        return ""
    return f"  simulated acceptance length {value:.2f} (1 + the sum of full_acc)"


class DetachedReporter(PlainReporter):
    """Of a run without a terminal: announces its id once it has begun, and from then on all that
    its process prints goes to the run's own log."""

    def __init__(self, announce: int):
        """`announce`: the file descriptor that the run's id is written to, and then closed."""
        super().__init__()
        self._announce = announce

    def run_started(self, run_id: str, folder: Path) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        with (folder / SUBMIT_LOG).open("ab") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        os.write(self._announce, run_id.encode())
        os.close(self._announce)
        super().run_started(run_id, folder)


class TerminalReporter(PlainReporter):
    """The same lines, and below them a bar that moves while a stage runs."""

    def __init__(self) -> None:
        super().__init__()
        from rich.console import Console
        from rich.text import Text

        self._console = Console(
            stderr=True,
            highlight=False,
            markup=False,
            emoji=False,
            color_system="standard" if coloured(sys.stderr) else None,
        )
        self._text = Text
        self._live: Any = None

    def _say(self, text: str) -> None:
        with while_read(sys.stderr):
            self._console.print(self._text.from_ansi(text), soft_wrap=True)

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _line(self) -> Any:
        line = self._pace.line(columns() - 1, time.monotonic()) if self._pace else ""
        return self._text(line, no_wrap=True, overflow="crop")

    def stage_started(self, stage: StagePlan) -> None:
        super().stage_started(stage)
        from rich.live import Live

        self._live = Live(
            get_renderable=self._line,
            console=self._console,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start()

    def _progressed(self, stage: StagePlan, pace: Pace, now: float) -> None:
        """The bar shows it."""

    def stage_ended(self, outcome: StageOutcome) -> None:
        self._stop()
        super().stage_ended(outcome)


def reporter() -> PlainReporter:
    """As standard error can show it."""
    moving = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    return TerminalReporter() if moving else PlainReporter()
