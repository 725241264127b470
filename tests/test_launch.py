"""Programs that stages run: what they wrote counts, and nothing less than a whole result does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kimi_eagle.engines.launch import (
    bound,
    cores_of_engine,
    cpu_build,
    engine_environment,
    run_program,
)
from kimi_eagle.engines.vllm_options import common_options
from kimi_eagle.job import StageFailed
from kimi_eagle.stages.engine import VllmEngine

needs_cpu_build = pytest.mark.skipif(not cpu_build(), reason="vLLM here is not the CPU build")

PROGRAM = """\
import os
from kimi_eagle.engines.launch import main
main({program})
os.abort()
"""


def ran(folder: Path, program: str) -> dict[str, object]:
    (folder / "ending.py").write_text(PROGRAM.format(program=program), "utf-8")
    path = os.pathsep.join([str(folder), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    return run_program("ending", {"a": 1}, folder / "scratch", {**os.environ, "PYTHONPATH": path})


def test_an_engine_that_aborts_while_it_is_taken_down_has_lost_nothing(tmp_path: Path) -> None:
    assert ran(tmp_path, "lambda job: {'b': job['a'] + 1}") == {"b": 2}


def test_a_program_that_ends_before_its_result_has_failed(tmp_path: Path) -> None:
    with pytest.raises(StageFailed, match="was ended by SIGABRT; it had no result yet"):
        ran(tmp_path, "lambda job: os.abort()")


def test_a_program_that_is_killed_says_what_for_most_often(tmp_path: Path) -> None:
    """An engine on a CPU runs inside its program."""
    with pytest.raises(StageFailed, match="was ended by SIGKILL; the machine may be out of memory"):
        ran(tmp_path, "lambda job: os.kill(os.getpid(), 9)")


def test_ranks_have_cores_of_their_own_or_share_them() -> None:
    assert bound([2, 3, 5, 7], 1) == "2,3,5,7"
    assert bound([2, 3, 5, 7], 2) == "2,5|3,7"
    assert bound([2, 3], 3) == "2|3|2"


@pytest.mark.parametrize(("listed", "cores"), [("0,2|1,3", {0, 1, 2, 3}), ("4-6,9", {4, 5, 6, 9})])
def test_a_writer_of_states_has_all_cores_of_its_engine(
    listed: str, cores: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", listed)
    assert cores_of_engine() == cores


def test_an_engine_that_is_bound_to_no_cores_has_those_of_its_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "auto")
    assert cores_of_engine() == os.sched_getaffinity(0)


@needs_cpu_build
def test_an_engine_of_one_rank_runs_inside_its_program_on_a_cpu() -> None:
    """Each process of an engine imports vLLM anew. Ranks must be processes."""
    apart = "VLLM_ENABLE_V1_MULTIPROCESSING"
    alone = engine_environment(VllmEngine(kind="vllm"), [4, 6])
    assert alone[apart] == "0"
    assert alone["OMP_NUM_THREADS"] == "2"
    assert alone["KMP_AFFINITY"].endswith("proclist=[4,6]")
    assert apart not in engine_environment(VllmEngine(kind="vllm", tensor_parallel=2), [4, 6])


@needs_cpu_build
def test_an_eager_engine_compiles_nothing_on_a_cpu() -> None:
    off = "TORCH_COMPILE_DISABLE"
    assert engine_environment(VllmEngine(kind="vllm"))[off] == "1"
    assert off not in engine_environment(VllmEngine(kind="vllm", enforce_eager=False))


@pytest.mark.parametrize("gib", [1.0, 0.125])
def test_the_cache_of_an_engine_on_a_cpu_is_as_large_as_the_manifest_says(
    gib: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of vLLM's own; it would come before what an engine is told.
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    engine = VllmEngine(kind="vllm", cpu_kv_cache_gib=gib)
    job = {"model": "", "max_model_len": 8, "multimodal": False, "cpu": True}
    options = common_options({**job, "engine": engine.model_dump(mode="json")})
    assert options["kv_cache_memory_bytes"] == gib * 2**30
    if cpu_build():
        assert "VLLM_CPU_KVCACHE_SPACE" not in engine_environment(engine)


WAITING = """\
import multiprocessing, os, queue, signal, time
from kimi_eagle.engines.launch import main

def run(job):
    spawn = multiprocessing.get_context("spawn")
    engine = spawn.Process(target=time.sleep, args=(600,), name="Core")
    engine.start()
    time.sleep(1)
    os.kill(engine.pid, signal.SIGKILL)
    queue.Queue().get()

if __name__ == "__main__":
    main(run)
"""


def test_a_program_whose_engine_is_killed_does_not_wait_for_it(tmp_path: Path) -> None:
    """vLLM's client waits on a queue that nobody fills any more."""
    (tmp_path / "waiting.py").write_text(WAITING, "utf-8")
    path = os.pathsep.join([str(tmp_path), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    with pytest.raises(StageFailed, match="process Core was ended by SIGKILL; the machine may be"):
        run_program("waiting", {}, tmp_path / "scratch", {**os.environ, "PYTHONPATH": path})
