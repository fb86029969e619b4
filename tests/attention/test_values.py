"""Every backend computes the formula, for every kind of bias, in every dtype."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from flashbias_convert import (
    Alibi,
    Axial,
    Dense,
    Diagonal,
    KeyBias,
    Lookup,
    LowRank,
    RelativeTable,
)
from flashbias_convert.attention import PreparedBias, flashbias_attention
from flashbias_convert.decompose.closed_forms import spatial_distance
from flashbias_convert.terms import Term
from tests.memory import LargestTensor
from tests.support import assert_parity

from .cases import BIASES, Inputs, check, plain_of, truth_of, views

OPTIONS = {
    "plain": {},
    "causal-cosine": {"causal": True, "cosine": True, "scale": 8.0},
    "mask": {"masked": True},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", BIASES)
def test_every_bias(
    name: str, options: str, backend: str, dtype: torch.dtype, device: torch.device
) -> None:
    """Two draws are judged together: one draw's largest error is too much a matter of luck."""
    parts = []
    for seed in (0, 1):
        x = Inputs(device, dtype, n=33, m=47, d=24, dv=16, heads=3, seed=seed)
        settings: dict[str, object] = dict(OPTIONS[options])
        if settings.pop("masked", False):
            mask = x.integers(3, 2, x.m) > 0
            mask[0, :] = False
            settings["key_mask"] = mask
        bias = BIASES[name](x)
        out = flashbias_attention(x.q, x.k, x.v, bias, backend=backend, **settings)  # type: ignore[arg-type]
        parts.append((out, plain_of(x, bias, **settings), truth_of(x, bias, **settings)))
    assert_parity(*(torch.stack(each) for each in zip(*parts, strict=True)))


@pytest.mark.parametrize("d", [8, 16, 24, 30, 32, 40, 64, 72, 80, 96, 128, 160])
def test_head_sizes(d: int, kernel: str, device: torch.device) -> None:
    x = Inputs(device, torch.float16, n=70, d=d, heads=1)
    # all of the signal sits in the last features: a head size fixed inside would lose it
    x.q[..., : d // 2] = 0
    x.q[..., d // 2 :] *= 4
    check(x, x.bias(x.low_rank(3)), kernel)


def test_head_sizes_of_values_differ(kernel: str, device: torch.device) -> None:
    check(Inputs(device, torch.float16, n=33, d=16, dv=70), None, kernel)


@pytest.mark.parametrize("n", [1, 16, 49, 63, 64, 65, 113, 144, 192, 197, 239, 255])
def test_lengths(n: int, kernel: str, device: torch.device) -> None:
    """A constant bias of -10 and values of one: any key outside would take nearly all weight."""
    x = Inputs(device, torch.float16, batch=(1,), n=n, heads=1)
    x.v.fill_(1.0)
    bias = x.bias(KeyBias(values=torch.full((1, n), -10.0, device=device)), x.low_rank(2))
    out = flashbias_attention(x.q, x.k, x.v, bias, backend=kernel)
    assert (out - 1).abs().max() <= 2**-10


@pytest.mark.parametrize("rank", [1, 2, 3, 7, 15, 17, 56])
@pytest.mark.parametrize("split", [None, 0])
def test_ranks(rank: int, split: int | None, kernel: str, device: torch.device) -> None:
    x = Inputs(device, torch.float16, n=66, d=8, heads=1)
    check(x, x.bias(x.low_rank(rank, split=split)), kernel)


@pytest.mark.parametrize(("n", "m"), [(1, 20), (20, 1), (1, 1), (3, 200), (130, 7)])
def test_queries_and_keys_differ(n: int, m: int, backend: str, device: torch.device) -> None:
    x = Inputs(device, torch.float32, n=n, m=m, heads=4, d=32)
    check(x, x.bias(x.low_rank(4), x.alibi()), backend)
    check(x, x.bias(x.low_rank(4), x.alibi()), backend, causal=n <= m)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_grouped_query_heads(
    kv_heads: int, backend: str, dtype: torch.dtype, device: torch.device
) -> None:
    x = Inputs(device, dtype, heads=4, kv_heads=kv_heads)
    check(x, x.bias(x.low_rank(), x.alibi()), backend)


# -- batch dimensions ----------------------------------------------------------------------


@pytest.mark.parametrize("lead", [(), (3,), (2, 1), (1, 3), (2, 3), (1, 1)])
def test_batch_dimensions_broadcast(
    lead: tuple[int, ...], backend: str, device: torch.device
) -> None:
    """Windows (b, nW), triangle rows (b, rows) with a bias of (b, 1), types of windows."""
    x = Inputs(device, batch=(2, 3), n=40)
    bias = x.bias(x.low_rank(3, batch=lead), x.dense(batch=lead), x.key_bias(batch=lead))
    expanded = x.bias(
        Dense(bias=bias.dense(x.n, x.m, dtype=torch.float32).expand(2, 3, -1, -1, -1))
    )
    out = flashbias_attention(x.q, x.k, x.v, bias, backend=backend)
    assert_parity(out, plain_of(x, expanded), truth_of(x, expanded))


def test_tensors_of_one_bias_broadcast_differently(backend: str, device: torch.device) -> None:
    x = Inputs(device, batch=(2, 3, 4), n=17, heads=2)
    bias = x.bias(x.rows(x.low_rank(2, batch=(4,)), batch=(2, 1, 1)), x.regions((3, 1)))
    check(x, bias, backend)


#: Terms of which one entry serves all heads, with a batch dimension and without.
SHARED: dict[str, Callable[[Inputs, tuple[int, ...]], Term]] = {
    "low_rank": lambda x, lead: LowRank(
        phi_q=x.normal(*lead, 1, x.n, 3), phi_k=x.normal(x.heads, x.m, 3)
    ),
    "key_bias": lambda x, lead: KeyBias(values=x.normal(*lead, 1, x.m)),
    "alibi": lambda x, lead: Alibi(slopes=x.normal(*lead, 1).abs()),
    "relative_table": lambda x, lead: RelativeTable(
        table=x.normal(*lead, 1, 45), u=x.integers(23, x.n), v=x.integers(23, x.m)
    ),
    "dense": lambda x, lead: Dense(bias=x.normal(*lead, 1, x.n, x.m)),
    "diagonal": lambda x, lead: Diagonal(values=x.normal(*lead, 1, x.n)),
    "lookup": lambda x, lead: Lookup(table=x.normal(1, 11), code=x.integers(11, *lead, x.n, x.m)),
    "axial": lambda x, lead: Axial(
        rel_h=x.normal(*lead, 1, x.n, 5),
        rel_w=x.normal(1, x.n, 9),
        y=x.integers(5, x.m),
        x=x.integers(9, x.m),
    ),
}


@pytest.mark.parametrize("lead", [(), (2,)])
@pytest.mark.parametrize("kind", SHARED)
def test_one_entry_serves_all_heads(
    kind: str, lead: tuple[int, ...], backend: str, device: torch.device
) -> None:
    """With three heads and a batch of two the two dimensions cannot be taken for each other."""
    x = Inputs(device, n=17, m=21, heads=3)
    bias = x.bias(SHARED[kind](x, lead))
    dense = bias.dense(17, 21, query_start=4, dtype=torch.float32)
    expanded = x.bias(Dense(bias=dense.expand(2, 3, 17, 21)))
    out = flashbias_attention(x.q, x.k, x.v, bias, backend=backend)
    assert_parity(out, plain_of(x, expanded), truth_of(x, expanded))


def test_more_batch_dimensions_than_the_kernel_walks(kernel: str, device: torch.device) -> None:
    x = Inputs(device, batch=(2, 2, 2, 2, 3), n=5, heads=1)
    bias = x.bias(x.dense(batch=(2, 1, 2, 1, 3)), x.regions((1, 2, 1, 2, 1)))
    check(x, bias, kernel)


def test_key_mask_broadcasts(backend: str, device: torch.device) -> None:
    x = Inputs(device, batch=(2, 3), n=20)
    mask = x.integers(2, 2, 1, x.m).bool()
    check(x, x.bias(x.low_rank(2)), backend, key_mask=mask)


def test_rows_share_a_bias_and_heads_a_mask(backend: str, device: torch.device) -> None:
    """As in triangle attention: the bias has no axis for its 32 rows, the mask none for heads."""
    x = Inputs(device, batch=(1, 32), heads=4, n=32)
    mask = x.integers(5, 1, 32, x.m) > 0
    for term in (x.low_rank(), x.dense()):
        check(x, x.bias(term), backend, key_mask=mask)


def test_what_rows_share_is_not_made_for_each_of_them(kernel: str, device: torch.device) -> None:
    x = Inputs(device, batch=(1, 32), heads=4, n=32)
    mask = x.integers(5, 1, 32, x.m) > 0
    for term in (x.low_rank(), x.dense()):
        with LargestTensor() as largest:
            flashbias_attention(x.q, x.k, x.v, x.bias(term), key_mask=mask, backend=kernel)
        # the output, and nothing as large as a bias of every row
        assert x.q.numel() == largest.elements < 32 * 4 * 32 * x.m


@pytest.mark.parametrize("shift", [0.0, 100.0, 1000.0, 5000.0])
def test_points_far_from_the_origin_keep_their_distances(
    shift: float, backend: str, dtype: torch.dtype, device: torch.device
) -> None:
    """The weights of keys show the bias; squares that are summed far out lose it in fp32."""
    points = torch.tensor([[0.0], [0.5], [1.0]], device=device)
    q, v = torch.zeros(1, 1, 3, 8, device=device), torch.eye(3, device=device)[None, None]
    bias = spatial_distance(points + shift)
    out = flashbias_attention(q.to(dtype), q.to(dtype), v.to(dtype), bias, backend=backend)
    right = (-(points.double() - points.double().mT).square()).softmax(-1)
    # rounded are the score, its exponential, the sum of these and the quotient
    allowed = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 0.0}
    torch.testing.assert_close(out[0, 0].double(), right, **allowed)


EMPTY = [{"batch": (0,)}, {"n": 0}, {"batch": (2, 0)}]


@pytest.mark.parametrize("of_batch", [False, True])
@pytest.mark.parametrize("sizes", EMPTY)
def test_empty(sizes: dict, of_batch: bool, backend: str, device: torch.device) -> None:
    x = Inputs(device, torch.float16, m=5, **{"n": 4, **sizes})
    term = x.low_rank(3)
    if of_batch:  # one of its factors is empty, too
        phi_q = term.phi_q.expand(*x.q.shape[:-3], *term.phi_q.shape[-3:])
        term = dataclasses.replace(term, phi_q=phi_q)
    for bias in (None, x.bias(term), x.bias(x.low_rank(2), x.dense(), x.key_bias())):
        out = flashbias_attention(x.q, x.k, x.v, bias, backend=backend)
        assert out.shape == x.q.shape and out.dtype == x.q.dtype


@pytest.mark.parametrize("sizes", EMPTY)
def test_gradients_of_nothing_are_zero(sizes: dict, backend: str, device: torch.device) -> None:
    x = Inputs(device, torch.float16, m=5, **{"n": 4, **sizes})
    term, scale = x.low_rank(3), torch.ones(x.heads, device=device)
    leaves = [x.q, x.k, x.v, term.phi_q, term.phi_k, scale]
    for leaf in leaves:
        leaf.requires_grad_()
    out = flashbias_attention(*leaves[:3], x.bias(term), scale=scale, backend=backend)
    for leaf, gradient in zip(leaves, torch.autograd.grad(out.sum(), leaves), strict=True):
        assert gradient.shape == leaf.shape and not gradient.any()


# -- layouts -------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["q", "k", "v", "phi_q", "phi_k", "dense", "table", "values"])
def test_any_strides(which: str, kernel: str, device: torch.device) -> None:
    """One tensor at a time in another layout: reading it with a neighbour's strides would show."""
    x = Inputs(device, torch.float16, n=20, m=20, heads=3)
    terms = [x.low_rank(), x.dense(), x.table(), x.key_bias()]
    expected = flashbias_attention(x.q, x.k, x.v, x.bias(*terms), backend=kernel)
    source = getattr(x, which, None)
    if isinstance(source, torch.Tensor):
        for view in views(source):
            call = {"q": x.q, "k": x.k, "v": x.v, which: view}
            out = flashbias_attention(**call, bias=x.bias(*terms), backend=kernel)
            assert torch.equal(out, expected)
        return
    field = "bias" if which == "dense" else which
    at = next(i for i, t in enumerate(terms) if hasattr(t, field))
    for view in views(getattr(terms[at], field)):
        other = [dataclasses.replace(t, **{field: view}) if i == at else t
                 for i, t in enumerate(terms)]  # fmt: skip
        assert torch.equal(
            flashbias_attention(x.q, x.k, x.v, x.bias(*other), backend=kernel), expected
        )


def test_heads_of_transposed_views_differ(backend: str, device: torch.device) -> None:
    """(B, N, H, D) transposed: heads must not all read head 0; ten runs give the same bits."""
    base = torch.randn(2, 64, 3, 32, generator=torch.Generator().manual_seed(1)).to(device)
    q = k = base.transpose(1, 2)
    v = (base + torch.arange(3, device=device)[:, None] * 10).transpose(1, 2)
    outs = [flashbias_attention(q, k, v, backend=backend) for _ in range(10)]
    assert all(torch.equal(out, outs[0]) for out in outs)
    means = outs[0].mean((0, 2, 3)).cpu()
    assert torch.allclose(means, torch.tensor([0.0, 10.0, 20.0]), atol=0.5)


def test_nothing_is_read_outside_the_tensors(kernel: str, device: torch.device) -> None:
    """The memory around every tensor holds NaN; sizes differ from all padded sizes."""
    x = Inputs(device, torch.float16, n=43, m=43, d=24, dv=40, heads=2, batch=(1,))
    low_rank, dense = x.low_rank(7), x.dense()

    def surrounded(t: torch.Tensor) -> torch.Tensor:
        shape = [s + 2 * 5 for s in t.shape[-3:]]
        big = torch.full((*t.shape[:-3], *shape), float("nan"), dtype=t.dtype, device=device)
        inner = big[..., 5:-5, 5:-5, 5:-5]
        inner.copy_(t)
        return inner

    bias = x.bias(
        LowRank(phi_q=surrounded(low_rank.phi_q), phi_k=surrounded(low_rank.phi_k)),
        Dense(bias=surrounded(dense.bias)),
    )
    x.q, x.k, x.v = surrounded(x.q), surrounded(x.k), surrounded(x.v)
    check(x, bias, kernel)


@pytest.mark.parametrize("which", ["q", "k", "v", "dense"])
@pytest.mark.parametrize("dim", [-1, -2])
def test_offsets_within_a_tile_may_need_64_bits(
    which: str, dim: int, kernel: str, device: torch.device
) -> None:
    """As in a large batch whose sequences come first, (M, B, H, D). The gaps are never touched."""
    x = Inputs(device, torch.float16, batch=(1,), heads=1, n=33, d=33)
    dense = x.dense().bias.half()
    steps = [2**32, 2**32, 2**26, 2**26]
    steps[-1 if dim == -2 else -2] = 1
    try:
        storage = torch.empty(2**31 + 2**6, dtype=torch.float16, device=device)
    except RuntimeError:
        pytest.skip("there is no room for 4 GiB")

    def spread(t: torch.Tensor) -> torch.Tensor:
        return storage.as_strided(t.shape, steps[-t.dim() :]).copy_(t)

    if which == "dense":
        check(x, x.bias(Dense(bias=spread(dense))), kernel)
        return
    setattr(x, which, spread(getattr(x, which)))
    check(x, x.bias(Dense(bias=dense)), kernel)
    if which == "k":
        check(x, None, kernel, cosine=True)


def test_output_is_laid_out_for_merging_heads(kernel: str, device: torch.device) -> None:
    x = Inputs(device, torch.float16)
    out = flashbias_attention(x.q, x.k, x.v, backend=kernel)
    assert out.transpose(-2, -3).is_contiguous()


# -- precision -----------------------------------------------------------------------------


@pytest.mark.parametrize("slope", [0.5, 0.917])
def test_alibi_positions_stay_exact(
    slope: float, backend: str, dtype: torch.dtype, device: torch.device
) -> None:
    """At distance 4,096 a position in fp16, bf16 or TF32 is off by one and more.

    Without q only the bias acts, and the exact result is known: a geometric series.
    """
    m = 4097
    x = Inputs(device, dtype, batch=(1,), heads=1, n=1, m=m, d=16)
    positions = torch.arange(m, device=device)
    x.v = (positions % 7 == 0).to(dtype)[:, None].expand(1, 1, m, 16)
    bias = x.bias(Alibi(slopes=torch.tensor([slope], device=device)))
    truth = truth_of(x, bias, scale=0.0)
    out = flashbias_attention(x.q, x.k, x.v, bias, scale=0.0, backend=backend)
    if backend == "sdpa" and dtype != torch.float32:
        pytest.skip("torch's attention takes an additive mask in the dtype of q only")
    assert (out.double() - truth).abs().max() <= 2 * torch.finfo(dtype).eps


def test_factors_of_a_distance_are_split(
    kernel: str, dtype: torch.dtype, device: torch.device
) -> None:
    """-w |x - y|^2 as factors: fp16 alone is off by 0.1, high and low parts by 1e-5."""
    x = Inputs(device, dtype, batch=(1,), heads=1, n=100, d=16)
    points = 2 * x.normal(100, 3)
    w = 10.0
    term = LowRank(phi_q=(2 * w * points)[None], phi_k=points[None])
    bias = x.bias(term, KeyBias(values=(-w * (points**2).sum(-1))[None]))
    x.v = torch.eye(100, device=device, dtype=dtype)[None, None]
    truth = truth_of(x, bias, scale=0.0)
    out = flashbias_attention(x.q, x.k, x.v, bias, scale=0.0, backend=kernel)
    # a logit error e changes a weight by a share e; split factors carry 22 bits, fp32 ones 24
    largest = float((2 * w * (points**2).sum(-1)).max())
    allowed = 2 * torch.finfo(dtype).eps + largest * 2.0**-20
    share = (out.double() - truth).abs() / truth.clamp_min(2.0**-8)
    assert share.max() <= allowed
    rounded = dataclasses.replace(term, split=0)
    coarse = flashbias_attention(
        x.q, x.k, x.v, x.bias(rounded, bias.terms[1]), scale=0.0, backend=kernel
    )
    if dtype != torch.float32:
        coarse_share = (coarse.double() - truth).abs() / truth.clamp_min(2.0**-8)
        assert coarse_share.max() > 4 * share.max(), "splitting must make a difference"


def test_large_scores_stay_finite(backend: str, dtype: torch.dtype, device: torch.device) -> None:
    x = Inputs(device, dtype, n=70, d=128, heads=1)
    x.q, x.k = 30 * x.q, 30 * x.k
    bias = x.bias(Dense(bias=25 * x.dense().bias))
    check(x, bias, backend)


def test_scores_near_the_largest_fp16_number(kernel: str, device: torch.device) -> None:
    x = Inputs(device, torch.float16, n=20, d=128, heads=1)
    x.q, x.k = 200 * x.q, 200 * x.k
    out = flashbias_attention(x.q, x.k, x.v, x.bias(x.low_rank(3)), backend=kernel)
    assert out.isfinite().all()


def test_double_precision_is_kept(device: torch.device) -> None:
    """A gate on factors is no reason to round them."""
    x = Inputs(device, torch.float64)
    for bias in (x.bias(x.rows(x.low_rank())), x.bias(x.rows(x.table()), x.key_bias())):
        out = flashbias_attention(x.q, x.k, x.v, bias, backend="sdpa")
        assert (out - truth_of(x, bias)).abs().max() < 1e-13


# -- the same call gives the same bits -----------------------------------------------------


def test_prepared_bias_gives_the_same_bits(
    backend: str, dtype: torch.dtype, device: torch.device
) -> None:
    x = Inputs(device, dtype)
    bias = x.bias(x.low_rank(), x.table(), x.regions())
    prepared = PreparedBias(bias)
    first = flashbias_attention(x.q, x.k, x.v, prepared, backend=backend)
    assert torch.equal(first, flashbias_attention(x.q, x.k, x.v, prepared, backend=backend))
    assert torch.equal(first, flashbias_attention(x.q, x.k, x.v, bias, backend=backend))


def test_inputs_are_not_changed(backend: str, device: torch.device) -> None:
    x = Inputs(device)
    bias = x.bias(x.low_rank(), x.dense())
    before = [t.clone() for t in (x.q, x.k, x.v, *(t for _, t in bias.named_tensors()))]
    flashbias_attention(x.q, x.k, x.v, bias, backend=backend, cosine=True)
    after = (x.q, x.k, x.v, *(t for _, t in bias.named_tensors()))
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


# -- axial terms ---------------------------------------------------------------------------


def test_axial_rows_in_fp32_keep_their_digits(
    backend: str, dtype: torch.dtype, device: torch.device
) -> None:
    """Large ones would lose eight times more in factors of fp16 than in a sum."""
    x = Inputs(device, dtype, n=33, m=70)
    term = x.axial(dtype=torch.float32)
    term = dataclasses.replace(term, rel_h=20 * term.rel_h, rel_w=20 * term.rel_w)
    check(x, x.bias(term), backend)


@pytest.mark.parametrize("value", [float("-inf"), -1e9, -6e4, 6e4])
def test_axial_entries_that_hide_or_select(
    value: float, backend: str, dtype: torch.dtype, device: torch.device
) -> None:
    """A mask that was added to the rows: other keys are as if it were not there."""
    x = Inputs(device, dtype, n=33, m=70)
    term = x.axial()
    for scale in (None, torch.tensor([0.3, 7.0], device=device)):
        rel_h = term.rel_h.clone()
        rel_h[..., 2] = value
        bias = x.bias(dataclasses.replace(term, rel_h=rel_h))
        check(x, bias, backend, scale=scale)
