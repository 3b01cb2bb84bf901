"""Logs the names of request fields that have no effect, each once per process."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from headway.server.http.errors import format_value

MAX_REPORTED = 100  # names; clients choose them, so their number must be limited
log = logging.getLogger(__name__)


class IgnoredFields:
    """The ignored fields that have been logged."""

    def __init__(self) -> None:
        self._reported: set[str] = set()

    def report(self, fields: Mapping[str, Any]) -> None:
        """Log the names that are new; a field without a value is not worth a warning."""
        for name, value in fields.items():
            if len(self._reported) >= MAX_REPORTED:
                return
            shown = format_value(name)
            if value is not None and shown not in self._reported:
                self._reported.add(shown)
                log.warning("request field %s has no effect; this is logged once", shown)
