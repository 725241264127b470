"""Which files a source's path names: a file, a glob, a folder, or a Hugging Face dataset. Looks at
names, and at the small JSON files that such a dataset describes itself with."""

from __future__ import annotations

import glob
import json
import re
from pathlib import Path

KNOWN = (".jsonl", ".json")
COMPRESSED = (".gz", ".xz", ".zst")
TABLES = (".parquet", ".arrow")
KINDS = f"{', '.join((*KNOWN, *TABLES))}; the first two also with {', '.join(COMPRESSED)}"

# What describes a data set and is no part of it.
_ABOUT = frozenset(
    {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "package.json"}
)
_SPLIT = re.compile(r"(?:^|[-_./])(train|test|validation|valid|val|dev|eval)(?=$|[-_./])")


class NoSource(ValueError):
    """A path that names no source; `help` says what to write instead."""

    def __init__(self, message: str, help: str):
        super().__init__(message)
        self.help = help


class NotThere(NoSource):
    """A path that names nothing at all."""


def bare_name(name: str) -> str:
    """A file's name in lower case, without the suffix of its compression."""
    name = name.lower()
    for suffix in COMPRESSED:
        name = name.removesuffix(suffix)
    return name


def is_readable(path: Path) -> bool:
    """Whether a file's name says that it holds records."""
    name = bare_name(path.name)
    compressed = name != path.name.lower()
    return name.endswith(KNOWN) or (name.endswith(TABLES) and not compressed)


def source_files(path: Path, *, records: bool = True) -> list[Path]:
    """The files that a path or a glob names, in the order of their names.

    Args:
        records: whether they hold records; if not, a file may be of any kind, and a folder is none.

    Raises:
        NoSource: there is none, one of a kind that is not read, or a folder of several splits.
    """
    if path.is_dir() and records:
        return _within(path)
    if path.exists():
        found = [path]
    else:
        found = sorted(Path(name) for name in glob.glob(str(path), recursive=True))  # noqa: PTH207
    if not found:
        raise NotThere(f"no file at {path}", "paths are relative to the manifest")
    for file in found:
        if not file.is_file():
            raise NoSource(f"{file} is not a file", "name files, or a glob such as *.jsonl")
        if records and not is_readable(file):
            raise _unsupported(file)
    return found


def _unsupported(file: Path) -> NoSource:
    suffix = file.suffix or "a file without a suffix"
    return NoSource(f"{file}: unsupported: {suffix}", f"known are {KINDS}")


def _within(folder: Path) -> list[Path]:
    """The files of a folder, at any depth."""
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(item.name for item in folder.iterdir() if item.is_dir())
        raise NoSource(
            f"{folder} is a saved dataset of several splits: {', '.join(splits)}",
            f"name one of them, such as {folder.name}/{splits[0] if splits else 'train'}",
        )
    if (folder / "state.json").is_file():
        return _saved(folder)
    if (folder / "config.json").is_file():
        raise NoSource(f"{folder} is a model's folder, not one of records", "name another")
    found = sorted(
        path
        for path in folder.rglob("*")
        if path.is_file()
        and is_readable(path)
        and path.name not in _ABOUT
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )
    if not found:
        raise NoSource(f"no file of records in {folder}", "name a folder that has some, or a file")
    splits = sorted(
        {name for path in found for name in _SPLIT.findall(_stem(path.relative_to(folder)))}
    )
    if len(splits) > 1:
        raise NoSource(
            f"{folder} holds several splits by the names of its files: {', '.join(splits)}",
            f"name the files that are meant, such as {folder.name}/**/*{splits[0]}*",
        )
    return found


def _stem(relative: Path) -> str:
    return relative.as_posix().lower().partition(".")[0]


def _saved(folder: Path) -> list[Path]:
    """The files of a dataset as `save_to_disk` wrote it, in its order."""
    state = folder / "state.json"
    try:
        names = [item["filename"] for item in json.loads(state.read_text("utf-8"))["_data_files"]]
        files = [folder / name for name in names if Path(name).name == name]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NoSource(
            f"{state} does not say which files the dataset has: {error!r}",
            "save the dataset again, or name its .arrow files",
        ) from None
    missing = [path.name for path in files if not path.is_file()]
    if missing or not files:
        raise NoSource(
            f"{folder}: {state.name} names {', '.join(missing) or 'no file'}"
            + (", which is not there" if missing else ""),
            "copy the whole folder of the saved dataset",
        )
    return files
