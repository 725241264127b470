"""Pin what comes from outside the store: paths become digests, before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kimi_eagle.artifacts.digests import Digests, Stat, stat_of
from kimi_eagle.identity import digest_tree
from kimi_eagle.manifest.load import LoadedManifest
from kimi_eagle.records import ArtifactRecord
from kimi_eagle.rows.source_files import NoSource, NotThere, source_files
from kimi_eagle.stages.catalog import KINDS
from kimi_eagle.stages.contract import SourceFiles, StoredArtifact, VerifierFiles
from kimi_eagle.stages.extract.spec import ExtractParams
from kimi_eagle.stages.import_states.spec import ImportStatesParams
from kimi_eagle.verifiers.facts import VerifierError
from kimi_eagle.verifiers.folder import VerifierFolder, open_folder

# What the store knows by the start of a hash: records with, for those that cannot be used as they
# are on disk, the reason why; and where each lies.
Stored = Callable[[str], Sequence[tuple[ArtifactRecord, Path, str | None]]]


@dataclass(frozen=True)
class Pinned:
    """One external input as it was found: what it is, and where."""

    record: ArtifactRecord
    path: Path
    stats: Mapping[Path, Stat] = field(default_factory=dict)
    """Every file behind it as it stood when it was digested."""

    def changed(self) -> Path | None:
        """A file behind the pin that is not as it was; None when all are."""
        for path, stat in self.stats.items():
            try:
                if stat_of(path) != stat:
                    return path
            except OSError:
                return path
        return None


@dataclass(frozen=True)
class Pins:
    """Every external input of a manifest, by stage and role."""

    verifier: VerifierFolder
    stages: Mapping[str, Mapping[str, tuple[Pinned, ...]]]
    absent: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Of each stage what is not on this machine, in words: its key is not known then."""

    def digests(self, stage: str) -> dict[str, list[str]]:
        return {
            role: [pinned.record.digest for pinned in items]
            for role, items in self.stages[stage].items()
        }

    def record(self, digest: str) -> ArtifactRecord | None:
        """The pinned input with this digest."""
        for roles in self.stages.values():
            for items in roles.values():
                for pinned in items:
                    if pinned.record.digest == digest:
                        return pinned.record
        return None

    def members(self, stages: Iterable[str]) -> list[ArtifactRecord]:
        """The files of the folders that these stages pin, each once."""
        folders = {
            pinned.record.digest: pinned
            for stage in stages
            for items in self.stages[stage].values()
            for pinned in items
            if pinned.record.state == "external"
        }
        return [member for pinned in folders.values() for member in member_records(pinned)]


def open_verifier(loaded: LoadedManifest) -> VerifierFolder:
    """The manifest's verifier folder, and whether the manifest's stages fit it.

    Raises:
        ManifestError: at the place in the manifest that names what is not there or does not fit.
    """
    path = loaded.folder / loaded.manifest.verifier.path
    try:
        folder = open_folder(path)
    except VerifierError as error:
        raise loaded.error(("verifier", "path"), str(error)) from None
    for name, stage in loaded.manifest.stages.items():
        if isinstance(stage, ExtractParams | ImportStatesParams):
            try:
                folder.facts.aux_layers(stage.layers)
            except VerifierError as error:
                raise loaded.error(("stages", name, "layers"), str(error)) from None
        if (
            stage.kind == "vocab"
            and isinstance(stage.size, int)
            and stage.size > folder.facts.vocab_size
        ):
            raise loaded.error(
                ("stages", name, "size"),
                f"draft vocab {stage.size} is larger than the verifier's {folder.facts.vocab_size}",
            )
    return folder


def pin(
    loaded: LoadedManifest, digests: Digests, stored: Stored, *, may_lack: bool = False
) -> Pins:
    """Digest every external input of a manifest.

    Args:
        may_lack: records, weights and tokenizer need not be here; what is not is listed.

    Raises:
        ManifestError: a path that does not exist or cannot be read, or a hash that the store has
            nothing for, at its place.
    """
    folder = open_verifier(loaded)
    parts: dict[str, Pinned] = {}
    stages: dict[str, dict[str, tuple[Pinned, ...]]] = {}
    absent: dict[str, list[str]] = {}
    for name, stage in loaded.manifest.stages.items():
        roles: dict[str, tuple[Pinned, ...]] = {}
        for role, externals in KINDS[stage.kind].externals(stage).items():
            found: list[Pinned] = []
            for external in externals:
                if isinstance(external, VerifierFiles):
                    lacks = _lacks(folder, external.part) if may_lack else None
                    if lacks is not None:
                        absent.setdefault(name, []).append(lacks)
                    if external.part not in parts:
                        parts[external.part] = _pin_verifier(loaded, folder, external.part, digests)
                    found.append(parts[external.part])
                elif isinstance(external, StoredArtifact):
                    found.append(_pin_stored(loaded, ("stages", name, role), external, stored))
                else:
                    where = ("stages", name, *_path_of(role))
                    try:
                        found += _pin_sources(loaded, where, external, digests)
                    except NotThere as error:
                        if not may_lack or not external.records:
                            raise loaded.error(where, str(error), error.help) from None
                        absent.setdefault(name, []).append(str(error))
            roles[role] = tuple(found)
        stages[name] = roles
    digests.flush()
    return Pins(folder, stages, absent)


def _lacks(folder: VerifierFolder, part: str) -> str | None:
    """Which part of a verifier a folder lacks: without it the digest is not the verifier's."""
    if part == "whole" and not folder.has_weights:
        return f"no weights in {folder.path}"
    if not folder.has_tokenizer:
        return f"no tokenizer in {folder.path}"
    return None


def _pin_stored(
    loaded: LoadedManifest, where: tuple[str | int, ...], named: StoredArtifact, stored: Stored
) -> Pinned:
    """What the store holds under a hash; its files are its own, and are not looked at here."""
    found = stored(named.prefix)
    fitting = [item for item in found if item[0].kind == named.kind]
    if len(fitting) > 1:
        listed = ", ".join(record.digest[:16] for record, _, _ in fitting)
        raise loaded.error(where, f"is the start of several hashes: {listed}", "give more of it")
    if not fitting:
        others = ", ".join(f"{record.digest[:12]} is a {record.kind}" for record, _, _ in found)
        raise loaded.error(
            where,
            f"no {named.kind} in this registry has this hash{f' ({others})' if others else ''}",
            "`kimi-eagle runs` and `kimi-eagle show` list what a run made",
        )
    record, path, trouble = fitting[0]
    if trouble is not None:
        raise loaded.error(where, trouble, "submit the manifest that made it to make it again")
    return Pinned(record, path)


def _path_of(role: str) -> tuple[str | int, ...]:
    """Where the manifest writes the path of a role: `sources.1` → sources, 1, path."""
    return (*(int(part) if part.isdigit() else part for part in role.split(".")), "path")


def _pin_sources(
    loaded: LoadedManifest, where: tuple[str | int, ...], source: SourceFiles, digests: Digests
) -> list[Pinned]:
    """Raises: NotThere; ManifestError."""
    try:
        paths = source_files(loaded.folder / source.path, records=source.records)
    except NotThere:
        raise
    except NoSource as error:
        raise loaded.error(where, str(error), error.help) from None
    pinned = []
    for path in paths:
        digest, size, stat = _digest(loaded, where, path, digests)
        record = ArtifactRecord(digest, "source", size, {}, "external", path.name)
        pinned.append(Pinned(record, path.absolute(), {path: stat}))
    return pinned


def _pin_verifier(
    loaded: LoadedManifest, folder: VerifierFolder, part: str, digests: Digests
) -> Pinned:
    files: dict[str, tuple[str, int]] = {}
    stats: dict[Path, Stat] = {}
    for name in folder.part(part):
        path = folder.path / name
        digest, size, stats[path] = _digest(loaded, ("verifier", "path"), path, digests)
        files[name] = (digest, size)
    kind = "verifier" if part == "whole" else "tokenizer"
    record = ArtifactRecord(
        digest_tree(kind, files),
        kind,
        sum(size for _, size in files.values()),
        files,
        "external",
        folder.path.resolve().name,
        {name: digest for name, (digest, _) in files.items()},
    )
    return Pinned(record, folder.path.absolute(), stats)


def _digest(
    loaded: LoadedManifest, where: tuple[str | int, ...], path: Path, digests: Digests
) -> tuple[str, int, Stat]:
    try:
        stat = stat_of(path)
        digest, size = digests.of(path)
    except OSError as error:
        raise loaded.error(where, f"{path} cannot be read: {error.strerror or error}") from None
    return digest, size, stat


def member_records(pinned: Pinned) -> list[ArtifactRecord]:
    """The files of a pinned folder as artifacts of their own, for the lineage."""
    return [
        ArtifactRecord(digest, "file", size, {}, "external", name)
        for name, (digest, size) in pinned.record.files.items()
    ]
