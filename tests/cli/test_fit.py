"""``flashbias-convert fit``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from flashbias_convert import load_model
from flashbias_convert.decompose.pair_forms import PairSite, forms
from flashbias_convert.decompose.pair_times import Pairs
from tests.pairformer import RECIPES, PairModel, make_inputs, make_model

from .conftest import Cli, Result

QUICK = ["--rank", 4, "--hidden", 8, "--steps", 20, "--learning-rate", 0.02]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, data, and a recipe for each kind of site."""
    folder = tmp_path_factory.mktemp("fit")
    save_file(make_model().state_dict(), folder / "m.safetensors")
    np.savez(folder / "data.npz", **{k: t.numpy() for k, t in make_inputs(proteins=3).items()})
    for name in ("TRIANGLE", "PAIR_BIAS"):
        text = f"from tests.pairformer import {name} as recipe\n"
        (folder / f"{name}.py").write_text(text)
    return folder


def arguments(files: Path, *more: object) -> list[object]:
    recipes = ["--recipe", files / "TRIANGLE.py", "--recipe", files / "PAIR_BIAS.py"]
    model = ["--arch", "tests.pairformer:make_model"]
    return ["fit", files / "m.safetensors", files / "data.npz", *recipes, *model, *QUICK, *more]


def test_a_fit_is_written_and_loads(cli: Cli, files: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    state = tmp_path / "fits"
    asked = ["--energy", 0.01, "--max-attention-error", 1, "-o", out, "--state", state]
    done = cli(*arguments(files, *asked))
    assert done.code == 0, done.err
    assert "factor_network" in done.out and "2 of 2 sites converted" in done.out
    assert sorted(path.name for path in state.iterdir()) == ["pair.fit", "triangle.fit"]
    model = load_model(out, arch=PairModel, recipes=RECIPES, backend="eager")
    with torch.no_grad():
        assert model(**make_inputs(proteins=1)).isfinite().all()
    shown = cli("show", out)
    assert shown.code == 0 and "factor_network" in shown.out
    back = cli("restore", out, "-o", tmp_path / "back.safetensors")
    assert back.code == 0, back.err


def test_no_fit_good_enough_writes_nothing(cli: Cli, files: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    done = cli(*arguments(files, "--sites", "pair", "--energy", 0.9999999, "-o", out, "--json"))
    assert done.code == 4 and not out.exists()
    told = done.json()
    assert told["error"]["type"] == "FitError" and told["exit_code"] == 4
    assert "1 fit missed what was asked, nothing was written: pair: the fit" in done.err
    by_name = {site["name"]: site for site in told["plan"]["sites"]}
    assert by_name["pair"]["status"] == "left alone"
    assert by_name["triangle"]["reason"] == "not among the included sites"


def test_some_fits_good_enough_write_those(
    cli: Cli, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flashbias_convert.fitting import site_fit

    original = site_fit.fit

    def spoiled(draw, **options):  # type: ignore[no-untyped-def]
        result = original(draw, **options)
        if options["evaluation"][0].x_q.shape[-1] == 12:  # the triangle, which has no single
            object.__setattr__(result, "reached", False)
        return result

    monkeypatch.setattr(site_fit, "fit", spoiled)
    out = tmp_path / "out.safetensors"
    asked = ["--energy", 0.01, "--max-attention-error", 1, "-o", out]
    done = cli(*arguments(files, *asked, "--json"))
    assert done.code == 5 and out.exists()
    assert "1 fit missed what was asked, the rest was converted: triangle" in done.err
    told = done.json()
    assert told["exit_code"] == 5 and told["counts"] == {"left alone": 1, "patched": 1}


# -- ESMFold of transformers, whose sites would be converted without a fit, too -----------------


@pytest.fixture(scope="module")
def folding(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model, and data."""
    pytest.importorskip("transformers")
    from tests.recipes.test_esmfold import model

    folder = tmp_path_factory.mktemp("folding")
    model().save_pretrained(folder / "m")
    residues = torch.randint(0, 20, (3, 12), generator=torch.Generator().manual_seed(0))
    np.savez(folder / "data.npz", input_ids=residues.numpy())
    return folder


def fit_folding(cli: Cli, folder: Path, *more: object) -> Result:
    quick = ("--rank", 1, "--hidden", 4, "--steps", 5, "--from-tokens", 1)
    return cli("fit", folder / "m", folder / "data.npz", *quick, *more)


def test_a_site_of_a_recipe_with_a_dense_bias_is_left_alone_too(
    cli: Cli, folding: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    done = fit_folding(cli, folding, "--energy", 0.999999, "-o", out, "--json")
    assert done.code == 4 and not list(tmp_path.iterdir())
    assert "3 fits missed what was asked, nothing was written" in done.err
    told = done.json()
    assert told["exit_code"] == 4 and told["error"]["type"] == "FitError"
    from tests.recipes.test_esmfold import PAIR

    for site in told["plan"]["sites"]:
        assert site["status"] == "left alone" and "did not reach" in site["reason"]
        assert site["spec"] is None and site["decisions"] == [] and site["gain"] is None
        heads, triangle = site["heads"], "tri_att" in site["name"]
        pairs = Pairs(PAIR, "linear", None) if triangle else Pairs(heads, "laying out")
        pair_site = PairSite(heads, site["head_dim"], pairs)
        assert site["forms"] == [dict(form) for form in forms(12, 12, pair_site)]
    shown = fit_folding(cli, folding, "--energy", 0.999999, "-o", out)
    assert "converted" not in shown.out and "left alone" in shown.out


def test_fits_that_reach_are_written_beside_those_that_miss(
    cli: Cli, folding: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flashbias_convert.fitting import site_fit

    original = site_fit.fit

    def spoiled(draw: Any, **options: Any) -> Any:
        result = original(draw, **options)
        object.__setattr__(result, "reached", "tri_att" in options["state"].name)
        return result

    monkeypatch.setattr(site_fit, "fit", spoiled)
    out = tmp_path / "out"
    anything = ("--energy", 0.001, "--max-attention-error", 1, "--state", tmp_path / "fits")
    done = fit_folding(cli, folding, *anything, "-o", out, "--json")
    assert done.code == 5, done.err
    told = done.json()
    assert told["exit_code"] == 5 and told["counts"] == {"left alone": 1, "patched": 2}
    assert "1 fit missed what was asked, the rest was converted" in done.err
    beside = json.loads(Path(told["plan_file"]).read_text())
    assert beside["sites"] == told["plan"]["sites"] and all(s["forms"] for s in beside["sites"])
    loaded = load_model(out)
    names = [name for name, m in loaded.named_modules() if hasattr(m, "score_bias")]
    assert len(names) == 2 and all("tri_att" in name for name in names)


def test_networks_that_hold_and_are_slower_are_told(
    cli: Cli, folding: Path, tmp_path: Path
) -> None:
    """Its sites are written with their bias as it is; a fit that misses is one all the same."""
    quick = ("--hidden", 4, "--steps", 5, "--max-attention-error", 1, "-o", tmp_path / "out")
    done = cli("fit", folding / "m", folding / "data.npz", *quick, "--energy", 0.001, "--json")
    assert done.code in (0, 5), done.err
    told = [s for s in done.json()["plan"]["sites"] if s["status"] == "patched"]
    many = f"{len(told)} site{'s' if len(told) > 1 else ''}"
    assert told and f"note: {many} with the bias as it is: trunk.blocks.0." in done.err
    for site in told:
        assert "its networks do not serve: up to 4096 tokens they are slower" in site["reason"]
        assert "factor networks of rank 96: reached" in site["reason"]
    loaded = load_model(tmp_path / "out")
    assert not any(".factor_network." in name for name in loaded.state_dict())
    missed = cli("fit", folding / "m", folding / "data.npz", "--rank", 1, *quick[:4],
                 "--energy", 0.999999, "-o", tmp_path / "none", "--json")  # fmt: skip
    assert missed.code == 4 and not (tmp_path / "none").exists()


def test_a_dry_run_fits_and_writes_nothing(cli: Cli, files: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    asked = ["--energy", 0.01, "--max-attention-error", 1, "-o", out, "--dry-run"]
    done = cli(*arguments(files, "--sites", "pair", *asked))
    assert done.code == 0 and not out.exists() and "would be converted" in done.out


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (["--rank", 0], "rank must be at least 1"),
        (["--from-tokens", 0], "--from-tokens must be at least 1"),
        (["--energy", 2], "energy must be in"),
        (["--sites", "nobody"], "matches no site"),
        (["--steps", 0], "steps must be a positive"),
    ],
)
def test_usage(cli: Cli, files: Path, change: list[object], said: str) -> None:
    done = cli(*arguments(files, *change))
    assert done.code == 2 and said in done.err


def test_data_that_is_not_there(cli: Cli, files: Path) -> None:
    done = cli("fit", files / "m.safetensors", "nowhere.npz")
    assert done.code == 2 and "there are no inputs nowhere.npz" in done.err
