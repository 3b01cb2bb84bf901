"""The class of all commands: help that shows every name in full, and errors of one sentence."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from typer.core import TyperCommand

from headway.errors import ConfigError
from headway.options import unsupported


def first_paragraph(help: str | None) -> str:
    """The first paragraph of a help text, on one line."""
    return " ".join((help or "").split("\n\n")[0].split())


class Command(TyperCommand):
    """A command with its options in panels."""

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
        if problem := unsupported(getattr(error, "option_name", "")):
            return problem
        parameter = getattr(error, "param", None)
        for flag, value in pairwise([word for each in given for word in each.split("=", 1)]):
            if parameter is not None and flag in parameter.opts:
                return f"{flag} {value}: {error.message}"
        return " ".join(error.format_message().split())

    def get_short_help_str(self, limit: int = 45) -> str:
        return first_paragraph(self.help)

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
