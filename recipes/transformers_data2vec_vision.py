"""Data2VecVision of transformers: an older copy of its BEiT."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor, nn

from flashbias_convert.about import About
from flashbias_convert.causal_owner import bound_arguments
from flashbias_convert.fallback import say_original
from flashbias_convert.patched_attention import PatchedAttention
from flashbias_convert.patched_owner import PatchedOwner
from flashbias_convert.recipe import Description, Owner, Recipe, Site

from .transformers_beit import described, resized, terms_of_call


class Data2VecAttention(PatchedAttention):
    """`Data2VecVisionSelfAttention`, with and without torch's fused attention."""

    bypassed = ("dropout", "relative_position_bias")

    config: Any
    attention_head_size: int
    query: nn.Linear
    key: nn.Linear
    value: nn.Linear

    def bias_sources(self) -> tuple[Tensor | Hashable, ...]:
        source = own_bias(self)
        if source is None:
            return ()
        return (source.relative_position_bias_table, tuple(source.window_size))

    def flashbias_forward(
        self,
        hidden_states: Tensor,
        output_attentions: bool = False,
        relative_position_bias: Any = None,
        interpolate_pos_encoding: bool = False,
        resolution: Any = None,
    ) -> tuple[Tensor | None, ...]:
        if output_attentions:
            say_original("attention weights")
            given = (relative_position_bias, interpolate_pos_encoding, resolution)
            original: tuple[Tensor, ...] = self.original_forward(hidden_states, True, *given)
            return original
        shape = (*hidden_states.shape[:-1], -1, self.attention_head_size)
        q, k, v = (
            project(hidden_states).view(shape).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        patch = self.config.patch_size
        call = terms_of_call(self, own_bias(self), relative_position_bias, resolution, patch)
        out = self.score_bias(q, k, v, scale=self.attention_head_size**-0.5, **call)
        # the older of the two classes returns a tuple of one
        weights = (None,) if self.original_class.__name__.endswith("SdpaSelfAttention") else ()
        return (out.transpose(1, 2).flatten(2), *weights)


class Data2VecEncoder(PatchedOwner):
    """The encoder with one bias for all layers: it hands on the table instead of the matrix."""

    reads = ("relative_position_bias",)

    config: Any

    def flashbias_forward(self, *args: Any, **kwargs: Any) -> Any:
        call = bound_arguments(self.original_class.forward, self, args, kwargs)
        if call.get("output_attentions"):
            return self.original_forward(*args, **kwargs)
        with self.lean():
            return self.original_forward(*args, **kwargs)

    @property
    def relative_position_bias(self) -> Any:
        """What the encoder calls for its bias: while lean, inputs of a builder."""
        shared = self._modules["relative_position_bias"]
        return (lambda window, **_: resized(shared, window)) if self.is_lean else shared


def own_bias(module: Any) -> Any:
    """What makes the bias of a layer, or None."""
    return module.relative_position_bias if module.has_relative_position_bias else None


def describe(site: Site) -> Description:
    module: Any = site.module
    owner: Any = site.owner
    shared = None if owner is None else owner.relative_position_bias
    own = own_bias(module)
    return described(own, shared, module.num_attention_heads, module.attention_head_size)


_MODULE = "transformers.models.data2vec.modeling_data2vec_vision"

recipe = Recipe(
    name="transformers_data2vec_vision",
    title="Data2VecVision (transformers)",
    classes=(
        f"{_MODULE}.Data2VecVisionSelfAttention",
        f"{_MODULE}.Data2VecVisionSdpaSelfAttention",
    ),
    library="transformers",
    tested=">=5.16,<5.25",
    attention=Data2VecAttention,
    describe=describe,
    owners=(
        Owner(
            (f"{_MODULE}.Data2VecVisionEncoder",),
            Data2VecEncoder,
            when=lambda encoder: bool(encoder.has_relative_position_bias),
            required=False,
        ),
    ),
    about=About(
        models="Data2VecVision: a copy of BEiT",
        exact="a shared bias, and every bias at another size than the config's",
        truncated="bias of a layer at the config's size",
        n="197",
    ),
)
