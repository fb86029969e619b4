"""A factor of low rank on every score: the same as multiplying the matrix of scores."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flashbias_convert import LowRank, flashbias_attention
from flashbias_convert.attention.multiplicative import largest_rank
from flashbias_convert.errors import UsageError
from tests.support import assert_parity

from .cases import Inputs

Options = dict[str, Any]


def cosine_factors(n: int, m: int) -> LowRank:
    """cos(i - j) = cos i cos j + sin i sin j."""
    i, j = torch.arange(n).double(), torch.arange(m).double()
    factors = [torch.stack([x.cos(), x.sin()], -1).float()[None] for x in (i, j)]
    return LowRank(phi_q=factors[0], phi_k=factors[1])


def plain(
    x: Inputs, term: LowRank, dtype: torch.dtype, options: Mapping[str, Any], form: str = "formula"
) -> Tensor:
    """Every step in `dtype`: the formula; "longer" rows, as the paper rewrites it; or "fused"."""
    groups = x.q.shape[-3] // x.k.shape[-3]
    q, k, v = (t.to(dtype) for t in (x.q, x.k, x.v))
    k, v = (t.repeat_interleave(groups, -3) for t in (k, v))
    scale = options.get("scale", x.q.shape[-1] ** -0.5)
    if options.get("cosine"):
        q, k = (t / t.norm(dim=-1, keepdim=True) for t in (q, k))
    if isinstance(scale, Tensor):
        scale = scale.to(dtype)[:, None, None]
    added = mask(x, dtype, options)
    if form == "formula":
        factor = term.dense(x.n, x.m, dtype=torch.float64).to(dtype)
        return ((q @ k.mT) * scale * factor + added).softmax(-1) @ v
    k = longer_rows(k, term, "phi_k")
    if form == "longer":
        return (longer_rows(q, term, "phi_q") @ k.mT * scale + added).softmax(-1) @ v
    q = longer_rows(q * scale, term, "phi_q")
    wide = F.pad(v, (0, q.shape[-1] - v.shape[-1]))  # torch's fused kernels want one size
    added = added.expand(q.shape[0], q.shape[1], x.n, x.m)
    return F.scaled_dot_product_attention(q, k, wide, added, scale=1.0)[..., : v.shape[-1]]


def mask(x: Inputs, dtype: torch.dtype, options: Mapping[str, Any]) -> Tensor:
    """What is added to the scores."""
    added = torch.zeros(x.n, x.m, dtype=dtype, device=x.q.device)
    if options.get("bias") is not None:
        added = added + options["bias"].dense(x.n, x.m, dtype=dtype)
    if options.get("causal"):
        hidden = torch.ones(x.n, x.m, dtype=torch.bool, device=x.q.device).triu(1 + x.m - x.n)
        added = added.masked_fill(hidden, float("-inf"))
    if "key_mask" in options:
        added = added.masked_fill(~options["key_mask"][:, None, None, :], float("-inf"))
    return added


def longer_rows(x: Tensor, term: LowRank, name: str) -> Tensor:
    """[phi_1 x, ..., phi_R x], rounded to the dtype of x."""
    phi = term.masked_phi_q() if name == "phi_q" else term.phi_k
    if name == "phi_q" and term.row_scale is not None:
        phi = phi * term.row_scale[..., None]
    parts = [column[..., None] * x.to(column.dtype) for column in phi.unbind(-1)]
    return torch.cat(parts, -1).to(x.dtype)


def worse(truth: Tensor, *results: Tensor) -> Tensor:
    """What a user may get in this dtype: factors of both signs cancel in some of the forms."""
    return max(results, key=lambda r: float((r.double() - truth).abs().max()))


def agrees(x: Inputs, term: LowRank, backend: str, options: Options) -> None:
    options = dict(options)
    truth = plain(x, term, torch.float64, options)
    forms = ("formula", "longer", "fused")
    expected = worse(truth, *(plain(x, term, x.dtype, options, form) for form in forms))
    bias = options.pop("bias", None)
    out = flashbias_attention(x.q, x.k, x.v, bias, score_scale=term, backend=backend, **options)
    assert_parity(out, expected, truth)


def test_the_cosine_of_the_distance(backend: str, dtype: torch.dtype, device: torch.device) -> None:
    x = Inputs(device, dtype, n=37, d=24)
    term = cosine_factors(37, 37).to(device)
    matrix = torch.cos(torch.arange(37.0).double()[:, None] - torch.arange(37.0).double())
    found = term.dense(37, 37, dtype=torch.float64)[0].cpu()
    assert torch.allclose(found, matrix, rtol=0, atol=4 * torch.finfo(torch.float32).eps)
    agrees(x, term, backend, {})


def rows(x: Inputs, term: LowRank) -> LowRank:
    return dataclasses.replace(term, row_scale=x.normal(x.heads, x.n))


CASES: dict[str, Callable[[Inputs], tuple[LowRank, Options]]] = {
    "causal": lambda x: (x.low_rank(2), {"causal": True}),
    "bias": lambda x: (x.low_rank(2), {"bias": x.bias(x.low_rank(3), x.table())}),
    "rows": lambda x: (rows(x, x.low_rank(2)), {}),
    "ranks": lambda x: (x.low_rank(3, ranks=tuple(1 + h % 3 for h in range(x.heads))), {}),
    "batch": lambda x: (x.low_rank(2, batch=(2,)), {}),
    "cosine": lambda x: (x.low_rank(2), {"cosine": True, "scale": torch.tensor([5.0, 2, 3, 4])}),
    "masked": lambda x: (x.low_rank(1), {"key_mask": torch.arange(x.m)[None] % 3 < 2}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_every_option(case: str, kv_heads: int, backend: str, device: torch.device) -> None:
    x = Inputs(device, heads=4, kv_heads=kv_heads, n=19, m=33, d=8)
    term, options = CASES[case](x)
    options = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in options.items()}
    agrees(x, term, backend, options)


def test_factors_that_differ_in_size_do_not_overflow(device: torch.device) -> None:
    x = Inputs(device, torch.float16, n=17, d=8)
    term = x.low_rank(2)
    far = dataclasses.replace(term, phi_q=term.phi_q * 2.0**20, phi_k=term.phi_k * 2.0**-20)
    agrees(x, far, "sdpa", {})


@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    x = Inputs(torch.device("cpu"), heads=2, kv_heads=1, n=3, m=5, d=3, dv=2)
    term = rows(x, x.low_rank(2))
    leaves = [x.q, x.k, x.v, *term.tensors().values()]

    def call(q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor) -> Tensor:
        own = dataclasses.replace(term, **dict(zip(term.tensors(), tensors, strict=True)))
        return flashbias_attention(q, k, v, score_scale=own, causal=True, backend=name)

    inputs = [t.double().requires_grad_() for t in leaves]
    assert torch.autograd.gradcheck(call, inputs, fast_mode=True)


def gradients(x: Inputs, term: LowRank, call: Callable[..., Tensor]) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in (x.q, x.k, x.v, term.phi_q, term.phi_k)]
    out = call(*leaves)
    start = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).half().to(out)
    return list(torch.autograd.grad(out, leaves, start))


def test_gradients_agree_with_those_of_plain_attention(
    backend: str, dtype: torch.dtype, device: torch.device
) -> None:
    x = Inputs(device, dtype, n=37, d=16)
    term = x.low_rank(2)

    def formula(q: Tensor, k: Tensor, v: Tensor, phi_q: Tensor, phi_k: Tensor) -> Tensor:
        scores = (q @ k.mT) * q.shape[-1] ** -0.5 * (phi_q @ phi_k.mT).to(q.dtype)
        return scores.softmax(-1) @ v

    def rewritten(q: Tensor, k: Tensor, v: Tensor, phi_q: Tensor, phi_k: Tensor) -> Tensor:
        own = LowRank(phi_q=phi_q, phi_k=phi_k)
        rows = longer_rows(q, own, "phi_q"), longer_rows(k, own, "phi_k")
        return (rows[0] @ rows[1].mT * q.shape[-1] ** -0.5).softmax(-1) @ v

    def fused(q: Tensor, k: Tensor, v: Tensor, phi_q: Tensor, phi_k: Tensor) -> Tensor:
        own = LowRank(phi_q=phi_q, phi_k=phi_k)
        rows = longer_rows(q, own, "phi_q"), longer_rows(k, own, "phi_k")
        wide = F.pad(v, (0, v.shape[-1]))  # torch's fused kernels want one size
        out = F.scaled_dot_product_attention(*rows, wide, scale=q.shape[-1] ** -0.5)
        return out[..., : v.shape[-1]]

    def ours(q: Tensor, k: Tensor, v: Tensor, phi_q: Tensor, phi_k: Tensor) -> Tensor:
        own = LowRank(phi_q=phi_q, phi_k=phi_k)
        return flashbias_attention(q, k, v, score_scale=own, backend=backend)

    exact = Inputs(device, dtype, n=37, d=16)
    exact.q, exact.k, exact.v = (t.double() for t in (x.q, x.k, x.v))
    wide = term.map_tensors(lambda _, t: t.double())
    truth = gradients(exact, wide, formula)
    forms = [gradients(x, term, form) for form in (formula, rewritten, fused)]
    for own, true, *others in zip(gradients(x, term, ours), truth, *forms, strict=True):
        assert_parity(own, worse(true, *others), true)


@pytest.mark.parametrize(
    "size, rank", [(64, 4), (32, 8), (16, 16), (128, 2), (256, 1), (400, 1), (8, 32), (4, 64)]
)
def test_the_largest_rank_pays_and_is_within_the_bound(size: int, rank: int) -> None:
    """Rows of 256 numbers, as measured; the corollary's bound is never less."""
    assert largest_rank(size) == rank
    assert rank <= (102400 / size**2 + 1) ** 0.5 and (rank * size <= 256 or rank == 1)


@pytest.mark.parametrize("name", ["sdpa", "auto", "triton"])
def test_a_rank_that_does_not_pay_is_refused(name: str) -> None:
    x = Inputs(torch.device("cpu"), n=9, d=64)
    if name != "triton":
        agrees(x, x.low_rank(4), name, {})
    term = x.low_rank(5)
    with pytest.raises(UsageError, match=r"rank 5 .* at most 4"):
        flashbias_attention(x.q, x.k, x.v, score_scale=term, backend=name)
    agrees(x, term, "eager", {})


def test_what_does_not_fit_is_refused() -> None:
    x = Inputs(torch.device("cpu"), n=9, d=8)

    def call(term: Any) -> Tensor:
        return flashbias_attention(x.q, x.k, x.v, score_scale=term, backend="sdpa")

    with pytest.raises(TypeError, match="LowRank"):
        call(x.bias(x.low_rank()))
    with pytest.raises(UsageError, match="all heads"):
        call(dataclasses.replace(x.low_rank(2).select_heads([0]), heads=(0,)))  # type: ignore[type-var]
    with pytest.raises(ValueError, match="8 queries"):
        call(LowRank(phi_q=torch.ones(1, 8, 2), phi_k=torch.ones(1, 9, 2)))
    with pytest.raises(ValueError, match="heads"):
        call(LowRank(phi_q=torch.ones(3, 9, 2), phi_k=torch.ones(3, 9, 2)))
    with pytest.raises(ValueError, match="rank 0"):
        call(LowRank(phi_q=torch.ones(1, 9, 2), phi_k=torch.ones(1, 9, 2), ranks=(0,)))
