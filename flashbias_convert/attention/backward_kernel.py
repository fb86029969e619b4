"""Launches of backward kernels, which keep what Triton would look up again in every call.

Its way from arguments to a compiled kernel takes longer than many kernels; all that it looks at is
in the layout of the call's tensors and in what the caller names.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from .direct_launch import DirectLaunch, direct
from .launch_plan import MAX_PLANS
from .tuning import LaunchSettings

_COMPILED: dict[Hashable, DirectLaunch | None] = {}


def run_kernel(
    kernel: Any,
    programs: int,
    arguments: tuple[Any, ...],
    constants: Mapping[str, Any],
    settings: LaunchSettings | None = None,
    *,
    layout: int,
    numbers: tuple[Any, ...],
    rounds_products: bool = False,
) -> None:
    """Launch on the current device.

    Args:
        kernel: Triton's.
        programs: of the launch; nothing is launched for none.
        arguments: those that are no constants, in the kernel's order. Tensors among them that do
            not belong to `layout` are allocated for the call, contiguous and aligned.
        constants: compile-time arguments by name.
        settings: of the launch.
        layout: see `known_layouts.layout_number`.
        numbers: every integer of `arguments` that the layout does not imply, and which of the
            optional arguments are there.
        rounds_products: round every product before it is added to something. Else lanes that add
            the same two numbers may find sums that differ in their last bit: each has one of
            them as a product of its own, which it does not round, and gets the other one rounded.
    """
    if not programs:
        return
    options: dict[str, Any] = {} if settings is None else settings.options()
    if rounds_products:
        options["enable_fp_fusion"] = False
    key = (kernel, layout, numbers, *constants.values(), *options.values())
    compiled = _COMPILED.get(key)
    if compiled is not None:
        names = kernel.arg_names[len(arguments) :]
        compiled(programs, (*arguments, *[constants[name] for name in names]))
        return
    if len(_COMPILED) >= MAX_PLANS:
        _COMPILED.clear()
    _COMPILED[key] = direct(kernel[(programs,)](*arguments, **constants, **options))
