"""A store of the outcomes of experiments, in one SQLite file."""

import json
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from chipfit.errors import ConfigError, RuntimeUnavailable, short_message
from chipfit.files import lock_folder

try:
    import sqlalchemy as sql
    from sqlalchemy.dialects.sqlite import insert
    from sqlalchemy.exc import DatabaseError
except ImportError as e:
    raise RuntimeUnavailable(
        f"Experiments need sqlalchemy: {short_message(e)}", hint="pip install 'chipfit[bench]'"
    ) from e

#: version of the tables, recorded in the store
VERSION = 1
_START_ANEW = "move it away and run the experiments again"
_METADATA = sql.MetaData()
RUNS = sql.Table(
    "runs",
    _METADATA,
    sql.Column("key", sql.String, primary_key=True),
    sql.Column("name", sql.String, nullable=False),
    sql.Column("study", sql.String, nullable=False, index=True),
    sql.Column("status", sql.String, nullable=False),  # "done", or "failed"
    sql.Column("ended", sql.Float, nullable=False),  # seconds since 1970
    sql.Column("tries", sql.Integer, nullable=False),
    sql.Column("outcome", sql.JSON),
    sql.Column("error", sql.String),
)


class Store:
    """The outcomes of experiments by key; several processes may read and write concurrently.

    Raises:
        ConfigError: the file is not a store, or has a newer version.
        ExportError: the folder cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.engine = sql.create_engine(f"sqlite:///{path}", connect_args={"timeout": 60})
        sql.event.listen(self.engine, "connect", lambda c, _: c.execute("PRAGMA journal_mode=WAL"))
        with lock_folder(path.parent, wait=True), self._transaction("read", _START_ANEW) as db:  # creates tables once
            version = db.execute(sql.text("PRAGMA user_version")).scalar_one()
            if version > VERSION:
                hint = "use the version of chipfit that wrote it, or a newer one"
                got, allowed = f"version {version}", f"up to {VERSION}"
                what = "The store is newer than this version of chipfit"
                raise ConfigError(what, where=str(path), got=got, allowed=allowed, hint=hint)
            _METADATA.create_all(db)
            db.execute(sql.text(f"PRAGMA user_version={VERSION}"))

    @contextmanager
    def _transaction(self, what: str, hint: str) -> Iterator[sql.Connection]:
        """Begin a transaction; `what` and `hint` are for messages."""
        try:
            with self.engine.begin() as db:
                yield db
        except DatabaseError as e:
            why = short_message(e.orig or e)
            raise ConfigError(f"The store cannot be {what}: {why}", where=str(self.path), hint=hint) from e

    def put(self, key: str, name: str, study: str, outcome: dict[str, Any] | None, error: str | None = None) -> None:
        """Store an outcome, or an error unless the experiment has an outcome.

        Raises:
            ConfigError: the store cannot be written.
        """
        ended = {"name": name, "study": study, "status": "failed" if outcome is None else "done", "ended": time.time()}
        values = {**ended, "outcome": outcome, "error": error}
        replaced = RUNS.c.status != "done" if outcome is None else None  # another process may have completed it
        again = values | {"tries": RUNS.c.tries + 1}
        row = insert(RUNS).values(key=key, tries=1, **values)
        filed = row.on_conflict_do_update(index_elements=["key"], set_=again, where=replaced)
        with self._transaction("written", "free disk space and run it again, which resumes it") as db:
            db.execute(filed)

    def rows(self, study: str | None = None, *, curves: bool = True) -> list[dict[str, Any]]:
        """Return all runs, sorted by name: their columns with `outcome` as data, with curves if requested.

        An outcome that is not JSON is a text.
        """
        stored = RUNS.c.outcome
        plain = sql.case((sql.func.json_valid(stored) == 1, sql.func.json_remove(stored, "$.curves")), else_=stored)
        outcome = sql.type_coerce(stored if curves else plain, sql.String).label("outcome")
        columns = [outcome if c.name == "outcome" else c for c in RUNS.c]
        query = sql.select(*columns).order_by(RUNS.c.name, RUNS.c.key)
        with self._transaction("read", _START_ANEW) as db:
            found = db.execute(query if study is None else query.where(RUNS.c.study == study))
            return [{**r, "outcome": _data(r["outcome"])} for r in found.mappings()]

    def done(self, keys: Iterable[str]) -> set[str]:
        """Return the keys of experiments with an outcome."""
        with self._transaction("read", _START_ANEW) as db:
            return set(db.execute(sql.select(RUNS.c.key).where(RUNS.c.status == "done")).scalars()) & set(keys)


def _data(stored: Any) -> Any:
    """Return the data of a JSON text, other values unchanged."""
    try:
        return json.loads(stored) if isinstance(stored, str) else stored
    except (ValueError, RecursionError):
        return stored
