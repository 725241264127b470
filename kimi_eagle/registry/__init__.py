"""The run registry: SQLite through SQLAlchemy; the coordinator alone writes it."""
