"""The store of outcomes, concurrent use, and damaged files."""

import sqlite3
import subprocess
import sys
from subprocess import PIPE

import pytest

from chipfit.bench.store import Store
from chipfit.errors import ConfigError, ExportError


def test_an_outcome_replaces_a_failure_and_no_later_failure_replaces_it(tmp_path):
    store = Store(tmp_path / "runs.sqlite")
    store.put("k", "one", "s", None, "it broke")
    assert store.done(["k", "other"]) == set()
    Store(tmp_path / "runs.sqlite").put("k", "one", "s", {"top1": 3.0})
    (found,) = store.rows("s")
    assert (found["status"], found["tries"], found["outcome"], found["error"]) == ("done", 2, {"top1": 3.0}, None)
    assert store.done(["k", "other"]) == {"k"} and store.rows("t") == []
    store.put("k", "one", "s", None, "no memory")
    (found,) = store.rows()
    assert (found["status"], found["outcome"], found["error"]) == ("done", {"top1": 3.0}, None)


def test_rows_are_read_without_curves_on_request(tmp_path):
    store = Store(tmp_path / "runs.sqlite")
    store.put("k", "one", "s", {"top1": 3.0, "curves": {"loss": [[1, 2.0]]}})
    store.put("l", "two", "s", None, "it broke")
    whole, plain = store.rows(), store.rows(curves=False)
    assert whole[0]["outcome"].pop("curves") and whole == plain


PUT = """import sys; from pathlib import Path; from chipfit.bench.store import Store
for at in sys.stdin: Store(Path(at.strip()) / 'runs.sqlite').put(sys.argv[1], 'n', 's', {}); print(flush=True)"""
WRITE = [sys.executable, "-c", PUT]


def test_processes_may_create_a_store_concurrently(tmp_path):
    drivers = [subprocess.Popen([*WRITE, str(k)], stdin=PIPE, stdout=PIPE, text=True) for k in range(3)]
    for k in range(10):
        for told in drivers:
            told.stdin.write(f"{tmp_path / str(k)}\n")
            told.stdin.flush()
        for told in drivers:
            told.stdout.readline()
        assert [r["key"] for r in Store(tmp_path / f"{k}/runs.sqlite").rows()] == ["0", "1", "2"]
    for told in drivers:
        told.communicate()
        assert told.returncode == 0


def test_a_folder_that_cannot_be_created_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ExportError, match="a file stands where it has a folder"):
        Store(tmp_path / "file" / "runs.sqlite")


def test_a_store_of_a_newer_version_is_refused_and_unchanged(tmp_path):
    path = tmp_path / "runs.sqlite"
    Store(path)
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version=2")
    with pytest.raises(ConfigError, match=r"newer than this.*version 2.*up to 1"):
        Store(path)
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (2,)


def test_a_file_that_is_no_store_is_refused(tmp_path):
    (tmp_path / "runs.sqlite").write_bytes(b"not a data base" * 100)
    with pytest.raises(ConfigError, match="cannot be read"):
        Store(tmp_path / "runs.sqlite")


def test_damage_of_an_open_store_is_reported(tmp_path):
    store = Store(tmp_path / "runs.sqlite")
    for k in range(50):
        store.put(f"{k}", "one", "s", {"x": "y" * 5000})
    store.engine.dispose()
    with (tmp_path / "runs.sqlite").open("r+b") as f:
        f.seek(4096)
        f.write(b"\xff" * 40_000)
    for ask in (store.rows, lambda: store.done(["1"])):
        with pytest.raises(ConfigError, match="store cannot be read.*malformed.*move it away"):
            ask()


def test_a_full_disk_is_reported(tmp_path):
    store = Store(tmp_path / "runs.sqlite")
    with store.engine.connect() as db:
        db.exec_driver_sql("PRAGMA max_page_count=1")
        pool = store.engine.raw_connection()
        pool.driver_connection.execute("PRAGMA max_page_count=1")
        pool.close()
    with pytest.raises(ConfigError, match="cannot be written.*full"):
        store.put("k", "one", "s", {"x": "y" * 100_000})
