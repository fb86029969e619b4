"""Who projects the pairs of a site: a kernel, or the site's own layers wherever they may differ."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashbias_convert import pair_projection, patch_model
from flashbias_convert.attention.projection import project_pairs_formula
from flashbias_convert.pair_projection import projected_pairs

C, H, N = 8, 3, 5


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What the kernel is asked for, by its formula; it could run."""
    seen: list[Tensor] = []

    def kernel(z: Tensor, *tensors: Any, eps: float, norms: bool, dtype: torch.dtype) -> Tensor:
        seen.append(project_pairs_formula(z, *tensors, eps, norms, dtype))
        return seen[-1]

    monkeypatch.setattr(pair_projection, "project_pairs", kernel)
    monkeypatch.setattr(pair_projection, "device_problem", lambda device: None)
    return seen


def site(backend: str = "auto") -> Any:
    return SimpleNamespace(score_bias=SimpleNamespace(backend=backend))


def layers(**changes: Any) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    linear, norm = nn.Linear(C, H, **changes), nn.LayerNorm(C, eps=1e-2)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    return linear.requires_grad_(False), norm.requires_grad_(False)


def pairs() -> Tensor:
    return torch.randn(2, N, N, C, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("normed", [True, False])
def test_the_kernel_gets_all_that_the_layers_have(
    bias: bool, normed: bool, calls: list[Tensor]
) -> None:
    linear, norm = layers(bias=bias)
    z = pairs()
    out = projected_pairs(site(), z, linear, norm if normed else None)
    assert len(calls) == 1 and out.shape == (2, H, N, N)
    plain = linear(norm(z) if normed else z).movedim(-1, -3)
    assert torch.allclose(out, plain, atol=1e-5)


def test_autocast_says_the_dtype(calls: list[Tensor]) -> None:
    linear, norm = layers()
    with torch.autocast("cpu", torch.bfloat16):
        out = projected_pairs(site(), pairs(), linear, norm)
        plain = linear(norm(pairs())).movedim(-1, -3)
    assert len(calls) == 1 and out.dtype == plain.dtype == torch.bfloat16
    assert (out.float() - plain.float()).abs().max() <= 2e-2 * plain.abs().max()


class Adapter(nn.Module):
    """As PEFT puts one around a layer."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base_layer = base

    @property
    def weight(self) -> Any:
        return self.base_layer.weight

    @property
    def bias(self) -> Any:
        return self.base_layer.bias

    def forward(self, x: Tensor) -> Any:
        return self.base_layer(x) + 1


class Doubled(torch.Tensor):
    """A weight that is not what its numbers say, as quantised ones are."""


def hooked(linear: nn.Linear, norm: nn.Module) -> nn.Module:
    linear.register_forward_hook(lambda module, given, out: out + 1)
    return linear


def own_forward(linear: nn.Linear, norm: nn.Module) -> nn.Module:
    linear.forward = lambda x: nn.functional.linear(x, linear.weight) + 7  # type: ignore[method-assign]
    return linear


def before_the_norm(linear: nn.Linear, norm: nn.Module) -> nn.Module:
    norm.register_forward_pre_hook(lambda module, given: (given[0].roll(1, -1),))
    return linear


def subclassed(linear: nn.Linear, norm: nn.Module) -> nn.Module:
    linear.weight = nn.Parameter(linear.weight.data.as_subclass(Doubled), requires_grad=False)
    return linear


def trained(linear: nn.Linear, norm: nn.Module) -> nn.Module:
    return linear.requires_grad_()


class LoRALinear(nn.Linear):
    """As loralib's, whose matrices are parameters of the layer itself."""

    def __init__(self) -> None:
        super().__init__(C, H)
        self.lora_A, self.lora_B = (nn.Parameter(torch.randn(*s)) for s in ((2, C), (H, 2)))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.lora_A.T @ self.lora_B.T


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class ZeroCentred(nn.LayerNorm):
    """Its scale is stored without the one that is added to it."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, (C,), 1 + self.weight, self.bias, self.eps)


class Precise(nn.Linear):
    """As OpenFold's, which can ask for another precision."""

    precision = torch.float64


CHANGES: dict[str, Callable[[Any, Any], nn.Module]] = {
    "hook": hooked,
    "own forward": own_forward,
    "hook of the norm": before_the_norm,
    "adapter": lambda linear, norm: Adapter(linear),
    "subclass": subclassed,
    "gradients": trained,
    "LoRA": lambda linear, norm: LoRALinear().requires_grad_(False),
    "own class": lambda linear, norm: Scaled(C, H).requires_grad_(False),
    "precision": lambda linear, norm: Precise(C, H).requires_grad_(False),
    "weight norm": lambda linear, norm: nn.utils.parametrizations.weight_norm(linear),
}
NORMS = {
    "zero-centred": lambda: ZeroCentred(C),
    "RMS": lambda: nn.RMSNorm(C),
    "none": nn.Identity,
    "of a map": lambda: nn.LayerNorm((N, C)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_layers_that_are_more_than_their_weights_are_asked(
    change: str, calls: list[Tensor]
) -> None:
    linear, norm = layers()
    linear = CHANGES[change](linear, norm)
    out = projected_pairs(site(), pairs(), linear, norm)
    assert not calls and torch.equal(out, linear(norm(pairs())).movedim(-1, -3))


@pytest.mark.parametrize("name", NORMS)
def test_other_norms_are_asked(name: str, calls: list[Tensor]) -> None:
    linear, _ = layers()
    norm: nn.Module = NORMS[name]().requires_grad_(False)
    out = projected_pairs(site(), pairs(), linear, norm)
    assert not calls and torch.equal(out, linear(norm(pairs())).movedim(-1, -3))


def test_hooks_of_all_modules_are_called(calls: list[Tensor]) -> None:
    linear, norm = layers()
    handle = nn.modules.module.register_module_forward_hook(lambda module, given, out: out + 1)
    try:
        projected_pairs(site(), pairs(), linear, norm)
        assert not calls
    finally:
        handle.remove()


def test_it_is_compiled_whole(calls: list[Tensor]) -> None:
    linear, norm = layers()
    where = site("sdpa")
    run = torch.compile(projected_pairs, backend="eager", fullgraph=True)
    assert torch.equal(
        run(where, pairs(), linear, norm), projected_pairs(where, pairs(), linear, norm)
    )
    where = site()
    out = run(where, pairs(), linear, norm)
    assert calls and torch.allclose(out, linear(norm(pairs())).movedim(-1, -3), atol=1e-5)


@pytest.mark.parametrize("backend", ["eager", "sdpa", None])
def test_references_ask_the_layers(backend: str | None, calls: list[Tensor]) -> None:
    linear, norm = layers()
    where = SimpleNamespace() if backend is None else site(backend)
    projected_pairs(where, pairs(), linear, norm)
    assert not calls


def test_pairs_that_learn_ask_the_layers(calls: list[Tensor]) -> None:
    linear, norm = layers()
    z = pairs().requires_grad_()
    projected_pairs(site(), z, linear, norm).sum().backward()
    assert not calls and z.grad is not None
    with torch.no_grad():
        projected_pairs(site(), z, linear, norm)
    assert len(calls) == 1


def test_transforms_ask_the_layers(calls: list[Tensor]) -> None:
    linear, norm = layers()
    torch.func.vmap(lambda z: projected_pairs(site(), z, linear, norm))(pairs())
    torch.func.jvp(lambda z: projected_pairs(site(), z, linear, norm), (pairs(),), (pairs(),))
    assert not calls


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_ask_the_layers(dtype: torch.dtype, calls: list[Tensor]) -> None:
    """Double precision is none of the kernel's; mixed ones are errors without autocast."""
    linear, norm = (layer.to(dtype) for layer in layers())
    z = pairs().to(dtype)
    projected_pairs(site(), z, linear, norm)
    assert len(calls) == (dtype == torch.bfloat16)
    calls.clear()
    with pytest.raises(RuntimeError):
        projected_pairs(site(), z, linear.float(), norm)
    assert not calls


def test_triangles_project_by_the_kernel(calls: list[Tensor]) -> None:
    """The normed pairs are there already; the starting node and the ending one."""
    pytest.importorskip("transformers")
    from tests.recipes.test_esmfold import CASES, block

    original, plain = block(), CASES["padded"].output(block())
    patch_model(original)
    out = CASES["padded"].output(original)
    assert len(calls) == 2 and (out - plain).abs().max() < 1e-5 * plain.abs().max()
