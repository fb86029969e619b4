"""Distances in graphs: looked up in each call, or found to be a table by looking at the bias."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from flashbias_convert import load_model, patch_model
from flashbias_convert.builders import find_builder
from flashbias_convert.built_terms import lookup
from flashbias_convert.cli.app import run
from flashbias_convert.decompose import added_cost
from tests import graphormer
from tests.graphormer import DIM, FARTHEST, HEADS, RECIPES, N, make_inputs, make_model
from tests.support import assert_parity


def outputs(model: nn.Module, fixed: bool, dtype: torch.dtype = torch.float32) -> Tensor:
    """Those of the nodes; rows of padding are nobody's."""
    inputs: dict[str, Any] = make_inputs()
    inputs["x"] = inputs["x"].bfloat16().to(dtype)
    if fixed:
        del inputs["distances"]
    with torch.no_grad():
        out: Tensor = model(**inputs)
    return out[inputs["nodes"]]


@pytest.mark.parametrize(("dtype", "backend"), [
    (torch.float32, "sdpa"), (torch.float32, "eager"), (torch.bfloat16, "sdpa"),
])  # fmt: skip
@pytest.mark.parametrize("fixed", [False, True])
def test_values(fixed: bool, dtype: torch.dtype, backend: str) -> None:
    truth_model = make_model(fixed).to(dtype).double()
    model = make_model(fixed).to(dtype)
    plain, truth = outputs(model, fixed, dtype), outputs(truth_model, fixed, torch.float64)
    plan = patch_model(model, recipes=RECIPES, backend=backend, method="exact")
    assert [site.status for site in plan.sites] == ["patched"] * 2
    assert_parity(outputs(model, fixed, dtype), plain, truth)
    nn.init.zeros_(truth_model.get_parameter("spatial.weight"))
    without = outputs(truth_model, fixed, torch.float64)
    assert (without - truth).abs().max() > 0.1


@pytest.mark.parametrize("fixed", [False, True])
def test_a_file_is_converted_by_the_program_saved_and_loaded(fixed: bool, tmp_path: Path) -> None:
    """The table is converted, or its weight is read in each call; other graphs need nothing new."""
    weights = {k: t.clone() for k, t in make_model(fixed).state_dict().items()}
    save_file(weights, tmp_path / "m.safetensors")
    recipe = tmp_path / "recipe.py"
    recipe.write_text(f"from tests.graphormer import {'FIXED' if fixed else 'GRAPH'} as recipe\n")
    factory = "make_fixed" if fixed else "make_model"
    given = ["--recipe", recipe, "--arch", f"tests.graphormer:{factory}", "--method", "exact", "-q"]
    assert run([str(a) for a in ["convert", tmp_path / "m.safetensors", *given]]) == 0
    loaded = load_model(
        tmp_path / "m.flashbias.safetensors",
        arch=getattr(graphormer, factory),
        recipes=RECIPES,
        backend="eager",
    )
    again = make_model(fixed)
    patch_model(again, recipes=RECIPES, backend="eager", method="exact")
    assert torch.equal(outputs(loaded, fixed), outputs(again, fixed))
    spec = loaded.get_submodule("layers.0.score_bias").spec()
    at = {"n": N, "m": N, "head_dim": DIM // HEADS}
    cheaper = min(("lookup", "dense"), key=lambda kind: added_cost(kind, **at))
    assert [t["kind"] for t in spec["terms"]] == ([cheaper] if fixed else [])
    assert spec.get("builders", []) == ([] if fixed else ["lookup"])


def test_another_table_is_read_in_the_next_call() -> None:
    model, other = make_model(), make_model()
    patch_model(model, recipes=RECIPES, backend="eager")
    for each in (model, other):
        outputs(each, fixed=False)
        with torch.no_grad():
            each.get_parameter("spatial.weight").mul_(-1)
    torch.testing.assert_close(outputs(model, fixed=False), outputs(other, fixed=False))


# -- the builder ---------------------------------------------------------------------------


def table() -> Tensor:
    return torch.randn(HEADS, FARTHEST, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
@pytest.mark.parametrize("batch", [(), (3,)])
def test_cells_are_entries(dtype: torch.dtype, batch: tuple[int, ...]) -> None:
    draw = torch.Generator().manual_seed(1)
    code = torch.randint(FARTHEST, (*batch, N, N + 2), generator=draw).to(dtype)
    term = find_builder("lookup").make(table=table(), code=code)
    wanted = table()[:, code.long()]
    wanted = wanted.movedim(0, 1) if batch else wanted
    assert torch.equal(term.dense(N, N + 2), wanted)
    assert lookup(table=table(), code=code).code is term.code  # layers share what is made of it
    code[..., 0, 0] = (code[..., 0, 0] + 1) % FARTHEST
    moved = lookup(table=table(), code=code).dense(N, N + 2)
    assert (moved != wanted).nonzero().shape[0] == HEADS * max(1, len(code) if batch else 1)


@pytest.mark.parametrize("wrong", [-1, FARTHEST])
def test_codes_outside_the_table_are_refused(wrong: int) -> None:
    code = torch.zeros(N, N, dtype=torch.int64)
    code[3, 4] = wrong
    with pytest.raises(ValueError, match=f"the table has {FARTHEST} entries"):
        lookup(table=table(), code=code)


def test_a_compiled_model_looks_up() -> None:
    model = make_model()
    patch_model(model, recipes=RECIPES, backend="eager")
    plain = outputs(model, fixed=False)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(outputs(compiled, fixed=False), plain)
