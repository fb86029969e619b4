"""Launches the Triton kernel for one group of heads."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .descriptors import TileDescriptor, dense_tiles
from .factors import SMALLEST_NUMBER
from .hopper import rules as hopper
from .launch_plan import MAX_PLANS, Launchable, LaunchPlan, layout_of
from .local_settings import settings_for
from .packing import GroupSpec
from .parted_plan import PartedPlan
from .parts import MOST_PARTS, MOST_QUERIES, multiprocessors_of, number_of_parts
from .room import lacks_room
from .shared_dense import is_shared
from .shared_dense import programs as shared_programs
from .strides import (
    MAX_BATCH_DIMS,
    TAILS,
    VECTOR_BYTES,
    VECTORS,
    batch_entry,
    batch_strides,
    collapse_batch,
    own_strides,
    padded,
    reach,
    vector_rows,
)
from .tuning import LaunchSettings, LaunchShape

#: Tensors of which the kernel reads tiles, in steps over the keys but for q.
TILED = ("q", "k", "v", "phi_k", "dense", "lookup_code")

#: plans and their settings; None: more batch dimensions than the kernel walks
_PLANS: dict[Hashable, tuple[Launchable, LaunchSettings] | None] = {}
_UNKNOWN: Any = object()
#: stands in the keys of plans with smaller settings than those of their shape, see `room`
_SMALLER = "smaller"

#: what `observed` set: called with the group, its tensors and the options of every launch
_observer: Callable[[GroupSpec, Mapping[str, Tensor], dict[str, Any]], None] | None = None
#: what `forced` set: settings that take the place of those of the shape
_forced: LaunchSettings | None = None
#: what `split_into` set: a number of parts that takes the place of the rule's
_parts: int | None = None


@contextmanager
def observed(
    observer: Callable[[GroupSpec, Mapping[str, Tensor], dict[str, Any]], None],
) -> Iterator[None]:
    """Tell `observer` of every launch of this process while the block runs.

    But for those of graphs that hold kernels, see `traced_launch`, and were compiled before.
    """
    global _observer
    before, _observer = _observer, observer
    try:
        yield
    finally:
        _observer = before


@contextmanager
def forced(settings: LaunchSettings) -> Iterator[None]:
    """Launch with these settings, whatever the shape, while the block runs.

    Graphs that hold kernels, see `traced_launch`, keep those that they were compiled with.
    """
    global _forced, _PLANS
    before, _forced, plans, _PLANS = _forced, settings, _PLANS, {}
    try:
        yield
    finally:
        _forced, _PLANS = before, plans


@contextmanager
def split_into(parts: int) -> Iterator[None]:
    """Let `parts` programs share the keys of a row, whatever the call, while the block runs.

    Calls that have a gate or that keep what a backward pass needs are left whole all the same, and
    graphs that hold kernels, see `traced_launch`, keep the parts that they were compiled with.

    Raises:
        ValueError: less than one, or more than `parts.MOST_PARTS`.
    """
    global _parts, _PLANS
    if not 1 <= parts <= MOST_PARTS:
        raise ValueError(f"parts must be from 1 to {MOST_PARTS}, got {parts}")
    before, _parts, plans, _PLANS = _parts, parts, _PLANS, {}
    try:
        yield
    finally:
        _parts, _PLANS = before, plans


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
            `starts`, `scale` (H,) and `gate` (like o) where present. Batch dimensions broadcast.
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
    plain_scale = _is_plain(tensors, scale)
    device, given = tensors["q"].device, tensors.values()
    key = (spec, causal, cosine, bounded, plain_scale, device, *tensors, *layout_of(given))
    plans = _PLANS  # another thread may put others in their place, or clear them, meanwhile
    plan = plans.get(key, _UNKNOWN)
    if plan is _UNKNOWN:
        if len(plans) >= MAX_PLANS:
            plans.clear()
        plan = plans[key] = plan_of(
            spec, tensors, scale=scale, causal=causal, cosine=cosine, bounded=bounded
        )
    if _SMALLER in plans and plan is not None:
        plan = plans.get((_SMALLER, *key, *_alignment(given)), plan)
    while plan is not None:
        try:
            plan[0].run(device, given, (scale, query_start))
            return
        except Exception as problem:
            smaller = None if _forced or not lacks_room(problem) else plan[1].smaller()
            if smaller is None:
                raise
        plan = _plan(spec, tensors, smaller, causal, cosine, bounded, plain_scale)
        plans[_SMALLER], plans[(_SMALLER, *key, *_alignment(given))] = None, plan
    dims = tensors["q"].dim() - 3
    for i in range(tensors["q"].shape[0]):
        launch(
            spec,
            {n: batch_entry(n, t, dims, i) for n, t in tensors.items()},
            scale=scale,
            causal=causal,
            query_start=query_start,
            cosine=cosine,
            bounded=bounded,
        )


def _alignment(tensors: Iterable[Tensor]) -> tuple[bool, ...]:
    """What the room that a kernel takes depends on, beside its plan."""
    return tuple([t.data_ptr() % VECTOR_BYTES == 0 for t in tensors])


def plan_of(
    spec: GroupSpec,
    tensors: Mapping[str, Tensor],
    *,
    scale: float,
    causal: bool,
    cosine: bool,
    bounded: bool = False,
) -> tuple[Launchable, LaunchSettings] | None:
    """How a call is launched, and with which settings; see `launch` for the arguments.

    Returns:
        None where the kernel cannot tell the batch dimensions apart: launch once per leading entry.
    """
    options = {"causal": causal, "cosine": cosine, "bounded": bounded}
    shape = shape_of(spec, tensors, scale=scale, **options)
    settings = _forced or settings_for(tensors["q"].device, shape)
    return _plan(spec, tensors, settings, causal, cosine, bounded, _is_plain(tensors, scale))


def is_changed() -> bool:
    """Whether launches are not the usual ones now, or somebody is told of them."""
    return _observer is not None or _forced is not None or _parts is not None


def _plan(
    spec: GroupSpec,
    tensors: Mapping[str, Tensor],
    settings: LaunchSettings,
    causal: bool,
    cosine: bool,
    bounded: bool,
    plain_scale: bool,
) -> tuple[Launchable, LaunchSettings] | None:
    """Work out arguments and grid."""
    q, k, v = tensors["q"], tensors["k"], tensors["v"]
    batch = tuple(q.shape[:-3])
    walked = [name for name in tensors if name not in VECTORS]
    sizes, strides = collapse_batch(batch, [batch_strides(n, tensors[n], batch) for n in walked])
    if len(sizes) > MAX_BATCH_DIMS:
        return None
    lead = [1] * (MAX_BATCH_DIMS - len(sizes))
    sizes = lead + sizes
    n, m, d, dv = q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1]
    heads = q.shape[-3] if spec.heads is None else len(spec.heads)
    half = q.dtype != torch.float32
    entries = heads * sizes[0] * sizes[1] * sizes[2]
    programs = -(-n // settings.block_m) * entries
    parts = parts_for(spec, tensors, programs)
    values: dict[str, Any] = dict.fromkeys([f"{name}_ptr" for name in (*TAILS, *VECTORS)])
    values |= dict.fromkeys([f"{name}_strides" for name in TAILS])
    for name, own in zip(walked, strides, strict=True):
        values[f"{name}_strides"] = (*[0] * len(lead), *own, *own_strides(name, tensors[name]))
    values |= {
        "scale": None,
        "query_start": None,
        "dense_desc": None,
        "parts_ptr": None,
        "parts": None if parts == 1 else parts,
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
        "PAIRS": spec.pairs,
        "DIVIDED": spec.divided,
        "REGION_PAIRS": spec.region_pairs,
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
    tiles: TileDescriptor | None = None
    if "dense" in tensors and n > MOST_QUERIES:
        tiles = dense_tiles(tensors["dense"], settings.block_m, settings.block_n)
    kernel, grid = _kernel(), programs * parts
    options = {"causal": causal, "cosine": cosine, "bounded": bounded, "plain_scale": plain_scale}
    if settings.entries == 2 and parts == 1 and is_shared(spec, tensors, **options):
        kernel, grid = _shared_kernel(), shared_programs(values, sizes[0])
    plan = LaunchPlan(
        kernel,
        {name: values[name] for name in kernel.arg_names},
        [f"{name}_ptr" for name in tensors] + ["parts_ptr"] * (parts > 1),
        ("scale", "query_start"),
        grid=grid,
        options=settings.options(),
        whole_rows=("ALIGNED_ROWS", ("k_ptr", "v_ptr")),
        tiles=None if tiles is None else ("dense_desc", "dense_ptr", tiles),
    )
    if parts == 1:
        form = None if _forced else hopper.form_of(spec, tensors, **options)
        if form is not None:
            from .hopper.plan import HopperPlan

            return HopperPlan(tensors, form, plan), settings
        return plan, settings
    return PartedPlan(plan, values, tuple(tensors), parts=parts, rows=entries * n), settings


def parts_for(spec: GroupSpec, tensors: Mapping[str, Tensor], programs: int) -> int:
    """How many programs share the keys of a row; `programs` there are with one each."""
    if "lse" in tensors or "gate" in tensors:
        return 1
    if _parts is not None:
        return _parts
    q, k, v = tensors["q"], tensors["k"], tensors["v"]
    if q.shape[-2] > MOST_QUERIES:
        return 1
    width = k.shape[-1] + v.shape[-1] + spec.columns
    return number_of_parts(
        programs=programs,
        keys=k.shape[-2],
        key_bytes=width * k.element_size(),
        multiprocessors=multiprocessors_of(q.device),
    )


def _is_plain(tensors: Mapping[str, Tensor], scale: float) -> bool:
    """Whether scores are scaled by one number, and no tiny one."""
    return "scale" not in tensors and scale >= SMALLEST_NUMBER


def shape_of(
    spec: GroupSpec, tensors: Mapping[str, Tensor], *, scale: float, **options: bool
) -> LaunchShape:
    """What the settings of a launch depend on.

    Args:
        spec, tensors, scale: see `launch`.
        options: its `causal`, `cosine` and `bounded`.
    """
    q, v = tensors["q"], tensors["v"]
    return LaunchShape(
        n=q.shape[-2],
        d=padded(q.shape[-1]),
        dv=padded(v.shape[-1]),
        columns=spec.columns,
        half=q.dtype != torch.float32,
        terms=spec.tensors,
        shared=is_shared(spec, tensors, plain_scale=_is_plain(tensors, scale), **options),
    )


@cache
def _kernel() -> Any:
    from .triton_forward import attention_kernel

    return attention_kernel


@cache
def _shared_kernel() -> Any:
    from .triton_shared import shared_dense_kernel

    return shared_dense_kernel
