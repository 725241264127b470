"""Start an engine's program in a process of its own, with the environment it needs. Pure start-up:
imports no engine.

Programs are modules of this package that are given one JSON file, print to the stage's log and
write one JSON file. A process of its own lets an engine be ended whole, gives back all memory
between two engines, and can have an OpenMP library preloaded, which cannot be done late.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from kimi_eagle import garbage
from kimi_eagle.artifacts.files import write_json
from kimi_eagle.engines import in_program
from kimi_eagle.engines.alive import EngineDied, how_it_ended, watched
from kimi_eagle.job import StageFailed

_BIND = "VLLM_CPU_OMP_THREADS_BIND"


def has_gpu() -> bool:
    """Whether an NVIDIA GPU is there to be used."""
    return Path("/dev/nvidiactl").exists() or bool(list(Path("/dev").glob("nvidia[0-9]*")))


def cpu_build() -> bool:
    """Whether vLLM here is the CPU build."""
    try:
        distribution("vllm-cpu")
    except PackageNotFoundError:
        return False
    return True


def share_of(cores: Sequence[int], number: int, shares: int) -> Sequence[int]:
    """The cores of one of several at once (`number` from 0); they share where cores are fewer."""
    return cores[number::shares] or [cores[number % len(cores)]]


def bound(cores: Sequence[int], ranks: int) -> str:
    """The cores of each of an engine's ranks, as VLLM_CPU_OMP_THREADS_BIND has them."""
    shares = (share_of(cores, rank, ranks) for rank in range(ranks))
    return "|".join(",".join(map(str, share)) for share in shares)


def cores_of_engine() -> set[int]:
    """The cores that an engine on a CPU, which this process is, has in all.

    Its OpenMP library binds the thread that asks for them to one, and so what that thread starts.
    """
    found: set[int] = set()
    try:
        for part in os.environ.get(_BIND, "").replace("|", ",").split(","):
            first, _, last = part.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    except ValueError:  # not said, or `auto`
        return os.sched_getaffinity(0)
    return found


def environment(*, ranks: int = 1, cores: Sequence[int] = ()) -> dict[str, str]:
    """The environment of an engine's process.

    Args: `ranks`: its tensor parallel ranks; `cores`: those it may use, all by default.
    """
    values = dict(os.environ)
    values.update(
        VLLM_NO_USAGE_STATS="1",
        DO_NOT_TRACK="1",
        HF_HUB_OFFLINE="1",
        TOKENIZERS_PARALLELISM="false",
        # Greedy decoding only; its sampling kernels would be compiled at the first start.
        VLLM_USE_FLASHINFER_SAMPLER="0",
    )
    if cpu_build():
        # It would come before what an engine is told.
        values.pop("VLLM_CPU_KVCACHE_SPACE", None)
        # By default plain vLLM, a speculating one and one with a KV connector bind to different
        # numbers of cores, which changes speed and can change bf16 sums: bind all alike.
        cores = cores or sorted(os.sched_getaffinity(0))
        values[_BIND] = bound(cores, ranks)
        library = Path(sys.prefix) / "lib" / "libiomp5.so"
        if library.exists():
            values["LD_PRELOAD"] = str(library)
    return values


def engine_environment(engine: Any, cores: Sequence[int] = ()) -> dict[str, str]:
    """The environment of a program that starts vLLM by itself.

    Args: `engine`: that of the manifest; `cores`: those it may use, all by default.
    """
    ranks = engine.tensor_parallel
    values = environment(ranks=ranks, cores=cores)
    if cpu_build() and engine.enforce_eager:
        # vLLM compiles what counts log probabilities all the same: two seconds of a core.
        values["TORCH_COMPILE_DISABLE"] = "1"
    if cpu_build() and ranks == 1:
        values |= in_program.settings(cores or sorted(os.sched_getaffinity(0)))
    return values


def run_program(
    module: str, job: Mapping[str, Any], folder: Path, env: Mapping[str, str]
) -> dict[str, Any]:
    """Run `python -m module JOB RESULT` to its end; returns what it wrote.

    Raises:
        StageFailed: it failed; the message is its own where it gave one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    given, result = folder / "program.json", folder / "program-result.json"
    write_json(given, dict(job))
    result.unlink(missing_ok=True)
    done = subprocess.run(
        [sys.executable, "-m", module, str(given), str(result)], env=dict(env), check=False
    )
    value: dict[str, Any] = {}
    if result.exists():
        value = json.loads(result.read_text("utf-8"))
    if "error" in value:
        raise StageFailed(str(value["error"]))
    # What it wrote is whole, and the last thing it did: an engine that aborts while it is taken
    # down (for a thread that its libraries left running) has lost nothing by then.
    if not value:
        raise StageFailed(
            f"{how_it_ended(module, done.returncode)}; it had no result yet; see the log of the "
            "stage"
        )
    return value


def main(program: Any) -> int:
    """Entry of an engine program: run `program(job)`, write what it returns, or why it failed."""
    garbage.look_seldom()
    given, result = Path(sys.argv[1]), Path(sys.argv[2])
    job = json.loads(given.read_text("utf-8"))
    try:
        with watched():
            value = program(job)
    except EngineDied as error:
        write_json(result, {"error": str(error)})
        os._exit(1)  # what waits for the engine on the way out would wait for ever
    except StageFailed as error:
        write_json(result, {"error": str(error)})
        return 1
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        said = f"{error.strerror}: {error.filename or 'the disk is full'}; what is whole is kept"
        write_json(result, {"error": said})
        return 1
    write_json(result, value)
    return 0
