"""Show what a submit would do: `kimi-eagle plan`."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from kimi_eagle.app import Planned
from kimi_eagle.plan import REUSE, StagePlan
from kimi_eagle.render import emit_json
from kimi_eagle.terminal import Hash, human_size, table


def planned(found: Planned, *, as_json: bool) -> None:
    if as_json:
        emit_json(found.document())
        return
    table(
        ("#", "STAGE", "ACTION", "KEY", "WHY"),
        [
            (str(number), stage.name, stage.action, _key(found, stage), _why(stage))
            for number, stage in enumerate(found.stages, 1)
        ],
    )
    for stage in found.stages:
        for line in _lines(found, stage.name):
            print(f"{stage.name}: {line}", file=sys.stderr)
    if found.lacking:
        print(f"not on this machine: {'; '.join(found.lacking)}", file=sys.stderr)
    if found.trouble is not None:
        print(found.trouble, file=sys.stderr)
    said = [", ".join(f"{count} {action}" for action, count in found.counts().items() if count)]
    if found.forecasts:
        written = found.states_bytes
        about = "about " if any(forecast.basis for forecast in found.forecasts.values()) else ""
        free = human_size(found.free_bytes)
        rest = f", and about {human_size(found.bytes - written)} besides" if found.writes else ""
        said.append(f"Writes {about}{human_size(written)} of hidden states{rest}; {free} free")
    print(f"{'. '.join(said)}. Nothing was started.", file=sys.stderr)


def _lines(found: Planned, stage: str) -> Iterator[str]:
    """What is likely, what is unknown and what does not fit, of one stage."""
    if stage in found.forecasts:
        yield found.troubles.get(stage) or found.forecasts[stage].says()
    if stage in found.writes:
        besides = "" if stage not in found.forecasts else " besides"
        yield f"writes about {human_size(found.writes[stage])}{besides} (an estimate)"
    if stage in found.expected:
        yield found.expected[stage].says()
    if stage in found.unknown:
        yield found.unknown[stage]
    if stage in found.weights:
        yield found.weights[stage].trouble or found.weights[stage].says()


def _key(found: Planned, stage: StagePlan) -> str:
    """A stage's key; on a terminal, while there is none, the numbers of those it waits for."""
    if stage.key is not None or not sys.stdout.isatty():
        return "-" if stage.key is None else Hash(stage.key, 0)
    waits = found.upstream.get(stage.name, ())
    numbers = [
        str(number)
        for number, other in enumerate(found.stages, 1)
        if other.name in waits and other.action != REUSE
    ]
    return f"after {', '.join(numbers)}"


def _why(stage: StagePlan) -> str:
    reasons = list(stage.reasons)
    if stage.action == REUSE and stage.made is not None and reasons and sys.stdout.isatty():
        reasons[0] += f" on {stage.made.started_at[:10]}"
    return "; ".join(reasons)
