"""How kernels are launched: chained, where the device can, so that one starts as another ends.

A chained kernel may be on the device while the one before it still runs; `begin` waits until that
one is done and all it wrote can be seen. Every kernel in a chain begins so, in every program, or
the one after it could run ahead of the one before it.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

# For kernels in which several threads hold one sum, and one of them stores it. If a product were
# fused with an addition in some of them and not in others, it were chance what is stored.
ROUNDED_ALIKE = {"enable_fp_fusion": False}


@triton.jit
def begin(CHAINED: tl.constexpr):
    """Let the kernel after this one come on to the device, and wait for the one before it."""
    if CHAINED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@cache
def can_chain() -> bool:
    """Whether the device starts a kernel while another ends: NVIDIA's, from Hopper on."""
    if not torch.cuda.is_available() or torch.version.hip:
        return False
    return torch.cuda.get_device_capability() >= (9, 0)


def launch_options(num_warps: int, num_stages: int) -> dict[str, Any]:
    """The keywords of a launch."""
    options: dict[str, Any] = {"num_warps": num_warps, "num_stages": num_stages, "CHAINED": False}
    if can_chain():
        options |= {"CHAINED": True, "launch_pdl": True}
    return options
