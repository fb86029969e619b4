"""Terms made from the input of a call: the functions behind the names of builders."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from .kept import kept_with
from .terms import Alibi, Axial, Dense, KeyBias, Lookup, LowRank, RelativeTable


def padded_alibi(*, slopes: Tensor, places: Tensor, start: int | Tensor, n: int) -> Alibi:
    """ALiBi whose positions count the tokens of each row and skip its padding (BLOOM).

    Args:
        slopes: fp32, shape (H,).
        places: int32 (B, M), the place of each key in its row.
        start: place of the first query among the keys.
        n: number of queries.
    """
    if isinstance(start, Tensor):
        pos_q = places.index_select(-1, start + torch.arange(n, device=places.device))
    else:
        pos_q = places[:, start : start + n]
        if not pos_q.is_contiguous():
            pos_q = kept_with(places, (start, n), pos_q.contiguous)
    return Alibi(slopes=slopes, pos_q=pos_q, pos_k=places.contiguous())


def rounded_alibi(*, slopes: Tensor, places: Tensor, unit: float, dtype: torch.dtype) -> KeyBias:
    """ALiBi as Falcon computes it: slopes, positions and products in bfloat16.

    Args:
        slopes: fp32, shape (H,), times `unit`.
        places: int32 (B, M), the place of each key in its row, from 1 on.
        unit: what the scores are multiplied with after the bias was added.
        dtype: of the model.
    """
    rounded = (slopes / unit).bfloat16()[:, None] * (places[:, None, :] - 1)  # (B, H, M)
    return KeyBias(values=rounded.to(dtype).float() * unit)


def cls_window_table(*, table: Tensor, window: tuple[int, int]) -> RelativeTable:
    """BEiT's bias of a window of patches behind a class token, without its (N, N) matrix.

    Args:
        table: shape (T + 3, H): an entry for each of the T = (2 Wh - 1)(2 Ww - 1) offsets, row by
            row, then those of the class token: its row, its column, and where they cross.
        window: (Wh, Ww).

    Returns:
        A term for 1 + Wh Ww queries and keys, with an fp32 table, or fp64 for one of fp64.
    """
    make = partial(_cls_window_table, table, window)
    term: RelativeTable = kept_with(table, ("cls window table", window), make)
    return term


def _cls_window_table(table: Tensor, window: tuple[int, int]) -> RelativeTable:
    (height, width), span = window, 2 * window[1] - 1
    size = (2 * height - 1) * span
    rows = torch.arange(height, dtype=torch.int32, device=table.device)
    columns = torch.arange(width, dtype=torch.int32, device=table.device)
    # offsets count from the last key to the first; the class token has codes of its own behind
    # them: its row takes entries size ..., its column those after, and the last is the crossing
    u = (rows[:, None] * span + columns).flatten()
    largest = (height - 1) * span + width - 1
    column = size + largest + 1
    wide = table.to(torch.promote_types(table.dtype, torch.float32)).T  # (H, T + 3)
    row, col, corner = wide[:, -3:].unsqueeze(-1).unbind(1)  # (H, 1) each
    rest = (row.expand(-1, largest + 1), col.expand(-1, size), corner)
    return RelativeTable(
        table=torch.cat([wide[:, :-3], *rest], dim=-1),
        u=torch.cat([u.new_tensor([size]), u]),
        v=torch.cat([u.new_tensor([column]), u.flip(0)]),
    )


def window_table(*, table: Tensor, window: tuple[int, int]) -> RelativeTable:
    """As `cls_window_table`, without a class token: a table (T, H), and Wh Ww queries and keys."""
    make = partial(_window_table, table, window)
    term: RelativeTable = kept_with(table, ("window table", window), make)
    return term


def _window_table(table: Tensor, window: tuple[int, int]) -> RelativeTable:
    (height, width), span = window, 2 * window[1] - 1
    rows = torch.arange(height, dtype=torch.int32, device=table.device)
    columns = torch.arange(width, dtype=torch.int32, device=table.device)
    u = (rows[:, None] * span + columns).flatten()
    wide = torch.promote_types(table.dtype, torch.float32)
    # a copy, which of one head `contiguous` would not make: it is kept with the table
    own = table.T.to(wide, copy=True, memory_format=torch.contiguous_format)
    # no two keys of a pair are of different rows
    return RelativeTable(table=own, u=u, v=u.flip(0), pairs=width % 2 == 0)


def shared_table(table: Tensor) -> Tensor:
    """A table (H, ...) as kernels read it, so that layers that share it need not make it so."""
    return table.to(torch.promote_types(table.dtype, torch.float32)).contiguous()


def distance_table(*, table: Tensor, n: int, gate: Tensor | None = None) -> RelativeTable:
    """A bias of the distance from query to key, from its values at each distance (T5, WavLM).

    Args:
        table: shape (H, N + M - 1): the bias where key minus query is -(N - 1), ..., M - 1.
        n: number of queries, N.
        gate: multiplies the rows, shape (*batch, H, N).
    """
    wide = table.to(torch.promote_types(table.dtype, torch.float32))

    def codes() -> tuple[Tensor, Tensor]:
        last = n - 1 + RelativeTable.MARGIN
        down = torch.arange(last, last - n, -1, dtype=torch.int32, device=table.device)
        return down, torch.arange(table.shape[-1] - n + 1, dtype=torch.int32, device=table.device)

    u, v = kept_with(table, ("distance codes", n), codes)
    return RelativeTable(
        table=torch.nn.functional.pad(wide, (RelativeTable.MARGIN, RelativeTable.MARGIN)),
        u=u,
        v=v,
        by_distance=1,
        row_scale=None if gate is None else gate.to(wide.dtype),
    )


def axial_rows(*, q: Tensor, rel_h: Tensor, rel_w: Tensor, special: int = 0) -> Axial:
    """Rows of decomposed relative positions: products of the queries with two tables (SAM, MViTv2).

    Args:
        q: shape (*batch, H, special + qH * qW, D), not scaled.
        rel_h: shape (qH, kH, D): for each row of queries what belongs to each row of keys.
        rel_w: shape (qW, kW, D): likewise for columns.
        special: tokens in front of the map, of queries and of keys, that take no part.
    """
    (height, k_height), (width, k_width) = rel_h.shape[:2], rel_w.shape[:2]
    grid = q[..., special:, :].unflatten(-2, (height, width))
    rows = torch.einsum("...yxd,ykd->...yxk", grid, rel_h.to(q.dtype)).flatten(-3, -2)
    columns = torch.einsum("...yxd,xkd->...yxk", grid, rel_w.to(q.dtype)).flatten(-3, -2)
    key = torch.arange(k_height * k_width, device=q.device)
    y, x = key // k_width, key % k_width
    if special:  # their rows are zeros, and so is a row and a column of keys that does not exist
        rows, columns = (F.pad(part, (0, 1, special, 0)) for part in (rows, columns))
        y, x = F.pad(y, (special, 0), value=k_height), F.pad(x, (special, 0), value=k_width)
    return Axial(rel_h=rows, rel_w=columns, y=y, x=x)


def axial_rows_3d(
    *, q: Tensor, rel_t: Tensor, rel_h: Tensor, rel_w: Tensor, special: int = 0
) -> Axial:
    """As `axial_rows`, for a video: frames and rows together are the first axis of the term.

    That makes kT kH + kW numbers per query instead of kT kH kW.

    Args:
        q: shape (*batch, H, special + qT * qH * qW, D), not scaled.
        rel_t: shape (qT, kT, D): for each frame of queries what belongs to each frame of keys.
        rel_h, rel_w: shapes (qH, kH, D) and (qW, kW, D): likewise for rows and columns.
        special: tokens in front of the video, of queries and of keys, that take no part.
    """
    (frames, k_frames), (height, k_height) = rel_t.shape[:2], rel_h.shape[:2]
    width, k_width = rel_w.shape[:2]
    grid = q[..., special:, :].unflatten(-2, (frames, height, width))
    times = torch.einsum("...tyxd,tkd->...tyxk", grid, rel_t.to(q.dtype))
    rows = torch.einsum("...tyxd,ykd->...tyxk", grid, rel_h.to(q.dtype))
    columns = torch.einsum("...tyxd,xkd->...tyxk", grid, rel_w.to(q.dtype)).flatten(-4, -2)
    first = (times.unsqueeze(-1) + rows.unsqueeze(-2)).flatten(-2).flatten(-4, -2)
    key = torch.arange(k_frames * k_height * k_width, device=q.device)
    y, x = key // k_width, key % k_width
    if special:  # as in `axial_rows`
        first, columns = (F.pad(part, (0, 1, special, 0)) for part in (first, columns))
        y, x = (
            F.pad(y, (special, 0), value=k_frames * k_height),
            F.pad(x, (special, 0), value=k_width),
        )
    return Axial(rel_h=first, rel_w=columns, y=y, x=x)


def product(*, q: Tensor, k: Tensor, scale: float) -> LowRank:
    """Scores of a second stream: its queries and keys are the factors (LiLT).

    Args:
        q, k: shapes (*batch, H, N, R) and (*batch, H, M, R).
        scale: multiplies their products.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    # the columns come in the precision of the model: there is nothing below it to split off
    return LowRank(phi_q=q.to(wide) * scale, phi_k=k.to(wide), split=0)


def dense(*, bias: Tensor) -> Dense:
    """A bias that a model makes of its input, shape (*batch, H, N, M) (LayoutLMv3)."""
    return Dense(bias=bias)


def lookup(*, table: Tensor, code: Tensor) -> Lookup:
    """A number for each pair, looked up in a table: distances in the graph of a call (Graphormer).

    Args:
        table: shape (H, T): for each head the values of all codes.
        code: integers, shape (*batch, N, M), all in 0 ... T - 1.

    Raises:
        ValueError: on the CPU, a code outside the table. Elsewhere the device stops, as it does
            for an embedding.
    """

    def checked() -> Tensor:
        made = code.to(torch.int32).contiguous()
        if made.device.type == "cpu" and not torch.compiler.is_compiling():
            Lookup(table=table, code=made).check_codes()
        else:  # a kernel trusts codes, and waiting for them would take longer than using them
            torch._assert_async((made.amin() >= 0) & (made.amax() < table.shape[-1]))
        return made if made is not code else made.clone()

    codes = kept_with(code, ("lookup codes", table.shape[-1]), checked)
    return Lookup(table=shared_table(table), code=codes)
