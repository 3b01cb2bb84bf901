"""The CPU and GPUs of this machine: selecting a device, and free memory.

Knows nothing about models. A device that cannot be used raises an error that says why.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from timeit import repeat

import torch

from headway.errors import ConfigError

Device = torch.device
GROUP = Path("/sys/fs/cgroup")  # of the container, inside a container
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
SMALLER = "use a smaller --dtype, a smaller model or another GPU (--device cuda:1)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    device: str
    name: str
    num_bytes: int


def why_no_cuda() -> str | None:
    """The reason that no GPU can be used here; None if one can."""
    return cuda_problem(
        is_built=bool(torch.version.cuda or torch.version.hip),
        start=torch.cuda.init,
        has_triton=find_spec("triton") is not None,
    )


def cuda_problem(*, is_built: bool, start: Callable[[], None], has_triton: bool) -> str | None:
    """The first reason that no GPU can be used; `start` is torch.cuda.init, which may raise."""
    if not is_built:
        return "this torch build has no CUDA support; install one that has"
    try:
        start()
    except Exception as error:  # torch raises different types, depending on what is missing
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        return f"torch cannot use a GPU: {reason}"
    if not has_triton:
        return "triton is not installed, and the GPU kernels need it: pip install triton"
    return None


def use_device(wanted: str) -> Device:
    """Select a device and make it current; ConfigError if it cannot be used."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", wanted):
        raise ConfigError(
            f"unknown device {wanted!r}; use auto, cpu, cuda, or cuda:1 for the second GPU"
        )
    reason = None if wanted == "cpu" else why_no_cuda()
    if wanted == "cpu" or (wanted == "auto" and reason):
        return torch.device("cpu")
    if reason:
        raise ConfigError(f"device {wanted} cannot be used: {reason}; or use --device cpu")
    number = gpu_index(wanted, torch.cuda.device_count(), torch.cuda.current_device())
    torch.cuda.set_device(number)  # kernels launch on the current device
    return torch.device("cuda", number)


def gpu_index(wanted: str, count: int, current: int) -> int:
    """The index of a GPU among `count` visible ones; ConfigError if there is no such GPU."""
    _, _, number = wanted.partition(":")
    if int(number or current) >= count:
        visible = f"cuda:0 to cuda:{count - 1}" if count > 1 else "cuda:0"
        raise ConfigError(
            f"no device {wanted}: {count} visible ({visible}); see CUDA_VISIBLE_DEVICES"
        )
    return int(number or current)


def check_gpus(size: int, first: Device) -> None:
    """ConfigError unless `size` GPUs are visible, from the first on."""
    visible = torch.cuda.device_count() - first.index
    if size > visible:
        raise ConfigError(
            f"tensor_parallel_size is {size}, but only {visible} GPUs are visible from {first} on; "
            "change --tensor-parallel-size, --device or CUDA_VISIBLE_DEVICES"
        )


def gpus() -> list[Gpu]:
    """All GPUs that torch sees; empty if none can be used."""
    if why_no_cuda() is not None:
        return []
    every = ((n, torch.cuda.get_device_properties(n)) for n in range(torch.cuda.device_count()))
    return [Gpu(device=f"cuda:{n}", name=p.name, num_bytes=p.total_memory) for n, p in every]


def free_memory() -> int:
    """Bytes of host memory that are available without swapping, in this system or container."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if "MemAvailable" in line)
    except (OSError, StopIteration):
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return min(free, container_free_memory(GROUP, free))


def container_free_memory(folder: Path, free: int) -> int:
    """Bytes that a container's memory limit leaves, not counting cached files as used."""
    try:
        limit, used = (int((folder / f"memory.{n}").read_text()) for n in ("max", "current"))
        lines = (folder / "memory.stat").read_text().splitlines()
    except (OSError, ValueError):  # no container, or one without a limit ("max")
        return free
    held = {name: int(value) for name, value in (line.split() for line in lines)}
    cached = held.get("inactive_file", 0) + held.get("active_file", 0)
    return max(0, limit - used + cached)


def free_device_memory(device: Device) -> int:
    """Bytes of GPU memory that are free, after torch has returned its cached memory."""
    torch.cuda.empty_cache()
    free: int = torch.cuda.mem_get_info(device)[0]
    return free


def usable_memory(device: Device, fraction: float) -> int:
    """Bytes for a model: all that are free, on a GPU this fraction less what others use."""
    if device.type == "cpu":
        return free_memory()
    free, total = torch.cuda.mem_get_info(device)
    return int(total * fraction) - (total - free)


@cache
def bandwidth(device: Device) -> float:
    """Bytes per second at which the device reads its memory, measured in a fraction of a second."""
    source = torch.ones(1 << (28 if device.type == "cuda" else 26), device=device)
    source.sum().item()
    return source.nbytes / min(repeat(lambda: source.sum().item(), number=1, repeat=3))


@contextmanager
def room_for_weights(num_bytes: int, device: Device) -> Iterator[None]:
    """Guard loading weights to a GPU: ConfigError before or when they turn out not to fit."""
    free = free_device_memory(device)
    check_weights(num_bytes, free)
    what = f"the weights need {size(num_bytes)} plus working memory; {size(free)} were free"
    with explain_out_of_memory(what, SMALLER):
        yield


def check_weights(num_bytes: int, free: int) -> None:
    """ConfigError for weights that do not fit, at once, because loading may take minutes."""
    if num_bytes > free:
        raise ConfigError(
            f"the weights need {size(num_bytes)} of GPU memory and {size(free)} are free, "
            f"{size(num_bytes - free)} too little; {SMALLER}"
        )


@contextmanager
def explain_out_of_memory(what: str, advice: str) -> Iterator[None]:
    """Turn running out of GPU memory into a ConfigError that says what to change."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise ConfigError(f"{what}: {shortened(str(error))}; {advice}") from error


# Messages of torch, Triton and cuBLAS if the driver has no memory for graphs or kernels.
OUT_OF_MEMORY = ("CUDA error: out of memory", "[CUDA]: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: Exception) -> bool:
    """Whether torch or the driver ran out of GPU memory."""
    is_drivers = isinstance(error, RuntimeError) and any(n in str(error) for n in OUT_OF_MEMORY)
    return is_drivers or isinstance(error, torch.OutOfMemoryError)


def shortened(message: str) -> str:
    """Torch's out-of-memory message without its advice: size needed, capacity and free memory."""
    first_line = next(iter(message.strip().splitlines()), "")
    sentences = [sentence.strip() for sentence in first_line.split(". ")]
    return ". ".join(sentences[:3]).rstrip(".")


def size(num_bytes: int) -> str:
    """Format a number of bytes for people."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def parse_size(size: int | str, name: str = "kv_memory") -> int:
    """Parse a number of bytes, or a text such as 512MiB, 2GiB or 1.5G."""
    match = re.fullmatch(r"([0-9]+\.?[0-9]*|\.[0-9]+) ?([kmg]i?|)b?", str(size).strip().lower())
    if match is None:
        raise ConfigError(f"{name} is {size!r}; it must be bytes, or a text such as 2GiB")
    return int(float(match[1]) * UNITS[match[2]])
