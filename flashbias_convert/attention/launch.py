"""Launches the Triton kernel for one group of heads.

What depends on shapes, strides and dtypes alone is worked out once and kept, because a call
with a small input would otherwise spend more time in Python than on the card.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .local_settings import settings_for
from .packing import SMALLEST_SCALE, GroupSpec
from .strides import TAILS, VECTORS, batch_entry, batch_strides, collapse_batch, own_strides
from .tuning import LaunchSettings, LaunchShape

#: Batch dimensions that the kernel can tell apart.
MAX_BATCH_DIMS = 3
#: Tensors of which the kernel reads tiles, in steps over the keys but for q.
TILED = ("q", "k", "v", "phi_k", "dense", "lookup_code")
#: Widest access of a thread.
VECTOR_BYTES = 16
#: How many plans to keep; a model has a few dozen.
MAX_PLANS = 4096


@dataclass
class LaunchPlan:
    """Everything about a launch that does not change while shapes stay the same.

    Attributes:
        arguments: the kernel's arguments by name, in its order; what changes between calls is None.
        positions: where each argument stands.
        grid: number of programs.
        settings: launch settings.
        slices: more batch dimensions than the kernel walks; launch once per leading entry.
        compiled: the compiled kernel, by alignment of the tensors.
    """

    arguments: dict[str, Any] = field(default_factory=dict)
    positions: dict[str, int] = field(default_factory=dict)
    grid: int = 0
    settings: LaunchSettings | None = None
    slices: bool = False
    compiled: dict[int, Any] = field(default_factory=dict)


_PLANS: dict[Hashable, LaunchPlan] = {}

#: what `observed` set: called with the group, its tensors and the options of every launch
_observer: Callable[[GroupSpec, Mapping[str, Tensor], dict[str, Any]], None] | None = None
#: what `forced` set: settings that take the place of those of the shape
_forced: LaunchSettings | None = None


@contextmanager
def observed(
    observer: Callable[[GroupSpec, Mapping[str, Tensor], dict[str, Any]], None],
) -> Iterator[None]:
    """Tell `observer` of every launch of this process while the block runs."""
    global _observer
    before, _observer = _observer, observer
    try:
        yield
    finally:
        _observer = before


@contextmanager
def forced(settings: LaunchSettings) -> Iterator[None]:
    """Launch with these settings, whatever the shape, while the block runs."""
    global _forced, _PLANS
    before, _forced, plans, _PLANS = _forced, settings, _PLANS, {}
    try:
        yield
    finally:
        _forced, _PLANS = before, plans


def launch(
    spec: GroupSpec,
    tensors: Mapping[str, Tensor],
    *,
    scale: float,
    causal: bool,
    query_start: int,
    cosine: bool,
    bounded: bool = False,
) -> None:
    """Run the kernel for one group of heads; writes the heads of the group into the output.

    Args:
        spec: the group.
        tensors: q (*batch, H, N, D), k (*batch, Hkv, M, D), v (*batch, Hkv, M, Dv) and
            o (*batch, H, N, Dv) with any strides, the group's tensors by name, and `key_mask`,
            `starts` and `scale` (H,) where present. Batch dimensions broadcast.
        scale: used unless `tensors` has one per head.
        causal, query_start, cosine: see `flashbias_attention`.
        bounded: no score is so large that its exponential overflows, or so small that a row's
            largest one vanishes.
    """
    if tensors["o"].numel() == 0:
        return
    if _observer is not None:
        options = {"scale": scale, "causal": causal, "query_start": query_start}
        _observer(spec, tensors, {**options, "cosine": cosine, "bounded": bounded})
    layout = tuple((n, t.dtype, t.shape, t.stride()) for n, t in tensors.items())
    plain_scale = "scale" not in tensors and scale >= SMALLEST_SCALE
    key = (spec, causal, cosine, bounded, plain_scale, tensors["q"].device, layout)
    plan = _PLANS.get(key)
    if plan is None:
        if len(_PLANS) >= MAX_PLANS:
            _PLANS.clear()
        plan = _PLANS[key] = make_plan(
            spec,
            tensors,
            causal=causal,
            cosine=cosine,
            bounded=bounded,
            plain_scale=plain_scale,
        )
    if plan.slices:
        dims = tensors["q"].dim() - 3
        for i in range(tensors["q"].shape[0]):
            entry = {n: batch_entry(n, t, dims, i) for n, t in tensors.items()}
            launch(
                spec,
                entry,
                scale=scale,
                causal=causal,
                query_start=query_start,
                cosine=cosine,
                bounded=bounded,
            )
        return
    with on_device(tensors["q"].device):
        run(plan, tensors, scale, query_start)


def make_plan(
    spec: GroupSpec,
    tensors: Mapping[str, Tensor],
    *,
    causal: bool,
    cosine: bool,
    bounded: bool,
    plain_scale: bool,
) -> LaunchPlan:
    """Work out arguments and grid; see `launch` for the arguments."""
    q, k, v = tensors["q"], tensors["k"], tensors["v"]
    batch = tuple(q.shape[:-3])
    walked = [name for name in tensors if name not in VECTORS]
    sizes, strides = collapse_batch(batch, [batch_strides(n, tensors[n], batch) for n in walked])
    if len(sizes) > MAX_BATCH_DIMS:
        return LaunchPlan(slices=True)
    lead = [1] * (MAX_BATCH_DIMS - len(sizes))
    sizes = lead + sizes
    n, m, d, dv = q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1]
    heads = q.shape[-3] if spec.heads is None else len(spec.heads)
    half = q.dtype != torch.float32
    settings = _forced or settings_for(q.device, shape_of(spec, tensors))
    values: dict[str, Any] = dict.fromkeys([f"{name}_ptr" for name in (*TAILS, *VECTORS)])
    values |= dict.fromkeys([f"{name}_strides" for name in TAILS])
    for name, own in zip(walked, strides, strict=True):
        values[f"{name}_strides"] = (*[0] * len(lead), *own, *own_strides(name, tensors[name]))
    values |= {
        "scale": None,
        "query_start": None,
        "region_value": spec.region_value,
        "batch_1": sizes[1],
        "batch_2": sizes[2],
        "G": heads,
        "kv_group": q.shape[-3] // k.shape[-3],
        "N": n,
        "M": m,
        "D": d,
        "DV": dv,
        "BLOCK_D": padded(d),
        "BLOCK_DV": padded(dv),
        "COLUMNS": spec.columns,
        "SPLIT": spec.split,
        "SCALED": spec.scaled,
        "PLAIN_SCALE": plain_scale,
        "NATURAL": not half,
        "ALIGNED_ROWS": vector_rows(k) and vector_rows(v),
        "WIDE": any(reach(tensors[n]) >= 2**31 for n in TILED if n in tensors),
        "CAUSAL": causal,
        "COSINE": cosine,
        "SYMMETRIC": spec.symmetric,
        "BOUNDED": bounded,
        "QUICK": half and not bounded,
        "BM": settings.block_m,
        "BN": settings.block_n,
    }
    order = _kernel().arg_names
    return LaunchPlan(
        arguments={name: values[name] for name in order},
        positions={name: i for i, name in enumerate(order)},
        grid=-(-n // settings.block_m) * heads * sizes[0] * sizes[1] * sizes[2],
        settings=settings,
    )


def shape_of(spec: GroupSpec, tensors: Mapping[str, Tensor]) -> LaunchShape:
    """What the settings of a launch depend on."""
    q, v = tensors["q"], tensors["v"]
    return LaunchShape(
        n=q.shape[-2],
        d=padded(q.shape[-1]),
        dv=padded(v.shape[-1]),
        columns=spec.columns,
        half=q.dtype != torch.float32,
        terms=spec.tensors,
    )


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make the tensors' own device the current one: Triton launches on that."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        return torch.cuda.device(device)
    return nullcontext()


def run(plan: LaunchPlan, tensors: Mapping[str, Tensor], scale: float, query_start: int) -> None:
    """Launch on the current device."""
    kernel = _kernel()
    values = list(plan.arguments.values())
    values[plan.positions["scale"]] = scale
    values[plan.positions["query_start"]] = query_start
    if tensors["k"].data_ptr() % VECTOR_BYTES or tensors["v"].data_ptr() % VECTOR_BYTES:
        values[plan.positions["ALIGNED_ROWS"]] = False
    aligned = 0
    for name, tensor in tensors.items():
        values[plan.positions[f"{name}_ptr"]] = tensor
        aligned = 2 * aligned + (tensor.data_ptr() % VECTOR_BYTES == 0)
    compiled = plan.compiled.get(aligned)
    if compiled is not None:
        # everything that Triton specialises on is in the plan, so its checks can be skipped
        compiled[(plan.grid, 1, 1)](*values)
        return
    assert plan.settings is not None
    plan.compiled[aligned] = kernel[(plan.grid,)](*values, **plan.settings.options())


def vector_rows(tensor: Tensor) -> bool:
    """Whether every row starts at a multiple of a vector, if the tensor does.

    Triton sees only whether a stride in elements is a multiple of 16. In a packed projection with
    a head size of 40 or 72 that is true of rows but not of heads, and it would read single numbers.
    """
    *outer, last = tensor.stride()
    return last == 1 and all(s * tensor.element_size() % VECTOR_BYTES == 0 for s in outer)


def reach(tensor: Tensor) -> int:
    """Largest offset within the last two dimensions, of which the kernel reads tiles."""
    return sum(
        (size - 1) * stride
        for size, stride in zip(tensor.shape[-2:], tensor.stride()[-2:], strict=True)
    )


def padded(size: int) -> int:
    """The power of two, at least 16, that a matrix product needs."""
    return max(16, 1 << (size - 1).bit_length())


def normalize_rows(x: Tensor) -> Tensor:
    """Rows of x (*batch, H, M, D) scaled to unit length; zero rows stay zero.

    Half-precision rows come back as fp16: numbers up to one need no other exponent, and its
    rounding is eight times finer than that of bf16.
    """
    from .triton_forward import normalize_rows_kernel

    out = torch.empty(
        x.shape, dtype=x.dtype if x.dtype == torch.float32 else torch.float16, device=x.device
    )
    *batch, heads, m, d = x.shape
    sizes, (strides,) = collapse_batch(batch, [batch_strides("k", x, batch)])
    if len(sizes) > MAX_BATCH_DIMS:
        return torch.stack([normalize_rows(entry) for entry in x]) if x.numel() else out
    lead = [1] * (MAX_BATCH_DIMS - len(sizes))
    sizes = lead + sizes
    rows = max(16, 2048 // padded(d))
    programs = -(-m // rows) * heads * sizes[0] * sizes[1] * sizes[2]
    walk = (*[0] * len(lead), *strides, *own_strides("k", x))
    if programs:
        with on_device(x.device):
            normalize_rows_kernel[(programs,)](
                x, out, walk, sizes[1], sizes[2], heads, m, D=d, BLOCK_D=padded(d), ROWS=rows
            )
    return out


@cache
def _kernel() -> Any:
    from .triton_forward import attention_kernel

    return attention_kernel
