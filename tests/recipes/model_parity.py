"""Recipes of models that make their bias in each call: checks of a tiny model and one run of it.

Other weights bring their own bias here; `parity` is for terms that are made of weights once.
"""

from __future__ import annotations

import copy
import importlib
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from flashbias_convert import fallback, load_model, patch_model, save_model, unpatch_model
from flashbias_convert.attention.backends import BackendFallbackWarning
from flashbias_convert.checkpoint import convert_checkpoint
from flashbias_convert.options import DecomposeOptions
from flashbias_convert.plan import Plan
from flashbias_convert.swap import patched_modules
from tests.recipes import parity
from tests.support import Float64Throughout, Nearby, assert_parity, nudged

#: dtypes and backends that a recipe is tried with
PATHS = (
    (torch.float32, "sdpa"),
    (torch.float32, "eager"),
    (torch.bfloat16, "sdpa"),
    (torch.float16, "eager"),
)


@dataclass(frozen=True)
class Case:
    """A model whose weights are random and whose bias matters.

    Attributes:
        make: a new one in eval mode, always the same.
        run: its output; floating-point inputs are cast to the dtype of its first parameter.
        bias: ends of the names of the parameters without which there is no bias.
        counts: what becomes of its sites.
        patch: keyword arguments of `patch_model`.
    """

    make: Callable[[], Any]
    run: Callable[[Any], Tensor]
    bias: tuple[str, ...]
    counts: Mapping[str, int]
    patch: Mapping[str, Any] = field(default_factory=dict)

    def patched(self, model: nn.Module, backend: str = "sdpa") -> Plan:
        """Patch a model of this case."""
        plan = patch_model(model, **{"backend": backend, "force_all": True, **self.patch})
        reasons = {(s.status, s.reason) for s in plan.sites}
        assert plan.counts() == self.counts, reasons
        return plan

    def output(self, model: nn.Module) -> Tensor:
        """What a model of this case computes, without gradients."""
        with torch.no_grad():
            return self.run(model)

    def truth(self, model: nn.Module) -> Tensor:
        """What it computes in float64 from the same weights."""
        with Float64Throughout():
            return self.output(copy.deepcopy(model).double())

    def nearby(self, model: nn.Module) -> Nearby:
        """For `assert_parity`, of the original."""

        def draw(number: int) -> tuple[Tensor, Tensor]:
            twin = nudged(model, number)
            unpatch_model(twin)
            return self.output(twin), self.truth(twin)

        return draw


def file_of(family: str) -> Any:
    """The file of transformers with the models of a family; skips where this version has none."""
    name = f"transformers.models.{family}"
    reason = f"this version of transformers has no {family}"
    pytest.importorskip(name, reason=reason, exc_type=ModuleNotFoundError)
    return importlib.import_module(f"{name}.modeling_{family}")


def randomised(model: Any, std: float = 0.15, **large: float) -> Any:
    """The model in eval mode, its matrices and biases normal, always the same.

    Args:
        model: any model.
        std: of every bias, and of every parameter with more than one dimension.
        **large: standard deviations of parameters whose names contain a word.
    """
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.eval().named_parameters():
        own = next((value for word, value in large.items() if word in name), None)
        if parameter.dim() > 1 or name.endswith("bias") or own is not None:
            own = std if own is None else own
            parameter.data.copy_(own * torch.randn(parameter.shape, generator=generator))
    return model


def compare(case: Case, dtype: torch.dtype, backend: str = "sdpa") -> tuple[Any, Tensor, Tensor]:
    """Patched equals original within rounding; the model, what the original computes, the truth."""
    model = case.make().to(dtype)
    plain, truth = case.output(model), case.truth(model)
    case.patched(model, backend)
    assert_parity(case.output(model), plain, truth, nearby=case.nearby(model))
    return model, plain, truth


def check_values(case: Case, dtype: torch.dtype, backend: str = "sdpa") -> None:
    """`compare`, and the bias is much larger than rounding."""
    model, plain, truth = compare(case, dtype, backend)
    off = (case.output(without_bias(case, model)).double() - truth).abs().max()
    slack = 2 * (plain.double() - truth).abs().max() + torch.finfo(dtype).eps * truth.abs().max()
    assert off > (100 if dtype == torch.float32 else 3) * slack, f"the bias moves {off:.3g} only"


def without_bias(case: Case, model: Any) -> Any:
    """The original without its bias."""
    bare = copy.deepcopy(model)
    unpatch_model(bare)
    found = [p for name, p in bare.named_parameters() if name.endswith(case.bias)]
    assert found
    for parameter in found:
        parameter.data.zero_()
    return bare


def check_comes_and_goes(case: Case, *, pickles: bool = True) -> None:
    """Unpatched, a model is as it was; copies and pickles of a patched one compute the same."""
    model = case.make()
    plain, classes, keys = (
        case.output(model),
        [type(m) for m in model.modules()],
        [*model.state_dict()],
    )
    case.patched(model)
    out = case.output(model)
    assert torch.equal(case.output(copy.deepcopy(model)), out)
    if pickles:  # some originals cannot be pickled
        assert torch.equal(case.output(pickle.loads(pickle.dumps(model))), out)
    assert [k for k in model.state_dict() if ".score_bias." not in k] == keys
    assert unpatch_model(model) == case.counts["patched"]
    assert [type(m) for m in model.modules()] == classes
    assert torch.equal(case.output(model), plain)


def check_training(case: Case, *, together: bool = False) -> None:
    """In training mode the original runs, with its dropout and its gradients.

    Args:
        case: the model.
        together: one attention module in training mode is enough to make all run the original.
    """
    model, grads = case.make(), []
    for change in (lambda m: None, case.patched):
        change(model)
        model.train().zero_grad()
        torch.manual_seed(3)
        case.run(model).square().mean().backward()
        found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        assert any(name.endswith(case.bias) for name in found)
        grads.append(found)
        model.eval()
    assert grads[0].keys() == grads[1].keys()
    assert all(torch.equal(grads[0][name], grads[1][name]) for name in grads[0])
    for module in patched_modules(model)[-1 if together else 0 :]:
        module.train()
    torch.manual_seed(4)
    out = case.output(model)
    unpatch_model(model)
    torch.manual_seed(4)
    assert torch.equal(case.output(model), out)


def check_follows_weights(case: Case) -> None:
    """Other weights after patching: the bias is theirs."""
    model, other = case.make(), case.make()
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if name.endswith(case.bias):
                parameter.mul_(-0.7)
    plain, truth = case.output(other), case.truth(other)
    case.patched(model)
    before = case.output(model)
    model.load_state_dict(other.state_dict(), strict=False)
    out = case.output(model)
    assert_parity(out, plain, truth, nearby=case.nearby(other))
    assert (out - before).abs().max() > 100 * (plain.double() - truth).abs().max()


def check_attention_weights(case: Case, run: Callable[[Any], Any]) -> None:
    """A call for attention weights runs the original, and says so.

    Args:
        case: the model.
        run: a call that asks for them; a tuple of tensors and tuples of tensors.
    """
    model = case.make()
    with torch.no_grad():
        plain = run(model)
        case.patched(model)
        fallback._warn.cache_clear()
        with pytest.warns(BackendFallbackWarning, match="attention weights"):
            out = run(model)
    assert _leaves(plain) and len(_leaves(plain)) == len(_leaves(out))
    assert all(torch.equal(a, b) for a, b in zip(_leaves(plain), _leaves(out), strict=True))


def _leaves(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [leaf for part in value for leaf in _leaves(part)]


def check_folder(case: Case, folder: Path) -> None:
    """Saved by transformers, converted and loaded, a model computes what a patched one does."""
    model = case.make()
    model.save_pretrained(folder / "model")
    options = DecomposeOptions(**{"force_all": True, **case.patch})
    done = convert_checkpoint(folder / "model", options=options)
    assert done.plan.counts() == case.counts
    loaded = load_model(done.output, backend="sdpa")
    case.patched(model)
    assert torch.equal(case.output(loaded), case.output(model))


def in_a_folder(case: parity.Case, folder: Path) -> None:
    """`check_folder` of a case of `parity`, with its terms exact."""

    def run(model: Any) -> Tensor:
        return case.run(model, case.inputs())

    exact = {"method": "exact"}
    check_folder(Case(case.model, run, (), {"patched": case.sites}, exact), folder)


def check_file(case: Case, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Saved as a converted file and loaded, with weights that no fresh model has, it is the same.

    Args:
        case: the model; `patch` may bring recipes along.
        folder: for the file.
        dtype: of the weights, in the file and loaded.
    """
    model = case.make().to(dtype)
    fresh = case.output(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-0.75)  # exact in every dtype
    plain = case.output(model)
    given: dict[str, Any] = {"recipes": case.patch.get("recipes", ())}
    plan = case.patched(model)
    out, file = case.output(model), folder / "model.safetensors"
    save_model(model, file, arch=case.make, plan=plan, **given)
    loaded = load_model(file, arch=case.make, dtype=dtype, backend="sdpa", **given)
    assert len(patched_modules(loaded)) == case.counts["patched"]
    assert next(loaded.parameters()).dtype == dtype
    assert torch.equal(case.output(loaded), out)
    assert (out - plain).abs().max() < 0.1 * (out - fresh).abs().max()
    unpatch_model(loaded)
    assert torch.equal(case.output(loaded), plain)


class NoSquares(TorchDispatchMode):
    """Fails when an operation makes a tensor that grows with N times M."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.n = n

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for made in out if isinstance(out, tuple | list) else (out,):
            if isinstance(made, Tensor):
                big = made.untyped_storage().nbytes() >= self.n * self.n
                assert not big, f"{func} makes {tuple(made.shape)}"
        return out
