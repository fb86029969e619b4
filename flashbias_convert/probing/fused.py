"""Calls of `scaled_dot_product_attention`: what is added there is an argument."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
#: what the kernels behind it are called, whose arguments have these or other names
KERNELS = "_scaled_dot_product"


@dataclass(frozen=True, eq=False)
class FusedCall:
    """One call of `scaled_dot_product_attention`.

    Attributes:
        q, k: shapes (*batch, H, N, D) and (*batch, H or fewer, M, D).
        mask: what was passed as one, a bias or a mask of booleans.
        causal: whether it was asked for.
        scale: None for the default.
        factor: what q and k were multiplied with before.
    """

    q: Tensor
    k: Tensor
    mask: Tensor | None
    causal: bool
    scale: float | None
    factor: float


#: gives what q and k were multiplied with before
Factor = Callable[[Tensor, Tensor], float]
OnFused = Callable[[FusedCall], None]


class SdpaWatcher(TorchFunctionMode):
    """Sees the calls as they are made; what torch makes of them is not followed.

    Args:
        resting: a context in which nothing else watches.
        factor: what q and k were multiplied with.
        on_fused: told about every call.
    """

    def __init__(
        self,
        resting: Callable[[], AbstractContextManager[None]],
        factor: Factor,
        on_fused: OnFused,
    ) -> None:
        super().__init__()
        self._resting, self._factor, self._on_fused = resting, factor, on_fused

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if func is not F.scaled_dot_product_attention:
            return func(*args, **options)
        with self._resting():
            self._on_fused(fused_call(_NAMES, args, options, self._factor))
            return func(*args, **options)


def fused_call(
    names: Sequence[str], args: Sequence[Any], options: Mapping[str, Any], factor: Factor
) -> FusedCall:
    """A call from its arguments.

    Args:
        names: of the positional ones.
        args, options: positional ones and those with a keyword.
        factor: what q and k were multiplied with.
    """
    given = {**dict(zip(names, args, strict=False)), **options}
    q, k = given["query"], given["key"]
    mask = given.get("attn_mask", given.get("attn_bias"))
    return FusedCall(q, k, mask, bool(given.get("is_causal")), given.get("scale"), factor(q, k))
