"""`headway`: the command line. Prints errors that a user can cause as one sentence."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from itertools import pairwise
from typing import Annotated, Any

import typer.main
from typer.core import TyperCommand, TyperGroup

from headway import __version__
from headway.cli.options.packages import check_versions, extra_of, install
from headway.errors import ConfigError, HeadwayError
from headway.options import unsupported
from headway.version import commit

GROUPS = {
    "bench": "Measure throughput, latency, a server, or a profile for the simulator. Result keys are "
    "those of `vllm bench`.",
    "plan": "Find the best settings, the highest request rate, or the effect of each setting, by "
    "simulation.",
}
HEADINGS = {
    "Run models": ("run", "generate", "chat", "serve", "top", "models"),
    "Study scheduling": ("simulate", "compare", "trace", "lab", "doctor"),
    "Plan a deployment": ("bench", "plan", "deploy"),
}
# The modules in headway/cli/commands/ by full name; the function ends in _command.
COMMANDS = {
    **{name: name for names in HEADINGS.values() for name in names if name not in GROUPS},
    "bench throughput": "bench", "bench latency": "bench", "bench serve": "bench_serve",
    "bench profile": "bench", "plan tune": "tune", "plan capacity": "capacity",
    "plan sweep": "sweep", "plan breakeven": "sweep",
}  # fmt: skip


class Command(TyperCommand):
    """A command: help shows every name in full, an error is one sentence."""

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


@cache
def load_command(name: str) -> Any:
    """Import a command and read its options. Both take time, so only commands in use are loaded."""
    if name in GROUPS:
        return CommandGroup(
            name=name, help=GROUPS[name], no_args_is_help=True, rich_markup_mode=None
        )
    from headway.cli.options.common import spread

    module, own_name = import_module(f"headway.cli.commands.{COMMANDS[name]}"), name.split()[-1]
    alone = typer.Typer(add_completion=False, rich_markup_mode=None)
    alone.command(own_name, cls=Command)(spread(getattr(module, f"{own_name}_command")))
    return typer.main.get_command(alone)


class LazyCommands(Mapping[str, Any]):
    """The commands of a group by name, or all top-level ones; looking one up loads it."""

    def __init__(self, group: str) -> None:
        prefix = f"{group} " if group in GROUPS else ""
        inner = (name.removeprefix(prefix) for name in COMMANDS if name.startswith(prefix))
        self._names = {name: prefix + name for name in (each.partition(" ")[0] for each in inner)}

    def __getitem__(self, name: str) -> Any:
        return load_command(self._names[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class CommandGroup(TyperGroup):
    """The group of all commands, or one of GROUPS."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = LazyCommands(self.name or "")  # type: ignore[assignment]  # only read

    def get_short_help_str(self, limit: int = 45) -> str:
        return " ".join((self.help or "").split("\n\n")[0].split())

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List the commands under their headings, with names in one column."""
        headings = {"Commands": tuple(self.commands)} if self.name in GROUPS else HEADINGS
        width = max(map(len, self.commands))
        for heading, names in headings.items():
            with formatter.section(heading):
                formatter.write_dl(
                    [(f"{n:{width}}", self.commands[n].get_short_help_str()) for n in names]
                )


app = typer.Typer(
    name="headway",
    cls=CommandGroup,
    help="An LLM inference engine built around its scheduler.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(is_given: bool) -> None:
    if is_given:
        print(f"headway {__version__} (commit {commit() or 'unknown'})")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_version,
            is_eager=True,
            help="Print version and commit, and exit.",
        ),
    ] = False,
) -> None:
    """An LLM inference engine built around its scheduler."""


def main() -> None:
    """Entry point of the `headway` command."""
    try:
        try:
            app()
        except (TypeError, AttributeError, ImportError):
            check_versions()  # an old package has other names and arguments
            raise
    except HeadwayError as error:
        from headway.cli.view.render import print_error

        print_error(str(error))
        sys.exit(2)
    except ModuleNotFoundError as error:  # a base installation has only scheduler and simulator
        if (extra := extra_of(error.name)) is None:
            raise
        print(f"error: {error.name} is not installed: {install(extra)}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:  # the reader of the pipe has closed it
        sys.stderr.close()
        sys.exit(0)
