"""The history of evaluations: a file of JSON lines, one outcome each, by the key of its job.

Lines are only appended, each with one write, so a process that is killed loses at most the outcome
that it was writing. A damaged line is skipped. Several processes may append to one file.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from headway.errors import FormatError
from headway.lab.planner.evaluate import Outcome, code_version


class History:
    """Outcomes of earlier evaluations with the present code; without a path, of this process."""

    def __init__(self, path: Path | None = None) -> None:
        self._path, self._known = path, dict[str, Outcome]()
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a+b") as file:
                self._read(file)
        except OSError as error:
            raise FormatError(path, None, f"cannot be used: {error.strerror}") from None

    def __len__(self) -> int:
        return len(self._known)

    def get(self, key: str) -> Outcome | None:
        return self._known.get(key)

    def put(self, key: str, outcome: Outcome) -> None:
        """Remember an outcome, on disk before this returns."""
        self._known[key] = outcome
        if self._path is None:
            return
        line = json.dumps({"key": key, "code": code_version(), "outcome": asdict(outcome)})
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(file, f"{line}\n".encode())
        finally:
            os.close(file)

    def _read(self, file: Any) -> None:
        file.seek(0)
        last = b"\n"
        for last in file:
            try:
                line = json.loads(last)
                if line["code"] == code_version():
                    self._known[line["key"]] = Outcome(**line["outcome"])
            except (ValueError, TypeError, KeyError):
                continue  # cut off by the end of a process
        if not last.endswith(b"\n"):
            file.write(b"\n")
