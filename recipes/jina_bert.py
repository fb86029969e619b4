"""Jina-BERT (jina-embeddings-v2): ALiBi in both directions, with padding.

The code comes with a checkpoint, under a module name of its own; some of it normalises queries and
keys. Modules are known by their parts, and tried out once before they are trusted.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flashbias_convert.about import About
from flashbias_convert.causal_owner import bound_arguments
from flashbias_convert.fallback import NO_PADDING_MASK, WEIGHTS, say_original
from flashbias_convert.patched_attention import PatchedAttention
from flashbias_convert.patched_owner import PatchedOwner
from flashbias_convert.recipe import Description, Owner, Recipe, Site, UnsupportedSite
from flashbias_convert.trial import Trial, has_parts, plain_attention

from .mosaic_bert import symmetric_alibi

#: why a call runs the original
MORE = "a call brings head masks, a cache or states of another encoder"


class JinaSelfAttention(PatchedAttention):
    """`JinaBertSelfAttention`; its arguments are those of BERT, and a bias behind them."""

    bypassed = ("dropout",)

    num_attention_heads: int
    attention_head_size: int
    query: nn.Linear
    key: nn.Linear
    value: nn.Linear

    def bias_sources(self) -> tuple[Tensor | Hashable, ...]:
        return (self.num_attention_heads,)  # slopes follow from it

    def flashbias_forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        call = bound_arguments(self.original_class.forward, self, args, kwargs)
        bias, mask = call["bias"], call.get("attention_mask")
        if tuple(bias.shape[-3:-1]) != (1, 1):  # not from a patched encoder
            original: tuple[Tensor, ...] = self.original_forward(*args, **kwargs)
            return original
        x: Tensor = call["hidden_states"]
        made = (self._normed("q", self.query(x)), self._normed("k", self.key(x)), self.value(x))
        q, k, v = (t.unflatten(-1, (-1, self.attention_head_size)).transpose(1, 2) for t in made)
        seen = None if mask is None else mask[:, 0, 0, :] == 0  # (B, N): 0, or very small
        out = self.score_bias(q, k, v, key_mask=seen, scale=self.attention_head_size**-0.5)
        return (out.transpose(1, 2).flatten(2),)

    def _normed(self, name: str, x: Tensor) -> Tensor:
        norm = self._modules.get(f"layer_norm_{name}")
        return x if norm is None else norm(x)


class JinaEncoder(PatchedOwner):
    """`JinaBertEncoder`, which makes a matrix (1, H, N, N), or cuts it from a larger one."""

    replaced = ("_current_alibi_size",)

    _original_current_alibi_size: int

    def flashbias_forward(self, *args: Any, **kwargs: Any) -> Any:
        call = bound_arguments(self.original_class.forward, self, args, kwargs)
        reason = _reason(call)
        if reason is not None:
            say_original(reason)
            return self.original_forward(*args, **kwargs)
        with self.lean():
            return self.original_forward(*args, **kwargs)

    def rebuild_alibi_tensor(self, size: int, device: Any = None) -> Tensor:
        if not self.is_lean:
            made: Tensor = super().rebuild_alibi_tensor(size, device)  # type: ignore[misc]
            return made
        return torch.zeros(1, 1, 1, 1, device=device)

    @property
    def alibi(self) -> Tensor:
        """The matrix, a buffer; while lean a zero."""
        made = self._buffers["alibi"]
        assert made is not None
        return made.new_zeros(1, 1, 1, 1) if self.is_lean else made

    @property
    def _current_alibi_size(self) -> int:
        """The matrix is never too small while nobody needs it."""
        return sys.maxsize if self.is_lean else self._original_current_alibi_size

    @_current_alibi_size.setter
    def _current_alibi_size(self, value: int) -> None:
        self._original_current_alibi_size = value

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "alibi" or not self.is_lean:  # the zero, moved to another device, is not kept
            super().__setattr__(name, value)


def _reason(call: Mapping[str, Any]) -> str | None:
    """Why a call of the encoder must run the original, or None."""
    heads, mask = call.get("head_mask"), call.get("attention_mask")
    others = ("encoder_hidden_states", "encoder_attention_mask", "past_key_values")
    if call.get("output_attentions"):
        return WEIGHTS
    if any(h is not None for h in heads or ()) or any(call.get(o) is not None for o in others):
        return MORE
    padding = mask is None or (mask.dim() == 4 and tuple(mask.shape[1:3]) == (1, 1))
    return None if padding and not call.get("use_cache") else NO_PADDING_MASK


def looks_like_it(module: Any) -> bool:
    """Whether a module has the parts."""
    return (
        has_parts(module, "query", "key", "value", kind=nn.Linear)
        and has_parts(module, "num_attention_heads", "attention_head_size", "dropout")
        and "bias" in inspect.signature(type(module).forward).parameters
    )


def makes_alibi(encoder: Any) -> bool:
    """Whether an encoder has a method that makes the matrix."""
    return callable(getattr(encoder, "rebuild_alibi_tensor", None))


def describe(site: Site) -> Description:
    """Slopes by the encoder's own method, after a trial whether the module adds its matrix."""
    module: Any = site.module
    if getattr(module, "is_decoder", False):
        raise UnsupportedSite("it is configured as a decoder")
    if getattr(module, "position_embedding_type", "").startswith("relative"):
        raise UnsupportedSite("it has relative embeddings beside its ALiBi")
    term = symmetric_alibi(_made_by(site.owner, 128))
    _try_out(module)
    heads, n = module.num_attention_heads, site.tokens or 512
    return Description(None, heads, n, n, module.attention_head_size, exact_terms=(term,))


def _made_by(owner: Any, size: int) -> Tensor:
    """What an encoder's method makes, in float32; the encoder keeps what it has."""
    twin = copy.copy(owner)
    twin.__dict__ = {**owner.__dict__, "_buffers": dict(owner._buffers)}
    made: Tensor = twin.rebuild_alibi_tensor(size=size)
    kept = owner._buffers.get("alibi")
    if kept is not None and not kept.is_meta:
        size = min(size, kept.shape[-1])
        if not torch.allclose(kept[..., :size, :size].float().cpu(), made[..., :size, :size].cpu(),
                              rtol=2**-7):  # fmt: skip
            raise UnsupportedSite("its encoder keeps another ALiBi than it makes")
    return made


def _try_out(module: Any) -> None:
    """Raise UnsupportedSite unless the forward is attention with a bias that it is handed."""
    trial, n = Trial(module, "Jina-BERT"), 5
    twin, heads, size = trial.twin, module.num_attention_heads, module.attention_head_size
    x, bias = trial.draw(2, n, twin.query.in_features), trial.draw(1, heads, n, n)
    mask = torch.zeros(2, 1, 1, n, dtype=torch.float64)
    mask[1, ..., 3:] = torch.finfo(torch.float32).min
    norms = [twin._modules.get(f"layer_norm_{name}") or nn.Identity() for name in "qk"]
    made = (norms[0](twin.query(x)), norms[1](twin.key(x)), twin.value(x))
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in made)

    def call() -> Tensor:
        (found,) = twin(x, mask, None, None, None, None, False, bias)
        return found

    trial.require(call, plain_attention(q, k, v, bias + mask, scale=size**-0.5))


recipe = Recipe(
    name="jina_bert",
    title="Jina-BERT (remote code)",
    classes=("*.JinaBertSelfAttention",),
    library="torch",
    tested=">=2.11,<2.15",
    attention=JinaSelfAttention,
    describe=describe,
    owners=(Owner(("*.JinaBertEncoder",), JinaEncoder, when=makes_alibi),),
    matches=looks_like_it,
    about=About(
        models="jina-embeddings-v2 and networks with its code, which are tried out first",
        exact="ALiBi in both directions, padding",
        n="any",
        tested="classes of the same interface",
    ),
)
