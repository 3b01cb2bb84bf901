"""The class of all commands: help that shows every name in full, and errors of one sentence."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from typer.core import TyperCommand

from headway.cli.options.replaced import REPLACED
from headway.errors import ConfigError
from headway.unsupported import unsupported


class Command(TyperCommand):
    """A command with its options in panels; the error for an old flag names the new one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # a UsageError, which Typer does not export
            if not hasattr(error, "format_message"):
                raise
            raise ConfigError(self._problem(error, given)) from None

    def _problem(self, error: Any, given: list[str]) -> str:
        """What is wrong with the arguments, on one line."""
        old, parameter = getattr(error, "option_name", ""), getattr(error, "param", None)
        known = {flag for p in self.params for flag in (*p.opts, *p.secondary_opts)}
        new = [flag for flag in REPLACED.get(old, ()) if flag in known - {old}]
        if new:
            return f"there is no option {old}; use {' or '.join(new)}"
        if problem := unsupported(old):
            return problem
        for flag, value in pairwise([word for each in given for word in each.split("=", 1)]):
            if parameter is not None and flag in parameter.opts:
                return f"{flag} {value}: {error.message}"
        return " ".join(error.format_message().split())

    def get_short_help_str(self, limit: int = 45) -> str:
        """The first paragraph of the help, in full."""
        return " ".join((self.help or "").split("\n\n")[0].split())

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the panels as plain text: Rich truncates long names at 80 columns."""
        panels: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                default = "Arguments" if parameter.param_type_name == "argument" else "Options"
                panel = getattr(parameter, "rich_help_panel", None) or default
                panels.setdefault(panel, []).append(record)
        for panel, records in panels.items():
            if records:
                with formatter.section(panel):
                    formatter.write_dl(records)
