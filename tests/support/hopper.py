"""A mark for tests of Gluon kernels, which have no interpreter: they need a Hopper GPU."""

import pytest
import torch
import triton

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
ON_HOPPER = pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")
if triton.knobs.compilation.instrumentation_mode:  # see `make sanitize`
    triton.set_allocator(lambda size, *_: torch.empty(size, dtype=torch.int8, device="cuda"))
