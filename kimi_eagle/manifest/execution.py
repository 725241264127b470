"""Where the stages of a manifest run, as it says so. Pure."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from kimi_eagle.stages.contract import Model

_Text = Annotated[str, Field(min_length=1)]


class Local(Model):
    """On this machine, as subprocesses."""

    kind: Literal["local"] = "local"
    gpus: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    """The GPUs that stages may be given, by id; null for all that there are."""
    retries: ClassVar[int] = 0


class Ray(Model):
    """In a Ray cluster that is there already; this root must be on a file system of all nodes."""

    kind: Literal["ray"]
    address: _Text = "auto"
    """Of its head, `host:6379`; `auto` for the cluster that this machine is part of."""
    python: _Text | None = None
    """The interpreter that has kimi-eagle on the nodes; null for the same path as here."""
    retries: Annotated[int, Field(ge=0)] = 2
    """How often a stage is begun again whose node died or that was preempted."""


class Slurm(Model):
    """As batch jobs of Slurm; this root must be on a file system of all nodes."""

    kind: Literal["slurm"]
    partition: _Text | None = None
    account: _Text | None = None
    qos: _Text | None = None
    options: tuple[Annotated[str, Field(pattern="^-")], ...] = ()
    """Further options of sbatch: `["--constraint=h200"]`."""
    setup: str = ""
    """Lines of shell that a job begins with: `module load cuda`."""
    python: _Text | None = None
    """The interpreter that has kimi-eagle on the nodes; null for the same path as here."""
    retries: Annotated[int, Field(ge=0)] = 2
    """How often a stage is begun again whose node died or that was preempted."""


Execution = Annotated[Local | Ray | Slurm, Field(discriminator="kind")]
KINDS = ("local", "ray", "slurm")
