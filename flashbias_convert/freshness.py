"""Whether the terms of a model still belong to its weights: by the numbers themselves."""

from __future__ import annotations

from torch import nn

from .errors import StaleTermsError, UsageError
from .patched_attention import PatchedAttention
from .patched_owner import PatchedOwner


def check_model(model: nn.Module) -> int:
    """Compare what the terms of a patched model were made from with what is there now.

    Calls do so by themselves, but on a card only for changes that torch counts: reading the
    numbers would wait for it. Weights that were written through ``.data`` (averages of weights,
    adapters that are merged) are found here, and by `eval`, ``to`` and `state_dict`. What is
    found stale stays so, in compiled code, too.

    Args:
        model: a patched model, as it is or inside a wrapper. Where its weights are distributed
            (FSDP), all processes call this together.

    Returns:
        How many sites were looked at.

    Raises:
        StaleTermsError: names the sites whose weights, window or input size have changed.
        UsageError: nothing is patched.
    """
    found, stale = 0, []
    for name, module in model.named_modules():
        if isinstance(module, PatchedAttention):
            found += 1
            module.compare_values()
            if module.is_stale():
                stale.append(name)
        elif isinstance(module, PatchedOwner) and module.look():
            stale.append(name)
    if not found:
        raise UsageError("no module of this model is patched", "call patch_model first")
    if stale:
        raise StaleTermsError(
            f"the terms of {len(stale)} sites do not belong to their weights, window or input "
            f"size: {', '.join(repr(name) for name in stale)}",
            "run unpatch_model and patch_model again",
        )
    return found
