"""Biases that take few values: a table looked up at an integer for each pair (Graphormer)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..terms import Lookup
from .chunks import chunks

#: more entries are no table: those of relative positions have as many
MOST_ENTRIES = 4096
#: pairs that share an entry, on average, so that it is no accident
SHARED_BY = 8
#: most biases that are no table take too many values in so many rows
PROBE_ROWS = 16


def few_values(bias: Tensor) -> bool:
    """Whether a bias (*batch, H, N, M) takes as few values as a table may have entries."""
    n, m = bias.shape[-2:]
    return _shared_codes(bias.reshape(-1, n * m), _most(n, m), m) is not None


@torch.no_grad()
def lookup(bias: Tensor) -> Lookup | None:
    """Recognise a bias that takes few values: bias[h, i, j] == table[h, code[i, j]].

    Codes need no structure, unlike those of a relative table: distances between the nodes of a
    graph, for instance.

    Args:
        bias: floating point, shape (*batch, H, N, M). All matrices share the codes.

    Returns:
        A term for all heads with an fp32 table (*batch, H, T) and int32 codes (N, M) that
        reproduces the bias bit for bit (0.0 and -0.0 count as one value); None where there are too
        many values, where fp32 cannot hold them, or where it would take as many bytes as the bias.
    """
    n, m = bias.shape[-2:]
    flat = bias.reshape(-1, n * m)
    codes = _shared_codes(flat, _most(n, m), m)
    if codes is None:
        return None
    size = int(codes.max()) + 1
    if 4 * (n * m + len(flat) * size) >= bias.element_size() * bias.numel():
        return None
    table = flat.new_empty(len(flat), size).scatter_(-1, codes.expand(len(flat), -1), flat).float()
    for part in chunks(len(flat), flat.shape[1], flat.device):
        if not torch.equal(table[part][:, codes].to(bias.dtype), flat[part]):
            return None
    return Lookup(table=table.reshape(*bias.shape[:-2], size), code=codes.int().reshape(n, m))


def _most(n: int, m: int) -> int:
    return min(MOST_ENTRIES, n * m // SHARED_BY)


def _shared_codes(flat: Tensor, most: int, m: int) -> Tensor | None:
    """For each cell which of the combinations of values it has, int64, shape (N M,).

    Args:
        flat: shape (matrices, N M).
        most: combinations that there may be; more give None.
        m: cells of a row.
    """
    codes = torch.zeros_like(flat[0], dtype=torch.int64)
    for numbers in flat:
        if len(torch.unique(numbers[: PROBE_ROWS * m])) > most:
            return None
        values, own = torch.unique(numbers, return_inverse=True)
        found, codes = torch.unique(codes * len(values) + own, return_inverse=True)
        if len(found) > most:
            return None
    return codes
