"""MosaicBERT and networks with its code (DNABERT-2): ALiBi in both directions, without padding.

The code comes with a checkpoint, under a module name of its own. Modules are known by their parts,
and tried out once before they are trusted.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn

from flashbias_convert.about import About
from flashbias_convert.patched_attention import PatchedAttention
from flashbias_convert.patched_owner import PatchedOwner
from flashbias_convert.recipe import Description, Owner, Recipe, Site, UnsupportedSite
from flashbias_convert.terms import Alibi
from flashbias_convert.trial import Trial, has_parts, plain_attention


class UnpaddedSelfAttention(PatchedAttention):
    """`BertUnpadSelfAttention`: tokens of all sequences in one row, and where they belong."""

    bypassed = ("dropout",)

    num_attention_heads: int
    attention_head_size: int
    Wqkv: nn.Linear

    def bias_sources(self) -> tuple[Tensor | Hashable, ...]:
        return (self.num_attention_heads,)  # slopes follow from it

    def flashbias_forward(
        self,
        hidden_states: Tensor,
        cu_seqlens: Tensor,
        max_seqlen_in_batch: int,
        indices: Tensor,
        attn_mask: Tensor,
        bias: Tensor,
    ) -> Tensor:
        n = max_seqlen_in_batch
        if tuple(bias.shape[-3:-1]) != (1, 1):  # not from a patched encoder
            given = (hidden_states, cu_seqlens, n, indices, attn_mask, bias)
            original: Tensor = self.original_forward(*given)
            return original
        qkv = self.Wqkv(hidden_states)  # (tokens, 3 H D)
        padded = qkv.new_zeros(attn_mask.shape[0] * n, qkv.shape[-1])
        padded = padded.index_copy(0, indices, qkv)
        heads = padded.view(attn_mask.shape[0], n, 3, self.num_attention_heads, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)  # views, (B, H, N, D)
        scale = self.attention_head_size**-0.5
        out = self.score_bias(q, k, v, key_mask=attn_mask.bool(), scale=scale)
        return out.transpose(1, 2).flatten(2).flatten(0, 1)[indices]


class MosaicEncoder(PatchedOwner):
    """`BertEncoder`, which cuts a matrix (1, H, N, N) from a larger one and adds the padding."""

    replaced = ("alibi", "_current_alibi_size")

    _original_alibi: Tensor
    _original_current_alibi_size: int

    def flashbias_forward(self, *args: Any, **kwargs: Any) -> Any:
        with self.lean():
            return self.original_forward(*args, **kwargs)

    @property
    def alibi(self) -> Tensor:
        """The matrix; while lean a zero, to which the padding is added."""
        made = self._original_alibi
        return made.new_zeros(1, 1, 1, 1) if self.is_lean else made

    @alibi.setter
    def alibi(self, value: Tensor) -> None:
        self._original_alibi = value

    @property
    def _current_alibi_size(self) -> int:
        """The matrix is never too small while nobody needs it."""
        return sys.maxsize if self.is_lean else self._original_current_alibi_size

    @_current_alibi_size.setter
    def _current_alibi_size(self, value: int) -> None:
        self._original_current_alibi_size = value

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "alibi" and self.is_lean:
            # the original moves it to where its inputs are, and sees the zero: that is not kept
            name, value = "_original_alibi", self._original_alibi.to(value.device)
        super().__setattr__(name, value)


def has_alibi(encoder: Any) -> bool:
    """Not every `BertEncoder`; the matrix is an attribute, and no buffer."""
    plain = "alibi" not in encoder._buffers and "alibi" not in encoder._parameters
    made = isinstance(getattr(encoder, "alibi", None), Tensor)
    return plain and made and hasattr(encoder, "rebuild_alibi_tensor")


def looks_like_it(module: Any) -> bool:
    """Whether a module has the parts."""
    names = ("num_attention_heads", "attention_head_size", "p_dropout", "dropout")
    return has_parts(module, "Wqkv", kind=nn.Linear) and has_parts(module, *names)


def describe(site: Site) -> Description:
    """Slopes by the encoder's own matrix, after a trial whether the module adds that."""
    module: Any = site.module
    owner: Any = site.owner
    made: Tensor = owner.alibi
    if made.is_meta or made.shape[-1] < 2:
        raise UnsupportedSite("its encoder has not made its ALiBi; call rebuild_alibi_tensor")
    term = symmetric_alibi(made)
    _try_out(module)
    heads, n = module.num_attention_heads, site.tokens or 512
    return Description(None, heads, n, n, module.attention_head_size, exact_terms=(term,))


def symmetric_alibi(matrix: Tensor) -> Alibi:
    """The term of a matrix (1, H, N, N) of minus a slope times the distance.

    Raises:
        UnsupportedSite: the matrix is another.
    """
    term = Alibi(slopes=-matrix[0, :, 0, 1].float(), symmetric=True)
    size = min(matrix.shape[-1], 128)
    right = term.dense(size, size)
    if not torch.allclose(matrix[0, :, :size, :size].float(), right, rtol=2**-7):
        raise UnsupportedSite("its encoder's ALiBi is not minus a slope times the distance")
    return term


def _try_out(module: Any) -> None:
    """Raise UnsupportedSite unless the forward is attention with a bias that it is handed."""
    trial, n = Trial(module, "MosaicBERT"), 5
    twin, heads, size = trial.twin, module.num_attention_heads, module.attention_head_size
    twin.p_dropout = 0.5  # the code without a kernel of its own; nothing is dropped in eval mode
    seen = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    indices = seen.flatten().nonzero().flatten()
    x, bias = trial.draw(len(indices), twin.Wqkv.in_features), trial.draw(2, heads, n, n)
    bias = bias + (seen - 1)[:, None, None, :] * 10000.0
    qkv = twin.Wqkv(x)
    padded = qkv.new_zeros(2 * n, qkv.shape[-1]).index_copy(0, indices, qkv)
    q, k, v = padded.view(2, n, 3, heads, -1).permute(2, 0, 3, 1, 4)
    right = plain_attention(q, k, v, bias, scale=size**-0.5).flatten(0, 1)[indices]
    arguments = (x, torch.tensor([0, 5, 8], dtype=torch.int32), n, indices, seen, bias)
    trial.require(lambda: twin(*arguments), right)


recipe = Recipe(
    name="mosaic_bert",
    title="MosaicBERT, DNABERT-2 (remote code)",
    classes=("*.BertUnpadSelfAttention",),
    library="torch",
    tested=">=2.11,<2.15",
    attention=UnpaddedSelfAttention,
    describe=describe,
    owners=(Owner(("*.BertEncoder",), MosaicEncoder, when=has_alibi),),
    matches=looks_like_it,
    about=About(
        models="MosaicBERT and networks with its code, which are tried out first",
        exact="ALiBi in both directions, padding",
        tested=(
            "github.com/mosaicml/examples at daddaeff, where it is fetched; classes of the same "
            "interface"
        ),
    ),
)
