"""BEATs and the first WavLM: a table of distances that each call gates, handed from layer to layer.

Both are classes of Microsoft's repository by one name, files without a package.
"""

from __future__ import annotations

from torch import nn

from flashbias_convert.recipe import Site
from flashbias_convert.refused import refused
from flashbias_convert.trial import has_parts

_PARTS = ("has_relative_attention_bias", "gru_rel_pos", "num_buckets", "compute_bias")


def looks_like_it(module: nn.Module) -> bool:
    """Whether a module of the name has the parts; torch's own has not."""
    return has_parts(module, *_PARTS)


def adds_a_bias(site: Site) -> bool:
    """Layers without a table gate that of the first one."""
    module = site.module
    return bool(getattr(module, "has_relative_attention_bias", False)) or bool(
        getattr(module, "gru_rel_pos", False)
    )


recipe = refused(
    name="gated_audio",
    title="BEATs and WavLM of Microsoft's repository",
    classes=("*.MultiheadAttention",),
    library="torch",
    tested=">=2.11,<2.15",
    models="BEATs, WavLM in its own repository (transformers' WavLM is converted)",
    reason=(
        "the first layer makes a tensor of its table for all layers, and each gates it by the "
        "tokens of the call: no recipe follows it through this class; a WavLM is converted as "
        "transformers' `WavLMModel`"
    ),
    when=adds_a_bias,
    matches=looks_like_it,
    with_what="the classes of both",
)
