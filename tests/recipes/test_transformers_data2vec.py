"""Data2VecVision of transformers, patched, against the original."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashbias_convert import fallback, load_model, patch_model
from flashbias_convert.attention.backends import BackendFallbackWarning
from flashbias_convert.checkpoint import convert_checkpoint
from flashbias_convert.options import DecomposeOptions
from tests.recipes.parity import CHECKS, ONCE, Case

transformers = pytest.importorskip("transformers")

TINY: dict[str, Any] = {
    "image_size": 20, "patch_size": 4, "hidden_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "intermediate_size": 48, "drop_path_rate": 0.0,
    "use_relative_position_bias": True,
}  # fmt: skip
SHARED_ONLY = {"use_relative_position_bias": False, "use_shared_relative_position_bias": True}


def make(eager: bool = False, **changes: Any) -> Any:
    config = transformers.Data2VecVisionConfig(**{**TINY, **changes})
    config._attn_implementation = "eager" if eager else "sdpa"
    return transformers.Data2VecVisionModel(config)


def last(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x).last_hidden_state
    return out


def case(name: str, size: tuple[int, int] = (20, 20), **changes: Any) -> Case:
    return Case(name, lambda: make(**changes), (2, 3, *size), last, sites=2)


OWN = case("own")
EAGER = case("own, eager", eager=True)
BOTH = case("both", use_shared_relative_position_bias=True)
CASES = [
    OWN,
    EAGER,
    case("no layer scale", layer_scale_init_value=0.0),
    case("shared", **SHARED_ONLY),
    BOTH,
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("check", CHECKS)
def test_parity(case: Case, check: Callable[[Case], None]) -> None:
    check(case)


@pytest.mark.parametrize("check", ONCE)
def test_changes(check: Callable[[Case], None]) -> None:
    check(EAGER)


@pytest.mark.parametrize(
    "check", [c for c in ONCE if c.__name__ in ("check_training", "check_state_dict")]
)
def test_changes_where_the_bias_is_shared(check: Callable[[Case], None]) -> None:
    check(BOTH)


def larger(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x, interpolate_pos_encoding=True).last_hidden_state
    return out


@pytest.mark.parametrize("changes", [{}, SHARED_ONLY], ids=["own", "shared"])
def test_another_size(changes: dict[str, Any]) -> None:
    made = Case("another size", lambda: make(**changes), (2, 3, 28, 12), larger, sites=2)
    for check in CHECKS:
        check(made)


def test_attention_weights_come_from_the_original() -> None:
    for case in (EAGER, BOTH):
        model, x = case.model(), case.inputs()
        with torch.no_grad():
            plain = model(x, output_attentions=True)
            case.patch(model)
            fallback._warn.cache_clear()
            with pytest.warns(BackendFallbackWarning, match="attention weights"):
                out = model(x, output_attentions=True)
        assert torch.equal(out.last_hidden_state, plain.last_hidden_state)
        assert len(out.attentions) == 2


def test_a_layer_returns_as_many_values_as_before() -> None:
    for case in (OWN, EAGER):
        model = case.model()
        layer, x = model.encoder.layer[0], torch.randn(1, 26, 32)
        before = len(layer.attention.attention(x, resolution=(20, 20)))
        case.patch(model)
        assert len(layer.attention.attention(x, resolution=(20, 20))) == before


def test_a_folder_converts_and_loads(tmp_path: Path) -> None:
    model, x = OWN.model(), OWN.inputs()
    model.save_pretrained(tmp_path / "model")
    options = DecomposeOptions(method="exact", force_all=True)
    done = convert_checkpoint(tmp_path / "model", options=options)
    assert done.plan.counts() == {"patched": 2}
    loaded = load_model(done.output, backend="sdpa")
    patch_model(model, method="exact", backend="sdpa", force_all=True)
    assert torch.equal(OWN.output(loaded, x), OWN.output(model, x))
