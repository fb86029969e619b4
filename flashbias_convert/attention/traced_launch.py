"""Calls of few queries in compiled graphs, which launch the kernels themselves.

A token is decoded with one call in each of dozens of layers, and the card computes for a few
microseconds in each. Going through torch's dispatcher, through the plans of this package and
through Triton's launcher takes a host several times as long. So the operator opens up while
AOTAutograd traces, as one of `torch.library.triton_op` does: the graph has the kernels in its
place, and the compiler launches them like its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .flags import COSINE
from .group_calls import GroupCall, empty_output, group_calls
from .launch import is_changed, plan_of
from .launch_plan import LaunchPlan
from .parted_plan import PartedPlan
from .parts import MOST_QUERIES
from .room import most_bytes


class _Planned(NamedTuple):
    """How a group of heads is launched; `second` and `left` where it takes two launches."""

    call: GroupCall
    first: LaunchPlan
    second: LaunchPlan | None = None
    left: int = 0


def open_up(mode: Any, op: Any, types: Any, arguments: Any, options: Any) -> Any:
    """The operator `flashbias_convert::attention` while a graph is made functional.

    Args:
        mode: torch's `FunctionalTensorMode`.
        op, types, arguments, options: see `torch.library.register_torch_dispatch`.
    """
    if _may_open(types) and _is_small(*arguments, **options):
        with mode:
            out = empty_output(arguments[0], arguments[2])
            planned = _planned(group_calls(out, *arguments, **options))
            if planned is not None and not is_changed():  # by another thread, in the meantime
                for each in planned:
                    _launch(each)
                return out
    return mode.__torch_dispatch__(op, types, arguments, options)


def kernels() -> tuple[Any, ...]:
    """Triton's kernels that graphs may hold.

    Raises:
        BypassAOTAutogradCache: launches are not the usual ones now; no graph on disk says so.
    """
    if is_changed():
        from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache

        raise BypassAOTAutogradCache("kernels are launched in another way for now")
    if not torch.cuda.is_initialized():  # no graph of a card, and nobody knows its settings yet
        return ()
    return tuple(_in_graphs().values())


def _may_open(types: Iterable[type]) -> bool:
    """Whether the graph is made now, will be run as it is, and on plain tensors."""
    from torch._functorch import config
    from torch._inductor import config as inductor
    from torch._subclasses import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    # the compiler looks into a kernel for what it writes to each time that it meets it, which takes
    # longer than all else that is done about a call: not before the trace itself, which comes
    # second, and not for CUDA graphs, where nothing is won
    if get_proxy_mode() is None or inductor.triton.cudagraphs:
        return False
    # exported programs keep operators; generated C++ has no words for what kernels are told
    if not config.decompose_custom_triton_ops or inductor.cpp_wrapper:
        return False
    if is_changed():
        return False
    return all(t is Tensor or issubclass(t, FakeTensor | FunctionalTensor) for t in types)


def _is_small(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias_tensors: Sequence[Tensor],
    spec: str,
    scale: float,
    head_scale: Tensor | None,
    key_mask: Tensor | None,
    query_start: int,
    query_starts: Tensor | None,
    flags: int,
    gate: Tensor | None = None,
) -> bool:
    """Whether the host would take longer than the card, and all but tensors is known."""
    if not _is_current(q.device) or flags & COSINE or 0 in q.shape:
        return False
    given = (q, k, v, *bias_tensors, head_scale, key_mask, query_starts, gate)
    tensors = [t for t in given if t is not None]
    sizes = [s for t in tensors for s in (*t.shape, *t.stride(), t.storage_offset())]
    if not all(isinstance(s, int) for s in (*sizes, query_start)):
        return False
    return is_constant(scale) and q.shape[-2] <= MOST_QUERIES


def is_constant(number: Any) -> bool:
    """Whether a kernel may have the number as a constant: fp64 is what Triton makes of others."""
    if not isinstance(number, int | float):
        return False
    limits = torch.finfo(torch.float32)
    return number == 0 or limits.smallest_normal <= abs(number) <= limits.max


def _is_current(device: torch.device) -> bool:
    """Whether it is the card that kernels go to where nobody chooses; one that is there.

    Inductor chooses in every call; other compilers must find the same card current then.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return False
    return device.index == torch.cuda.current_device()


def _planned(calls: Iterator[GroupCall]) -> list[_Planned] | None:
    """The launches; None if one of them is no plain one."""
    found = []
    for call in calls:
        planned = plan_of(call.group, call.tensors, **call.options)
        plan = None if planned is None else planned[0]
        if isinstance(plan, PartedPlan):
            found.append(_Planned(call, plan.first, plan.second, plan.size))
        elif isinstance(plan, LaunchPlan):
            found.append(_Planned(call, plan))
        else:
            return None
        if not _can_be_held(found[-1].first, call):
            return None
    return found


def _can_be_held(plan: LaunchPlan, call: GroupCall) -> bool:
    """Whether the compiler can launch the kernel: it has no second settings to try."""
    options = dict(plan.options)
    stages = options.pop("num_stages")
    if plan.kernel not in _in_graphs() or options.keys() - {"num_warps"}:
        return False
    if not is_constant(call.group.region_value):
        return False
    q, pairs = call.tensors["q"], ("dense", "lookup_code")
    cell = sum(call.tensors[name].element_size() for name in pairs if name in call.tensors)
    most = most_bytes(plan.arguments(), stages=stages, element=q.element_size(), cell=cell)
    return most <= _memory_on_chip(q.device)


def _memory_on_chip(device: torch.device) -> int:
    """Bytes that one program may use; 0 where torch does not know."""
    card = torch.cuda.get_device_properties(device)
    return int(getattr(card, "shared_memory_per_block_optin", 0))


def _launch(planned: _Planned) -> None:
    call = planned.call
    tensors = {f"{name}_ptr": tensor for name, tensor in call.tensors.items()}
    numbers = {"scale": call.options["scale"], "query_start": call.query_start}
    if planned.second is not None:
        q = call.tensors["q"]
        tensors["parts_ptr"] = q.new_empty(planned.left, dtype=torch.float32)
    for plan in (planned.first, planned.second):
        if plan is not None:
            _into_graph(plan, tensors | numbers)


def _into_graph(plan: LaunchPlan, given: Mapping[str, Any]) -> None:
    """Leave the launch in the graph."""
    arguments = {name: given.get(name, value) for name, value in plan.arguments().items()}
    # how pointers are aligned is known to who calls the graph, and told by it
    arguments |= {"ALIGNED_ROWS": False} if "ALIGNED_ROWS" in arguments else {}
    kernel = torch.library.wrap_triton(_in_graphs()[plan.kernel])
    kernel[(plan.programs,)](**arguments, **plan.options)


@cache
def _in_graphs() -> dict[Any, Any]:
    """What stands in graphs for the kernels of plans."""
    from triton.runtime import JITFunction

    from .triton_combine import combine_parts_kernel
    from .triton_forward import attention_kernel
    from .triton_traced import traced_attention_kernel, traced_combine_kernel

    found = {
        attention_kernel: traced_attention_kernel,
        combine_parts_kernel: traced_combine_kernel,
    }
    # Triton's interpreter has others, which have no text and would run while a graph is made
    return found if isinstance(attention_kernel, JITFunction) else {}
