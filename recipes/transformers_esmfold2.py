"""EsmFold2 of transformers: attention of its diffusion, with a bias from pairs.

A layer makes the bias once for each structure, padding included, and hands it over in every step.
It stays a dense term: a bias that hides keys is no matter for factors.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor, nn

from flashbias_convert.about import About
from flashbias_convert.patched_attention import PatchedAttention
from flashbias_convert.recipe import Description, Recipe, Site


class DiffusionAttention(PatchedAttention):
    """`EsmFold2DiffusionAttention`; its projections are the original's."""

    head_dim: int
    scaling: float
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    gate_proj: nn.Linear
    o_proj: nn.Linear

    def bias_sources(self) -> tuple[Tensor | Hashable, ...]:
        return (self.head_dim,)  # the bias comes with each call

    def flashbias_forward(
        self, hidden_states: Tensor, attention_bias: Tensor, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        heads = (project(hidden_states).view(shape) for project in projections)
        q, k, v = (x.transpose(1, 2) for x in heads)
        gate = self.gate_proj(hidden_states).view(shape).transpose(1, 2)
        built = {"dense": {"bias": attention_bias}}
        out = self.score_bias(q, k, v, built=built, scale=self.scaling, gate=gate)
        return self.o_proj(out.transpose(1, 2).flatten(2)), None


def describe(site: Site) -> Description:
    """A dense term that comes with each call."""
    module: Any = site.module
    n = site.tokens or 384  # open in the model; a usual crop of training
    heads = module.q_proj.out_features // module.head_dim
    return Description(None, heads, n, n, module.head_dim, builders=("dense",))


recipe = Recipe(
    name="transformers_esmfold2",
    title="EsmFold2, diffusion (transformers)",
    classes=("transformers.models.esmfold2.modeling_esmfold2.EsmFold2DiffusionAttention",),
    library="transformers",
    tested=">=5.16,<5.25",
    attention=DiffusionAttention,
    describe=describe,
    about=About(
        models="EsmFold2: the token transformer of its diffusion",
        exact="pair bias and padding: a dense term that a layer makes once a structure",
        n="residues of the structure",
    ),
)
