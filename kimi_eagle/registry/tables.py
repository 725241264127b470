"""The tables of the registry. `migrations/` makes them; a test holds the two equal.

`schema.REVISION` is the revision that they are.
"""

from __future__ import annotations

from sqlalchemy import (
    CheckConstraint,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
)

# SQLite cannot drop a constraint without a name: every one has a name from the first revision.
metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

runs = Table(
    "runs",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("seq", Integer, nullable=False, unique=True),
    Column("name", Text, nullable=False),
    Column(
        "kind",
        String(16),
        CheckConstraint("kind in ('submit','reproduce')", name="kind"),
        nullable=False,
    ),
    Column(
        "status",
        String(16),
        CheckConstraint("status in ('running','done','failed','interrupted')", name="status"),
        nullable=False,
    ),
    Column("manifest_digest", String(64), nullable=False),
    Column("manifest_path", Text, nullable=False),
    Column("manifest_text", Text, nullable=False),
    Column("resolved", Text, nullable=False),
    Column("overrides", Text, nullable=False),
    Column("environment", Text, nullable=False),
    Column("started_at", String(32), nullable=False),
    Column("ended_at", String(32)),
    Column("host", Text, nullable=False),
    Column("pid", Integer, nullable=False),
)

artifacts = Table(
    "artifacts",
    metadata,
    Column("digest", String(64), primary_key=True),
    Column("kind", String(32), nullable=False),
    Column("bytes", Integer, nullable=False),
    Column("files", Text, nullable=False),
    Column("label", Text, nullable=False),
    Column(
        "state",
        String(16),
        CheckConstraint("state in ('present','evicted','missing','external')", name="state"),
        nullable=False,
    ),
    Column("created_at", String(32), nullable=False),
    # When every file was last read and found equal to its digest.
    Column("verified_at", String(32)),
)

# Artifacts that are kept whatever the policy of `gc` says.
pins = Table(
    "pins",
    metadata,
    Column("digest", String(64), ForeignKey("artifacts.digest"), primary_key=True),
    Column("note", Text, nullable=False),
    Column("created_at", String(32), nullable=False),
)

artifact_members = Table(
    "artifact_members",
    metadata,
    Column("parent", String(64), ForeignKey("artifacts.digest"), primary_key=True),
    Column("path", Text, primary_key=True),
    Column("child", String(64), ForeignKey("artifacts.digest"), nullable=False),
    Index("ix_artifact_members_child", "child"),
)

executions = Table(
    "executions",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("run_id", String(32), ForeignKey("runs.id"), nullable=False),
    Column("stage", Text, nullable=False),
    Column("kind", String(32), nullable=False),
    Column("key", String(64)),
    Column("document", Text),
    Column(
        "disposition",
        String(16),
        CheckConstraint(
            "disposition in ('executed','reused','reproduced','failed','running','interrupted')",
            name="disposition",
        ),
        nullable=False,
    ),
    Column("reused_from", Integer, ForeignKey("executions.id")),
    Column("attempt", String(32)),
    Column("metrics", Text, nullable=False),
    # What it took: seconds of CPU, peak memory, bytes written.
    Column("resources", Text, nullable=False),
    Column("environment", Text, nullable=False),
    Column("error", Text),
    Column("seconds", Float),
    Column("started_at", String(32), nullable=False),
    Column("ended_at", String(32)),
    Index("ix_executions_key_disposition", "key", "disposition"),
    Index("ix_executions_run_id", "run_id"),
    Index("ix_executions_kind_stage", "kind", "stage"),
)

execution_inputs = Table(
    "execution_inputs",
    metadata,
    Column("execution", Integer, ForeignKey("executions.id"), primary_key=True),
    Column("role", Text, primary_key=True),
    Column("position", Integer, primary_key=True),
    Column("digest", String(64), ForeignKey("artifacts.digest"), nullable=False),
    Index("ix_execution_inputs_digest", "digest"),
)

execution_outputs = Table(
    "execution_outputs",
    metadata,
    Column("execution", Integer, ForeignKey("executions.id"), primary_key=True),
    Column("role", Text, primary_key=True),
    Column("digest", String(64), ForeignKey("artifacts.digest"), nullable=False),
    Index("ix_execution_outputs_digest", "digest"),
)

# What a file held when it was last read: its digest stands as long as nothing of this changes.
file_stats = Table(
    "file_stats",
    metadata,
    Column("path", Text, primary_key=True),
    Column("device", Integer, nullable=False),
    Column("inode", Integer, nullable=False),
    Column("size", Integer, nullable=False),
    Column("mtime_ns", Integer, nullable=False),
    Column("ctime_ns", Integer, nullable=False),
    Column("digest", String(64), nullable=False),
)

state_shards = Table(
    "state_shards",
    metadata,
    Column("digest", String(64), primary_key=True),
    Column("bytes", Integer, nullable=False),
    Column("rows", Integer, nullable=False),
    Column("tokens", Integer, nullable=False),
    Column("created_at", String(32), nullable=False),
)

state_rows = Table(
    "state_rows",
    metadata,
    Column("key", String(64), primary_key=True),
    Column("shard", String(64), ForeignKey("state_shards.digest"), nullable=False),
    Column("start", Integer, nullable=False),
    Column("tokens", Integer, nullable=False),
    Column("digest", String(64), nullable=False),
    Index("ix_state_rows_shard", "shard"),
)
