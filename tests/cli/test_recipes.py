"""``flashbias-convert recipes``."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

from .conftest import Cli


def test_json_is_a_list_of_recipes(cli: Cli) -> None:
    found = {recipe["name"]: recipe for recipe in cli("recipes", "--json").json()}
    swin = found["timm_swinv2"]
    assert swin["library"] == "timm" and swin["installed"] == version("timm")
    assert swin["classes"] == ["timm.models.swin_transformer_v2.WindowAttention"]
    assert swin["installed_is_tested"] is True
    assert swin["title"] and swin["tested"] and swin["converts"] is True
    assert found["transformers_deberta"]["converts"] is False


def test_the_table_names_every_recipe(cli: Cli) -> None:
    done = cli("recipes")
    assert (done.code, done.err) == (0, "")
    for recipe in cli("recipes", "--json").json():
        assert recipe["name"] in done.out
    lines = [line.split() for line in done.out.splitlines()]
    rows = {line[0]: line[1] for line in lines if len(line) > 1}
    assert rows["timm_swin"] == "yes" and rows["transformers_deberta"] == "no"


def test_a_recipe_in_a_file_is_listed_too(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from tests.toy import TOY as recipe\n")
    names = [r["name"] for r in cli("recipes", "--recipe", tmp_path / "mine.py", "--json").json()]
    assert "toy" in names and "timm_swinv2" in names
