"""How large the tensors of a computation become."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LargestTensor(TorchDispatchMode):
    """Inside, `elements` is the size of the largest tensor that an operation has returned.

    Expanded tensors count with their elements in memory.
    """

    elements: int = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        sizes = [x.untyped_storage().nbytes() // x.element_size()
                 for x in tree_leaves(made) if isinstance(x, Tensor)]  # fmt: skip
        self.elements = max([self.elements, *sizes])
        return made
