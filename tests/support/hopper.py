"""A mark for tests of Gluon kernels, which have no interpreter: they need a Hopper GPU."""

import pytest
import torch

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
ON_HOPPER = pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")
