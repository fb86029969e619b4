"""Biases from tables of relative positions: what recipes of windowed attention share."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn

from .masks import planned_mask
from .recipe import Description, Site, UnsupportedSite


def require_index(found: Tensor, right: Tensor) -> None:
    """Refuse an index that does not belong to its window.

    Checkpoints do not hold such buffers: after a build on the meta device they are garbage.

    Args:
        found: the module's own index, of any shape.
        right: what the module's library computes for its window.

    Raises:
        UnsupportedSite: they differ.
    """
    if not torch.equal(found.flatten(), right.to(found.device).flatten()):
        refuse_buffers()


def absolute_offsets(height: int, width: int, step: int = 1) -> Tensor:
    """How LeViT and its kind number the offsets between tokens of a map, whatever their signs.

    Args:
        height, width: of the map; all its tokens are keys.
        step: only every so many rows and columns have queries.

    Returns:
        Integers, shape (N, M): rows apart times width, plus columns apart.
    """
    keys = torch.stack(torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij"))
    queries = keys[:, ::step, ::step]
    rows, columns = (queries.flatten(1)[:, :, None] - keys.flatten(1)[:, None]).abs()
    return rows * width + columns


def require_coordinates(found: Tensor, right: Tensor) -> None:
    """As `require_index`, for coordinates, which may have been rounded to bfloat16."""
    close = found.shape == right.shape and torch.allclose(
        found.float(), right.to(found.device).float(), rtol=2**-7
    )
    if not close:
        refuse_buffers()


def require_own_buffers(module: nn.Module) -> None:
    """As `require_index`, for every buffer that a module of timm makes by `_init_buffers`."""
    right: Any = copy.deepcopy(module)
    right._init_buffers()
    made = dict(right.named_buffers(recurse=False))
    for name, buffer in module.named_buffers(recurse=False):
        check = require_coordinates if buffer.is_floating_point() else require_index
        check(buffer, made[name])


def refuse_buffers() -> None:
    """Raise UnsupportedSite; see `require_index`."""
    raise UnsupportedSite(
        "its relative position buffers do not belong to its window, as after a build on the "
        "meta device; call init_non_persistent_buffers() of every module that has it"
    )


def require_plain_layers(layers: nn.Module, attention: nn.Module) -> None:
    """Refuse layers that make a bias if others have put something between them.

    An adapter can be switched off without a trace in the parameters: terms would go stale unseen.

    Args:
        layers: what makes the bias; torch's own and those of the library of `attention` pass.
        attention: the attention module.

    Raises:
        UnsupportedSite: something else is among them.
    """
    library = type(attention).__module__.partition(".")[0]
    own = ("torch.nn.modules.", f"{library}.")
    for layer in layers.modules():
        if not f"{type(layer).__module__}.".startswith(own):
            raise UnsupportedSite(
                f"its bias is made by layers such as {type(layer).__name__}; merge adapters, and "
                "remove parametrizations and quantisation first"
            )


def require_shared_heads(heads: int, table: nn.Embedding | None) -> None:
    """Refuse attention with fewer heads than the bias that it shares, as after pruning.

    Args:
        heads: of the attention module.
        table: what makes the bias, an entry for every head; None if it is not known.

    Raises:
        UnsupportedSite: the numbers differ.
    """
    if table is not None and table.embedding_dim != heads:
        raise UnsupportedSite(
            f"it has {heads} heads, but the bias that its layers share has {table.embedding_dim}"
        )


def describe_windows(
    site: Site,
    bias: Tensor,
    index: Tensor,
    dim: int,
    warnings: tuple[str, ...] = (),
    *,
    cosine: bool = False,
) -> Description:
    """Attention in windows, and the shift mask that its block keeps.

    A block whose map may change size (timm's `dynamic_mask`) keeps no `attn_mask`: it makes one for
    each call.

    Args:
        site: the attention.
        bias: of a window, shape (H, N, N).
        index: see `Description`.
        dim: of the queries of all heads, H * D.
        warnings: what to say of the bias.
        cosine: whether its scores are cosines.
    """
    masks, mask_warnings = planned_mask(getattr(site.parent, "attn_mask", None))
    heads, n, m = bias.shape
    return Description(
        bias=bias,
        num_heads=heads,
        n=n,
        m=m,
        head_dim=dim // heads,
        index=index,
        exact_terms=masks,
        warnings=warnings + mask_warnings,
        shared=not cosine and not masks and _is_unshifted(site.parent),
    )


def _is_unshifted(block: object) -> bool:
    """Whether a block of windows says that it never rolls its map, and so needs no mask."""
    shift = getattr(block, "shift_size", None)
    return shift is not None and not any(shift if isinstance(shift, list | tuple) else (shift,))


def in_float32(module: nn.Module) -> Any:
    """The module, or a copy in float32 of one in half precision, which rounds what it computes."""
    half = any(torch.finfo(p.dtype).bits < 32 for p in module.parameters())
    return copy.deepcopy(module).float() if half else module


# -- continuous position bias (SwinV2) -----------------------------------------------------


@torch.no_grad()
def continuous_bias(
    mlp: nn.Module, coordinates: Tensor, index: Tensor, num_heads: int
) -> tuple[Tensor, tuple[str, ...]]:
    """The bias of SwinV2: 16 sigmoid(mlp(coordinates)), looked up by the relative position.

    Args:
        mlp: the module's own.
        coordinates: floating point, shape (1, 2 Wh - 1, 2 Ww - 1, 2).
        index: integers, N * N in any shape, into the flattened coordinates.
        num_heads: H.

    Returns:
        The bias (H, N, N) in float32 or wider, and warnings: what differs from the original's own
        where that computes in half precision.
    """
    own = _run_mlp(mlp, coordinates, index, num_heads)
    if torch.finfo(own.dtype).bits >= 32:
        return own, ()
    wide = copy.deepcopy(mlp).float()
    bias = _run_mlp(wide, coordinates.float(), index, num_heads)
    return bias, rounding_warnings(own, bias)


def rounding_warnings(own: Tensor, bias: Tensor) -> tuple[str, ...]:
    """Says how far the original's bias is off where it is computed in half precision."""
    off = float((bias - own.float()).abs().max())
    if off == 0.0:
        return ()
    return (
        f"the original computes its bias in {str(own.dtype).removeprefix('torch.')} and is off "
        f"by up to {off:.2g}; the terms are made in float32 from the same weights",
    )


def _run_mlp(mlp: nn.Module, coordinates: Tensor, index: Tensor, num_heads: int) -> Tensor:
    table = mlp(coordinates).view(-1, num_heads)
    n = math.isqrt(index.numel())
    # once in memory: this is the largest tensor of a conversion
    bias = table.mT.contiguous()[:, index.reshape(-1)].view(-1, n, n)
    return bias.sigmoid_().mul_(16)


def cosine_scale(logit_scale: Tensor) -> Tensor:
    """The scale of SwinV2's cosine attention, shape (H,), in float32 or wider."""
    wide = logit_scale.to(torch.promote_types(logit_scale.dtype, torch.float32))
    return wide.clamp(max=math.log(1.0 / 0.01)).exp().reshape(-1)
