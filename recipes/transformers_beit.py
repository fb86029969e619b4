"""BEiT of transformers: tables of relative positions that are resized to every input.

DPT and ZoeDepth have it as their backbone.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flashbias_convert.about import About
from flashbias_convert.built_terms import cls_window_table
from flashbias_convert.causal_owner import bound_arguments
from flashbias_convert.fallback import say_original, wants_weights
from flashbias_convert.patched_attention import PatchedAttention
from flashbias_convert.patched_owner import PatchedOwner
from flashbias_convert.recipe import Description, NoBias, Owner, Recipe, Site
from flashbias_convert.tables import in_float32
from flashbias_convert.terms import Dense


class BeitLayer(PatchedAttention):
    """`BeitLayer`, with the attention in it: the layer makes the bias and adds it to the mask."""

    bypassed = ("attention", "relative_position_bias")
    head_counts = ("attention.num_attention_heads",)

    attention: Any
    relative_position_bias: Any
    patch_size: int
    layernorm_before: nn.Module
    layernorm_after: nn.Module
    mlp: nn.Module
    dropout: nn.Module
    drop_path: nn.Module
    lambda_1: Any
    lambda_2: Any

    def bias_sources(self) -> tuple[Tensor | Hashable, ...]:
        source = self.relative_position_bias
        if source is None:
            return ()
        return (source.relative_position_bias_table, tuple(source.window_size))

    def flashbias_forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        interpolate_pos_encoding: bool = False,
        resolution: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        masked = isinstance(attention_mask, Tensor) and not attention_mask.is_floating_point()
        if masked or wants_weights(self.attention.config, kwargs):
            say_original("a mask" if masked else "attention weights")
            given = (hidden_states, attention_mask, interpolate_pos_encoding, resolution)
            original: Tensor = self.original_forward(*given, **kwargs)
            return original
        x = self._attend(self.layernorm_before(hidden_states), attention_mask, resolution)
        x = self.drop_path(self.lambda_1 * self.dropout(x)) + hidden_states
        out = self.dropout(self.mlp(self.layernorm_after(x)))
        return self.drop_path(self.lambda_2 * out) + x

    def _attend(self, x: Tensor, mask: Any, resolution: Any) -> Tensor:
        attention, source = self.attention, self.relative_position_bias
        shape = (*x.shape[:-1], -1, attention.head_dim)
        q, k, v = (
            project(x).view(shape).transpose(1, 2)
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        call = terms_of_call(self, source, mask, resolution, self.patch_size)
        out = self.score_bias(q, k, v, scale=attention.scaling, **call)
        projected: Tensor = attention.o_proj(out.transpose(1, 2).flatten(2))
        return projected


class BeitModel(PatchedOwner):
    """`BeitModel` with one bias for all layers: it hands on the table instead of the matrix."""

    reads = ("shared_position_bias",)

    config: Any

    def flashbias_forward(self, *args: Any, **kwargs: Any) -> Any:
        call = bound_arguments(self.original_class.forward, self, args, kwargs)
        if call.get("attention_mask") is not None or wants_weights(self.config, call):
            return self.original_forward(*args, **kwargs)
        with self.lean():
            return self.original_forward(*args, **kwargs)

    @property
    def shared_position_bias(self) -> Any:
        """What the model calls for its bias: while lean, inputs of a builder."""
        shared = self._modules["shared_position_bias"]
        return (lambda window, **_: resized(shared, window)) if self.is_lean else shared


def resized(source: Any, window: tuple[int, int]) -> dict[str, Any]:
    """The table for another window, as a `BeitRelativePositionBias` resizes it, and the window."""
    table: Tensor = source.relative_position_bias_table
    wide = table.to(torch.promote_types(table.dtype, torch.float32))
    height, width = (2 * size - 1 for size in source.window_size)
    # the original takes rows for columns, which matters where the window is not square
    offsets = wide[:-3].reshape(1, width, height, -1).permute(0, 3, 1, 2)
    size = (2 * window[0] - 1, 2 * window[1] - 1)
    offsets = F.interpolate(offsets, size=size, mode="bilinear")
    return {"table": torch.cat([offsets[0].flatten(1).T, wide[-3:]]), "window": window}


def terms_of_call(
    module: Any, source: Any, shared: Any, resolution: Any, patch_size: int
) -> dict[str, Any]:
    """What a call brings along, as arguments of the module's terms.

    Args:
        module: patched.
        source: what makes the layer's own bias, or None.
        shared: the matrix or the builder's inputs that an owner handed on, or None.
        resolution: height and width of the image.
        patch_size: of the image's patches.
    """
    call: dict[str, Any] = {"extra": ()}
    if isinstance(shared, Tensor):  # the owner did not run
        call["extra"] = (Dense(bias=shared),)
    elif shared is not None:
        call["built"] = {"cls_window_table": shared}
    if source is None:
        return call
    height, width = resolution
    window = (height // patch_size, width // patch_size)
    if window != tuple(source.window_size):
        call["extra"] += (cls_window_table(**resized(source, window)),)
        call["without"] = tuple(term.kind for term in module.score_bias.bias.terms)
    return call


def described(own: Any, shared: Any, num_heads: int, head_dim: int) -> Description:
    """The bias of a layer at the size of its config; one that layers share comes with a call.

    Args:
        own: what makes the layer's own bias, or None.
        shared: what makes the bias of all layers, or None.
        num_heads, head_dim: of the layer.
    """
    source = shared if own is None else own
    if source is None:
        raise NoBias("it has no relative positions")
    window = source.window_size
    n = window[0] * window[1] + 1
    return Description(
        bias=None if own is None else in_float32(own)(window)[0],
        num_heads=num_heads,
        n=n,
        m=n,
        head_dim=head_dim,
        index=source.generate_relative_position_index(window),
        builders=() if shared is None else ("cls_window_table",),
    )


def describe(site: Site) -> Description:
    module: Any = site.module
    owner: Any = site.owner
    shared: Any = None if owner is None else owner.shared_position_bias
    attention = module.attention
    return described(
        module.relative_position_bias, shared, attention.num_attention_heads, attention.head_dim
    )


_MODULE = "transformers.models.beit.modeling_beit"

recipe = Recipe(
    name="transformers_beit",
    title="BEiT (transformers)",
    classes=(f"{_MODULE}.BeitLayer",),
    library="transformers",
    tested=">=5.16,<5.25",
    attention=BeitLayer,
    describe=describe,
    owners=(
        Owner(
            (f"{_MODULE}.BeitModel",),
            BeitModel,
            when=lambda model: model.shared_position_bias is not None,
            required=False,
        ),
    ),
    about=About(
        models="BEiT, alone and as the backbone of DPT",
        exact=(
            "a shared bias, and every bias at another size than the config's; with `--method "
            "exact` all"
        ),
        truncated="bias of a layer at the config's size",
        n="197 to 1025",
    ),
)
