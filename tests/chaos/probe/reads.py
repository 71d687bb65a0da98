"""Reads of a node's files as steps, so that one of them can fail as on a bad sector.

Seen are: opening a file to read it, `pread`, and questions to a database. Not seen is what another language or a
mapping reads after that: BLAKE3 of a mapped file, pages of mapped weights, SQLite's own pages.
"""

import builtins
import io
import os
import sqlite3

KINDS = ("open", "pread", "select")


def follow(probe, folder: str, caller) -> None:
    """Follow the reads of all files below a folder. `caller`: names who reads."""
    folder = os.path.join(folder, "")
    file_open, os_open, pread = io.open, os.open, os.pread

    def reach(kind: str, path: object) -> None:
        where = os.path.realpath(os.fsdecode(path)) if isinstance(path, str | bytes | os.PathLike) else ""
        if where.startswith(folder) and (name := caller()) != "nobody":
            probe.reach(f"{kind} {name}", "before", kind)

    def opened(file, mode="r", *args, **named):
        if not set(mode) & set("wax+"):
            reach("open", file)
        return file_open(file, mode, *args, **named)

    def os_opened(path, flags, *args, **named):
        if not flags & (os.O_WRONLY | os.O_RDWR | os.O_DIRECTORY):
            reach("open", path)
        return os_open(path, flags, *args, **named)

    def read_at(descriptor, *args):
        reach("pread", os.readlink(f"/proc/self/fd/{descriptor}"))
        return pread(descriptor, *args)

    builtins.open = io.open = opened
    os.open, os.pread = os_opened, read_at
    begin = sqlite3.connect

    class Cursor(sqlite3.Cursor):
        """Its questions are steps."""

        def execute(self, statement, *values):
            if statement.lstrip()[:6].upper() == "SELECT" and (name := caller()) != "nobody":
                probe.reach(f"select {name}", "before", "select")
            return super().execute(statement, *values)

    def connect(*args, **named):
        connection = begin(*args, **named)
        connection.cursor = lambda: Cursor(connection)
        return connection

    sqlite3.connect = connect
