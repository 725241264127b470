"""From Python what the command line does, as thin: `kimi_eagle.open(root)` gives a `Root`.

    import kimi_eagle

    root = kimi_eagle.open("runs")
    outcome = root.submit("manifest.yaml", {"stages.draft.lr": 1e-4})
    draft = root.load_checkpoint(outcome.stages[-1].outputs["checkpoint"])

What it returns are the frozen records that the command line prints. Errors are those that end a
command with exit code 2: `ManifestError` (with the problems of the file), `RegistryError`, and
`LookupError` for a hash that is unknown or the start of several.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping, Sequence
from datetime import datetime
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kimi_eagle import app
from kimi_eagle.app import Lineage, Planned, Shown, Validation
from kimi_eagle.manifest.problem import ManifestError
from kimi_eagle.outcome import Reporter, RunOutcome, StageOutcome
from kimi_eagle.plan import StagePlan
from kimi_eagle.records import ArtifactRecord, Edge, ExecutionRecord, Node, RunRecord
from kimi_eagle.registry.schema import RegistryError
from kimi_eagle.registry.search import RunFilter

if TYPE_CHECKING:
    from kimi_eagle.draft.eagle3 import Eagle3

__all__ = [
    "ArtifactRecord",
    "Edge",
    "ExecutionRecord",
    "Lineage",
    "ManifestError",
    "Node",
    "Planned",
    "RegistryError",
    "Reporter",
    "Root",
    "RunOutcome",
    "RunRecord",
    "Shown",
    "Silent",
    "StageOutcome",
    "StagePlan",
    "Validation",
]

Overrides = Mapping[str, Any] | Sequence[str]
"""`{"stages.draft.lr": 1e-4}`, or as `--set` has them: `["stages.draft.lr=1e-4"]`."""


class Silent:
    """A `Reporter` that tells nobody; derive from it to be told of some things."""

    def run_started(self, run_id: str, folder: Path) -> None: ...

    def stage_reused(self, stage: StagePlan, made: ExecutionRecord) -> None: ...

    def stage_started(self, stage: StagePlan) -> None: ...

    def stage_event(self, stage: StagePlan, event: Mapping[str, Any]) -> None: ...

    def stage_ended(self, outcome: StageOutcome) -> None: ...

    def note(self, text: str) -> None: ...


class Root:
    """A root: registry, artifacts and runs. It holds nothing open between calls."""

    def __init__(self, path: str | PathLike[str] | None = None):
        given = path if path is not None else os.environ.get("KIMI_EAGLE_ROOT") or "runs"
        self.path = Path(given)

    def __repr__(self) -> str:
        return f"kimi_eagle.open({str(self.path)!r})"

    def validate(
        self, manifest: str | PathLike[str], overrides: Overrides | None = None
    ) -> Validation:
        """Check a manifest and run nothing. Raises: ManifestError."""
        return app.validate(Path(manifest), _overrides(overrides))

    def plan(
        self,
        manifest: str | PathLike[str],
        overrides: Overrides | None = None,
        reporter: Reporter | None = None,
    ) -> Planned:
        """Of every stage whether it would run, and why. Raises: ManifestError, RegistryError."""
        return app.plan(self.path, Path(manifest), _overrides(overrides), reporter or Silent())

    def submit(
        self,
        manifest: str | PathLike[str],
        overrides: Overrides | None = None,
        reporter: Reporter | None = None,
    ) -> RunOutcome:
        """Run a manifest, to its end; what is unchanged is reused.

        A stage that fails raises nothing: `status` of the outcome is then `failed`.

        Args:
            reporter: who is told as it goes; `kimi_eagle.progress.PlainReporter()` writes lines to
                standard error.

        Raises:
            ManifestError, RegistryError: nothing was started.
            RuntimeError: called from another thread than the main one, which alone can see to it
                that a signal ends the run in good order.
        """
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "submit runs in the main thread alone, where signals arrive; start "
                "`kimi-eagle submit --detach` as a process instead"
            )
        return app.submit(self.path, Path(manifest), _overrides(overrides), reporter or Silent())

    def runs(
        self,
        *,
        since: datetime | None = None,
        stage: str | None = None,
        status: str | None = None,
        artifact: str | None = None,
        name: str | None = None,
        limit: int | None = None,
    ) -> Sequence[tuple[RunRecord, Sequence[ExecutionRecord]]]:
        """Runs with their stages, newest first.

        Args:
            since: started then or later; a time without a zone is UTC.
            stage: with a stage of this name or kind.
            status: `running`, `done`, `failed`, `interrupted` or `lost`.
            artifact: hash, or the start of one, of what they made or took in.
            name: of the manifest; `*` and `?` as in a shell.

        Raises: RegistryError when there is no registry; LookupError.
        """
        wanted = RunFilter(
            None if since is None else _written(since), stage, status, artifact, name
        )
        return app.runs(self.path, wanted, limit).runs

    def show(self, hash: str) -> Shown:
        """What a hash, or the start of one, names. Raises: RegistryError, LookupError."""
        return app.show(self.path, hash)

    def lineage(self, hash: str, *, up: bool = True, down: bool = True) -> Lineage:
        """What an artifact came from and what came of it. Raises: RegistryError, LookupError."""
        return app.lineage(self.path, hash, up=up, down=down)

    def folder(self, hash: str) -> Path:
        """Where an artifact's files lie; they must not be changed.

        Raises: RegistryError; LookupError, also where it is no artifact or not in the store.
        """
        found = self.show(hash)
        if found.artifact is None:
            raise LookupError(f"{found.digest} is no artifact but a {found.kind}")
        folder = self.path / "objects" / found.digest[:2] / found.digest
        if found.artifact.state != "present" or not folder.is_dir():
            raise LookupError(
                f"{found.kind} {found.digest} is {found.artifact.state}: its files are not in the "
                "store; submit the manifest that made it"
            )
        return folder

    def load_checkpoint(self, hash: str, device: str = "cpu") -> Eagle3:
        """The draft of a checkpoint, or of a release in vLLM's form, to be run. Imports torch.

        Raises: RegistryError; LookupError, also where it is no draft.
        """
        folder = self.folder(hash)
        kind = self.show(hash).kind
        if kind not in ("checkpoint", "release"):
            raise LookupError(f"{hash} is a {kind}, not a checkpoint")
        from kimi_eagle.draft.checkpoint import BadCheckpoint
        from kimi_eagle.draft.reading import read_draft

        try:
            return read_draft(folder, device)
        except BadCheckpoint as error:
            raise LookupError(f"{kind} {hash} is no draft in speculators' form: {error}") from None


def _overrides(given: Overrides | None) -> list[str]:
    if isinstance(given, str):
        raise TypeError(
            "overrides are a mapping, or a list of texts such as 'stages.draft.lr=1e-4'"
        )
    if isinstance(given, Mapping):
        # JSON is YAML, and what is text stays text.
        return [f"{path}={json.dumps(value, allow_nan=False)}" for path, value in given.items()]
    return list(given or ())


def _written(moment: datetime) -> str:
    """A time as the registry writes it."""
    from datetime import UTC

    aware = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    return aware.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
