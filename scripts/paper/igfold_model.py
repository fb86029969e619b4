"""IgFold with its pair biases served in another way, from packages that were only unpacked.

Nothing of IgFold is copied here: its own classes run, but for the attention that adds a pair bias.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional as F

from flashbias_convert import KeyBias, ScoreBias, flashbias_attention

#: bias (B, H, N, N) -> terms
Decomposer = Callable[[Tensor], ScoreBias]
#: where the pair bias reaches the fold, and what tells one fold from a better one
SITES = ("structure_ipa", "dev_ipa")


def language_model(folder: Path) -> tuple[nn.Module, dict[str, int]]:
    """AntiBERTy as a plain BERT, and its vocabulary; the weights are read as tensors alone."""
    from transformers import BertConfig, BertModel

    (home,) = (path.parent for path in folder.glob("antiberty/trained_models/*/config.json"))
    config = BertConfig(**json.loads((home / "config.json").read_text()))
    config._attn_implementation = "eager"  # others do not tell their weights
    model = BertModel(config)
    state = torch.load(home / "pytorch_model.bin", map_location="cpu", weights_only=True)
    own = {k.removeprefix("bert."): v for k, v in state.items() if k.startswith("bert.")}
    own = {k: v for k, v in own.items() if k != "embeddings.position_ids"}  # a buffer of the past
    model.load_state_dict(own)
    words = (home.parent / "vocab.txt").read_text().split()
    return model.eval(), {word: at for at, word in enumerate(words)}


@torch.no_grad()
def read_chain(model: Any, vocabulary: dict[str, int], chain: str) -> tuple[Tensor, Tensor]:
    """What the language model says of a chain.

    Returns:
        Features (1, L, 512), and all weights of its attention (1, layers, heads, L, L).
    """
    tokens = [vocabulary[word] for word in ("[CLS]", *chain, "[SEP]")]
    out = model(torch.tensor([tokens]), output_attentions=True)
    weights = torch.stack(out.attentions, 1)[..., 1:-1, 1:-1]
    return out.last_hidden_state[:, 1:-1], weights


def open_models(folder: Path, device: str) -> list[Any]:
    """The four networks of IgFold, without importing what its command line needs."""
    if "igfold" not in sys.modules:
        package = types.ModuleType("igfold")
        package.__path__ = [str(folder / "igfold")]
        sys.modules["igfold"] = package
    cls = importlib.import_module("igfold.model.IgFold").IgFold
    models = []
    for path in sorted(folder.glob("igfold/trained_models/IgFold/*.safetensors")):
        with safe_open(path, framework="pt") as file:
            model = cls(json.loads(file.metadata()["config"]))
            model.load_state_dict({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
        model.main_block = Trunk(model.main_block)
        models.append(model.eval().to(device))
    return models


class Trunk(nn.Module):
    """The part of a network before its pair biases, kept for as long as its input is the same."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.original = original
        self._given: tuple[Tensor, Tensor] | None = None
        self._made: Any = None

    def forward(self, nodes: Tensor, edges: Tensor, mask: Tensor | None = None) -> Any:
        same = self._given is not None and all(
            torch.equal(a, b) for a, b in zip(self._given, (nodes, edges), strict=True)
        )
        if not same:
            self._given, self._made = (nodes, edges), self.original(nodes, edges, mask=mask)
        return self._made


@torch.no_grad()
def fold(model: Any, chains: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, float]:
    """Fold by one network, as it is before IgFold's refinement of bonds and angles.

    Returns:
        Places of the C-alpha atoms, (L, 3), and the error that the network expects of itself.
    """
    interface = importlib.import_module("igfold.model.interface")
    given = interface.IgFoldInput(
        embeddings=[features for features, _ in chains],
        attentions=[weights for _, weights in chains],
    )
    out = model(given)
    return out.coords[0, :, 1], float(out.prmsd.quantile(0.9))


def serve(model: Any, decomposer: Decomposer | None) -> None:
    """Let the pair biases of a network be added by `flashbias_attention`.

    Its attention over a template has nothing to attend to without one, and stays as it is.

    Args:
        model: is changed.
        decomposer: makes terms of each bias; None gives back the original.
    """
    for name in SITES:
        for module in getattr(model, name).modules():
            if hasattr(module, "to_pairwise_attn_bias"):
                module.__dict__.pop("forward", None)
                if decomposer is not None:
                    module.forward = partial(point_attention, module, decomposer, module.forward)


def point_attention(
    module: Any,
    decomposer: Decomposer,
    original: Callable[..., Tensor],
    x: Tensor,
    pairwise_repr: Tensor,
    *,
    rotations: Tensor,
    translations: Tensor,
    mask: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
) -> Tensor:
    """Invariant point attention (AlphaFold 2, algorithm 22) with terms for its pair bias.

    Args:
        module: IgFold's.
        decomposer: makes the terms.
        original: the forward of the module.
        x: tokens (B, N, C).
        pairwise_repr: (B, N, N, C).
        rotations, translations: frames of the tokens, (B, N, 3, 3) and (B, N, 3).
        mask, key_padding_mask: True for tokens that count, (B, N); the original takes others.
    """
    if any(m is not None and not bool(m.all()) for m in (mask, key_padding_mask)):
        frames = {"rotations": rotations, "translations": translations}
        masks = {"mask": mask, "key_padding_mask": key_padding_mask}
        return original(x, pairwise_repr, **frames, **masks)
    heads = module.heads
    bias = module.to_pairwise_attn_bias[0](pairwise_repr).movedim(-1, -3)
    terms = decomposer(bias * module.pairwise_attn_logits_scale)

    def split(projection: nn.Module) -> Tensor:  # (B, H, N, D)
        return projection(x).unflatten(-1, (heads, -1)).transpose(1, 2)

    def points(projection: nn.Module) -> Tensor:  # (B, H, N, P, 3), in the frame of all
        own = split(projection).unflatten(-1, (-1, 3))
        return own @ rotations[:, None] + centred[:, None, :, None]

    # distances do not care where the middle is, but their rounding does
    middle = translations.mean(1, keepdim=True)
    centred = translations - middle
    weight = F.softplus(module.point_weights) * module.point_attn_logits_scale
    scalars = [split(p) for p in (module.to_scalar_q, module.to_scalar_k, module.to_scalar_v)]
    places = [points(p) for p in (module.to_point_q, module.to_point_k, module.to_point_v)]
    q, k, far = score_parts(scalars[0] * module.scalar_attn_logits_scale, scalars[1],
                            places[0], places[1], weight)  # fmt: skip
    v = torch.cat([scalars[2], places[2].flatten(-2)], -1)
    bias_terms = dataclasses.replace(terms, terms=(far, *terms.terms))
    out = flashbias_attention(q, k, v, bias_terms, scale=1.0)
    flat, moved = out.split([scalars[2].shape[-1], v.shape[-1] - scalars[2].shape[-1]], -1)
    local = (moved.unflatten(-1, (-1, 3)) - centred[:, None, :, None]) @ rotations[:, None].mT
    norms = (local.square().sum(-1) + module.eps).sqrt()
    # values per pair need the weights themselves
    n = x.shape[1]
    scores = q @ k.mT + bias_terms.dense(n, n, dtype=q.dtype)
    pairs = torch.einsum("bhij,bijd->bhid", scores.softmax(-1), pairwise_repr)
    parts = (flat, local.flatten(-2), norms, pairs)
    merged: Tensor = module.to_out(torch.cat([p.transpose(1, 2).flatten(2) for p in parts], -1))
    return merged


def score_parts(
    q: Tensor, k: Tensor, q_points: Tensor, k_points: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, KeyBias]:
    """q, k and a term whose scores are q k^T less weight / 2 times the squares of distances.

    What depends on the query alone is left out: softmax does not see it.

    Args:
        q, k: (B, H, N, D).
        q_points, k_points: (B, H, N, P, 3).
        weight: (H,).
    """
    scaled = q_points * weight[:, None, None, None]
    far = -0.5 * weight[:, None] * k_points.square().sum((-2, -1))
    return (
        torch.cat([q, scaled.flatten(-2)], -1),
        torch.cat([k, k_points.flatten(-2)], -1),
        KeyBias(values=far.float()),
    )
