"""Alembic's entry: the connection is handed over by `kimi_eagle.registry.schema`."""

from alembic import context

from kimi_eagle.registry.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    # SQLite alters a table by copying it.
    render_as_batch=True,
)
context.run_migrations()
