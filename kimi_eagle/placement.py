"""From what a manifest says of where to run to the executor that does, and what it must have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter

from kimi_eagle.executors.local import LocalExecutor
from kimi_eagle.executors.protocol import Executor, Needs
from kimi_eagle.executors.ray import RayExecutor
from kimi_eagle.executors.slurm import SlurmExecutor, SlurmSettings
from kimi_eagle.manifest.execution import Execution, Local, Ray
from kimi_eagle.manifest.load import LoadedManifest
from kimi_eagle.sizes import parse_seconds, parse_size
from kimi_eagle.stages.contract import Resources, StageParams

# Kinds whose rows can be shared out over workers, and those whose processes can span nodes.
SHARED_OUT = ("extract", "regenerate")
SEVERAL_NODES = ("train",)


def executor_of(execution: Execution) -> Executor:
    """The executor that a manifest chose; nothing is started yet."""
    if isinstance(execution, Local):
        return LocalExecutor(None if execution.gpus is None else tuple(map(str, execution.gpus)))
    if isinstance(execution, Ray):
        return RayExecutor(execution.address, execution.python)
    return SlurmExecutor(
        SlurmSettings(
            execution.partition,
            execution.account,
            execution.qos,
            execution.options,
            execution.setup,
            execution.python,
        )
    )


def execution_from(document: Mapping[str, Any]) -> Execution:
    """What `model_dump(mode="json")` made of one. Raises: ValueError."""
    adapter: TypeAdapter[Execution] = TypeAdapter(Execution)
    return adapter.validate_python(document, strict=False)


def needs_of(resources: Resources) -> Needs:
    return Needs(
        cpus=resources.cpus,
        gpus=resources.gpus,
        memory_bytes=parse_size(resources.memory) if resources.memory else None,
        nodes=resources.nodes,
        seconds=parse_seconds(resources.time) if resources.time else None,
    )


def workers_of(params: StageParams, executor: Executor) -> int:
    """How many workers the rows of a stage are shared out over. Raises: ExecutorError."""
    wanted = params.resources.workers
    if wanted != "all":
        return wanted
    needs = needs_of(params.resources)
    return max(1, sum(node.holds(needs) for node in executor.offer().nodes))


def misfits(loaded: LoadedManifest, executor: Executor, stages: Sequence[str]) -> dict[str, str]:
    """Of these stages, those that can never run where they are to, and why.

    Raises: ExecutorError: it is not known what there is.
    """
    found: dict[str, str] = {}
    for name in stages:
        params = loaded.manifest.stages[name]
        if params.resources.workers != 1 and params.kind not in SHARED_OUT:
            kinds = " and ".join(SHARED_OUT)
            found[name] = f"only stages of kind {kinds} have rows to share out: leave `workers` out"
        nodes = params.resources.nodes
        if nodes > 1 and params.kind not in SEVERAL_NODES:
            kinds = " and ".join(SEVERAL_NODES)
            found[name] = f"only stages of kind {kinds} run on several nodes: leave `nodes` out"
        elif nodes > 1 and not executor.remote:
            found[name] = (
                f"it asks for {nodes} nodes, and the {executor.name} executor has this machine "
                "alone: leave `nodes` out, or use --executor slurm or ray"
            )
    stated = {name: needs_of(loaded.manifest.stages[name].resources) for name in stages}
    if not executor.remote and not any(needs.stated for needs in stated.values()):
        return found  # to look for GPUs takes a while
    offer = executor.offer()
    for name, needs in stated.items():
        trouble = offer.lacks(needs)
        if trouble is not None:
            found.setdefault(name, trouble)
    return found
