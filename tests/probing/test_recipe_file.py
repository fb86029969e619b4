"""A starting recipe can be imported, passes the linter, and says what is missing."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flashbias_convert import (
    NothingToConvertError,
    Probe,
    UsageError,
    inspect_model,
    load_model,
    load_recipe_file,
    patch_model,
    probe_model,
)
from flashbias_convert.cli.app import run
from flashbias_convert.probing import recipe_text
from flashbias_convert.recipe import qualified_name
from tests.toy import BiasedAttention, make_input, make_model

from . import architectures as a

ROOT = Path(__file__).parents[2]
MODELS: dict[str, Callable[[], a.Made]] = {
    "a table and an index": a.swin,
    "a parameter": lambda: (make_model(1), make_input()),
    "an owner": a.t5,
    "a gate": a.wavlm,
    "queries": a.sam,
    "queries and keys": a.deberta,
}


def without_recipes(found: Probe) -> Probe:
    """As if nobody had written a recipe for these classes."""
    sites = tuple(replace(site, recipe=None, refused="") for site in found.sites)
    return replace(found, sites=sites)


def written(name: str, folder: Path) -> tuple[nn.Module, Path, str]:
    model, inputs = MODELS[name]()
    text, about = recipe_text(without_recipes(probe_model(model, inputs)), model)
    path = folder / "starting.py"
    path.write_text(text)
    return model, path, about


@pytest.mark.parametrize("name", MODELS)
def test_it_passes_the_linter_and_can_be_imported(name: str, tmp_path: Path) -> None:
    model, path, about = written(name, tmp_path)
    for command in (["check"], ["format", "--check"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--config", ROOT / "pyproject.toml", path]
        done = subprocess.run(ruff, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr + path.read_text()
    recipe = load_recipe_file(path)
    assert recipe.classes == (about,)
    assert any(qualified_name(type(module)) == about for module in model.modules())


@pytest.mark.parametrize("name", ["an owner", "a gate", "queries", "queries and keys"])
def test_a_plan_shows_what_is_missing(name: str, tmp_path: Path) -> None:
    model, path, _ = written(name, tmp_path)
    plan = inspect_model(model, recipes=[load_recipe_file(path)], force_all=True)
    assert {site.status for site in plan.sites} == {"failed"}
    assert all(site.reason.startswith("NotImplementedError: ") for site in plan.sites)


@pytest.mark.parametrize("name", ["a table and an index", "a parameter"])
def test_what_was_found_is_filled_in(name: str, tmp_path: Path) -> None:
    """The plan of the starting recipe holds the bias; only the forward is left to write."""
    model, path, _ = written(name, tmp_path)
    found = probe_model(model, MODELS[name]()[1])
    recipe = load_recipe_file(path)
    plan = inspect_model(model, recipes=[recipe], method="exact", force_all=True)
    assert {site.status for site in plan.sites} == {"patched"}
    for site, probed in zip(plan.sites, found.sites, strict=True):
        assert site.bias is not None and probed.bias is not None
        assert torch.equal(site.bias.dense(site.n, site.m), probed.bias[0])
    before = [type(module) for module in model.modules()]
    with pytest.raises(UsageError, match=r"is not finished: write flashbias_forward") as raised:
        patch_model(model, recipes=[recipe], method="exact", force_all=True)
    assert "unfinished" in (raised.value.hint or "")
    assert [type(module) for module in model.modules()] == before


def finished(text: str) -> str:
    """The starting recipe of the toy, as somebody would complete it."""
    text, count = re.subn(r"    # nothing is patched as long.*\n    unfinished = .*\n\n", "", text)
    assert count == 1
    head, _, rest = text.partition("        # the original forward:")
    _, raised, after = rest.partition("\n\n\ndef describe(")
    assert raised and "NotImplementedError" in rest
    body = """        q, k, v = type(self).project(self, x)
        return self.proj(self.score_bias(q, k, v).transpose(1, 2).flatten(2))"""
    return head + body + raised + after


def test_a_recipe_without_a_forward_converts_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is written; finished, it converts, and what is printed loads the file."""
    model, path, _ = written("a parameter", tmp_path)
    file = tmp_path / "toy.pth"
    torch.save(model.state_dict(), file)
    words = [str(file), "--arch", "tests.toy:make_model", "--arch-args", '{"depth": 1}', "--recipe",
             str(path), "--force-all", "--method", "exact"]  # fmt: skip
    assert run(words) == 2
    said = capsys.readouterr().err
    assert "not finished: write flashbias_forward" in said and "unfinished" in said
    assert sorted(p.name for p in tmp_path.iterdir()) == ["starting.py", "toy.pth"]

    path.write_text(finished(path.read_text()))
    assert run(words) == 0
    lines = capsys.readouterr().out.partition("to load it:\n")[2].splitlines()
    with pytest.raises(UsageError, match="wants recipe") as raised:
        load_model(tmp_path / "toy.flashbias.safetensors", arch=partial(make_model, depth=1))
    assert "recipes=[load_recipe_file(...)]" in (raised.value.hint or "")
    found: dict[str, Any] = {}
    exec(textwrap.dedent("\n".join(lines)), found)
    x = make_input()
    torch.testing.assert_close(found["model"](x), model.eval()(x))


def test_nothing_to_write() -> None:
    model, inputs = a.vit()
    with pytest.raises(NothingToConvertError, match="no attention of this model has a bias"):
        recipe_text(probe_model(model, inputs), model)
    model, inputs = a.bloom()  # there is a recipe for all of it
    with pytest.raises(UsageError, match="no biased attention without a recipe"):
        recipe_text(probe_model(model, inputs), model)


def test_the_class_with_most_sites_is_chosen() -> None:
    class Other(BiasedAttention):
        pass

    model = make_model(depth=2)
    model.blocks.append(nn.ModuleDict({"attn": Other(), "mlp": nn.Linear(16, 16)}))
    _, about = recipe_text(probe_model(model, make_input()), model)
    assert about == "tests.toy.BiasedAttention"
