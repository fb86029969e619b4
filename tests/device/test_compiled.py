"""Whole patched models under torch.compile, in one graph, and replayed as CUDA graphs.

On the CPU what was traced is run by aot_eager, without a compiler for C++.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

pytest.importorskip("timm")
pytest.importorskip("transformers")

from flashbias_convert import patch_model
from tests.checkpoint.models import tiny_model
from tests.recipes.alibi.models import make
from tests.support import assert_parity, nudged

from .models import on, outputs

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@dataclass(frozen=True)
class Compiling:
    """A model, and calls of it that differ in their numbers alone.

    Attributes:
        make: the model on the CPU, in eval mode, always the same weights, without a classifier.
        call: the call of a number, on the CPU.
        method: how it is converted, for `patch_model`.
    """

    make: Callable[[], Any]
    call: Callable[[int], Any]
    method: dict[str, Any]


def swinv2() -> Any:
    model: Any = tiny_model()
    model.reset_classifier(0)  # the error of a few logits is too much a matter of chance
    return model


def images(number: int) -> Tensor:
    return torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(number))


def words(number: int) -> dict[str, Any]:
    ids = torch.randint(3, 97, (2, 64), generator=torch.Generator().manual_seed(number))
    return {"input_ids": ids}


CASES = {
    "swinv2": Compiling(swinv2, images, {"method": "exact"}),
    "swinv2 by factors": Compiling(swinv2, images, {"method": "svd", "energy": 0.9}),
    "gpt2": Compiling(lambda: make("gpt2", use_cache=False), words, {"method": "exact"}),
}


@pytest.fixture(params=list(CASES))
def case(request: pytest.FixtureRequest) -> Compiling:
    return CASES[str(request.param)]


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch.compiler.reset()
    counters.clear()
    if torch.cuda.is_available():
        from torch._inductor.cudagraph_trees import reset_cudagraph_trees

        reset_cudagraph_trees()


def patched(case: Compiling, model: nn.Module, **options: Any) -> nn.Module:
    """The model itself, converted."""
    assert patch_model(model, force_all=True, **case.method, **options).patched
    return model


def check(case: Compiling, call: Any, found: Tensor, dtype: torch.dtype) -> None:
    """Compare with the converted model in eager mode, by plain attention, beside float64."""
    device = found.device

    def pair(model: nn.Module) -> tuple[Tensor, Tensor]:
        plain, wide = model.to(dtype), copy.deepcopy(model).to(dtype).double()
        patched(case, plain.to(device), backend="eager")
        patched(case, wide, backend="eager")
        return outputs(plain, on(device, call, dtype)).cpu(), outputs(
            wide, on(torch.device("cpu"), call, torch.float64)
        )

    plain, truth = pair(case.make())
    assert_parity(
        found.cpu(), plain, truth, nearby=lambda seed: pair(nudged(case.make().to(dtype), seed))
    )


def dynamo_backend(device: torch.device) -> str:
    return "inductor" if device.type == "cuda" else "aot_eager"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_is_one_graph(case: Compiling, device: torch.device, dtype: torch.dtype) -> None:
    if device.type not in ("cpu", "cuda"):
        pytest.skip("torch.compile cannot trace tensors of a device made in Python")
    model = patched(case, case.make().to(device, dtype))
    compiled: Any = torch.compile(model, backend=dynamo_backend(device), fullgraph=True)
    for number in range(2):
        found = outputs(compiled, on(device, case.call(number), dtype))
        assert found.device == device
        check(case, case.call(number), found, dtype)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_is_replayed_as_a_cuda_graph(
    case: Compiling, device: torch.device, dtype: torch.dtype
) -> None:
    """The first call warms up, the second records, and others replay what was recorded."""
    if device.type != "cuda":
        pytest.skip("CUDA graphs need a CUDA card")
    from torch._inductor.cudagraph_trees import get_manager

    model = patched(case, case.make().to(device, dtype))
    compiled: Any = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    found = []
    for number in range(5):
        torch.compiler.cudagraph_mark_step_begin()
        out = outputs(compiled, on(device, case.call(number), dtype))
        found.append(out.clone())  # a replay writes over it
    manager = get_manager(device.index, create_if_none_exists=False)
    assert manager is not None and any(manager.roots.values())  # something was recorded
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert counters["stats"]["unique_graphs"] == 1
    for number in (0, 1, 3, 4):
        check(case, case.call(number), found[number], dtype)
    assert not torch.equal(found[3], found[4])


@pytest.mark.parametrize("way", ["inference mode", "autocast"])
def test_modes_of_calls(case: Compiling, device: torch.device, way: str) -> None:
    """A compiled model in inference mode, and in bf16 by autocast: what it gives in eager mode."""
    if device.type not in ("cpu", "cuda"):
        pytest.skip("torch.compile cannot trace tensors of a device made in Python")
    model = patched(case, case.make().to(device))
    compiled: Any = torch.compile(model, backend=dynamo_backend(device), fullgraph=True)
    lowered = way == "autocast"
    for number in range(2):
        call = on(device, case.call(number), torch.float32)
        with ExitStack() as modes:
            if lowered:
                modes.enter_context(torch.no_grad())
                modes.enter_context(torch.autocast(device.type, torch.bfloat16))
            else:
                modes.enter_context(torch.inference_mode())
            found, expected = outputs(compiled, call).float(), outputs(model, call).float()
        assert found.isfinite().all()
        error = (found - expected).norm() / expected.norm()
        assert error < (4 * torch.finfo(torch.bfloat16).eps if lowered else 1e-5)
    assert counters["stats"]["unique_graphs"] == 1


def test_a_model_is_exported(case: Compiling, device: torch.device) -> None:
    """The exported program holds the operator, and gives what the model gives."""
    if device.type not in ("cpu", "cuda"):
        pytest.skip("torch.export cannot trace tensors of a device made in Python")
    model = patched(case, case.make().to(device))
    call = on(device, case.call(0), torch.float32)
    args, kwargs = ((), call) if isinstance(call, dict) else ((call,), {})
    with torch.no_grad():
        program = torch.export.export(model, args, kwargs)
        expected = outputs(model, call)
        found = program.module()(*args, **kwargs)
    names = {str(node.target) for node in program.graph.nodes}
    if device.type == "cuda":
        assert "flashbias_convert.attention.default" in names
    found = found if isinstance(found, Tensor) else found[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
