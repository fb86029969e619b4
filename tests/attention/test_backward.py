"""The kernels' gradients are as close to float64 as those of plain attention in the same dtype."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from flashbias_convert import Alibi, Dense, LowRank, ScoreBias
from flashbias_convert.attention import (
    backward,
    backward_launch,
    backward_pairs,
    flashbias_attention,
)
from flashbias_convert.attention.backends import BackendFallbackWarning
from flashbias_convert.attention.training_packing import (
    factor_gradients,
    pack_for_training,
    rounded,
)
from flashbias_convert.attention.tuning import backward_settings
from flashbias_convert.errors import UnsupportedTermError
from flashbias_convert.nn import SpatialDistanceBias
from tests.support import assert_parity

from .cases import BIASES, Inputs, views
from .gradients import Recomputed, gradients, of_backend, plain_gradients


def compared(
    x: Inputs, bias: ScoreBias | None, backend: str, **options: Any
) -> dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Gradients by name: of a backend, of plain attention, and the truth."""
    truth = gradients(x, bias, of_backend("eager"), torch.float64, **options)
    found = gradients(x, bias, of_backend(backend), **options)
    plain = plain_gradients(x, bias, truth, **options)
    assert set(found) == set(truth)
    return {name: (found[name], plain[name], truth[name]) for name in truth}


def check(x: Inputs, bias: ScoreBias | None, backend: str, **options: Any) -> None:
    for each in compared(x, bias, backend, **options).values():
        assert_parity(*each)


@pytest.mark.parametrize("name", BIASES)
def test_every_bias_with_padding(name: str, kernel: str, device: torch.device) -> None:
    """Sizes that fill no block, two blocks of keys; one batch entry sees no key at all.

    Two draws are judged together: one draw's largest error is too much a matter of luck.
    """
    parts = []
    for seed in (0, 1):
        x = Inputs(device, heads=1, n=17, m=47, d=24, dv=16, seed=seed)
        mask = x.integers(3, 2, x.m) > 0
        mask[seed, :] = False
        parts.append(compared(x, BIASES[name](x), kernel, key_mask=mask))
    for gradient in parts[0]:
        assert_parity(*(torch.stack(e) for e in zip(*(p[gradient] for p in parts), strict=True)))


@pytest.mark.parametrize("scale", [2.1, [0.45, 2.1]], ids=["number", "heads"])
@pytest.mark.parametrize("name", ["none", "low_rank", "dense", "regions", "key_bias"])
def test_sharp_scores_in_fp32(
    name: str, scale: float | list[float], kernel: str, device: torch.device
) -> None:
    """Scores of up to 45: the backward pass must round them exactly as the forward pass did.

    The interpreter multiplies by a library whose rounding depends on the shape of a tile.
    """
    if device.type != "cuda":
        pytest.skip("needs the products of a GPU")
    given = torch.tensor(scale, device=device) if isinstance(scale, list) else scale
    parts = []
    for seed in range(4):
        x = Inputs(device, heads=2, n=33, m=33, d=24, dv=40, seed=seed)
        parts.append(compared(x, BIASES[name](x), kernel, scale=given))
    for gradient in parts[0]:
        assert_parity(*(torch.stack(e) for e in zip(*(p[gradient] for p in parts), strict=True)))


@pytest.mark.parametrize("name", BIASES)
def test_every_bias_in_half_precision(
    name: str, half: torch.dtype, kernel: str, device: torch.device
) -> None:
    """Causal cosine attention with a scale that is learnt for each head, as in SwinV2."""
    x = Inputs(device, half, n=33, m=47, d=24, dv=16)
    scale = torch.tensor([3.0, 8.0], device=device)
    check(x, BIASES[name](x), kernel, causal=True, cosine=True, scale=scale)


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize(("n", "d"), [(256, 24), (256, 48), (64, 48)])
def test_windows_of_swin_v2(
    n: int, d: int, shifted: bool, half: torch.dtype, kernel: str, device: torch.device
) -> None:
    """Whole tiles, and so many windows on a card that a program sums over several of them."""
    batch = (16, 8) if device.type == "cuda" else (1, 2)
    x = Inputs(device, half, batch=batch, n=n, d=d)
    factors = x.low_rank(9, split=0)
    terms = (factors, x.regions(batch[1:])) if shifted else (factors,)
    scale = torch.tensor([3.0, 8.0], device=device)
    check(x, x.bias(*terms), kernel, cosine=True, scale=scale)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_transforms_of_torch_func_take_another_way(kernel: str, device: torch.device) -> None:
    x = Inputs(device, torch.float32, batch=(3,), heads=2, n=20, m=20)
    bias = x.bias(x.low_rank(2))

    def loss(q: Any, k: Any, v: Any, backend: str = "auto") -> Any:
        return flashbias_attention(q, k, v, bias, backend=backend).square().sum()

    q, k, v = (t.detach() for t in (x.q, x.k, x.v))
    own = q.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(loss(own, k, v, "eager"), own)
    torch.testing.assert_close(torch.func.grad(loss)(q, k, v), wanted, rtol=1e-4, atol=1e-5)
    each = torch.func.vmap(torch.func.grad(loss))(q, k, v)
    torch.testing.assert_close(each, wanted, rtol=1e-4, atol=1e-5)
    with pytest.raises(UnsupportedTermError, match=r"torch\.func"):
        torch.func.grad(loss)(q, k, v, kernel)


def test_a_factor_needs_the_other_one_in_bf16() -> None:
    met, bf16 = backward._met_by_scores, torch.bfloat16
    assert met(["phi_q"], bf16) == {"phi_k": bf16}
    assert met(["dense", "phi_k"], bf16) == {"phi_q": bf16}
    assert met(["phi_q", "phi_k"], bf16).keys() == {"phi_q", "phi_k"}
    assert not met(["dense"], bf16) and not met(["phi_q", "phi_k"], torch.float16)


@pytest.mark.parametrize("head_scale", [False, True])
@pytest.mark.parametrize("wanted", ["phi_q", "phi_k"])
def test_split_factors_keep_two_parts_for_gradients(wanted: str, head_scale: bool) -> None:
    """Gradients of columns, added up as those of the factors are, are those of whole numbers."""
    generator = torch.Generator().manual_seed(0)
    phi_q, phi_k = (torch.randn(2, n, 5, generator=generator) for n in (6, 7))
    bias = ScoreBias((LowRank(phi_q=phi_q, phi_k=8 * phi_k, split=3),), 2)
    packed = pack_for_training(bias, half=True)
    (spec,), scales = packed.groups, torch.tensor([-0.3, 1e-4])
    raw = dict(zip(spec.tensors, packed.tensors, strict=True))
    other = "phi_k" if wanted == "phi_q" else "phi_q"
    _, own = rounded(
        spec, raw, half=True, scale=-0.3, head_scale=scales if head_scale else None,
        again=backward._met_by_scores([wanted], torch.bfloat16),
    )  # fmt: skip
    assert own[f"{other}_rounded"].dtype == torch.bfloat16 and f"{wanted}_rounded" not in own
    scores = torch.randn(2, 6, 7, generator=generator, dtype=torch.float64)
    scores = scores if wanted == "phi_q" else scores.mT
    of_columns = scores @ own[f"{other}_rounded"].double()
    if wanted == "phi_k":  # a kernel multiplies by what queries were divided by
        sizes = torch.tensor([0.3, 1.0]) if head_scale else torch.tensor([0.3, 0.3])
        of_columns = of_columns * sizes.double()[:, None, None]
    found = factor_gradients(spec, raw, {wanted: of_columns.float()})
    exact = scores @ raw[other].double()
    error = (found[wanted] - exact).abs() / exact.abs().amax()
    assert error[..., :3].max() < 2**-15  # 16 bits
    assert 2**-15 < error[..., 3:].max() < 2**-7  # 8 bits


@pytest.mark.parametrize("deterministic", [True, False])
def test_weights_of_distances(deterministic: bool, kernel: str, device: torch.device) -> None:
    """Squared distances are sums that cancel, and so are the gradients of their weights."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    x = Inputs(device, dtype, batch=(1,), heads=2, n=256, m=256, d=16)
    points = torch.nn.functional.normalize(x.normal(256, 3).double(), dim=-1)
    weights = 64 * x.normal(2, 256).double().sigmoid()

    def gradient(kind: torch.dtype, attend: Any) -> torch.Tensor:
        wide = torch.promote_types(kind, torch.float32)
        own, at = weights.to(wide).requires_grad_(), points.to(wide)
        q, k, v, dout = (t.detach().to(kind) for t in (x.q, x.k, x.v, x.q.flip(-2)))
        return torch.autograd.grad(attend(q, k, v, own, at), own, dout)[0]

    def plain(q: Any, k: Any, v: Any, own: Any, at: Any) -> Any:
        bias = -own[..., None] * (at[:, None] - at).square().sum(-1)
        if q.dtype != torch.float64:
            # what factors are multiplied with is rounded, like what q and k are
            bias.register_hook(lambda found: found.to(q.dtype).to(found.dtype))
            visible = torch.ones(1, 1, dtype=torch.bool, device=device)
            return Recomputed.apply(q, k, v, bias, bias, visible, q.shape[-1] ** -0.5)
        return (q @ k.mT * q.shape[-1] ** -0.5 + bias).softmax(-1) @ v

    def ours(q: Any, k: Any, v: Any, own: Any, at: Any) -> Any:
        module = SpatialDistanceBias(2, widest=1.0, narrowest=1.0, learnable=False).to(device)
        bias = module(at, weight=own)
        return flashbias_attention(q, k, v, bias, backend=kernel, deterministic=deterministic)

    found, formula = gradient(dtype, ours), gradient(dtype, plain)
    assert_parity(found, formula, gradient(torch.float64, plain))


def test_factors_that_are_rounded_apart(
    kernel: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with bf16, which the interpreter does not know; other numbers show who takes them in."""
    x = Inputs(device, torch.float16, n=33, m=70, d=24, dv=16)
    bias = x.bias(x.low_rank(5, split=0))
    whole = gradients(x, bias, of_backend(kernel))

    def twice(*args: Any, **options: Any) -> Any:
        spec, own = rounded(*args, **options)
        return spec, own | {f"{name}_rounded": 2 * own[name] for name in ("phi_q", "phi_k")}

    monkeypatch.setattr(backward, "rounded", twice)
    found = gradients(x, bias, of_backend(kernel))
    of_factors = {name for name in whole if "phi" in name}
    assert len(of_factors) == 2
    for name, own in whole.items():  # theirs alone are made of them
        assert torch.equal(found[name], 2 * own if name in of_factors else own), name


@pytest.mark.parametrize("name", ["relative_table", "axial", "all"])
def test_half_precision_without_a_cosine(name: str, kernel: str, device: torch.device) -> None:
    x = Inputs(device, torch.float16, n=33, m=70, d=8, dv=30)
    check(x, BIASES[name](x), kernel, scale=-0.4)


@pytest.mark.parametrize("rows", [torch.float32, torch.float16])
def test_axial_rows_of_either_dtype(
    rows: torch.dtype, half: torch.dtype, kernel: str, device: torch.device
) -> None:
    """SAM's are what a product of the queries gives, fp32 where that is not under autocast."""
    x = Inputs(device, half, n=33, m=70, d=8)
    term = x.axial()
    term = dataclasses.replace(term, rel_h=term.rel_h.to(rows), rel_w=term.rel_w.to(rows))
    check(x, x.bias(term), kernel)


@pytest.mark.parametrize(("n", "m"), [(128, 64), (70, 65)])
@pytest.mark.parametrize("scale", [-0.4, 0.3, -1e-3, 0.0])
def test_factors_in_half_precision(
    scale: float, n: int, m: int, kernel: str, device: torch.device
) -> None:
    """Whole tiles, and others. Kernels take the sign of a scale, or a tiny one, into q or k."""
    x = Inputs(device, torch.float16, batch=(1,), n=n, m=m)
    check(x, x.bias(x.low_rank(3), x.key_bias()), kernel, scale=scale)
    check(x, x.bias(x.low_rank(3)), kernel, scale=scale)


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize(("n", "m", "start"), [(128, 192, 64), (192, 128, -64), (150, 130, 40)])
def test_causal_tiles(
    n: int, m: int, start: int, rank: int, kernel: str, device: torch.device
) -> None:
    """Tiles that all see, tiles that some see, and tiles beyond the ends; with grouped heads."""
    x = Inputs(device, torch.float16, batch=(1,), heads=2, kv_heads=1, n=n, m=m)
    terms = [x.low_rank(rank)] if rank else []
    check(x, x.bias(*terms) if terms else None, kernel, causal=True, query_start=start)
    bias = x.bias(*terms, x.alibi())
    check(x, bias, kernel, causal=True, query_start=start)
    said = {"number": start, "tensor": torch.tensor([start], device=device)}
    found = {
        how: gradients(x, bias, of_backend(kernel), causal=True, query_start=own)
        for how, own in said.items()
    }
    assert all(torch.equal(found["number"][name], own) for name, own in found["tensor"].items())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rank", [0, 2])
def test_tall_blocks(rank: int, causal: bool, kernel: str, device: torch.device) -> None:
    """Heads of 64 in sequences that are long enough; the last blocks are not full."""
    columns = 16 * bool(rank)
    sizes = {name: backward_settings(name, rows=530, d=64, dv=64, columns=columns, half=True)
             for name in ("queries", "keys")}  # fmt: skip
    assert sizes["queries"].block_m == 128
    x = Inputs(device, torch.float16, batch=(1,), heads=1, n=530, d=64)
    check(x, x.bias(x.low_rank(rank, split=0)) if rank else None, kernel, causal=causal)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_grouped_query_heads(kv_heads: int, kernel: str, device: torch.device) -> None:
    x = Inputs(device, torch.float16, batch=(1,), heads=4, kv_heads=kv_heads, n=20)
    terms = (x.low_rank(3), Dense(bias=x.normal(1, 20, 20), heads=(3,)))
    check(x, x.bias(*terms), kernel, causal=True)


@pytest.mark.parametrize("n", [1, 64, 65])
def test_lengths(n: int, kernel: str, device: torch.device) -> None:
    x = Inputs(device, torch.float16, batch=(1,), heads=1, n=n, m=70)
    check(x, x.bias(x.low_rank(2), x.key_bias()), kernel, causal=True)


@pytest.mark.parametrize("scale", [0.0, 1e-4, 30.0])
def test_scales(scale: float, kernel: str, device: torch.device) -> None:
    x = Inputs(device, batch=(1,), n=12)
    check(x, x.bias(x.low_rank(3)), kernel, scale=torch.full((2,), scale, device=device))


# -- batch dimensions ----------------------------------------------------------------------


@pytest.mark.parametrize("programs", [1, 4])
@pytest.mark.parametrize("lead", [(), (3,), (2, 1)])
def test_gradients_of_what_the_batch_shares(
    lead: tuple[int, ...], programs: int, kernel: str, device: torch.device, monkeypatch: Any
) -> None:
    """However the sum over the batch is cut into splits."""
    monkeypatch.setattr(backward_launch, "ENOUGH_PROGRAMS", programs)
    x = Inputs(device, batch=(2, 3), heads=1, n=9, m=11)
    bias = x.bias(x.low_rank(3, batch=lead), x.dense(batch=lead), x.key_bias(batch=lead), x.table())
    check(x, bias, kernel)


def test_tensors_of_one_bias_broadcast_differently(kernel: str, device: torch.device) -> None:
    x = Inputs(device, batch=(2, 2, 3), n=7, heads=1)
    bias = x.bias(
        x.rows(x.dense(batch=(3,)), batch=(2, 1, 1)), x.rows(x.lookup((1, 3)), batch=(2, 2, 1))
    )
    check(x, bias, kernel)


def test_what_heads_and_rows_share(kernel: str, device: torch.device) -> None:
    x = Inputs(device, n=11)
    shared = LowRank(phi_q=x.normal(1, 11, 2), phi_k=x.normal(1, 2, 11, 2))
    gate = x.normal(2, 1, 1)
    dense = Dense(bias=x.normal(1, 1, 11, 11), row_scale=gate)
    alibi = Alibi(slopes=torch.tensor([0.3, 0.1], device=device), row_scale=x.normal(2, 1))
    check(x, x.bias(shared, dense, alibi), kernel)


def test_more_batch_dimensions_than_the_kernels_walk(kernel: str, device: torch.device) -> None:
    x = Inputs(device, batch=(2, 1, 2, 2, 2), n=5, heads=1)
    terms = (x.dense(batch=(2, 1, 2, 1, 2)), x.low_rank(2, batch=(1, 1, 2, 1, 1)))
    check(x, x.bias(*terms), kernel, scale=torch.ones(1, device=device))


def test_tables_in_strips(kernel: str, device: torch.device, monkeypatch: Any) -> None:
    """Score gradients of a long sequence do not fit the buffer at once."""
    monkeypatch.setattr(backward_pairs, "STRIP", 1)
    monkeypatch.setattr(backward_pairs, "LONG_SUM", 8)
    x = Inputs(device, n=70, m=20, heads=1)
    check(x, x.bias(x.table(), x.lookup((2,)), x.dense()), kernel)


# -- arguments -----------------------------------------------------------------------------


def test_query_start_per_batch_entry(kernel: str, device: torch.device) -> None:
    x = Inputs(device, batch=(3,), n=5, m=11)
    bias = x.bias(x.alibi(), x.diagonal(), x.low_rank(2))
    starts = torch.tensor([0, 5, -2], device=device)
    options = {"causal": True, "query_start": starts}
    truth = gradients(x, bias, of_backend("eager"), torch.float64, **options)
    for name, found in gradients(x, bias, of_backend(kernel), **options).items():
        # fp32 sums of a few dozen products
        allowed = 64 * torch.finfo(torch.float32).eps * (1 + float(truth[name].abs().max()))
        assert (found - truth[name]).abs().max() < allowed


def test_a_row_of_minus_infinity(kernel: str, device: torch.device) -> None:
    """Nothing is attended to, so nothing has an influence; NaN would spread to every key."""
    x = Inputs(device, n=7)
    values = x.dense().bias
    values[:, 2] = float("-inf")
    values[0, 3, :5] = float("-inf")
    check(x, x.bias(Dense(bias=values)), kernel)


def test_strides_of_inputs_and_gradients(kernel: str, device: torch.device) -> None:
    """Other layouts change nothing, expanded gradients of the output among them."""
    x = Inputs(device, n=17, d=24)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        out = flashbias_attention(*leaves, x.bias(x.table(5)), backend=kernel)
        weight = torch.linspace(-1, 1, out.shape[-1], device=device)
        return list(
            torch.autograd.grad((out * 1).transpose(1, 2), leaves, weight.expand(2, 17, 2, 24))
        )

    x.generator.manual_seed(3)
    expected = run(x.q, x.k, x.v)
    for q, k, v in zip(*(views(t) for t in (x.q, x.k, x.v)), strict=True):
        x.generator.manual_seed(3)
        for found, e in zip(run(q, k, v), expected, strict=True):
            assert torch.equal(found, e)


def test_the_same_call_gives_the_same_bits(kernel: str, device: torch.device) -> None:
    x = Inputs(device, torch.float16, n=20)
    bias = BIASES["all"](x)
    first, second = (gradients(x, bias, of_backend(kernel)) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_only_what_asks_gets_a_gradient(kernel: str, device: torch.device) -> None:
    x = Inputs(device, n=11)
    bias = x.bias(x.low_rank(2), x.table(), x.key_bias())
    everything = gradients(x, bias, of_backend(kernel))
    fixed = (x.q, x.k, x.v)
    start = torch.randn(x.q.shape, generator=torch.Generator().manual_seed(7)).half().to(x.q)
    for term, field in ((0, "phi_k"), (1, "table"), (2, "values")):
        leaf = getattr(bias.terms[term], field).clone().requires_grad_()
        terms = list(bias.terms)
        terms[term] = dataclasses.replace(terms[term], **{field: leaf})
        out = flashbias_attention(*fixed, x.bias(*terms), backend=kernel)
        (found,) = torch.autograd.grad(out, leaf, start)
        assert torch.equal(found, everything[f"{bias.terms[term].kind}.{field}"])


def test_no_output_no_gradient(kernel: str, device: torch.device) -> None:
    q, k, v = (torch.zeros(0, 2, 5, 8, device=device, requires_grad=True) for _ in range(3))
    flashbias_attention(q, k, v, backend=kernel).sum().backward()
    assert q.grad is not None and q.grad.shape == q.shape


# -- what surrounds it ---------------------------------------------------------------------


def test_auto_trains_on_the_kernel(
    kernel: str, device: torch.device, recwarn: pytest.WarningsRecorder
) -> None:
    x = Inputs(device, n=11)
    bias = x.bias(x.low_rank(2))
    auto, asked = (gradients(x, bias, of_backend(name)) for name in ("auto", kernel))
    assert all(torch.equal(auto[name], asked[name]) for name in auto)
    assert not [w for w in recwarn if issubclass(w.category, BackendFallbackWarning)]


def test_a_second_derivative_is_refused(kernel: str, device: torch.device) -> None:
    x = Inputs(device, n=11)
    q = x.q.requires_grad_()
    out = flashbias_attention(q, x.k, x.v, backend=kernel)
    (first,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match=r"no second derivative.*backend='eager'"):
        first.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool, kernel: str, device: torch.device) -> None:
    from torch.utils.checkpoint import checkpoint

    x = Inputs(device, torch.float16, n=11)
    bias = x.bias(x.low_rank(2), x.alibi())
    expected = gradients(x, bias, of_backend(kernel), causal=True)

    def attention(q: Any, k: Any, v: Any, own: Any, options: Any) -> torch.Tensor:
        leaves = [t for _, t in own.named_tensors()]

        def call(q: Any, k: Any, v: Any, *_: Any) -> torch.Tensor:
            return flashbias_attention(q, k, v, own, backend=kernel, **options)

        return checkpoint(call, q, k, v, *leaves, use_reentrant=reentrant)

    if reentrant:  # takes .backward() only
        leaves = [t.clone().requires_grad_() for t in (x.q, x.k, x.v)]
        start = torch.randn(x.q.shape, generator=torch.Generator().manual_seed(7)).half().to(x.q)
        attention(*leaves, bias, {"causal": True}).backward(start)
        found = {name: leaf.grad for name, leaf in zip("qkv", leaves, strict=True)}
    else:
        found = gradients(x, bias, attention, causal=True)
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_autocast_and_a_loss_scale(kernel: str, device: torch.device) -> None:
    """Factors stay fp32 and get fp32 gradients; the scaler finds no infinity and steps."""
    x = Inputs(device, torch.float16, n=11)
    projection = torch.nn.Linear(16, 16, device=device)
    phi = [torch.nn.Parameter(x.normal(2, 11, 2)) for _ in range(2)]
    before = [p.detach().clone() for p in phi]
    optimizer = torch.optim.SGD([*projection.parameters(), *phi], lr=0.1)
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0)
    with torch.autocast(device.type, torch.float16):
        q = projection(x.q)
        bias = x.bias(LowRank(phi_q=phi[0], phi_k=phi[1]))
        out = flashbias_attention(q, x.k, x.v, bias, backend=kernel)
        assert out.dtype == torch.float16
        loss = out.float().square().mean()
    scaler.scale(loss).backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in phi)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 1024.0
    assert all(not torch.equal(p, b) for p, b in zip(phi, before, strict=True))


@pytest.mark.parametrize("target", [torch.float16, torch.bfloat16])
def test_autocast_changes_no_gradient(
    target: torch.dtype, kernel: str, device: torch.device
) -> None:
    """Not even where it is set to another half precision than that of factors, or goes backward."""
    x = Inputs(device, torch.float16, n=11)
    bias = x.bias(x.rows(x.low_rank(3)), x.low_rank(2), x.table())
    expected = gradients(x, bias, of_backend(kernel), causal=True)
    with torch.autocast(device.type, target):
        found = gradients(x, bias, of_backend(kernel), causal=True)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
