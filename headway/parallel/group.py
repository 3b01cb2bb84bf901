"""The collectives of a tensor-parallel group: NCCL between GPUs, gloo between processes on a CPU.

The process group is an object of its own, not torch's default group, so that a process can have
several engines. The ranks of one machine find each other through an open file without a name.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from headway.errors import ConfigError
from headway.parallel.progress import Progress

# Ranks that are dead, stopped or stuck are found in less than a second; see watch.py. These limits
# are for collectives that all ranks have joined and that do not end.
TIMEOUT, NCCL_TIMEOUT = timedelta(seconds=120), timedelta(seconds=600)


class Group:
    """Collectives over a process group of torch; see model.sharding.Collectives."""

    def __init__(
        self,
        process_group: Any,
        rank: int,
        size: int,
        progress: Progress | None = None,
        file: int | None = None,
    ) -> None:
        """`progress` counts the collectives; `file` is that of the store, if it has one."""
        self.rank, self.size = rank, size
        self._group, self._file = process_group, file
        self._progress = progress or Progress()
        self._gather, self._sum = c10d.AllgatherOptions(), c10d.AllreduceOptions()
        self._broadcast = c10d.BroadcastOptions()
        self._broadcast.rootRank = 0
        for options in (self._gather, self._sum, self._broadcast):
            options.asyncOp = False  # NCCL then runs on the current stream

    def __del__(self) -> None:
        """Close the file, if there is one, after its last user, which is the store of the group."""
        self._group = None
        if self._file is not None:
            os.close(self._file)

    def gather(self, x: Tensor, widths: tuple[int, ...]) -> Tensor:
        num_rows, most = len(x), max(widths)
        if x.shape[1] < most:
            x = F.pad(x, (0, most - x.shape[1]))
        out = x.new_empty((self.size * num_rows, most))
        self._finish(self._group._allgather_base(out, x.contiguous(), self._gather))
        parts = out.view(self.size, num_rows, most)
        if min(widths) == most:
            return parts.transpose(0, 1).reshape(num_rows, -1)
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], 1)

    def sum(self, x: Tensor) -> None:
        self._finish(self._group.allreduce([x], self._sum))

    def broadcast(self, x: Tensor) -> None:
        self._finish(self._group.broadcast([x], self._broadcast))

    def abort(self) -> None:
        """End collectives that wait for another rank, on any thread; the group is unusable then."""
        if dist.is_nccl_available() and isinstance(self._group, dist.ProcessGroupNCCL):
            self._group.abort()  # gloo's collectives end with the connection to a dead process

    def _finish(self, work: Any) -> None:
        """Wait for a collective; NCCL's are done in the order of the stream, and may return None."""
        self._progress.enter()
        if work is not None:
            work.wait()
        self._progress.leave()


def connect(
    store: int | dist.Store,
    rank: int,
    size: int,
    device: torch.device,
    progress: Progress | None = None,
    host: str = "127.0.0.1",
) -> Group:
    """Join the group; blocks until all ranks have.

    `store` is that of rank 0, or an open file that all ranks share. `host` is the address of this
    machine, for gloo; NCCL finds one by itself.
    """
    file: int | None = None
    if isinstance(store, int):
        # The store writes to its path once more when it is destroyed: until then, the number must
        # not become that of another file. After a failure it stays open, as the error may keep the
        # store.
        file = os.dup(store)
        store = dist.FileStore(f"/dev/fd/{file}", size)
    store.set_timeout(TIMEOUT)
    process_group = (
        _nccl(store, rank, size) if device.type == "cuda" else _gloo(store, rank, size, host)
    )
    del store
    group = Group(process_group, rank, size, progress, file)
    del process_group
    group.sum(torch.zeros(1, device=device))  # NCCL connects at the first call
    return group


def _gloo(store: dist.Store, rank: int, size: int, host: str) -> Any:
    if not dist.is_gloo_available():
        raise ConfigError("tensor_parallel_size above 1 on a CPU needs a torch build with gloo")
    options = dist.ProcessGroupGloo._Options()
    options._timeout = TIMEOUT
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    return dist.ProcessGroupGloo(store, rank, size, options)


def _nccl(store: dist.Store, rank: int, size: int) -> Any:
    if not dist.is_nccl_available():
        raise ConfigError("tensor_parallel_size above 1 on GPUs needs a torch build with NCCL")
    # After an error of another rank, abort the communicator but not the process, so that rank 0 can
    # report it. Set by the user, it stays.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = NCCL_TIMEOUT
    return dist.ProcessGroupNCCL(store, rank, size, options)
