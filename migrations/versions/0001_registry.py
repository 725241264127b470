"""The registry as first released."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "runs",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("seq", sa.Integer, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("manifest_digest", sa.String(64), nullable=False),
        sa.Column("manifest_path", sa.Text, nullable=False),
        sa.Column("manifest_text", sa.Text, nullable=False),
        sa.Column("resolved", sa.Text, nullable=False),
        sa.Column("overrides", sa.Text, nullable=False),
        sa.Column("environment", sa.Text, nullable=False),
        sa.Column("started_at", sa.String(32), nullable=False),
        sa.Column("ended_at", sa.String(32)),
        sa.Column("host", sa.Text, nullable=False),
        sa.Column("pid", sa.Integer, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_runs"),
        sa.UniqueConstraint("seq", name="uq_runs_seq"),
        sa.CheckConstraint("kind in ('submit','reproduce')", name=op.f("ck_runs_kind")),
        sa.CheckConstraint(
            "status in ('running','done','failed','interrupted')", name=op.f("ck_runs_status")
        ),
    )
    op.create_table(
        "artifacts",
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("bytes", sa.Integer, nullable=False),
        sa.Column("files", sa.Text, nullable=False),
        sa.Column("label", sa.Text, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("created_at", sa.String(32), nullable=False),
        sa.Column("verified_at", sa.String(32)),
        sa.PrimaryKeyConstraint("digest", name="pk_artifacts"),
        sa.CheckConstraint(
            "state in ('present','evicted','missing','external')", name=op.f("ck_artifacts_state")
        ),
    )
    op.create_table(
        "pins",
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("note", sa.Text, nullable=False),
        sa.Column("created_at", sa.String(32), nullable=False),
        sa.PrimaryKeyConstraint("digest", name="pk_pins"),
        sa.ForeignKeyConstraint(["digest"], ["artifacts.digest"], name="fk_pins_digest"),
    )
    op.create_table(
        "artifact_members",
        sa.Column("parent", sa.String(64), nullable=False),
        sa.Column("path", sa.Text, nullable=False),
        sa.Column("child", sa.String(64), nullable=False),
        sa.PrimaryKeyConstraint("parent", "path", name="pk_artifact_members"),
        sa.ForeignKeyConstraint(
            ["parent"], ["artifacts.digest"], name="fk_artifact_members_parent"
        ),
        sa.ForeignKeyConstraint(["child"], ["artifacts.digest"], name="fk_artifact_members_child"),
    )
    op.create_index("ix_artifact_members_child", "artifact_members", ["child"])
    op.create_table(
        "executions",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("run_id", sa.String(32), nullable=False),
        sa.Column("stage", sa.Text, nullable=False),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("key", sa.String(64)),
        sa.Column("document", sa.Text),
        sa.Column("disposition", sa.String(16), nullable=False),
        sa.Column("reused_from", sa.Integer),
        sa.Column("attempt", sa.String(32)),
        sa.Column("metrics", sa.Text, nullable=False),
        sa.Column("resources", sa.Text, nullable=False),
        sa.Column("environment", sa.Text, nullable=False),
        sa.Column("error", sa.Text),
        sa.Column("seconds", sa.Float),
        sa.Column("started_at", sa.String(32), nullable=False),
        sa.Column("ended_at", sa.String(32)),
        sa.PrimaryKeyConstraint("id", name="pk_executions"),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_executions_run_id"),
        sa.ForeignKeyConstraint(
            ["reused_from"], ["executions.id"], name="fk_executions_reused_from"
        ),
        sa.CheckConstraint(
            "disposition in ('executed','reused','reproduced','failed','running','interrupted')",
            name=op.f("ck_executions_disposition"),
        ),
    )
    op.create_index("ix_executions_key_disposition", "executions", ["key", "disposition"])
    op.create_index("ix_executions_run_id", "executions", ["run_id"])
    op.create_index("ix_executions_kind_stage", "executions", ["kind", "stage"])
    op.create_table(
        "execution_inputs",
        sa.Column("execution", sa.Integer, nullable=False),
        sa.Column("role", sa.Text, nullable=False),
        sa.Column("position", sa.Integer, nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.PrimaryKeyConstraint("execution", "role", "position", name="pk_execution_inputs"),
        sa.ForeignKeyConstraint(
            ["execution"], ["executions.id"], name="fk_execution_inputs_execution"
        ),
        sa.ForeignKeyConstraint(
            ["digest"], ["artifacts.digest"], name="fk_execution_inputs_digest"
        ),
    )
    op.create_index("ix_execution_inputs_digest", "execution_inputs", ["digest"])
    op.create_table(
        "execution_outputs",
        sa.Column("execution", sa.Integer, nullable=False),
        sa.Column("role", sa.Text, nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.PrimaryKeyConstraint("execution", "role", name="pk_execution_outputs"),
        sa.ForeignKeyConstraint(
            ["execution"], ["executions.id"], name="fk_execution_outputs_execution"
        ),
        sa.ForeignKeyConstraint(
            ["digest"], ["artifacts.digest"], name="fk_execution_outputs_digest"
        ),
    )
    op.create_index("ix_execution_outputs_digest", "execution_outputs", ["digest"])
    op.create_table(
        "file_stats",
        sa.Column("path", sa.Text, nullable=False),
        sa.Column("device", sa.Integer, nullable=False),
        sa.Column("inode", sa.Integer, nullable=False),
        sa.Column("size", sa.Integer, nullable=False),
        sa.Column("mtime_ns", sa.Integer, nullable=False),
        sa.Column("ctime_ns", sa.Integer, nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.PrimaryKeyConstraint("path", name="pk_file_stats"),
    )
    op.create_table(
        "state_shards",
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("bytes", sa.Integer, nullable=False),
        sa.Column("rows", sa.Integer, nullable=False),
        sa.Column("tokens", sa.Integer, nullable=False),
        sa.Column("created_at", sa.String(32), nullable=False),
        sa.PrimaryKeyConstraint("digest", name="pk_state_shards"),
    )
    op.create_table(
        "state_rows",
        sa.Column("key", sa.String(64), nullable=False),
        sa.Column("shard", sa.String(64), nullable=False),
        sa.Column("start", sa.Integer, nullable=False),
        sa.Column("tokens", sa.Integer, nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.PrimaryKeyConstraint("key", name="pk_state_rows"),
        sa.ForeignKeyConstraint(["shard"], ["state_shards.digest"], name="fk_state_rows_shard"),
    )
    op.create_index("ix_state_rows_shard", "state_rows", ["shard"])


def downgrade() -> None:
    for table in (
        "state_rows",
        "state_shards",
        "file_stats",
        "execution_outputs",
        "execution_inputs",
        "executions",
        "artifact_members",
        "pins",
        "artifacts",
        "runs",
    ):
        op.drop_table(table)
