"""`headway`: the command line. Prints errors that a user can cause as one sentence."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated

import typer

from headway import __version__
from headway.cli.commands import (
    bench,
    capacity,
    chat,
    compare,
    doctor,
    generate,
    lab,
    lists,
    profile,
    run,
    serve,
    simulate,
    sweep,
    top,
    trace,
    tune,
)
from headway.cli.options.command import Command
from headway.cli.options.packages import install, is_optional
from headway.cli.view.render import print_error
from headway.errors import HeadwayError
from headway.version import commit

app = typer.Typer(
    name="headway",
    help="An LLM inference engine built around its scheduler.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
COMMANDS: dict[str, Callable[..., None]] = {
    "run": run.run_command,
    "generate": generate.generate_command,
    "chat": chat.chat_command,
    "serve": serve.serve_command,
    "top": top.top_command,
    "doctor": doctor.doctor_command,
    "models": lists.models_command,
    "profile": profile.profile_command,
    "simulate": simulate.simulate_command,
    "compare": compare.compare_command,
    "sweep": sweep.sweep_command,
    "breakeven": sweep.breakeven_command,
    "tune": tune.tune_command,
    "capacity": capacity.capacity_command,
    "trace": trace.trace_command,
    "lab": lab.lab_command,
    "step": lab.step_command,
    "demo": simulate.demo_command,
    "presets": lists.presets_command,
    "profiles": lists.profiles_command,
}
for name, command in COMMANDS.items():
    app.command(name, cls=Command)(command)
app.add_typer(bench.app, name="bench")


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
        app()
    except HeadwayError as error:
        print_error(str(error))
        sys.exit(2)
    except ModuleNotFoundError as error:  # a base installation has only scheduler and simulator
        if not is_optional(error.name):
            raise
        print(f"error: {error.name} is not installed: {install('torch')}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:  # the reader of the pipe has closed it
        sys.stderr.close()
        sys.exit(0)
