"""The process that keeps Ray for a gateway: it may end, and it ends with the gateway. Without Ray."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headway.errors import ConfigError, ExecutorError
from headway.fleet.discovery import FileDirectory, write_announced
from headway.on_ray import gateway
from headway.on_ray.gateway import LIST, MODEL, Published, kept, wait_for_model
from headway.on_ray.options import FleetOptions
from headway.on_ray.reaper import TOKEN
from headway.server.process.serve import SIGNALS
from tests.support.waiting import LIMIT, wait_until

# Writes a list with its process id as a port, and at the end of its input that it has ended.
KEEPER = f"""
import os, pickle, sys
from pathlib import Path
from headway.fleet.discovery import write_announced
from headway.on_ray.gateway import Published
folder = Path(sys.argv[1])
factory, options = pickle.load(sys.stdin.buffer)
replicas = {{"a": (options.name, os.getpid())}}
write_announced(folder / "{LIST}", Published(replicas=replicas))
(folder / "new").write_bytes(pickle.dumps(("info", "identity")))
(folder / "new").rename(folder / "{MODEL}")
sys.stdin.buffer.read()
Path(options.name).write_text("ended")
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(gateway, "KEEPER", ("-c", KEEPER))
    monkeypatch.setattr(gateway, "PAUSE", 0.0)
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@contextmanager
def keeper(end: Path) -> Iterator[Path]:
    """The folder of a keeper on an existing Ray, which writes the file `end` when it ends."""
    options = FleetOptions(replicas=1, address="auto", name=str(end))
    with kept(None, options) as folder:  # type: ignore[arg-type]
        yield folder


def pid(folder: Path) -> int:
    """The process that has written the list."""
    return FileDirectory(folder / LIST).read().replicas["a"][1]


def test_a_keeper_that_is_killed_is_started_again_and_its_list_stays(tmp_path: Path) -> None:
    counts: list[int] = []
    with keeper(tmp_path / "end") as folder:
        assert wait_for_model(folder, counts.append) == ("info", "identity")
        assert counts == [1] and stat.S_IMODE(folder.stat().st_mode) == 0o700
        first = pid(folder)
        os.kill(first, signal.SIGKILL)
        assert pid(folder) in (first, wait_until(lambda: pid(folder) != first and pid(folder)))
        assert not (tmp_path / "end").exists()
    assert (tmp_path / "end").read_text() == "ended" and not folder.exists()


def test_a_keeper_that_cannot_run_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway, "KEEPER", ("-c", "raise SystemExit(7)"))
    with keeper(tmp_path / "end") as folder, pytest.raises(ExecutorError, match="status 7"):
        wait_for_model(folder, lambda _: None)


@pytest.mark.parametrize("kind", [ConfigError, ExecutorError])
def test_what_a_keeper_reports_at_the_start_is_raised(
    tmp_path: Path, kind: type[Exception]
) -> None:
    failed = Published(replicas={}, error="2 GPUs are missing", is_usage=kind is ConfigError)
    write_announced(tmp_path / LIST, failed)
    with pytest.raises(kind, match="2 GPUs are missing"):
        wait_for_model(tmp_path, lambda _: None)


GATEWAY = """
import sys, time
from pathlib import Path
from headway.on_ray import gateway, options
address = None if sys.argv[1] == "private" else "auto"
options.prepare(address)
gateway.KEEPER = ("-c", sys.argv[2])
given = options.FleetOptions(replicas=1, address=address, name=sys.argv[3])
with gateway.kept(None, given) as folder:
    gateway.wait_for_model(folder, lambda _: None)
    pid = gateway.FileDirectory(folder / gateway.LIST).read().replicas["a"][1]
    print(pid, folder, "ray" in sys.modules, flush=True)
    time.sleep(float(sys.argv[4]))
"""


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
@pytest.mark.parametrize("ray", ["private", "existing"])
@pytest.mark.parametrize(
    ("sent", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, -2), (signal.SIGKILL, -9)]
)
def test_all_that_was_started_ends_with_the_gateway(
    ray: str, sent: signal.Signals, status: int, tmp_path: Path
) -> None:
    """The gateway's process imports no Ray. A keeper on an existing Ray has time to clean up."""
    end = tmp_path / "end"
    other = subprocess.Popen(["sleep", str(10 * LIMIT)], env={**os.environ, TOKEN: "other"})
    process = subprocess.Popen(
        [sys.executable, "-c", GATEWAY, ray, KEEPER, str(end), str(10 * LIMIT)],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert process.stdout is not None
    keeper, folder, has_ray = process.stdout.readline().split()
    assert has_ray == "False"
    process.send_signal(sent)
    assert process.wait(LIMIT) == status
    wait_until(lambda: not Path(f"/proc/{keeper}").exists())
    if ray == "private" or sent != signal.SIGKILL:
        wait_until(lambda: not Path(folder).exists())
    if ray == "existing":
        assert end.read_text() == "ended"
    assert other.poll() is None
    other.kill()
    other.wait()
    process.communicate()


def test_an_entry_of_the_directory_ends_unless_it_is_renewed() -> None:
    directory = pytest.importorskip("headway.on_ray.directory")
    now = [0.0]
    actor = directory.DirectoryActor(b"secret", lambda: now[0])
    assert "secret" not in repr(actor), "Ray logs it"
    assert actor.announce("a", None) == 1
    assert actor.announce("b", ("host", 1)) == 1
    now[0] = directory.LEASE_SECONDS - 1
    assert actor.announce("a", ("host", 2)) == 0
    actor.fail("old", "no model")
    assert actor.read("new").replicas == {"a": ("host", 2), "b": ("host", 1)}
    now[0] += 2
    assert actor.read("new") == Published(replicas={"a": ("host", 2)})
    assert actor.read("old").error == "no model"
    actor.forget("a")
    assert actor.read("new").replicas == {}
