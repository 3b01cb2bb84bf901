"""The machine: its CPU and GPUs, which of them a model runs on, and how much memory is free.

Knows nothing of models. What is asked for and cannot be had is an error that says why.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from headway.errors import ConfigError

Device = torch.device
GROUP = Path("/sys/fs/cgroup")  # in a container, of the container
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
SMALLER = "take a smaller --dtype, a smaller model or another GPU (--device cuda:1)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU as torch sees it."""

    device: str
    name: str
    num_bytes: int


def why_no_cuda() -> str | None:
    """Why no model can run on a GPU here; None if it can."""
    return why_not(
        is_built=bool(torch.version.cuda or torch.version.hip),
        start=torch.cuda.init,
        has_triton=find_spec("triton") is not None,
    )


def why_not(*, is_built: bool, start: Callable[[], None], has_triton: bool) -> str | None:
    """The first thing that keeps a model from a GPU; `start` is torch's, which raises if it fails."""
    if not is_built:
        return "torch is built without CUDA: install a torch build that has it"
    try:
        start()
    except Exception as error:  # torch raises its own kinds, by what is missing
        said = next(iter(str(error).strip().splitlines()), type(error).__name__)
        return f"torch cannot use a GPU: {said}"
    if not has_triton:
        return "triton, which the kernels are written in, is not installed: pip install triton"
    return None


def use_device(wanted: str) -> Device:
    """The device that a text means, made the current one; ConfigError if it cannot be used."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", wanted):
        raise ConfigError(
            f"device {wanted!r} is unknown; there are auto, cpu, cuda, and cuda:1 for the second GPU"
        )
    reason = None if wanted == "cpu" else why_no_cuda()
    if wanted == "cpu" or (wanted == "auto" and reason):
        return torch.device("cpu")
    if reason:
        raise ConfigError(f"device {wanted}: {reason}; or run on the CPU with --device cpu")
    number = numbered(wanted, torch.cuda.device_count(), torch.cuda.current_device())
    torch.cuda.set_device(number)  # kernels are launched on the current one
    return torch.device("cuda", number)


def numbered(wanted: str, count: int, current: int) -> int:
    """The number of the GPU that a text means, of so many; ConfigError if there is none such."""
    _, _, number = wanted.partition(":")
    if int(number or current) >= count:
        last = f", cuda:0 to cuda:{count - 1}" if count > 1 else ", cuda:0"
        raise ConfigError(f"device {wanted}: {count} can be seen{last}; see CUDA_VISIBLE_DEVICES")
    return int(number or current)


def gpus() -> list[Gpu]:
    """All that torch sees; none if no model can run on them."""
    if why_no_cuda() is not None:
        return []
    every = ((n, torch.cuda.get_device_properties(n)) for n in range(torch.cuda.device_count()))
    return [Gpu(device=f"cuda:{n}", name=p.name, num_bytes=p.total_memory) for n, p in every]


def free_memory() -> int:
    """Bytes of the host that can be had without swapping, as far as system or container tell."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if "MemAvailable" in line)
    except (OSError, StopIteration):
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return min(free, room_in_group(GROUP, free))


def room_in_group(folder: Path, free: int) -> int:
    """Bytes that a container's limit leaves, files that are only cached not counted."""
    try:
        limit, used = (int((folder / f"memory.{n}").read_text()) for n in ("max", "current"))
        lines = (folder / "memory.stat").read_text().splitlines()
    except (OSError, ValueError):  # no container, or one without a limit ("max")
        return free
    held = {name: int(value) for name, value in (line.split() for line in lines)}
    cached = held.get("inactive_file", 0) + held.get("active_file", 0)
    return max(0, limit - used + cached)


def free_device_memory(device: Device) -> int:
    """Bytes of a GPU that nobody uses, nor torch keeps for later."""
    torch.cuda.empty_cache()
    free: int = torch.cuda.mem_get_info(device)[0]
    return free


@contextmanager
def room_for_weights(num_bytes: int, device: Device) -> Iterator[None]:
    """For loading so many bytes on to a GPU: a ConfigError before or while they turn out too many."""
    free = free_device_memory(device)
    check_weights(num_bytes, free)
    what = f"the weights need {size(num_bytes)} and some room to be loaded, {size(free)} were free"
    with explaining(what, SMALLER):
        yield


def check_weights(num_bytes: int, free: int) -> None:
    """ConfigError at once for weights that a GPU cannot hold: loading them may take minutes."""
    if num_bytes > free:
        raise ConfigError(
            f"the weights need {size(num_bytes)} and {size(free)} of the GPU's memory are free: "
            f"{size(num_bytes - free)} too little; {SMALLER}"
        )


@contextmanager
def explaining(what: str, advice: str) -> Iterator[None]:
    """Running out of a GPU's memory becomes a ConfigError: what was too much, and what to do."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise ConfigError(f"{what}: {shortened(str(error))}; {advice}") from error


# What torch, Triton and cuBLAS say if there is none left for graphs, kernels and workspaces.
OUT_OF_MEMORY = ("CUDA error: out of memory", "[CUDA]: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: Exception) -> bool:
    """Torch's memory, or what the driver takes besides."""
    is_drivers = isinstance(error, RuntimeError) and any(n in str(error) for n in OUT_OF_MEMORY)
    return is_drivers or isinstance(error, torch.OutOfMemoryError)


def shortened(said: str) -> str:
    """What torch says when memory runs out, without its own advice: need, capacity, what is free."""
    first_line = next(iter(said.strip().splitlines()), "")
    sentences = [sentence.strip() for sentence in first_line.split(". ")]
    return ". ".join(sentences[:3]).rstrip(".")


def size(num_bytes: int) -> str:
    """Bytes as people read them."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def parse_size(size: int | str) -> int:
    """Bytes of a number, or of a text such as 512MiB, 2GiB or 1.5G."""
    match = re.fullmatch(r"([0-9.]+) ?([kmg]i?|)b?", str(size).strip().lower())
    try:
        value = float(match[1]) if match else -1.0
    except ValueError:
        value = -1.0
    if match is None or value < 0:
        raise ConfigError(f"kv_memory must be bytes, or a text such as 512MiB or 2GiB: {size!r}")
    return int(value * UNITS[match[2]])
