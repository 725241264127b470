"""Put a release into a folder or a repository of the Hugging Face Hub."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from filecmp import cmp
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kimi_eagle.artifacts.files import sync_tree
from kimi_eagle.engines.launch import main, run_program
from kimi_eagle.job import StageFailed


def push(release: Path, given: Any, scratch: Path) -> str:
    """Push as the manifest says; returns what was done, in words.

    Args: `given`: a `Push`; `scratch`: a folder for the program's files.
    Raises: StageFailed.
    """
    if given.folder is not None:
        return push_folder(release, Path(given.folder).expanduser(), overwrite=given.overwrite)
    if find_spec("huggingface_hub") is None:
        raise StageFailed("huggingface_hub is not installed: pip install huggingface_hub")
    job = {"release": str(release), **given.model_dump()}
    # Stages are kept off the network; this program alone is let on it.
    env = {**os.environ, "HF_HUB_OFFLINE": "0"}
    found = run_program("kimi_eagle.stages.export.push", job, scratch, env)
    return str(found["done"])


def push_folder(release: Path, target: Path, *, overwrite: bool) -> str:
    """Copy a release to a folder, whole or not at all.

    Raises: StageFailed when the folder holds something else and must not be overwritten.
    """
    if target.exists() and _same(release, target):
        return f"{target} holds it already"
    if target.exists() and any(target.iterdir()) and not overwrite:
        raise StageFailed(
            f"not pushed: {target} holds something else; set push.overwrite, or name another folder"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as held:
        new, old = Path(held) / "new", Path(held) / "old"
        shutil.copytree(release, new, copy_function=shutil.copyfile)
        sync_tree(new)
        if target.exists():
            target.rename(old)
        new.rename(target)
    return f"copied to {target}"


def _same(a: Path, b: Path) -> bool:
    names = sorted(path.name for path in a.iterdir())
    if not b.is_dir() or sorted(path.name for path in b.iterdir()) != names:
        return False
    return all(cmp(a / name, b / name, shallow=False) for name in names)


def upload(job: Mapping[str, Any]) -> dict[str, Any]:
    """Upload to the Hub: a program. The token comes from the environment and is not shown."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api, name = HfApi(), job["repository"]
    try:
        api.create_repo(name, private=job["private"], exist_ok=True)
        held = set(api.list_repo_files(name)) - {".gitattributes"}
        if held and not job["overwrite"]:
            raise StageFailed(f"not pushed: {name} holds {len(held)} files; set push.overwrite")
        done = api.upload_folder(
            repo_id=name, folder_path=job["release"], commit_message="Release by kimi-eagle"
        )
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise StageFailed(f"not pushed to {name}: {error}") from None
    return {"done": f"pushed to {done.commit_url}"}


if __name__ == "__main__":
    sys.exit(main(upload))
