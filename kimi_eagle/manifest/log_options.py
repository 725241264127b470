"""`logging:` in a manifest: where the curves of trainings go besides the run's own events. Pure.

It is no part of any stage key, nor of what makes two manifests the same.
"""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from kimi_eagle.manifest.problem import FieldProblem
from kimi_eagle.stages.contract import Model

Name = Annotated[str, Field(min_length=1)]


class MlflowOptions(Model):
    """MLflow; takes the package `mlflow-skinny` or `mlflow`."""

    tracking_uri: Name | None = None
    """A server or a store; null: files in the run's folder. Credentials are for the environment."""
    experiment: Name | None = None
    """Null: the manifest's name."""

    @field_validator("tracking_uri")
    @classmethod
    def _holds_no_secret(cls, value: str | None) -> str | None:
        if value is not None and urlsplit(value).password is not None:
            raise FieldProblem(
                (),
                "holds a password",
                "leave it out, and set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD",
            )
        return value


class WandbOptions(Model):
    """Weights & Biases; takes the package `wandb`."""

    project: Name | None = None
    """Null: the manifest's name."""
    entity: Name | None = None
    mode: Literal["offline", "online"] = "offline"
    """`offline`: files in the run's folder, for `wandb sync`."""


class LogOptions(Model):
    """Where the curves of trainings go. Nothing here is part of a stage key."""

    tensorboard: bool = True
    """Event files in the run's folder: `tensorboard --logdir runs/RUN/tensorboard`."""
    mlflow: MlflowOptions | None = None
    wandb: WandbOptions | None = None
