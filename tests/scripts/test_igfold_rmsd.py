"""The script about folds of real weights: its attention and its distance, without the weights."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "paper"
sys.path.insert(0, str(SCRIPTS))

import igfold_model as parts  # noqa: E402
import igfold_rmsd as script  # noqa: E402

B, H, N, C, KEYS, POINTS = 2, 3, 9, 8, 5, 2


def module() -> Any:
    """The attributes of an invariant point attention, float64."""
    torch.manual_seed(0)

    def into(width: int) -> nn.Module:
        return nn.Linear(C, H * width, bias=False).double()

    return SimpleNamespace(
        heads=H, eps=1e-8, point_weights=torch.randn(H).double(),
        scalar_attn_logits_scale=(3 * KEYS) ** -0.5, pairwise_attn_logits_scale=3**-0.5,
        point_attn_logits_scale=(3 * POINTS * 4.5) ** -0.5,
        to_scalar_q=into(KEYS), to_scalar_k=into(KEYS), to_scalar_v=into(4),
        to_point_q=into(3 * POINTS), to_point_k=into(3 * POINTS), to_point_v=into(3 * 3),
        to_pairwise_attn_bias=[nn.Linear(C, H).double()], to_out=nn.Identity(),
    )  # fmt: skip


def inputs() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    x, pairs, places, turns = (
        torch.randn(*size, generator=draw).double()
        for size in ((B, N, C), (B, N, N, C), (B, N, 3), (B, N, 3, 3))
    )
    return {"x": x, "pairwise_repr": pairs, "translations": 5 * places,
            "rotations": torch.linalg.qr(turns).Q}  # fmt: skip


def reference(m: Any, x: Tensor, pairwise_repr: Tensor, rotations: Tensor, translations: Tensor,
              with_bias: bool = True) -> Tensor:  # fmt: skip
    """Algorithm 22 of AlphaFold 2, distance by distance; vectors are rows."""

    def points(projection: Any) -> Tensor:  # (B, N, H, P, 3)
        own = projection(x).reshape(B, N, H, -1, 3)
        return torch.einsum("bnhpc,bncr->bnhpr", own, rotations) + translations[:, :, None, None]

    q, k, v = (p(x).reshape(B, N, H, -1) for p in (m.to_scalar_q, m.to_scalar_k, m.to_scalar_v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * m.scalar_attn_logits_scale
    apart = points(m.to_point_q)[:, :, None] - points(m.to_point_k)[:, None]
    weight = F.softplus(m.point_weights) * m.point_attn_logits_scale
    scores -= 0.5 * torch.einsum("bijhpc,h->bhij", apart.square(), weight)
    if with_bias:
        bias = m.to_pairwise_attn_bias[0](pairwise_repr).permute(0, 3, 1, 2)
        scores += bias * m.pairwise_attn_logits_scale
    a = scores.softmax(-1)
    moved = torch.einsum("bhij,bjhpc->bihpc", a, points(m.to_point_v))
    local = torch.einsum("bihpc,birc->bihpr", moved - translations[:, :, None, None], rotations)
    norms = (local.square().sum(-1) + m.eps).sqrt()
    flat = torch.einsum("bhij,bjhd->bihd", a, v)
    pairs = torch.einsum("bhij,bijd->bihd", a, pairwise_repr)
    return torch.cat([part.flatten(2) for part in (flat, local.flatten(-2), norms, pairs)], -1)


@torch.no_grad()
@pytest.mark.parametrize("with_bias", [True, False])
def test_point_attention(with_bias: bool) -> None:
    m, given = module(), inputs()
    decomposer = script.exact if with_bias else script.nothing

    def original(*_: Any, **__: Any) -> Tensor:
        raise AssertionError("the original ran")

    out = parts.point_attention(m, decomposer, original, **given, mask=torch.ones(B, N).bool())
    expected = reference(m, **given, with_bias=with_bias)
    # the term of the keys, a sum of squares of some hundreds, is fp32
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(out, reference(m, **given, with_bias=not with_bias), atol=1e-2)


def test_what_is_masked_is_left_to_the_original() -> None:
    mask = torch.ones(B, N).bool()
    mask[0, -1] = False

    def original(*_: Any, **given: Any) -> Any:
        return given

    for name in ("mask", "key_padding_mask"):
        masks = {name: mask}
        seen: Any = parts.point_attention(module(), script.exact, original, **inputs(), **masks)
        assert seen[name] is mask


def test_distance_of_folds() -> None:
    draw = torch.Generator().manual_seed(0)
    points = torch.randn(20, 3, generator=draw).double()
    turn = torch.linalg.qr(torch.randn(3, 3, generator=draw).double()).Q
    turn = turn * torch.linalg.det(turn).sign()
    assert script.rmsd(points @ turn + 3, points) < 1e-12
    assert script.rmsd(points * torch.tensor([1.0, 1.0, -1.0]), points) > 0.1  # a mirror image
    line = torch.tensor([[-1.0, 0, 0], [1.0, 0, 0]]).double()
    assert script.rmsd(2 * line, line) == pytest.approx(1.0)


def test_what_is_truncated_is_reported() -> None:
    bias = torch.randn(1, H, N, N, generator=torch.Generator().manual_seed(0))
    made = script.Truncating(0.9)
    made(bias)
    facts = made.facts()
    assert 0 < facts["rank_max"] < N and 0.9 <= float(facts["energy_worst"]) < 1
