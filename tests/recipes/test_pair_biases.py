"""Boltz, Protenix and OpenFold 2 and 3, where they are installed: patched against original classes.

None of them is a dependency; each is tested alone, module by module, with random weights.
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
    apply_plan,
    factors_once,
    fit_sites,
    inspect_model,
    pair_projection,
    patch_model,
    unpatch_model,
)
from flashbias_convert.attention.projection import project_pairs_formula
from flashbias_convert.builders import module_entries
from flashbias_convert.decompose.factor_networks import FactorNetworks
from flashbias_convert.decompose.neural_options import FitOptions
from flashbias_convert.decompose.pair_forms import PairSite, forms
from flashbias_convert.decompose.pair_times import Pairs
from flashbias_convert.modules import ScoreBiasModule
from flashbias_convert.recipe import Registry
from tests.recipes import model_parity as parity
from tests.recipes.model_parity import Case, randomised

N, PAIR, SINGLE, HEADS = 9, 8, 12, 2
TRIANGLES = {
    "boltz": "boltz.model.layers.triangular_attention.attention",
    "protenix": "protenix.model.triangular.triangular",
    "openfold": "openfold.model.triangular_attention",
    "openfold3": "openfold3.core.model.layers.triangular_attention",
}
LARGE = {"linear.": 1.0, "0.linear_z": 1.0}
PATHS = parity.PATHS


@pytest.fixture(autouse=True)
def plain_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Protenix compiles a kernel for its layer norms unless it is told not to."""
    monkeypatch.setenv("LAYERNORM_TYPE", "torch")


def imported(path: str) -> Any:
    """A module of a package that may not be there, or may need what is not there."""
    pytest.importorskip(path.partition(".")[0])
    return pytest.importorskip(path, exc_type=ImportError)


def numbers(model: nn.Module, *shape: int, seed: int = 1) -> Tensor:
    """The same in each dtype."""
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return made.bfloat16().to(next(model.parameters()).dtype)


def padding(like: Tensor, copies: int = 1) -> Tensor:
    """Ones and zeros, (2 * copies, N)."""
    mask = torch.ones(2, N, dtype=like.dtype)
    mask[0, -3:] = 0
    return mask.repeat_interleave(copies, 0)


# -- triangle attention --------------------------------------------------------------------


def triangle(package: str, starting: bool) -> Case:
    def make() -> Any:
        cls = imported(TRIANGLES[package]).TriangleAttention
        return randomised(nn.ModuleList([cls(PAIR, 4, HEADS, starting=starting)]), 0.4, **LARGE)

    def run(model: Any) -> Tensor:
        z = numbers(model, 2, N, N, PAIR)
        real = padding(z)
        pairs = real[:, :, None] * real[:, None]
        out: Tensor = model[0](z, mask=pairs)
        return out[pairs.bool()]

    weights = ("0.linear.weight", "0.linear_z.weight")
    return Case(make, run, weights, {"patched": 1})


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


# -- rows of alignments --------------------------------------------------------------------

ROWS = {"openfold": "openfold.model.msa", "openfold3": "openfold3.core.model.layers.msa"}


def rows(package: str, masked: bool = True) -> Case:
    """Two alignments of three sequences each, some of whose residues are padding."""

    def make() -> Any:
        cls = imported(ROWS[package]).MSARowAttentionWithPairBias
        return randomised(nn.ModuleList([cls(SINGLE, PAIR, 4, HEADS)]), 0.4, linear_z=1.0)

    def run(model: Any) -> Tensor:
        m, z = numbers(model, 2, 3, N, SINGLE), numbers(model, 2, N, N, PAIR, seed=2)
        mask = padding(z)[:, None].repeat(1, 3, 1)
        mask[:, 1, 2] = 0  # a gap in one sequence
        out: Tensor = model[0](m, z, mask if masked else None, chunk_size=2)
        return out

    return Case(make, run, ("0.linear_z.weight",), {"patched": 1})


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


# -- attention with pair bias of Boltz -----------------------------------------------------


def boltz(version: int, samples: int) -> Case:
    """Two structures, some samples of each, and padding."""
    name = "attention" if version == 1 else "attentionv2"

    def make() -> Any:
        cls = imported(f"boltz.model.layers.{name}").AttentionPairBias
        return randomised(nn.ModuleList([cls(SINGLE, PAIR, HEADS)]), 0.4, proj_z=1.0)

    def run(model: Any) -> Tensor:
        s = numbers(model, 2 * samples, N, SINGLE)
        z = numbers(model, 2, N, N, PAIR, seed=2)
        more = {} if version == 1 else {"k_in": s}
        out: Tensor = model[0](s, z, padding(s, samples), multiplicity=samples, **more)
        return out

    return Case(make, run, ("proj_z.1.weight",), {"patched": 1})


BOLTZ = [(1, 1), (1, 3), (2, 1), (2, 3)]


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


# -- attention with pair bias of Protenix --------------------------------------------------


def protenix(has_s: bool = True, fused: bool = False) -> Case:
    def make() -> Any:
        cls = imported("protenix.model.modules.transformer").AttentionPairBias
        made = cls(has_s=has_s, n_heads=HEADS, c_a=SINGLE, c_s=6, c_z=PAIR)
        made.attention.use_efficient_implementation = False  # it cannot do other than fp32
        return randomised(nn.ModuleList([made]), 0.4, linear_nobias_z=1.0)

    def run(model: Any) -> Tensor:
        a, s = numbers(model, 3, N, SINGLE), numbers(model, 3, N, 6, seed=3)
        z = numbers(model, 1, N, N, PAIR, seed=2)
        if fused:
            z = torch.nn.functional.layer_norm(z, (PAIR,)).movedim(-1, -3).contiguous()
        out: Tensor = model[0](a, s, z, enable_efficient_fusion=fused)
        return out

    return Case(make, run, ("linear_nobias_z.weight",), {"patched": 1})


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


# -- what networks see of a token ----------------------------------------------------------


class Alone(nn.ModuleList):
    """A module by itself, as a model that can be run."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = self[0](*args, **kwargs)
        return out


def in_trunk(package: str) -> tuple[Alone, dict[str, Tensor]]:
    """Attention with pair bias as the trunk of a model has it, and inputs for it."""
    made: Case = {"boltz1": boltz(1, 1), "boltz2": boltz(2, 1), "protenix": protenix(False)}.get(
        package
    ) or openfold3()
    model = Alone(made.make()).eval()
    single, z = numbers(model, 2, N, SINGLE), numbers(model, 2, N, N, PAIR, seed=2)
    if package == "protenix":
        return model, {"a": single, "s": numbers(model, 2, N, 6), "z": z}
    if package == "openfold3":
        return model, {"a": single, "z": z, "mask": padding(z)}
    more = {"k_in": single} if package == "boltz2" else {}
    return model, {"s": single, "z": z, "mask": padding(z), **more}


@pytest.mark.parametrize("package", ["boltz1", "boltz2", "protenix", "openfold3"])
def test_in_a_trunk_networks_see_the_tokens_too(package: str) -> None:
    model, inputs = in_trunk(package)
    anything = FitOptions(hidden=8, steps=5, check_every=5, energy=None, max_attention_error=None)
    plan = fit_sites(model, inputs, rank=2, options=anything, from_tokens=1)
    (site,) = plan.patched
    assert site.modules is not None
    networks: Any = site.modules[FactorNetworks.kind]
    assert networks.q_features == networks.k_features == 2 * PAIR + SINGLE
    # networks of Boltz read the pairs as they are, those of the others behind their norm
    pairs = Pairs(PAIR, "norm and linear", normed="boltz" not in package)
    assert site.forms == forms(N, N, PairSite(HEADS, site.head_dim, pairs))
    older = FactorNetworks(2 * PAIR, 2 * PAIR, HEADS, 2, hidden=8)  # of a file from before
    older.initialise(torch.Generator().manual_seed(0))
    for own in (networks, older):
        bias = {"builder_modules": module_entries({FactorNetworks.kind: own})}
        spec = {**(site.spec or {}), **bias}
        chosen = dataclasses.replace(site, spec=spec, modules={FactorNetworks.kind: own})
        apply_plan(model, dataclasses.replace(plan, sites=[chosen]), backend="sdpa")
        with torch.no_grad():
            out = model(**inputs)
            moved = {**inputs, "z": inputs["z"].flip(1)}
            assert out.isfinite().all() and not torch.equal(out, model(**moved))
        unpatch_model(model)


@pytest.mark.parametrize("package", ["boltz1", "boltz2", "protenix", "openfold3"])
def test_pairs_are_projected_by_the_kernel(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norm and linear layer in one, by its formula here; layers with a hook are asked."""
    model, inputs = in_trunk(package)
    seen: list[Tensor] = []

    def kernel(z: Tensor, *tensors: Any, eps: float, norms: bool, dtype: torch.dtype) -> Tensor:
        assert norms
        seen.append(project_pairs_formula(z, *tensors, eps, norms, dtype))
        return seen[-1]

    with torch.no_grad():
        plain = model(**inputs)
        patch_model(model)
        exact = model(**inputs)
        monkeypatch.setattr(pair_projection, "project_pairs", kernel)
        monkeypatch.setattr(pair_projection, "device_problem", lambda device: None)
        out = model(**inputs)
        assert len(seen) == 1
        for found in (exact, out):
            assert (found - plain).abs().max() < 1e-5 * plain.abs().max()
        for layer in model.modules():
            if isinstance(layer, nn.LayerNorm) or type(layer).__name__.endswith("LayerNorm"):
                layer.register_forward_hook(lambda *_: None)
        assert torch.equal(model(**inputs), exact) and len(seen) == 1


@pytest.mark.parametrize("package", ["boltz1", "boltz2"])
@pytest.mark.parametrize("place", ["before", "after", "forward", "heads"])
def test_boltz_projections_that_are_watched_are_called(
    package: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = in_trunk(package)
    monkeypatch.setattr(pair_projection, "project_pairs", lambda *_, **__: pytest.fail("kernel"))
    monkeypatch.setattr(pair_projection, "device_problem", lambda device: None)
    whole: Any = model[0].proj_z
    if place == "before":
        whole.register_forward_pre_hook(lambda *_: None)
    elif place == "after":
        whole.register_forward_hook(lambda *_: None)
    elif place == "heads":
        whole[2].register_forward_hook(lambda module, given, out: out + 3)
    else:
        whole.forward = lambda z: whole[2](whole[1](whole[0](z))) * 2
    with torch.no_grad():
        plain = model(**inputs)
        patch_model(model)
        assert (model(**inputs) - plain).abs().max() < 1e-5 * plain.abs().max()


@pytest.mark.parametrize("package", ["boltz1", "boltz2", "protenix", "openfold3"])
def test_in_a_diffusion_they_do_not(package: str) -> None:
    model: Any = {
        "boltz1": boltz(1, 2), "boltz2": boltz(2, 2), "protenix": protenix(True),
        "openfold3": openfold3(diffusion=True),
    }[package].make()  # fmt: skip
    z, tokens = numbers(model, 2, 1, N, N, PAIR), numbers(model, 2, 3, N, SINGLE)
    given: dict[str, Any] = {"a": tokens, "s": numbers(model, 2, 3, N, 6), "z": z}
    if package.startswith("boltz"):  # as its diffusion makes it, with one sample
        setattr(model[0], "initial_norm" if package == "boltz1" else "compute_pair_bias", False)
        given = {"s": tokens[:, 0], "z": z[:, 0], "mask": padding(z)}
        given |= {"k_in": tokens[:, 0]} if package == "boltz2" else {}
    recipe = Registry(()).find(model[0])
    assert recipe is not None and recipe.observe is not None
    with torch.no_grad():
        seen = recipe.observe(model[0], **given)
    assert seen.x_q.shape[-1] == 2 * PAIR


# -- OpenFold 3 ----------------------------------------------------------------------------


def openfold3(diffusion: bool = False, masked: bool = True, samples: int = 3) -> Case:
    """Two structures, in the diffusion with samples of each, and padding."""
    lead = (2, samples) if diffusion else (2,)

    def make() -> Any:
        layers = imported("openfold3.core.model.layers.attention_pair_bias")
        cls = layers.DiffusionAttentionPairBias if diffusion else layers.AttentionPairBias
        made = cls(SINGLE, SINGLE, SINGLE, 6, PAIR, SINGLE // HEADS, HEADS)
        return randomised(nn.ModuleList([made]), 0.4, linear_z=1.0)

    def run(model: Any) -> Tensor:
        a = numbers(model, *lead, N, SINGLE)
        z = numbers(model, 2, *(1,) * diffusion, N, N, PAIR, seed=2)
        mask = padding(a).reshape(2, *(1,) * diffusion, N)
        given = {"s": numbers(model, *lead, N, 6, seed=3)} if diffusion else {}
        out: Tensor = model[0](a, z, mask=mask if masked else None, **given)
        return out[mask.expand(a.shape[:-1]).bool()] if masked else out

    return Case(make, run, ("0.linear_z.weight",), {"patched": 1})


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
