"""Settings for all tests."""

from __future__ import annotations

import torch

# the tensors are tiny: more threads only wait for each other, above all under pytest-xdist
torch.set_num_threads(1)
