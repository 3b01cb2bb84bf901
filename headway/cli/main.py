"""`headway`: gathers the commands, and turns errors a user can cause into one clear sentence."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from headway import __version__
from headway.cli.commands import (
    bench,
    chat,
    compare,
    demo,
    generate,
    lists,
    models,
    profile,
    run,
    serve,
    simulate,
    top,
    trace,
)
from headway.cli.options.packages import install, is_optional
from headway.errors import HeadwayError

app = typer.Typer(
    name="headway",
    help="An LLM inference engine built around its scheduler.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command("run")(run.run_command)
app.command("generate")(generate.generate_command)
app.command("chat")(chat.chat_command)
app.command("serve")(serve.serve_command)
app.command("top")(top.top_command)
app.add_typer(bench.app, name="bench")
app.command("models")(models.models_command)
app.command("profile")(profile.profile_command)
app.command("simulate")(simulate.simulate_command)
app.command("compare")(compare.compare_command)
app.command("trace")(trace.trace_command)
app.command("demo")(demo.demo_command)
app.command("presets")(lists.presets_command)
app.command("profiles")(lists.profiles_command)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"headway {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """An LLM inference engine built around its scheduler."""


def main() -> None:
    """Entry point of the `headway` command."""
    try:
        app()
    except HeadwayError as error:
        text = f"[bold red]error:[/] {escape(str(error))}"
        Console(stderr=True).print(text, highlight=False, soft_wrap=True)
        sys.exit(2)
    except ModuleNotFoundError as error:  # a base install has scheduler and simulator only
        if not is_optional(error.name):
            raise
        print(f"error: {error.name} is not installed: {install('torch')}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:  # the reader of a pipe has seen enough
        sys.stderr.close()
        sys.exit(0)
