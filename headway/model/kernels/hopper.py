"""Which kernels for Hopper GPUs can be used here. They are written in Gluon, imported only then."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import torch
import triton

# Versions of Triton with which the kernels were compiled; Gluon is still experimental.
MIN_GLUON, MAX_GLUON = (3, 6), (3, 9)


def hopper_module(name: str) -> ModuleType | None:
    """A module of kernels, on a Hopper GPU with a Triton that can compile it."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return None
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if not MIN_GLUON <= version <= MAX_GLUON:
        return None
    return import_module(f"headway.model.kernels.{name}")
