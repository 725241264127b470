"""Stages of one run that are under way side by side."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack
from dataclasses import dataclass

from kimi_eagle.executors.protocol import Executor, Needs
from kimi_eagle.outcome import StageOutcome
from kimi_eagle.plan import StagePlan

# Resumed again and again, and returns how the stage came out, or nothing when another run made it.
Steps = Generator[None, None, StageOutcome | None]


@dataclass(frozen=True)
class _Begun:
    stage: StagePlan
    needs: Needs
    steps: Steps


class Beside:
    """Those of one coordinator; on leaving, all that still run are ended."""

    def __init__(self, executor: Executor):
        self._executor = executor
        self._begun: dict[str, _Begun] = {}

    def __enter__(self) -> Beside:
        return self

    def __exit__(self, *_: object) -> None:
        with ExitStack() as stack:  # one that cannot be ended keeps no other from being ended
            for begun in self._begun.values():
                stack.callback(begun.steps.close)
        self._begun.clear()

    def __bool__(self) -> bool:
        return bool(self._begun)

    def room(self, stage: StagePlan, needs: Needs) -> bool:
        """Whether a stage should be begun now. One whose key is being made waits for that."""
        others = self._begun.values()
        if stage.name in self._begun or any(item.stage.key == stage.key for item in others):
            return False
        return self._executor.room(needs, [item.needs for item in others])

    def begin(self, stage: StagePlan, needs: Needs, steps: Steps) -> None:
        self._begun[stage.name] = _Begun(stage, needs, steps)

    def step(self) -> list[tuple[StagePlan, StageOutcome | None]]:
        """Take each a step further; returns those that ended, with how they came out."""
        ended: list[tuple[StagePlan, StageOutcome | None]] = []
        for name, begun in list(self._begun.items()):
            try:
                next(begun.steps)
            except StopIteration as end:
                del self._begun[name]
                ended.append((begun.stage, end.value))
        return ended
