"""SQLAlchemy's and Alembic's way to a registry: for queries made of parts, and for migrations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import URL, create_engine, event
from sqlalchemy.engine import Engine
from sqlalchemy.exc import DBAPIError

from kimi_eagle.registry.schema import BUSY_SECONDS, REVISION, Database, readable, scripts


def engine_of(database: Database) -> Engine:
    """An engine on a registry that `schema.open_database` has let through."""
    url = URL.create("sqlite", database=database.uri, query={"uri": "true"})
    engine = create_engine(url, connect_args={"timeout": BUSY_SECONDS})

    @event.listens_for(engine, "connect")
    def _settings(connection: Any, _record: Any) -> None:
        # SQLAlchemy's own begin is kept out of the way: see `_begin`.
        connection.isolation_level = None
        database.configure(connection)

    @event.listens_for(engine, "begin")
    def _begin(connection: Any) -> None:
        # As in `Database.write`: a transaction that may write takes the write lock first.
        reading = connection.get_execution_options().get("read_only", False)
        connection.exec_driver_sql("begin" if reading else "begin immediate")

    return engine


@contextmanager
def told(database: Database) -> Iterator[None]:
    """Say what SQLite says through SQLAlchemy as `schema.readable` would."""
    with readable(database.path):
        try:
            yield
        except DBAPIError as error:
            if error.orig is None:
                raise
            raise error.orig from error


def migrate(database: Database) -> None:
    """Bring a database's schema up to this program's. Raises: RegistryError."""
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(scripts()).replace("%", "%%"))
    engine = engine_of(database)
    try:
        with told(database), engine.begin() as connection:
            config.attributes["connection"] = connection
            command.upgrade(config, REVISION)
    finally:
        engine.dispose()
