"""A short name for how the tensors of a call lie in memory.

What is worked out for a call, and what Triton compiles for it, depends on dtypes, shapes, strides
and alignment alone. A number that stands for all of them makes looking it up cheap.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping

from torch import Tensor

from .launch_plan import MAX_PLANS
from .strides import VECTOR_BYTES

#: layouts to numbers; a number never comes twice
_NUMBERS: dict[Hashable, int] = {}
_fresh = itertools.count()


def layout_number(tensors: Mapping[str, Tensor]) -> int:
    """The same number for the same names, dtypes, shapes, strides and alignment on one device."""
    layout = tuple(
        [
            (name, t.dtype, t.shape, t.stride(), t.data_ptr() % VECTOR_BYTES == 0, t.device)
            for name, t in tensors.items()
        ]
    )
    number = _NUMBERS.get(layout)
    if number is None:
        if len(_NUMBERS) >= MAX_PLANS:
            _NUMBERS.clear()
        number = _NUMBERS[layout] = next(_fresh)
    return number
