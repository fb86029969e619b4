"""T5 and its copies in transformers: layer 0 makes a bias of the distance for all layers.

Those are mT5, Pop2Piano and the decoder of LongT5.

transformers lets attention functions be registered that take a `position_bias`; ours, for models
without a recipe, is `register_attention`. Replacing the module's class is the sturdier way. At that
interface the bias is a dense (1, H, N, M) tensor already; the function is chosen by a string in the
config, for cross-attention and other models of the process as well, and is lost when the config is
set or saved; and without a mask function under the same name the padding mask silently becomes
None.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor, nn

from flashbias_convert.about import About
from flashbias_convert.built_terms import shared_table
from flashbias_convert.causal import (
    attend_causal,
    attend_padded,
    cache_of_call,
    is_key_table,
    own_cache,
    query_start,
)
from flashbias_convert.causal_owner import KeyTableOwner, PaddingMaskInGenerate
from flashbias_convert.patched_attention import PatchedAttention
from flashbias_convert.recipe import Description, NoBias, Owner, Recipe, Site, UnsupportedSite
from flashbias_convert.tables import require_shared_heads


class T5Attention(PatchedAttention):
    """`T5Attention` as self-attention; the projections are the original's, the scale is 1."""

    head_counts = ("n_heads",)

    n_heads: int
    key_value_proj_dim: int
    is_decoder: bool
    layer_idx: int | None
    q: nn.Linear
    k: nn.Linear
    v: nn.Linear
    o: nn.Linear

    def bias_sources(self) -> tuple[Tensor | Hashable, ...]:
        return (self.n_heads,)  # layer 0 makes the table anew in each call

    def projections(self) -> tuple[nn.Linear, nn.Linear, nn.Linear, nn.Linear]:
        """To queries, keys and values, and of the output."""
        return self.q, self.k, self.v, self.o

    def flashbias_forward(
        self,
        hidden_states: Tensor,
        mask: Tensor | None = None,
        key_value_states: Tensor | None = None,
        position_bias: Tensor | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, ...]:
        cache = cache_of_call(cache, kwargs)
        if mask is None or not is_key_table(mask):
            given = (hidden_states, mask, key_value_states, position_bias, cache)
            original: tuple[Tensor, ...] = self.original_forward(*given, **kwargs)
            return original
        out, table = self.attend(hidden_states, mask, position_bias, cache)
        return out, table, None  # type: ignore[return-value]

    def attend(
        self, hidden_states: Tensor, keys: Tensor, table: Tensor | None, cache: Any
    ) -> tuple[Tensor, Tensor]:
        """Output and the table (H, N + M - 1) of the bias, made here if no layer before did."""
        shape = (*hidden_states.shape[:-1], -1, self.key_value_proj_dim)
        *inward, outward = self.projections()
        heads = (project(hidden_states).view(shape) for project in inward)
        q, k, v = (x.transpose(1, 2) for x in heads)
        start = query_start(cache, self.layer_idx)
        if cache is not None:
            k, v = own_cache(cache).update(k, v, self.layer_idx)
        n, m = q.shape[-2], k.shape[-2]
        if table is None:  # one row: the bias of every distance from -(start + n - 1) on
            row = (1, n + m - 1, q.device, start + n - 1)
            table = shared_table(self.compute_bias(*row)[0, :, 0])  # type: ignore[operator]
        built = {"distance_table": {"table": table, "n": n}}
        if self.is_decoder:
            out = attend_causal(self.score_bias, q, k, v, keys, start=start, built=built, scale=1.0)
        else:
            out = attend_padded(self.score_bias, q, k, v, keys, built=built, scale=1.0)
        return outward(out.transpose(1, 2).flatten(2)), table


def is_self_attention(module: Any) -> bool:
    """Cross-attention, a decoder's attention that is not causal, adds no bias."""
    return bool(module.is_causal or not module.is_decoder)


def table_below(stack: nn.Module | None) -> nn.Embedding | None:
    """The first table below a module: all layers share that of layer 0, or have their own."""
    below = () if stack is None else stack.modules()
    found = (getattr(module, "relative_attention_bias", None) for module in below)
    return next((table for table in found if isinstance(table, nn.Embedding)), None)


def describe(site: Site) -> Description:
    """A table for each call: the bias depends on the distance alone."""
    module: Any = site.module
    if not is_self_attention(module):
        raise NoBias("cross-attention: it adds no bias")
    if module.is_decoder and not getattr(module.config, "is_causal", True):
        raise UnsupportedSite("it is configured to attend in both directions")
    n, size = site.tokens or 512, module.key_value_proj_dim
    heads = getattr(module.q, "out_features", module.n_heads * size) // size
    require_shared_heads(heads, table_below(module) or table_below(site.owner))
    return Description(None, heads, n, n, size, builders=("distance_table",))


_PREFIXES = tuple(
    f"transformers.models.{name}.modeling_{name}.{prefix}"
    for name, prefix in (
        ("t5", "T5"), ("mt5", "MT5"), ("pop2piano", "Pop2Piano"), ("longt5", "LongT5")
    )
)  # fmt: skip


def makes_key_tables(stack: Any) -> bool:
    """Not the encoder of LongT5, which cuts its text into blocks and has a recipe of its own."""
    return bool(stack.is_decoder or not hasattr(stack, "local_radius"))


recipe = Recipe(
    name="transformers_t5",
    title="T5, mT5, Pop2Piano, decoder of LongT5 (transformers)",
    classes=tuple(f"{prefix}Attention" for prefix in _PREFIXES),
    library="transformers",
    tested=">=5.16,<5.25",
    attention=T5Attention,
    describe=describe,
    owners=(
        Owner(
            tuple(f"{prefix}Stack" for prefix in _PREFIXES), KeyTableOwner, when=makes_key_tables
        ),
        Owner(
            tuple(f"{prefix}ForConditionalGeneration" for prefix in _PREFIXES),
            PaddingMaskInGenerate,
        ),
    ),
    shares=is_self_attention,
    about=About(
        models=(
            "T5, mT5, Pop2Piano: encoders, and decoders with dynamic and static caches; the "
            "decoder of LongT5; cross-attention has no bias and is left alone"
        ),
        exact="its bias of the distance: a table of 2 N - 1 numbers a head, made once a call",
    ),
)
