"""BEATs: one bias of the distance for all layers, gated by each query after its projection.

The class is a file of Microsoft's repository that others have copied, SpeechBrain among them. Its
attention takes (N, B, C). Modules are known by their parts, and tried out before they are trusted.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from flashbias_convert.about import About
from flashbias_convert.built_terms import shared_table
from flashbias_convert.fallback import NO_PADDING_MASK, WEIGHTS, say_original
from flashbias_convert.patched_attention import PatchedAttention
from flashbias_convert.patched_owner import PatchedOwner
from flashbias_convert.recipe import Description, NoBias, Owner, Recipe, Site, UnsupportedSite
from flashbias_convert.tables import require_shared_heads
from flashbias_convert.trial import Trial, has_parts, plain_attention

#: why a call runs the original
MORE = "a call brings a cache, or asks for the scores"
OTHERS = "a call brings other keys than its queries"
_PARTS = ("has_relative_attention_bias", "gru_rel_pos", "scaling")
_LAYERS = ("q_proj", "k_proj", "v_proj", "out_proj", "dropout_module")


class GatedAttention(PatchedAttention):
    """`MultiheadAttention`; what layers hand on is a table (H, 2 N - 1) instead of (B H, N, N)."""

    bypassed: ClassVar[tuple[str, ...]] = ("dropout_module",)

    num_heads: int
    scaling: float
    gru_rel_pos: bool
    has_relative_attention_bias: bool
    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    out_proj: nn.Module
    grep_linear: nn.Linear
    grep_a: nn.Parameter
    relative_attention_bias: nn.Embedding

    def bias_sources(self) -> tuple[Tensor | Hashable, ...]:
        return (self.num_heads,)  # the first layer makes the table anew in each call

    def flashbias_forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        key_padding_mask: Tensor | None = None,
        incremental_state: Any = None,
        need_weights: bool = True,
        static_kv: bool = False,
        attn_mask: Tensor | None = None,
        before_softmax: bool = False,
        need_head_weights: bool = False,
        position_bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        original = partial(
            self.original_forward, query, key, value, key_padding_mask, incremental_state,
            need_weights, static_kv, attn_mask, before_softmax, need_head_weights,
        )  # fmt: skip
        if position_bias is not None and position_bias.dim() == 1:  # make a table
            position_bias = position_bias if self.has_relative_attention_bias else None
        if position_bias is None or position_bias.dim() > 2:  # not from a patched encoder
            made: tuple[Tensor, Tensor | None, Tensor | None] = original(position_bias)
            return made
        n, batch = query.shape[:2]
        table = position_bias if position_bias.dim() == 2 else distance_values(self, n)
        reason = None
        if need_weights or need_head_weights:
            reason = WEIGHTS
        elif attn_mask is not None or not _hides_keys(key_padding_mask):
            reason = NO_PADDING_MASK
        elif before_softmax or incremental_state is not None or static_kv:
            reason = MORE
        elif key is not query or value is not query:
            reason = OTHERS
        if reason is not None:
            say_original(reason)
            dense = matrix_of(table, n).to(query.dtype)
            out, weights, _ = original(dense.repeat(batch, 1, 1))
            return out, weights, table
        q, k, v = (
            self.split(self.project(layer, query))
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        gate = gate_of(self, self.gate_source(query, q)) if self.gru_rel_pos else None
        built = {"distance_table": {"table": table, "n": n, "gate": gate}}
        seen = None if key_padding_mask is None else ~key_padding_mask  # (B, N)
        # divided by 32 and multiplied after the largest was taken away, its scores are the usual
        out = self.score_bias(q, k, v, built=built, key_mask=seen, scale=self.scaling)
        out = self.project(self.out_proj, out.permute(2, 0, 1, 3).flatten(2))
        return out, None, table

    def split(self, x: Tensor) -> Tensor:
        """(N, B, C) -> (B, H, N, D)."""
        return x.unflatten(-1, (self.num_heads, -1)).permute(1, 2, 0, 3)

    def project(self, layer: nn.Module, x: Tensor) -> Tensor:
        """What one of its linear layers makes of x."""
        made: Tensor = layer(x)
        return made

    def gate_source(self, query: Tensor, q: Tensor) -> Tensor:
        """What gates are made from, (B, H, N, D)."""
        return q


class GatedEncoder(PatchedOwner):
    """`TransformerEncoder`, whose layers hand on what the first makes; it tells it to make less."""

    def flashbias_forward(self, *args: Any, **kwargs: Any) -> Any:
        with self.lean():
            return self.original_forward(*args, **kwargs)

    @property
    def layers(self) -> Any:
        """The layers; while lean, calls of them in which the first is handed a bias, too."""
        layers: Any = self._modules["layers"]
        return [partial(_call, layer) for layer in layers] if self.is_lean else layers


def _call(layer: nn.Module, x: Tensor, *args: Any, pos_bias: Any = None, **kwargs: Any) -> Any:
    # without any numbers: make a table
    handed = x.new_empty(0) if pos_bias is None else pos_bias
    return layer(x, *args, pos_bias=handed, **kwargs)


def _hides_keys(mask: Tensor | None) -> bool:
    """Whether a padding mask is the usual one (B, N), or none."""
    return mask is None or (mask.dtype == torch.bool and mask.dim() == 2)


def distance_values(module: Any, n: int) -> Tensor:
    """The bias where key minus query is -(n - 1) ... n - 1, (H, 2 n - 1), by its own buckets."""
    # on the CPU, as the original: another logarithm may round into another bucket
    bucket = module._relative_positions_bucket(torch.arange(1 - n, n))
    table = module.relative_attention_bias
    return shared_table(table(bucket.to(table.weight.device)).T)


def matrix_of(table: Tensor, n: int) -> Tensor:
    """The bias (H, n, n) of a table of distances (H, 2 n - 1)."""
    place = torch.arange(n, device=table.device)
    return table[:, place[None, :] - place[:, None] + n - 1]


def gate_of(module: Any, heads: Tensor) -> Tensor:
    """What multiplies the rows of the bias, (B, H, N), made from (B, H, N, D)."""
    sums = module.grep_linear(heads).unflatten(-1, (2, 4)).sum(-1)
    a, b = sums.sigmoid().unbind(-1)
    gate: Tensor = a * (b * module.grep_a[..., 0] - 1.0) + 2.0
    return gate


def looks_like_it(module: nn.Module) -> bool:
    """Whether a module of the name has the parts; torch's own has not."""
    parts = has_parts(module, *_PARTS) and has_parts(module, *_LAYERS, kind=nn.Module)
    sizes = has_parts(module, "num_buckets", "max_distance", "num_heads", kind=int)
    methods = ("compute_bias", "_relative_positions_bucket")
    return parts and sizes and all(callable(getattr(module, name, None)) for name in methods)


def calls_torchs(module: nn.Module) -> bool:
    """Whether its forward leaves attention to torch's function, as WavLM's does."""
    forward = getattr(type(module), "original_class", type(module)).forward
    code = getattr(forward, "__code__", None)
    return code is not None and "multi_head_attention_forward" in code.co_names


def is_beats(module: nn.Module) -> bool:
    """Whether a module of the name has the parts, and computes attention itself."""
    return looks_like_it(module) and not calls_torchs(module)


def hands_on(encoder: Any) -> bool:
    """Not every `TransformerEncoder`: its layers have attention with the parts."""
    layers = encoder._modules.get("layers")
    attention = [getattr(layer, "self_attn", None) for layer in layers or ()]
    return bool(attention) and all(a is not None and looks_like_it(a) for a in attention)


def describe_gated(site: Site, patch: type[GatedAttention], what: str) -> Description:
    """A table for each call: 50 frames a second or so, so 500 stand for ten seconds.

    Args:
        site: an attention module.
        patch: what it becomes, which says what its gates are made from.
        what: whose parts it has, for messages.
    """
    module: Any = site.module
    owner: Any = site.owner
    tables = [layer.self_attn.has_relative_attention_bias for layer in owner.layers]
    if not any(tables):
        raise NoBias("it has no relative positions")
    if not tables[0]:
        raise UnsupportedSite("the first layer of its encoder makes no bias")
    first = owner.layers[0].self_attn
    n, heads = site.tokens or 500, module.num_heads
    require_shared_heads(heads, first.relative_attention_bias)
    _try_out(module, patch, what)
    if module is first:  # the weights of another may be elsewhere
        _try_table(module, what)
    return Description(None, heads, n, n, module.head_dim, builders=("distance_table",))


def _try_out(module: Any, patch: type[GatedAttention], what: str) -> None:
    """Raise UnsupportedSite unless the forward is attention with the gated bias it is handed."""
    trial, n, batch = Trial(module, what), 5, 2
    twin, heads = trial.twin, module.num_heads
    x, bias = trial.draw(n, batch, module.embed_dim), trial.draw(batch * heads, n, n)
    hidden = torch.zeros(batch, n, dtype=torch.bool)
    hidden[1, 3:] = True
    inward = (twin.q_proj, twin.k_proj, twin.v_proj)
    q, k, v = (patch.split(twin, patch.project(twin, layer, x)) for layer in inward)
    added = bias.unflatten(0, (batch, heads))
    if module.gru_rel_pos:
        trial.redraw(twin.grep_a)
        added = gate_of(twin, patch.gate_source(twin, x, q))[..., None] * added
    added = added.masked_fill(hidden[:, None, None, :], -torch.inf)
    right = plain_attention(q, k, v, added, scale=module.scaling).transpose(0, 1)
    right = patch.project(twin, twin.out_proj, right)

    def call() -> Tensor | None:
        out, _, handed = twin(
            x, x, x, key_padding_mask=hidden, need_weights=False, position_bias=bias
        )
        return out if handed is bias else None

    trial.require(call, right)


def _try_table(module: Any, what: str) -> None:
    """Raise UnsupportedSite unless it makes a bias of the distance."""
    trial, n = Trial(module, what), 40
    make, far = trial.twin.compute_bias, 2 * module.max_distance
    trial.redraw(trial.twin.relative_attention_bias.weight)
    trial.require(lambda: make(n, n), matrix_of(distance_values(trial.twin, n), n))
    values = distance_values(trial.twin, far)
    trial.require(lambda: make(1, far)[:, 0], values[:, far - 1 :])
    trial.require(lambda: make(far, 1)[..., 0].flip(-1), values[:, :far])


recipe = Recipe(
    name="gated_audio",
    title="BEATs (Microsoft's repository and copies)",
    classes=("*.MultiheadAttention",),
    library="torch",
    tested=">=2.11,<2.15",
    attention=GatedAttention,
    describe=lambda site: describe_gated(site, GatedAttention, "BEATs"),
    owners=(Owner(("*.TransformerEncoder",), GatedEncoder, when=hands_on),),
    matches=is_beats,
    about=About(
        models="BEATs in Microsoft's repository and in SpeechBrain, which are tried out first",
        exact="its bias of the distance times the gate of each query, padding",
        n="any: 8 for every 16 frames",
        tested=(
            "github.com/microsoft/unilm at 768a3c87, where it is fetched; speechbrain 1.1; classes "
            "of the same interface"
        ),
    ),
)
