"""The records of runs on disk, from which the registry can be made again.

    <root>/<run>/run.json              the run; its texts are manifest.yaml and resolved.json there
    <root>/<run>/stages/<stage>.json   an execution: columns, inputs and outputs, their artifacts
    <root>/<run>/reused.json           what the run took from earlier executions, by their ids

They are copies of what the registry holds, written right after it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kimi_eagle.artifacts.files import write_text
from kimi_eagle.registry.keeping import Keeper
from kimi_eagle.registry.ledger import Ledger

RUN = "run.json"
STAGES = "stages"
REUSED = "reused.json"

# Columns of a run that are files of their own in its folder, for people: column → file, what
# follows the text in it.
TEXTS = {"manifest_text": ("manifest.yaml", ""), "resolved": ("resolved.json", "\n")}


class Books:
    """Writes the records of runs under one root.

    A record that cannot be written (a full disk) is told of, and stops no run: the registry has
    what it would have said.
    """

    def __init__(self, root: Path, registry: Ledger, tell: Callable[[str], None]):
        self._root = root
        self._keeper = Keeper(registry)
        self._tell = tell

    def run(self, run_id: str) -> None:
        """Record a run as the registry has it now."""
        document = self._keeper.run_document(run_id)
        for column in TEXTS:
            del document[column]
        self._write(self._root / run_id / RUN, document)

    def execution(self, execution: int) -> None:
        """Record an execution as the registry has it now."""
        document = self._keeper.execution_document(execution)
        folder = self._root / document["run_id"] / STAGES
        self._write(folder / f"{document['stage']}.json", document)

    def close(self, run_id: str) -> None:
        """Record a run that has ended, whole: itself, what it took, and what it did."""
        self.run(run_id)
        reused = self._keeper.reuses_of(run_id)
        if reused:
            self._write(self._root / run_id / REUSED, reused)
        for execution in self._keeper.executions_of(run_id):
            self.execution(execution)

    def _write(self, path: Path, value: Any) -> None:
        # Keys keep the registry's order, so that what is made again of this is the same text.
        text = json.dumps(value, ensure_ascii=False) + "\n"
        try:
            if path.exists() and path.read_text("utf-8") == text:
                return
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, text)
        except OSError as error:
            self._tell(
                f"the record {path} could not be written ({error.strerror or error}); the registry "
                "has it: keep a backup of that (`kimi-eagle registry backup FILE`)"
            )
