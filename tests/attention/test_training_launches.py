"""What a call and its backward pass launch where terms are trained, without a card.

Small launches cost the host more than the card. Kernels write nothing here: only what would be
launched is counted, and that is the same whatever the numbers are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flashbias_convert import KeyBias, LowRank, ScoreBias
from flashbias_convert.attention import (
    PreparedBias,
    factor_launch,
    launch,
    library,
    normalize,
)
from flashbias_convert.attention.arguments import check_arguments
from flashbias_convert.attention.launch_plan import LaunchPlan
from flashbias_convert.attention.operator import training_attention
from flashbias_convert.terms import constants

from .ahead_of_time import KERNELS
from .conftest import INTERPRETED

pytestmark = pytest.mark.skipif(INTERPRETED, reason="operations of the interpreter would count")
BF16, FP32 = torch.bfloat16, torch.float32
HEADS, LENGTH = 4, 64


class Launches(TorchDispatchMode):
    """Counts what would be launched on a card: kernels, and what torch does but for views."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self._pretend(monkeypatch)

    def _pretend(self, patch: pytest.MonkeyPatch) -> None:
        """Let tensors on the CPU pass for those of a card, and this mode go unseen."""
        patch.setattr(factor_launch, "_is_readable", lambda t: t.numel() > 0)
        patch.setattr(library, "_MORE_TO_COME", 0)
        for module in (factor_launch, constants):
            patch.setattr(module, "is_watched", lambda: False)
        for module in (launch, normalize, factor_launch):
            patch.setattr(module, "_PLANS", {})

        def planned(plan: Any, *_: object) -> None:
            self.found[plan.kernel.__name__] += 1

        patch.setattr(LaunchPlan, "_launch", planned)
        for module, name in KERNELS:
            patch.setattr(module, name, _Stub(getattr(module, name), self.found))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        views = [a.alias_info for a in func._schema.arguments if a.alias_info is not None]
        name = func._schema.name.removeprefix("aten::")
        if "empty" not in name and all(alias.is_write for alias in views):
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


class _Stub:
    """Stands in for a kernel."""

    def __init__(self, kernel: Any, found: Counter[str]) -> None:
        self.__name__, self.arg_names, self._found = kernel.__name__, kernel.arg_names, found

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *_, **__: self._found.update([self.__name__])


def trained(dtype: torch.dtype = FP32, batch: tuple[int, ...] = (), **fields: Any) -> LowRank:
    shape = (*batch, HEADS, LENGTH, 9)
    phi_q, phi_k = (torch.ones(shape, dtype=dtype).requires_grad_() for _ in "qk")
    return LowRank(phi_q=phi_q, phi_k=phi_k, **fields)


def inputs_in(dtype: torch.dtype = BF16) -> list[Tensor]:
    """q, k and v."""
    return [torch.ones(2, HEADS, LENGTH, 32, dtype=dtype).requires_grad_() for _ in range(3)]


def attend(
    inputs: list[Tensor], bias: PreparedBias, deterministic: bool = True, **options: Any
) -> Tensor:
    call: dict[str, Any] = {"scale": None, "causal": False, "query_start": None, "key_mask": None}
    args = check_arguments(*inputs, **{**call, "cosine": False, **options})
    return training_attention(*inputs, bias, args, deterministic)


def launches(
    monkeypatch: pytest.MonkeyPatch, *terms: Any, dtype: torch.dtype = BF16, **options: Any
) -> tuple[Counter[str], Counter[str]]:
    """Of a call, and of the gradients of q, k, v and everything that asks for one."""
    bias, inputs, counted = ScoreBias(terms, HEADS), inputs_in(dtype), Launches(monkeypatch)
    given = [*inputs, *(t for _, t in bias.named_tensors()), options.get("scale")]
    with counted:
        out = attend(inputs, PreparedBias(bias, once=True), **options)
    forward, dout = counted.found.copy(), torch.zeros_like(out)
    counted.found.clear()
    with counted:
        torch.autograd.grad(out, [t for t in given if t is not None and t.requires_grad], dout)
    return forward, counted.found


FORWARD = {"linalg_vector_norm": 2, "factor_columns_kernel": 1, "attention_kernel": 1}
BACKWARD = {
    "delta_kernel": 1, "factor_columns_kernel": 1, "query_gradients_kernel": 1,
    "key_gradients_kernel": 1, "sum": 2, "factor_gradients_kernel": 1,
}  # fmt: skip
#: a call -> what it launches beside `FORWARD`, and beside `BACKWARD`
CALLS: dict[str, tuple[Callable[[], dict[str, Any]], dict[str, int], dict[str, int]]] = {
    "split": (lambda: {"terms": (trained(),)}, {}, {}),
    "unsplit": (lambda: {"terms": (trained(split=0),)}, {}, {}),
    "factors-in-bf16": (lambda: {"terms": (trained(BF16),)}, {}, {}),
    "factors-of-the-batch": (lambda: {"terms": (trained(batch=(2,)),)}, {}, {"sum": -2}),
    "fp16": (lambda: {"terms": (trained(),), "dtype": torch.float16}, {}, {}),
    "fp32": (lambda: {"terms": (trained(),), "dtype": FP32}, {}, {}),
    "cosine": (
        lambda: {"terms": (trained(),), "cosine": True, "scale": torch.ones(HEADS)},
        {"normalize_rows_kernel": 1}, {"normalize_rows_kernel": 2},
    ),
    "trained-scale": (
        lambda: {"terms": (trained(),), "scale": torch.ones(HEADS).requires_grad_()},
        {}, {"sum": 1},
    ),
    "atomics": (
        lambda: {"terms": (trained(),), "deterministic": False}, {},
        {"query_gradients_kernel": -1, "key_gradients_kernel": -1, "sum": -1,
         "all_gradients_kernel": 1, "zeros": 1, "finish_queries_kernel": 1},
    ),
    "key-bias": (
        lambda: {"terms": (trained(), KeyBias(values=torch.ones(1, LENGTH).requires_grad_()))},
        {}, {"sum": 1},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_launches_of_a_trained_term(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """None is there that one of these does not account for."""
    make, more_forward, more_backward = CALLS[name]
    options = make()
    forward, found = launches(monkeypatch, *options.pop("terms"), **options)
    assert forward == _sums(FORWARD, more_forward)
    assert found == _sums(BACKWARD, more_backward)


def _sums(*parts: dict[str, int]) -> Counter[str]:
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part)
    return +total  # without those of which none is left


@pytest.mark.parametrize("wanted", ["phi_q", "phi_k"])
def test_what_is_not_wanted_is_not_written(monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    """Of the two factors, the columns in bf16 of the other one, and one gradient."""
    term, written = trained(), []
    frozen = term.phi_k if wanted == "phi_q" else term.phi_q
    frozen.requires_grad_(False)
    run = LaunchPlan.run

    def noted(plan: Any, device: object, tensors: Any, *numbers: Any) -> None:
        if plan.kernel.__name__.startswith("factor_"):
            outs = {n: t for n, t in tensors.mapping.items() if n.startswith(("out", "again"))}
            written.append({name: t.dtype for name, t in outs.items()})
        run(plan, device, tensors, *numbers)

    monkeypatch.setattr(LaunchPlan, "run", noted)
    launches(monkeypatch, term)
    own, other = ("q", "k") if wanted == "phi_q" else ("k", "q")
    columns = {"out_q": torch.float16, "out_k": torch.float16}
    assert written == [columns, {**columns, f"again_{other}": BF16}, {f"out_{own}": FP32}]


def test_a_bias_that_is_frozen_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """How large its columns are is kept with the bias; calls after the first do not ask again."""
    frozen = LowRank(**{n: t.detach() for n, t in trained().tensors().items()})
    bias, counted = PreparedBias(ScoreBias((frozen,), HEADS)), Launches(monkeypatch)
    inputs = inputs_in()
    with counted:
        for _ in range(2):
            attend(inputs, bias)
    assert counted.found["linalg_vector_norm"] == 2
    assert counted.found["attention_kernel"] == 2


def test_factors_that_have_changed_give_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of an optimizer between a call and its backward pass is an error, not a wrong sum."""
    term, _ = trained(), Launches(monkeypatch)
    bias = PreparedBias(ScoreBias((term,), HEADS), once=True)
    attend(inputs_in(), bias).sum().backward()
    out = attend(inputs_in(), bias)
    with torch.no_grad():
        term.phi_k.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
