"""Which tensors of a module its bias was made from: for a starting recipe."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

#: more tensors than this are not tried
MOST_TENSORS = 64


@dataclass(frozen=True)
class BiasSource:
    """Code that makes a bias.

    Attributes:
        lines: statements that make `bias`, shape (*batch, H, N, M), from `module`.
        names: the tensors that it reads.
        index: name of an index matrix among them, or None.
    """

    lines: tuple[str, ...]
    names: tuple[str, ...]
    index: str | None = None


def find_source(module: nn.Module, bias: Tensor) -> BiasSource | None:
    """A parameter or buffer that holds the bias, or a table and an index that give it.

    Args:
        module: the attention module.
        bias: shape (P, H, N, M), P window types.
    """
    wanted = bias[0] if len(bias) == 1 else bias
    tensors = [*module.named_parameters(), *module.named_buffers()][:MOST_TENSORS]
    floats = [(name, t.detach()) for name, t in tensors if t.is_floating_point()]
    indices = [
        (name, t)
        for name, t in tensors
        if t.dtype in (torch.int64, torch.int32)
        and t.numel() == wanted.shape[-2] * wanted.shape[-1]
    ]
    for name, tensor in floats:
        if tensor.numel() == wanted.numel() and torch.equal(tensor.reshape(wanted.shape), wanted):
            shape = ", ".join(map(str, wanted.shape))
            return BiasSource((f"bias: Tensor = module.{name}.reshape({shape})",), (name,))
    for name, tensor in floats:
        for index_name, index in indices:
            code = _gathered(tensor, index, wanted)
            if code is not None:
                n, m = wanted.shape[-2:]
                lines = (
                    f"table: Tensor = module.{name}",
                    f"index: Tensor = module.{index_name}.reshape({n}, {m})",
                    f"bias = {code}",
                )
                return BiasSource(lines, (name, index_name), index_name)
    return None


def _gathered(table: Tensor, index: Tensor, wanted: Tensor) -> str | None:
    """Code for a table (T, H) or (H, T), if it gives the bias (H, N, M)."""
    if table.dim() != 2 or wanted.dim() != 3 or int(index.min()) < 0:
        return None
    heads, n, m = wanted.shape
    index = index.reshape(n, m).long()
    by_rows = table.shape[1] == heads and int(index.max()) < table.shape[0]
    if by_rows and torch.equal(table[index].permute(2, 0, 1), wanted):
        return "table[index].permute(2, 0, 1)"
    by_columns = table.shape[0] == heads and int(index.max()) < table.shape[1]
    if by_columns and torch.equal(table[:, index], wanted):
        return "table[:, index]"
    return None
