"""What a search box for runs takes, as conditions: `state:failed stage:train kimi 9c41`.

state:failed   of this status, `lost` and `running` told apart
stage:train    with a stage of this name or kind
name:kimi-*    of a manifest with this name; `*` and `?` as in a shell
kind:submit    or reproduce
since:2d       started so long ago at the most, or since a date or time in UTC
artifact:9c41  that made this artifact or took it in, by the start of its hash
anything else  the start of the run's id, or a part of its manifest's name
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass

from kimi_eagle.clock import since

RUNNING, LOST = "running", "lost"

_PLAIN = {
    "name": "runs.name glob ?",
    "kind": "runs.kind = ?",
    "since": "runs.started_at >= ?",
    "stage": "exists (select 1 from executions e where e.run_id = runs.id "
    "and ? in (e.stage, e.kind))",
}
# A file of a pinned folder was taken in with the folder.
_ARTIFACT = (
    "runs.id in (with wanted(digest) as (select digest from artifacts where digest >= ? and "
    "digest < ? union select m.parent from artifact_members m "
    "where m.child >= ? and m.child < ?) "
    "select e.run_id from execution_outputs o join executions e on e.id = o.execution "
    "where o.digest in wanted union "
    "select e.run_id from execution_inputs i join executions e on e.id = i.execution "
    "where i.digest in wanted)"
)
NAMES = ("state", *_PLAIN, "artifact")


@dataclass(frozen=True)
class Term:
    """One condition of a search, as it was written."""

    text: str
    name: str
    """One of `NAMES`; empty for a word that is none."""
    value: str

    def condition(self, lost: Collection[str]) -> tuple[str, list[str]]:
        """The term in SQL, over the table `runs`, and what stands for its placeholders.

        `lost`: the ids of runs that the registry has as running and nobody runs.
        """
        if self.name == "state" and self.value in (RUNNING, LOST):
            inside = "in" if self.value == LOST else "not in"
            marks = ",".join("?" * len(lost))
            return f"runs.status = 'running' and runs.id {inside} ({marks})", list(lost)
        if self.name == "state":
            return "runs.status = ?", [self.value]
        if self.name == "artifact":
            value = self.value.lower()
            return _ARTIFACT, [value, value + "\x7f"] * 2
        if self.name:
            return _PLAIN[self.name], [self.value]
        value = self.value.lower()
        return (
            "(runs.id >= ? and runs.id < ? or instr(lower(runs.name), ?))",
            [value, value + "\x7f", value],
        )


def terms(text: str) -> list[Term]:
    """The terms of a search, parted at blanks."""
    found = []
    for word in text.split():
        name, colon, value = word.partition(":")
        known = bool(colon) and name in NAMES and bool(value)
        if known and name == "since":
            known = False
            with suppress(ValueError):
                value, known = since(value), True
        found.append(Term(word, name if known else "", value if known else word))
    return found


def conjunction(of: Sequence[Term], lost: Collection[str]) -> tuple[str, list[str]]:
    """All terms together, as one condition and its values."""
    conditions, values = ["1"], []
    for term in of:
        condition, given = term.condition(lost)
        conditions.append(condition)
        values += given
    return " and ".join(conditions), values
