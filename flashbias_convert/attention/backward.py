"""The backward pass on the Triton kernels: gradients of q, k, v, the scale and the terms.

Memory is linear in the number of queries and keys, gradients of matrices aside: scores are
computed again, and gradients of tables pass through a buffer of bounded size. The same call gives
the same bits, unless it lets `backward_atomic` do a part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .backward_atomic import all_gradients, is_served
from .backward_kernel import run_kernel
from .backward_launch import GroupCall, TooManyBatchDimensions, share
from .backward_pairs import pair_gradients
from .backward_rows import key_gradients, query_gradients
from .launch_plan import on_device
from .normalize import normalize_rows
from .packing import GroupSpec, parse_spec
from .strides import TAILS, batch_entry, padded
from .training_packing import factor_gradients, rounded

#: What a gradient of a factor is a product with.
_OTHER = {"phi_q": "phi_k", "phi_k": "phi_q"}


@dataclass(frozen=True)
class Saved:
    """What the forward pass leaves for the backward pass; see `attention_training_op`."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    bias_tensors: Sequence[Tensor]
    spec: str
    scale: float
    head_scale: Tensor | None
    key_mask: Tensor | None
    query_start: int
    query_starts: Tensor | None
    causal: bool
    cosine: bool
    deterministic: bool


def attention_gradients(
    saved: Saved, dout: Tensor, wanted: Sequence[bool]
) -> tuple[dict[str, Tensor], list[Tensor | None]]:
    """Gradients of the inputs of an attention call.

    Args:
        saved: the call.
        dout: gradient of its output, any strides.
        wanted: whether q, k, v, head_scale, and then each of the bias tensors want a gradient.

    Returns:
        Gradients of "q", "k", "v" and "head_scale", as far as they are wanted, and one for each
        of the bias tensors, or None.
    """
    of_call = dict(zip(("q", "k", "v", "head_scale"), wanted[:4], strict=True))
    found = {
        name: empty_gradient(getattr(saved, name))
        for name, want in of_call.items()
        if want and name != "head_scale"
    }
    tensors = _call_tensors(saved, dout, found)
    of_heads: list[tuple[Tensor, Tensor | None]] = []
    of_terms: list[Tensor | None] = []
    for spec in parse_spec(saved.spec):
        first = len(of_terms)
        last = first + len(spec.tensors)
        raw = dict(zip(spec.tensors, saved.bias_tensors[first:last], strict=True))
        names = [n for n, want in zip(raw, wanted[4 + first : 4 + last], strict=True) if want]
        own_spec, own = rounded(
            spec, raw, half=saved.v.dtype != torch.float32, scale=saved.scale,
            head_scale=saved.head_scale, again=_met_by_scores(names, saved.v.dtype),
        )  # fmt: skip
        call = GroupCall(
            own_spec, {**tensors, **own}, saved.scale, saved.query_start, saved.causal,
            saved.cosine, not saved.deterministic,
        )  # fmt: skip
        also = ["scale"] if of_call["head_scale"] else []
        with on_device(dout.device):
            gradients = group_gradients(call, frozenset(names + also))
        if also:
            of_heads.append((gradients.pop("scale")[:, 0], own.get("heads")))
        gradients = factor_gradients(spec, raw, gradients)
        of_terms += [
            gradients[n].to(t.dtype).contiguous() if n in names else None for n, t in raw.items()
        ]
    _merge_heads(saved, tensors, found)
    if of_call["head_scale"]:
        found["head_scale"] = _placed(of_heads, saved.q.shape[-3])
    return found, of_terms


def _met_by_scores(wanted: Collection[str], dtype: torch.dtype) -> dict[str, torch.dtype]:
    """What gradients of scores in bf16 are multiplied with, for those of the factors `wanted`: of
    each the other one, in that dtype.

    The kernels could round the tiles of fp16 that scores are made of. But ptxas 12.8, which Triton
    3.4 to 3.7 bring along, compiles products with such tiles wrongly for Hopper: it reads a uniform
    register that nothing has written, for where the tile lies. And split columns have two parts of
    bf16 here, not two of fp16 that lose bits of their own: distances cancel, and with a rounding of
    8 bits gradients of their weights were off by 5 %.
    """
    if dtype != torch.bfloat16:
        return {}
    return {_OTHER[name]: dtype for name in wanted if name in _OTHER}


def empty_gradient(x: Tensor) -> Tensor:
    """An uninitialised gradient of `x`, laid out like it where its memory does not overlap."""
    return torch.empty_like(x)


def _call_tensors(saved: Saved, dout: Tensor, found: dict[str, Tensor]) -> dict[str, Tensor]:
    """What all groups share: inputs, row sums, and where gradients of q, k and v go."""
    q, k = saved.q, saved.k
    tensors = {"q": q, "k": k, "v": saved.v, "do": dout, "lse": saved.lse}
    if saved.cosine:
        tensors |= {"q": normalize_rows(q), "k": normalize_rows(k), "raw_q": q, "raw_k": k}
    mask = saved.key_mask
    optional = {
        "key_mask": None if mask is None else mask.view(torch.uint8),
        "starts": saved.query_starts,
        "scale": saved.head_scale,
        "dq": found.get("q"),
    }
    tensors |= {name: t for name, t in optional.items() if t is not None}
    for name, like in (("k", k), ("v", saved.v)):
        if name not in found:
            continue
        tensors[f"d{name}"] = found[name]
        if q.shape[-3] != k.shape[-3]:  # one for each query head; added up in the end
            shape = (*q.shape[:-2], *like.shape[-2:])
            tensors[f"d{name}"] = torch.empty(shape, dtype=torch.float32, device=q.device)
    tensors["delta"] = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    with on_device(q.device):
        _row_sums({"q": saved.out, "v": saved.v, "do": dout, "delta": tensors["delta"]})
    return tensors


def _merge_heads(saved: Saved, tensors: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    """Add up the gradients of query heads that share keys and values."""
    kv_heads = saved.k.shape[-3]
    for name in ("k", "v"):
        if name in found and saved.q.shape[-3] != kv_heads:
            found[name].copy_(tensors[f"d{name}"].unflatten(-3, (kv_heads, -1)).sum(-3))


def _placed(parts: Sequence[tuple[Tensor, Tensor | None]], heads: int) -> Tensor:
    """Numbers of all heads (H,), from those of groups and which heads these are; None for all."""
    if parts[0][1] is None:
        return parts[0][0]
    total = parts[0][0].new_empty(heads)
    for part, own in parts:
        assert own is not None
        total.index_copy_(0, own.long(), part)
    return total


def _row_sums(tensors: dict[str, Tensor]) -> None:
    """delta[i] = sum(out[i] * dout[i]); `q` stands for the output, whose shape it has."""
    from .triton_backward import delta_kernel

    out = tensors["q"]
    call = GroupCall(GroupSpec(None), tensors, 1.0, 0, False, False)
    try:
        shares = share(call, 1, (), True)
    except TooManyBatchDimensions:
        for i in range(out.shape[0]):
            _row_sums({n: batch_entry(n, t, out.dim() - 3, i) for n, t in tensors.items()})
        return
    (*_, heads, n, dv), walks = out.shape, shares.walks
    rows = max(16, 2048 // padded(dv))
    programs = -(-n // rows) * heads * shares.entries.kept
    run_kernel(
        delta_kernel, programs,
        (walks["q"], walks["do"], walks["delta"], shares.entries, heads, n),
        {"DV": dv, "BLOCK_DV": padded(dv), "ROWS": rows},
        layout=call.layout, numbers=tuple(shares.entries), rounds_products=True,
    )  # fmt: skip


def group_gradients(call: GroupCall, wanted: Collection[str]) -> dict[str, Tensor]:
    """Write dq, dk and dv of the group's heads; return fp32 gradients of its other tensors.

    Args:
        call: the group.
        wanted: names of tensors, and "scale" for the scale by head, (G, 1).
    """
    if call.tensors["do"].numel() == 0 or call.tensors["q"].numel() == 0:
        return _no_gradients(call, wanted)
    try:
        if call.atomic and is_served(call, wanted):
            found = all_gradients(call, wanted)
        else:
            found = query_gradients(call, wanted) | key_gradients(call, wanted)
        return found | pair_gradients(call, wanted)
    except TooManyBatchDimensions:
        return _by_slices(call, wanted)


def _no_gradients(call: GroupCall, wanted: Collection[str]) -> dict[str, Tensor]:
    """Nothing came out, so nothing has an influence."""
    for name in {"dq", "dk", "dv"} & set(call.tensors):
        call.tensors[name].zero_()
    zeros = {n: torch.zeros_like(call.tensors[n], dtype=torch.float32) for n in wanted}
    if "scale" in zeros:
        zeros["scale"] = zeros["scale"].new_zeros(call.heads, 1)
    return zeros


def _by_slices(call: GroupCall, wanted: Collection[str]) -> dict[str, Tensor]:
    """One launch for each entry of the first batch dimension."""
    dims, parts = len(call.batch), []
    for i in range(call.batch[0]):
        entry = {n: batch_entry(n, t, dims, i) for n, t in call.tensors.items()}
        parts.append(group_gradients(dataclasses.replace(call, tensors=entry), wanted))
    found = {}
    for name in wanted:
        each = torch.stack([part[name] for part in parts])
        tensor = call.tensors[name]
        axis = tensor.dim() - TAILS.get(name, 0) - dims
        if name == "scale":
            found[name] = each.sum(0)
        elif axis >= 0 and tensor.shape[axis] > 1:
            found[name] = each.reshape(tensor.shape)
        else:
            found[name] = each.sum(0).reshape(tensor.shape)
    return found
