"""Boltz, Protenix and OpenFold 2 and 3, where they are installed: patched against original classes.

Each is tested alone, module by module, with random weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashbias_convert import (
    factors_once,
    inspect_model,
    patch_model,
)
from flashbias_convert.modules import ScoreBiasModule
from flashbias_convert.recipe import Registry
from tests.recipes import model_parity as parity
from tests.recipes.model_parity import randomised

from .pair_models import (
    BOLTZ,
    HEADS,
    PAIR,
    PATHS,
    ROWS,
    SINGLE,
    TRIANGLES,
    N,
    boltz,
    imported,
    numbers,
    openfold3,
    padding,
    plain_norms,  # noqa: F401
    protenix,
    rows,
    triangle,
)


@pytest.mark.parametrize(("dtype", "backend"), PATHS)
@pytest.mark.parametrize("starting", [True, False])
@pytest.mark.parametrize("package", TRIANGLES)
def test_triangles(package: str, starting: bool, dtype: torch.dtype, backend: str) -> None:
    parity.check_values(triangle(package, starting), dtype, backend)


@pytest.mark.parametrize("package", TRIANGLES)
def test_triangles_come_and_go(package: str) -> None:
    parity.check_comes_and_goes(triangle(package, True), pickles=False)
    parity.check_follows_weights(triangle(package, False))
    parity.check_training(triangle(package, False))


@pytest.mark.parametrize(("dtype", "backend"), PATHS)
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("package", ROWS)
def test_rows(package: str, masked: bool, dtype: torch.dtype, backend: str) -> None:
    parity.check_values(rows(package, masked), dtype, backend)


@pytest.mark.parametrize("package", ROWS)
def test_rows_come_and_go(package: str) -> None:
    parity.check_comes_and_goes(rows(package), pickles=False)
    parity.check_follows_weights(rows(package))
    parity.check_training(rows(package))


@pytest.mark.parametrize("package", ROWS)
def test_columns_have_no_bias(package: str) -> None:
    cls = imported(ROWS[package]).MSAColumnAttention
    (site,) = inspect_model(cls(SINGLE, 4, HEADS)).sites
    assert site.status == "left alone" and "without pair bias" in site.reason


@pytest.mark.parametrize("package", ROWS)
def test_rows_without_pairs_go_to_the_original(package: str) -> None:
    model = rows(package).make()
    m = numbers(model, 2, 3, N, SINGLE)
    with torch.no_grad():
        plain = model[0](m)
        patch_model(model, backend="sdpa", force_all=True)
        assert torch.equal(model[0](m), plain)


@pytest.mark.parametrize("package", ROWS)
def test_rows_say_what_they_add_to_their_scores(package: str) -> None:
    model = rows(package).make()
    m, z = numbers(model, 2, 3, N, SINGLE), numbers(model, 2, N, N, PAIR, seed=2)
    recipe = Registry(()).find(model[0])
    assert recipe is not None and recipe.observe is not None
    mask = padding(z)[:, None].repeat(1, 3, 1)
    with torch.no_grad():
        seen = recipe.observe(model[0], m, z, mask=mask)
        biases: list[Tensor] = []
        model[0].mha.forward = lambda **given: biases.extend(given["biases"]) or given["q_x"]
        model[0](m, z, mask)
    torch.testing.assert_close(seen.bias, biases[1])
    assert seen.x_q.shape == (2, 1, N, 2 * PAIR)


@pytest.mark.parametrize(("dtype", "backend"), PATHS)
@pytest.mark.parametrize(("version", "samples"), BOLTZ)
def test_boltz(version: int, samples: int, dtype: torch.dtype, backend: str) -> None:
    case = boltz(version, samples)
    parity.check_values(case, dtype, backend)


def test_boltz_comes_and_goes() -> None:
    parity.check_comes_and_goes(boltz(1, 2), pickles=False)
    parity.check_training(boltz(2, 2))


def test_boltz_windows_and_caches() -> None:
    """Windows of atoms have other keys than queries, and a projected bias can be handed on."""
    model = boltz(1, 1).make()
    s, z = numbers(model, 2, N, SINGLE), numbers(model, 2, N, N - 2, PAIR)

    def run(cache: dict[str, Any]) -> Tensor:
        with torch.no_grad():
            keys: Callable[[Tensor], Tensor] = lambda x: x[:, 2:]  # noqa: E731
            out: Tensor = model[0](s, z, padding(s), to_keys=keys, model_cache=cache)
        return out

    plain, cache = run({}), {}
    patch_model(model, backend="sdpa", force_all=True)
    torch.testing.assert_close(run(cache), plain)
    assert cache["z"].shape == (2, HEADS, N, N - 2)
    cache["z"] = torch.zeros_like(cache["z"])
    assert (run(cache) - plain).abs().max() > 0.01  # it was read


def test_boltz_with_a_bias_that_is_handed_over() -> None:
    module = imported("boltz.model.layers.attentionv2").AttentionPairBias
    model = randomised(nn.ModuleList([module(SINGLE, None, HEADS, compute_pair_bias=False)]), 0.4)
    s, bias = numbers(model, 2, N, SINGLE), numbers(model, 2, N, N, HEADS, seed=2)
    with torch.no_grad():
        plain = model[0](s, bias, padding(s), s)
        patch_model(model, backend="sdpa", force_all=True)
        torch.testing.assert_close(model[0](s, bias, padding(s), s), plain)


@pytest.mark.usefixtures("free_factors")
def test_boltz_denoising_steps_share_factors() -> None:
    """Each step brings other samples and the same pairs."""
    case = boltz(2, 2)
    model = case.make()
    z = numbers(model, 2, N, N, PAIR, seed=2)

    def steps() -> list[Tensor]:
        found = []
        for step in range(4):
            s = numbers(model, 4, N, SINGLE, seed=10 + step)
            found.append(model[0](s, z, padding(s, 2), k_in=s, multiplicity=2))
        return found

    with torch.no_grad():
        plain = steps()
        patch_model(model, backend="sdpa", force_all=True)
        with factors_once(model, rank=N) as memories:
            out = steps()
    assert [(m.calls, m.served) for m in memories] == [(4, 2)]
    assert {d.term for d in memories[0].decisions} == {"low_rank"}
    for ours, theirs in zip(out, plain, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("dtype", "backend"), PATHS)
@pytest.mark.parametrize(("has_s", "fused"), [(True, False), (False, False), (True, True)])
def test_protenix(
    has_s: bool, fused: bool, dtype: torch.dtype, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    primitives = imported("protenix.model.modules.primitives")
    original = primitives._attention

    def with_truth(q: Tensor, k: Tensor, v: Tensor, attn_bias: Tensor, **kwargs: Any) -> Tensor:
        if q.dtype == torch.float64:  # the original goes through fp32
            return (q @ k.mT + attn_bias).softmax(-1) @ v
        out: Tensor = original(q, k, v, attn_bias, **kwargs)
        return out

    monkeypatch.setattr(primitives, "_attention", with_truth)
    parity.check_values(protenix(has_s, fused), dtype, backend)


def test_protenix_comes_and_goes() -> None:
    parity.check_comes_and_goes(protenix(), pickles=False)
    parity.check_training(protenix(False))


def test_the_gate_of_protenix_is_the_kernels_to_apply(monkeypatch: pytest.MonkeyPatch) -> None:
    gates: list[tuple[int, ...]] = []
    forward = ScoreBiasModule.forward

    def seen(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        gates.append(tuple(kwargs["gate"].shape))
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(ScoreBiasModule, "forward", seen)
    case = protenix()
    model = case.make()
    case.patched(model)
    case.output(model)
    assert gates == [(3, HEADS, N, SINGLE // HEADS)]


def test_protenix_pairs_without_a_batch_go_to_the_original() -> None:
    """It spreads the heads of such a bias over the samples."""
    model = protenix().make()
    a, s = numbers(model, HEADS, N, SINGLE), numbers(model, HEADS, N, 6, seed=3)
    z = numbers(model, N, N, PAIR, seed=2)
    with torch.no_grad():
        plain = model[0](a, s, z)
        patch_model(model, backend="sdpa", force_all=True)
        assert torch.equal(model[0](a, s, z), plain)


def test_protenix_windows_of_atoms_are_refused() -> None:
    cls = imported("protenix.model.modules.transformer").AttentionPairBias
    made = cls(n_heads=HEADS, c_a=SINGLE, c_s=6, c_z=PAIR, cross_attention_mode=True)
    (site,) = inspect_model(nn.ModuleList([made])).sites
    assert site.status == "unsupported" and "windows of atoms" in site.reason


@pytest.mark.usefixtures("free_factors")
def test_protenix_copies_of_pairs_need_a_word() -> None:
    """It casts the representation at each step; the caller can vouch that it stays."""
    model = protenix().make()
    patch_model(model, backend="sdpa", force_all=True)
    z, a = numbers(model, 1, N, N, PAIR), numbers(model, 1, N, SINGLE)
    s = numbers(model, 1, N, 6)
    for unchanged, served in ((False, 0), (True, 2)):
        with (
            torch.no_grad(),
            factors_once(model, rank=N, include=["0"], unchanged=unchanged) as (memory,),
        ):
            for _ in range(3):
                model[0](a, s, z.clone())
        assert (memory.calls, memory.served) == (3, served)


# -- files ---------------------------------------------------------------------------------

SAVED = {
    **{f"triangle of {name}": lambda name=name: triangle(name, False) for name in TRIANGLES},
    **{f"rows of {name}": lambda name=name: rows(name) for name in ROWS},
    "boltz 1": lambda: boltz(1, 2),
    "boltz 2": lambda: boltz(2, 1),
    "protenix": lambda: protenix(True),
    "openfold3": lambda: openfold3(True),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SAVED)
def test_saved_and_loaded(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    parity.check_file(SAVED[name](), tmp_path, dtype)


@pytest.mark.parametrize(("dtype", "backend"), PATHS)
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("diffusion", [False, True])
def test_openfold3(diffusion: bool, masked: bool, dtype: torch.dtype, backend: str) -> None:
    parity.check_values(openfold3(diffusion, masked), dtype, backend)


def test_openfold3_comes_and_goes() -> None:
    for diffusion in (False, True):
        parity.check_comes_and_goes(openfold3(diffusion), pickles=False)
        parity.check_follows_weights(openfold3(diffusion))
        parity.check_training(openfold3(diffusion))


def test_openfold3_options_that_choose_a_kernel_change_nothing() -> None:
    for case, options in (
        (openfold3(), {"use_high_precision_attention": True}),
        (triangle("openfold3", True), {"chunk_size": 2, "inplace_safe": True}),
    ):
        model = case.make()
        z = numbers(model, 2, N, N, PAIR, seed=2)
        given = (z,) if "chunk_size" in options else (numbers(model, 2, N, SINGLE), z)
        with torch.no_grad():
            plain = model[0](*given, **options)
            case.patched(model)
            torch.testing.assert_close(model[0](*given, **options), plain)


@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize("starting", [True, False])
def test_openfold3_turns_the_bias_of_its_ending_node(starting: bool, by_name: bool) -> None:
    case = triangle("openfold3", starting)

    def run(model: Any) -> Tensor:
        z = numbers(model, 2, N, N, PAIR)
        real = padding(z)
        pairs = real[:, :, None] * real[:, None]
        rest = {"transpose_bias": True} if by_name else {}
        out: Tensor = model[0](z, pairs, *([] if by_name else [True]), **rest)
        return out[pairs.bool()]

    turned = dataclasses.replace(case, run=run)
    parity.check_values(turned, torch.float32)
    model = case.make()
    assert (turned.output(model) - case.output(model)).abs().max() > 0.01


@pytest.mark.parametrize("turned", [True, False])
def test_openfold3_says_what_it_adds_to_its_scores(turned: bool) -> None:
    """A fit learns the bias of the call."""
    model = triangle("openfold3", True).make()
    z = numbers(model, 2, N, N, PAIR)
    recipe = Registry(()).find(model[0])
    assert recipe is not None and recipe.observe is not None
    with torch.no_grad():
        seen = recipe.observe(model[0], z, None, transpose_bias=turned)
        biases = []
        model[0].mha.forward = lambda **given: biases.extend(given["biases"]) or given["q_x"]
        model[0](z, transpose_bias=turned)
    torch.testing.assert_close(seen.bias, biases[1])


def test_openfold3_windows_of_atoms_are_refused() -> None:
    cls = imported("openfold3.core.model.layers.attention_pair_bias").CrossAttentionPairBias
    made = cls(SINGLE, SINGLE, SINGLE, 6, PAIR, SINGLE // HEADS, HEADS, n_query=4, n_key=8)
    (site,) = inspect_model(nn.ModuleList([made])).sites
    assert site.status == "unsupported" and "windows of atoms" in site.reason


@pytest.mark.usefixtures("free_factors")
def test_openfold3_denoising_steps_share_factors() -> None:
    """Each step brings other samples and the same pairs."""
    model = openfold3(diffusion=True).make()
    z = numbers(model, 2, 1, N, N, PAIR, seed=2)
    mask = padding(z).reshape(2, 1, N)

    def steps() -> list[Tensor]:
        found = []
        for step in range(4):
            a = numbers(model, 2, 3, N, SINGLE, seed=10 + step)
            found.append(model[0](a, z, numbers(model, 2, 3, N, 6, seed=20 + step), mask))
        return found

    with torch.no_grad():
        plain = steps()
        patch_model(model, backend="sdpa", force_all=True)
        with factors_once(model, rank=N) as (memory,):
            out = steps()
    assert (memory.calls, memory.served) == (4, 2)
    for ours, theirs in zip(out, plain, strict=True):
        real = mask.expand(2, 3, N).bool()
        torch.testing.assert_close(ours[real], theirs[real], atol=1e-4, rtol=1e-4)
