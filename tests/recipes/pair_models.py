"""Sites of Boltz, Protenix and OpenFold 2 and 3, where these are installed, with random weights.

None of them is a dependency; a test that imports `plain_norms` runs it for each of its tests.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

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


# -- attention with pair bias in a trunk -----------------------------------------------------


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
