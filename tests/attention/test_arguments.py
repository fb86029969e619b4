"""Calls that make no sense are refused, and the message names what is wrong."""

from __future__ import annotations

import pytest
import torch

from flashbias_convert import Alibi, Dense, KeyBias, LowRank, RelativeTable, ScoreBias
from flashbias_convert.attention import PreparedBias, flashbias_attention
from flashbias_convert.attention.backends import BackendFallbackWarning, _warn
from flashbias_convert.errors import UnsupportedTermError, UsageError

from .cases import Inputs

CPU = torch.device("cpu")


def qkv(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.zeros(s, dtype=dtype) for s in shapes]


@pytest.mark.parametrize(
    ("shapes", "match"),
    [
        (((1, 1, 3, 8), (1, 1, 5, 8), (1, 1, 6, 8)), "same number of keys.*k \\(1, 1, 5, 8\\)"),
        (((1, 1, 3, 8), (1, 1, 5, 4), (1, 1, 5, 8)), "same head size"),
        (((2, 1, 3, 8), (1, 1, 5, 8), (1, 1, 5, 8)), "same batch dimensions"),
        (((1, 3, 3, 8), (1, 2, 5, 8), (1, 2, 5, 8)), "divides the heads of q"),
        (((1, 2, 3, 8), (1, 1, 5, 8), (1, 2, 5, 8)), "divides the heads of q"),
        (((3, 8), (3, 8), (3, 8)), "q must have shape"),
        (((1, 1, 3, 8), (1, 1, 0, 8), (1, 1, 0, 8)), "at least one key"),
    ],
)
def test_shapes(shapes: tuple, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        flashbias_attention(*qkv(*shapes))


def test_dtypes() -> None:
    q, k, v = qkv((1, 1, 3, 8), (1, 1, 3, 8), (1, 1, 3, 8))
    with pytest.raises(TypeError, match="share dtype"):
        flashbias_attention(q, k.half(), v)
    with pytest.raises(TypeError, match="fp16, bf16, fp32 or fp64"):
        flashbias_attention(q.int(), k.int(), v.int())
    with pytest.raises(TypeError, match="boolean"):
        flashbias_attention(q, k, v, key_mask=torch.zeros(1, 3))


def test_scale_key_mask_and_query_start() -> None:
    q, k, v = qkv((2, 3, 4, 8), (2, 3, 4, 8), (2, 3, 4, 8))
    with pytest.raises(ValueError, match="one entry for each of the 3 heads"):
        flashbias_attention(q, k, v, scale=torch.ones(2))
    with pytest.raises(ValueError, match="one entry for each of the 3 heads"):
        flashbias_attention(q, k, v, scale=torch.ones(1))
    with pytest.raises(ValueError, match="key_mask must have shape"):
        flashbias_attention(q, k, v, key_mask=torch.ones(2, 5, dtype=torch.bool))
    with pytest.raises(ValueError, match="key_mask must have shape"):
        flashbias_attention(q, k, v, key_mask=torch.ones(3, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match="query_start must be"):
        flashbias_attention(q, k, v, query_start=torch.zeros(3, dtype=torch.long))


@pytest.mark.parametrize(
    ("term", "match"),
    [
        (LowRank(phi_q=torch.zeros(2, 6, 2), phi_k=torch.zeros(2, 5, 2)), "phi_k is for 5 keys"),
        (LowRank(phi_q=torch.zeros(2, 5, 2), phi_k=torch.zeros(2, 6, 2)), "phi_q is for 5 queries"),
        (KeyBias(values=torch.zeros(2, 7)), "values is for 7 keys"),
        (Dense(bias=torch.zeros(2, 6, 7)), "bias is for 7 keys"),
        (Dense(bias=torch.zeros(3, 2, 6, 6)), "batch dimensions"),
        (
            RelativeTable(
                table=torch.zeros(2, 9), u=torch.zeros(6).long(), v=torch.zeros(4).long()
            ),
            "v is for 4 keys",
        ),
    ],
)
def test_terms_of_other_sizes(term: object, match: str) -> None:
    q, k, v = qkv((2, 2, 6, 8), (2, 2, 6, 8), (2, 2, 6, 8))
    with pytest.raises(ValueError, match=match):
        flashbias_attention(q, k, v, ScoreBias((term,), 2))  # type: ignore[arg-type]


def test_a_three_dimensional_bias_means_heads_not_batch() -> None:
    """(B, N, N) for B = 3 and H = 2 is refused, not read as something else."""
    q, k, v = qkv((3, 2, 6, 8), (3, 2, 6, 8), (3, 2, 6, 8))
    with pytest.raises(ValueError, match="dense has 3 heads, expected 1 or 2"):
        flashbias_attention(q, k, v, ScoreBias((Dense(bias=torch.zeros(3, 6, 6)),), 2))


def test_a_bias_for_another_number_of_heads() -> None:
    q, k, v = qkv((1, 4, 6, 8), (1, 4, 6, 8), (1, 4, 6, 8))
    with pytest.raises(ValueError, match="the bias is for 2 heads, q has 4"):
        flashbias_attention(q, k, v, ScoreBias((Alibi(slopes=torch.ones(2)),), 2))


def test_unknown_backend() -> None:
    q, k, v = qkv((1, 1, 3, 8), (1, 1, 3, 8), (1, 1, 3, 8))
    with pytest.raises(UsageError, match="backend must be one of"):
        flashbias_attention(q, k, v, backend="cuda")


def test_the_kernel_refuses_what_it_cannot_add(kernel: str, device: torch.device) -> None:
    x = Inputs(device)
    two = x.bias(x.table(), x.table())
    with pytest.raises(UnsupportedTermError, match="more than one relative_table term"):
        flashbias_attention(x.q, x.k, x.v, two, backend=kernel)
    with pytest.warns(BackendFallbackWarning, match="more than one relative_table term"):
        _warn.cache_clear()
        out = flashbias_attention(x.q, x.k, x.v, two)
    expected = flashbias_attention(x.q, x.k, x.v, two, backend="eager")
    assert torch.allclose(out, expected, atol=1e-5)


def test_falling_back_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashbias_convert.attention import operator

    monkeypatch.setattr(operator, "device_problem", lambda device: "this card is too old")
    _warn.cache_clear()
    q, k, v = qkv((1, 1, 3, 8), (1, 1, 3, 8), (1, 1, 3, 8))
    with pytest.warns(BackendFallbackWarning, match="this card is too old") as record:
        flashbias_attention(q, k, v)
        flashbias_attention(q, k, v)
    assert len(record) == 1


def test_fp64_needs_no_warning(recwarn: pytest.WarningsRecorder) -> None:
    q, k, v = qkv((1, 1, 3, 8), (1, 1, 3, 8), (1, 1, 3, 8), dtype=torch.float64)
    assert flashbias_attention(q, k, v).dtype == torch.float64
    assert not [w for w in recwarn if issubclass(w.category, BackendFallbackWarning)]


def test_a_learnt_scale_of_one_head_stays_one_in_a_trace() -> None:
    """What a trace has for numbers, tensors without dimensions, must not swallow parameters."""

    class Attend(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.tensor(0.1))

        def forward(self, q: torch.Tensor) -> torch.Tensor:
            return flashbias_attention(q, q, q, scale=self.scale, backend="sdpa")

    q = torch.randn(1, 1, 6, 8)
    model = Attend()
    traced = torch.jit.trace(model, q)
    assert traced(q).requires_grad
    before = traced(q)
    with torch.no_grad():
        traced.scale.fill_(5.0)
    assert not torch.allclose(traced(q), before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_mask_of_a_call_joins_a_dense_bias(dtype: torch.dtype) -> None:
    """The kernels read one matrix: that of windows with their mask, whose batch it has."""
    x = Inputs(CPU, dtype, batch=(3, 4))
    own = PreparedBias(x.bias(Dense(bias=x.dense().bias.to(dtype))))
    mask = Dense(bias=-100 * (x.normal(4, 1, x.n, x.m) > 0).float())
    joined = own.joined((mask,))
    half = dtype != torch.float32
    assert joined.problem(half) is None
    (group,), (dense,) = joined.packed(half, None).groups, joined.packed(half, None).tensors
    assert group.tensors == ("dense",) and dense.shape == (4, x.heads, x.n, x.m)
    assert dense.dtype == (torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)
    wanted = x.bias(*own.bias.terms, mask).dense(x.n, x.m)
    torch.testing.assert_close(dense.float(), wanted, rtol=2**-8, atol=0)
    seen = mask.bias == 0
    assert torch.equal(dense.float()[seen.expand_as(dense)], wanted[seen.expand_as(wanted)])
