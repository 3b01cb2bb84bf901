"""The API of the lab page. It knows no sockets: a request comes in, a response goes out.

`server.py` serves it on this machine. A run is computed while its recording is sent, so the page shows
the first steps of a long run at once. The run ends if the page is closed.

A link or a file of another person decides what the page asks for. So a request reads no file by its
path and imports no module, except what the command line named or the user confirmed on the page.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from shutil import rmtree
from tempfile import NamedTemporaryFile, mkdtemp
from typing import Any
from weakref import finalize

from headway.errors import ConfigError, HeadwayError, OwnPolicyError
from headway.lab.cost import known_profiles
from headway.lab.recording.fork import fork
from headway.lab.recording.run import SimulatedRun, recording_of_file, recording_of_texts
from headway.lab.recording.spec import RunSpec, read_spec
from headway.lab.stories import Story, load_stories
from headway.lab.web.catalog import catalog
from headway.lab.web.export import exported
from headway.record.reader import read_journal
from headway.scheduler.policies.presets import check_own_policies

STATIC = Path(__file__).parent / "static"
TYPES = {".html": "text/html; charset=utf-8", ".js": "text/javascript", ".css": "text/css"}
RECORDING = "application/octet-stream"
MAX_SPEC = 1 << 20  # bytes
POLICY = "default-src 'self'; img-src 'self' data:; base-uri 'none'; frame-ancestors 'none'"
SECURITY = {
    "Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache",
}  # fmt: skip


@dataclass(slots=True)
class Response:
    """A body is sent piece by piece, as it is made."""

    status: int
    content_type: str
    body: Iterable[bytes]
    headers: dict[str, str] = field(default_factory=dict)


class LabApp:
    """Answers requests of the page.

    `own` has the `module:function` policies that may be imported. If `asks`, the user may confirm
    others on the page.
    """

    def __init__(
        self,
        mode: str = "lab",
        traces: dict[str, Path] | None = None,
        stories: list[Story] | None = None,
        live: Callable[[], Iterator[bytes]] | None = None,
        default: Mapping[str, object] | None = None,
        own: Iterable[str] = (),
        asks: bool = False,
    ) -> None:
        self._own, self._asks = set(own), asks
        self._default = default  # the run that the page shows first
        self.mode, self.traces, self.live = mode, dict(traces or {}), live
        self._titles = {name: str(path) for name, path in self.traces.items()}
        if stories is None:  # only a lab with a scheduler of its own can run them
            stories = load_stories() if mode == "lab" else []
        self.stories = stories

    def handle(self, method: str, path: str, query: dict[str, str], body: bytes) -> Response:
        """Answer one request; errors that a user can cause are sentences in JSON."""
        try:
            return self._route(method, path.strip("/"), query, body)
        except OwnPolicyError as error:
            return json_response(400, {"error": str(error), "own": error.names})
        except HeadwayError as error:
            return json_response(400, {"error": str(error)})

    def _route(self, method: str, path: str, query: dict[str, str], body: bytes) -> Response:
        if (method, path) in ROUTES:
            return ROUTES[method, path](self, query, body)
        if method == "GET" and not path.startswith("api/"):
            return static(path or "index.html")
        return json_response(404, {"error": f"there is no {method} /{path}"})

    def _catalog(self) -> Response:
        traces = [{"name": n, "title": self._titles.get(n, n)} for n in self.traces]
        offers = catalog(self.mode, self.stories, traces, self._default)
        return json_response(200, {**offers, "asks": self._asks})

    def _live(self) -> Response:
        if self.live is None:
            raise ConfigError("this lab follows no server; start it with --attach")
        return _sent(self.live())

    def _allow(self, data: Any) -> Response:
        """Allow policies that the user has confirmed on the page."""
        names = data.get("own") if isinstance(data, dict) else None
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ConfigError("a confirmation needs own, a list of module:function")
        if not self._asks:
            raise OwnPolicyError(names)
        self._own |= set(names)
        return json_response(200, {"own": sorted(self._own)})

    def _recording(self, data: Any) -> Iterator[bytes]:
        spec = read_spec(data)
        self._check(spec)
        if not spec.trace:
            return SimulatedRun(spec, self._own).record()
        if (path := self.traces.get(spec.trace)) is None:
            known = ", ".join(self.traces) or "none"
            raise ConfigError(f"unknown trace {spec.trace!r}; opened traces: {known}")
        if spec.edits:
            return fork(list(read_journal(path)), spec, self._own)
        return recording_of_file(path, self._own)

    def _check(self, spec: RunSpec) -> None:
        """ConfigError if a run would import or read what this lab does not allow."""
        check_own_policies(self._own, spec.set, *(edit.set or {} for edit in spec.edits))
        known = known_profiles()
        if spec.profile not in (*known, (self._default or {}).get("profile")):
            raise ConfigError(
                f"unknown profile {spec.profile!r}; known: {', '.join(known)}; start the lab with "
                "--profile to use a file"
            )

    def _upload(self, body: bytes, name: str) -> Response:
        """The recording of a trace in a request; from now on the trace can be forked by its name."""
        recording = recording_of_texts(name, body.splitlines(keepends=True), self._own)
        with NamedTemporaryFile(dir=self._folder, suffix=".trace.jsonl", delete=False) as file:
            file.write(body.removeprefix(codecs.BOM_UTF8))
        self.traces[name] = Path(file.name)
        self._titles.pop(name, None)
        return _sent(recording)

    @cached_property
    def _folder(self) -> Path:
        """Uploaded traces; removed with this object."""
        folder = mkdtemp(prefix="headway-lab-")
        finalize(self, rmtree, folder, ignore_errors=True)
        return Path(folder)

    def _export(self, data: Any) -> Response:
        if not isinstance(data, dict) or "spec" not in data:
            raise ConfigError("an export needs a spec")
        specs = [data["spec"], *filter(None, [data.get("other")])]
        recordings = [b"".join(self._recording(spec)) for spec in specs]
        name = str(data["spec"].get("story", "")).partition("/")[0]
        stories = [story for story in self.stories if story.name == name]
        page = exported(recordings, str(data.get("hash", "")), stories)
        headers = {"Content-Disposition": 'attachment; filename="headway-lab.html"'}
        return Response(200, TYPES[".html"], [page], headers)


ROUTES: dict[tuple[str, str], Callable[[LabApp, dict[str, str], bytes], Response]] = {
    ("GET", "api/catalog"): lambda app, query, body: app._catalog(),
    ("GET", "api/live"): lambda app, query, body: app._live(),
    ("POST", "api/recording"): lambda app, query, body: _sent(app._recording(_parsed(body))),
    ("POST", "api/trace"): lambda app, query, body: app._upload(
        body, query.get("name", "the file")
    ),
    ("POST", "api/export"): lambda app, query, body: app._export(_parsed(body)),
    ("POST", "api/allow"): lambda app, query, body: app._allow(_parsed(body)),
}


def _sent(pieces: Iterator[bytes]) -> Response:
    return Response(200, RECORDING, pieces)


def _parsed(body: bytes) -> Any:
    if len(body) > MAX_SPEC:
        raise ConfigError(f"the description of a run has at most {MAX_SPEC} bytes, not {len(body)}")
    try:
        return json.loads(body)
    except ValueError as error:
        raise ConfigError(f"the description of the run is not JSON: {error}") from None


def json_response(status: int, data: object) -> Response:
    return Response(status, "application/json", [json.dumps(data).encode()])


def static(name: str) -> Response:
    """A file of the page; 404 if there is none with this name."""
    file = STATIC / name
    if "/" in name or file.suffix not in TYPES or not file.is_file():
        return json_response(404, {"error": f"there is no page /{name}"})
    return Response(200, TYPES[file.suffix], [file.read_bytes()], dict(SECURITY))
