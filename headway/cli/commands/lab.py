"""`headway lab`: look at every decision of a run, on a page or in the terminal."""

from __future__ import annotations

import base64
import json
import sys
import webbrowser
from collections.abc import Callable, Container, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

from headway.cli.commands.compare import parse_variant
from headway.cli.options import common as options
from headway.cli.options.common import argument, option
from headway.cli.options.simulation import SimulationOptions, without
from headway.errors import ConfigError, HeadwayError
from headway.lab.recording.describe import frame_lines, why
from headway.lab.recording.format import Mark
from headway.lab.recording.reader import RunRecording, read_recording
from headway.lab.recording.run import SimulatedRun, recording_of_file
from headway.lab.recording.spec import RunSpec, read_spec
from headway.lab.simulate import config_for
from headway.lab.web.app import LabApp
from headway.lab.web.attach import follow
from headway.lab.web.catalog import DEFAULT_SPEC
from headway.lab.web.export import exported
from headway.lab.web.server import LabServer
from headway.scheduler.policies.presets import own_policies
from headway.scheduler.policies.text import ANY

COMMANDS = """\
n [COUNT]   next step (also Enter)      b [COUNT]   back
j STEP      jump to a step              m           next decision that matters
e           to the end                  w REQUEST   why does this request wait, or run?
h           this list                   q           quit"""
MATTERS = Mark.PREEMPTION | Mark.BLOCK | Mark.HIT | Mark.END


def lab_command(
    source: str = argument(
        "", "A trace file, or a workload in the simulator's language.", show_default="an example"
    ),
    port: int = option(8700, "0 chooses a free port.", min=0, max=65535),
    export: Path | None = option(None, "Write the run as one HTML file instead of serving it."),
    open_page: bool = option(True, "Open the page in a browser.", "--open/--no-open"),
    attach: str | None = option(None, "Follow a running server, e.g. http://host:8000."),
    api_key: str | None = option(None, "API key of that server.", envvar="HEADWAY_API_KEY"),
    against: str | None = option(
        None, "Show a second scheduler beside it: 'preset; slot=value; number=value'."
    ),
    terminal: bool = option(
        False, "Show plain text and read commands: h lists them.", "--terminal"
    ),
    allow_own_policies: bool = options.ALLOW_OWN_POLICIES,
    *,
    simulation: Annotated[SimulationOptions, without("limit", "speed", "allowed_tokens", "accept")],
) -> None:
    """Step through every decision of the scheduler on a web page or in the terminal."""
    for flag, value in {"--attach": attach, "--export": export, "--against": against}.items():
        if terminal and value:
            raise ConfigError(f"{flag} {value} cannot be used with --terminal")
    options.import_from_working_directory()
    if attach:
        follow(attach, api_key)  # ConfigError now if the server cannot be followed
        _serve(LabApp("attach", live=partial(follow, attach, api_key)), port, open_page)
        return
    spec = _spec(source, simulation)
    traces = {Path(source).name: Path(source)} if spec.trace else {}
    changes: dict[str, str | int] = {}
    if against:
        _, other, changes = parse_variant(f"against: {against}")
        config_for(other, simulation.machine, changes, ANY)  # ConfigError if a value is wrong
    own = own_policies(spec.set, changes)  # typed on the command line
    allowed = ANY if (export or terminal) and allow_own_policies else own
    if terminal:
        _step(spec, traces, allowed)
        return
    run = _recording(
        spec, traces, allowed
    )  # ConfigError or FormatError now if there is no such run
    if export:
        recording = b"".join(run)
        _warn(read_recording([recording]))
        page = exported([recording])
        with options.written(export) as file:
            file.write(page)
        print(f"{export} written ({export.stat().st_size / 1e3:.0f} kB); open it in a browser")
        return
    shown = {name: value for name, value in asdict(spec).items() if value}
    link = ""
    if against:
        link = f"#spec={_packed(shown)}&other={_packed({**shown, 'preset': other, 'set': changes})}"
    app = LabApp(traces=traces, default=shown, own=own, asks=allow_own_policies)
    _serve(app, port, open_page, link)


def _step(spec: RunSpec, traces: dict[str, Path], own: Container[str]) -> None:
    """Show the run in the terminal, and read commands from stdin."""
    recording = read_recording(_recording(spec, traces, own))
    if not recording.num_frames:
        raise ConfigError((recording.end or {}).get("error") or "the run has no steps")
    _warn(recording)
    Stepper(recording).run(iter(sys.stdin.readline, ""))


def _spec(source: str, simulation: SimulationOptions) -> RunSpec:
    settings: dict[str, object] = {
        "preset": simulation.preset, "profile": simulation.profile, "set": simulation.changes,
        "async_scheduling": simulation.async_scheduling,
    }  # fmt: skip
    if not source:
        settings["workload"] = DEFAULT_SPEC["workload"]
        settings["set"] = {**DEFAULT_SPEC["set"], **simulation.changes}  # type: ignore[dict-item]
    elif "=" in source and not Path(source).exists():
        settings["workload"] = source
    else:
        settings["trace"] = Path(source).name
    return read_spec(settings)


def _recording(spec: RunSpec, traces: dict[str, Path], own: Container[str]) -> Iterator[bytes]:
    return (
        recording_of_file(traces[spec.trace], own)
        if spec.trace
        else SimulatedRun(spec, own).record()
    )


def _warn(recording: RunRecording) -> None:
    """Say why a recording is not complete, or is shown from the lines of its trace alone."""
    if error := (recording.end or {}).get("error"):
        print(f"warning: {error}", file=sys.stderr)
    elif notice := recording.header.get("notice"):
        print(f"warning: shown from the recorded lines alone: {notice}", file=sys.stderr)


def _packed(spec: dict[str, object]) -> str:
    """A run as the page's address has it: JSON in base64 for URLs."""
    return base64.urlsafe_b64encode(json.dumps(spec).encode()).decode().rstrip("=")


def _serve(app: LabApp, port: int, open_page: bool, link: str = "") -> None:
    try:
        server = LabServer(app, port=port)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on port {port}: {error.strerror}; choose another --port"
        ) from None
    print(f"The lab is at {server.url}{link} (Ctrl-C stops it)", flush=True)
    if open_page:
        webbrowser.open(server.url + link)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print()
    finally:
        server.server_close()


class Stepper:
    """Shows one frame at a time and obeys commands."""

    def __init__(self, recording: RunRecording) -> None:
        self.recording, self.frame = recording, 0

    def run(self, commands: Iterator[str]) -> None:
        """Obey commands until `q` or the end of the input."""
        print(COMMANDS)
        self._show()
        while True:
            if sys.stdin.isatty():
                print("> ", end="", flush=True)
            text = next(commands, None)
            if text is None or text.strip() == "q":
                return
            try:
                self._obey(*(text.split() or ["n"]))
            except HeadwayError as error:
                print(error)

    def _obey(self, name: str, argument: str = "", *more: str) -> None:
        moves: dict[str, Callable[[], int]] = {
            "n": lambda: self.frame + _count(argument or "1"),
            "b": lambda: self.frame - _count(argument or "1"),
            "j": lambda: self._frame_of(_count(argument)),
            "m": self._next_that_matters,
            "e": lambda: self.recording.num_frames - 1,
        }
        if more or name not in (*moves, "w", "h"):
            raise ConfigError(
                f"unknown command {' '.join((name, argument, *more)).strip()!r}; h: help"
            )
        if name == "h":
            print(COMMANDS)
        elif name == "w":
            print(why(self.recording, self.frame, argument))
        else:
            self.frame = max(0, min(moves[name](), self.recording.num_frames - 1))
            self._show()

    def _frame_of(self, step: int) -> int:
        """The frame of a step; there are frames without a step after a failure or an abort."""
        recording = self.recording
        frames = (f for f in range(recording.num_frames) if recording.column("step", f) >= step)
        return next(frames, recording.num_frames - 1)

    def _next_that_matters(self) -> int:
        recording = self.recording
        later = range(self.frame + 1, recording.num_frames)
        return next(
            (f for f in later if recording.column("marks", f) & MATTERS), recording.num_frames - 1
        )

    def _show(self) -> None:
        print("\n".join(frame_lines(self.recording, self.frame)))


def _count(text: str) -> int:
    if not text.isdigit():
        raise ConfigError(f"expected a number, not {text!r}; h: help")
    return int(text)
