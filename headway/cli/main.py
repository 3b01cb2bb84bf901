"""`headway`: the command line. Prints errors that a user can cause as one sentence."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from typing import Annotated, Any

import typer.main
from typer.core import TyperGroup

from headway import __version__
from headway.cli.options.command import Command
from headway.cli.options.packages import check_versions, extra_of, install
from headway.errors import HeadwayError
from headway.version import commit

COMMANDS = {  # the module in headway/cli/commands/ and the function; `app` is a group of commands
    "run": "run.run_command",
    "generate": "generate.generate_command",
    "chat": "chat.chat_command",
    "serve": "serve.serve_command",
    "deploy": "deploy.deploy_command",
    "top": "top.top_command",
    "doctor": "doctor.doctor_command",
    "models": "lists.models_command",
    "profile": "profile.profile_command",
    "simulate": "simulate.simulate_command",
    "compare": "compare.compare_command",
    "sweep": "sweep.sweep_command",
    "breakeven": "sweep.breakeven_command",
    "tune": "tune.tune_command",
    "capacity": "capacity.capacity_command",
    "trace": "trace.trace_command",
    "lab": "lab.lab_command",
    "step": "lab.step_command",
    "demo": "simulate.demo_command",
    "presets": "lists.presets_command",
    "profiles": "lists.profiles_command",
    "bench": "bench.app",
}


@cache
def load_command(name: str) -> Any:
    """Import a command and read its options. Both take time, so only commands in use are loaded."""
    module, _, function = COMMANDS[name].partition(".")
    found = getattr(import_module(f"headway.cli.commands.{module}"), function)
    if isinstance(found, typer.Typer):
        return typer.main.get_command(found)
    alone = typer.Typer(add_completion=False, rich_markup_mode=None)
    alone.command(name, cls=Command)(found)
    return typer.main.get_command(alone)


class LazyCommands(Mapping[str, Any]):
    """All commands by name; looking one up loads it."""

    def __getitem__(self, name: str) -> Any:
        return load_command(name)

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


class CommandGroup(TyperGroup):
    """The group of all commands."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = LazyCommands()  # type: ignore[assignment]  # Typer only reads it


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
