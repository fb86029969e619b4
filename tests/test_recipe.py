"""Finding the recipe of a module, and loading recipes from files."""

from __future__ import annotations

import pickle
import sys
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from torch import nn

import flashbias_convert.recipe as recipe_module
from flashbias_convert.errors import UsageError
from flashbias_convert.recipe import GROUP, Recipe, Registry, Site, load_recipe_file
from tests.toy import TOY, BiasedAttention, make_model, make_recipe


class Derived(BiasedAttention):
    pass


def test_an_explicit_recipe_is_found_by_class() -> None:
    assert Registry([TOY]).find(BiasedAttention()) is TOY
    assert Registry().find(BiasedAttention()) is None


def test_a_subclass_finds_the_recipe_of_its_nearest_base() -> None:
    near = make_recipe(name="near", classes=(f"{__name__}.Derived",))
    assert Registry([TOY]).find(Derived()) is TOY
    assert Registry([TOY, near]).find(Derived()) is near
    assert Registry([TOY, near]).find(BiasedAttention()) is TOY


def test_an_explicit_recipe_comes_before_an_installed_one() -> None:
    name = "timm.models.swin_transformer_v2.WindowAttention"
    mine = make_recipe(name="mine", classes=(name,))
    fake = type("WindowAttention", (nn.Module,), {"__module__": name.rpartition(".")[0]})
    assert Registry([mine]).find(fake()) is mine
    installed = Registry().find(fake())
    assert installed is not None and installed.name == "timm_swinv2"


def test_a_name_in_any_module_is_found_where_it_matches() -> None:
    """After recipes for the class itself, and after those for its bases."""
    wild = make_recipe(name="wild", classes=("*.Derived", "*.BiasedAttention"))
    fits = replace(wild, matches=lambda module: hasattr(module, "here"))
    module = Derived()
    assert Registry([wild]).find(module) is wild and Registry([fits]).find(module) is None
    module.here = True  # type: ignore[assignment]
    assert Registry([fits]).find(module) is fits
    assert Registry([fits, TOY]).find(module) is TOY
    assert wild.knows(Derived) and TOY.knows(BiasedAttention)
    assert not TOY.knows(Derived) and not wild.knows(nn.Linear)


def test_a_word_behind_a_colon_tells_recipes_of_one_name_apart() -> None:
    by_word = [
        replace(
            make_recipe(name=word, classes=(f"*.Derived:{word}",)),
            matches=lambda module, word=word: hasattr(module, word),
        )
        for word in ("one", "other")
    ]
    module = Derived()
    assert Registry(by_word).find(module) is None
    module.other = True  # type: ignore[assignment]
    assert Registry(by_word).find(module) is by_word[1]
    assert by_word[0].knows(Derived) and not by_word[0].knows(BiasedAttention)


def test_by_name_names_the_nearest_recipes_when_it_fails() -> None:
    registry = Registry([TOY])
    assert registry.by_name("toy") is TOY
    with pytest.raises(UsageError, match=r"'tow'.*nearest: toy"):
        registry.by_name("tow")
    with pytest.raises(UsageError, match=r"nearest: timm_swinv2,"):
        registry.by_name("timm_swinv3")


def test_all_lists_every_recipe_once() -> None:
    twice = make_recipe(classes=("a.A", "b.B"))
    names = [recipe.name for recipe in Registry([twice]).all()]
    assert sorted(names) == sorted(set(names))
    assert {"toy", "timm_swinv2"} <= set(names)


def test_a_broken_plugin_does_not_break_the_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    points = [
        EntryPoint("tests.toy.BiasedAttention", "no_such_module_anywhere:recipe", GROUP),
        EntryPoint("torch.nn.modules.linear.Linear", "tests.toy:TOY", GROUP),
    ]
    monkeypatch.setattr(recipe_module, "entry_points", lambda group: points)
    registry = Registry()
    assert registry.find(BiasedAttention()) is None
    assert registry.find(nn.Linear(1, 1)) is TOY
    assert registry.all() == [TOY]
    assert "no_such_module_anywhere" in caplog.text


def test_a_site_knows_its_parent() -> None:
    model = make_model()
    inner = model.get_submodule("blocks.1.attn")
    assert Site("blocks.1.attn", inner, model).parent is model.get_submodule("blocks.1")
    assert Site("", model, model).parent is None


def test_a_recipe_file_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("from tests.toy import make_recipe\nrecipe = make_recipe(name='from_file')\n")
    loaded = load_recipe_file(path)
    assert isinstance(loaded, Recipe) and loaded.name == "from_file"


def test_a_recipe_file_may_define_dataclasses_and_be_pickled(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "from typing import ClassVar\n"
        "from tests.toy import make_recipe\n"
        "@dataclass\nclass Sizes:\n    known: ClassVar[int] = 1\n    n: int = 2\n"
        "def describe(site):\n    return None\n"
        "recipe = make_recipe(name='from_file', describe=describe)\n"
    )
    describe = load_recipe_file(path).describe
    assert pickle.loads(pickle.dumps(describe)) is describe
    sizes = sys.modules[describe.__module__].Sizes
    assert pickle.loads(pickle.dumps(sizes(n=3))) == sizes(n=3)


def test_recipe_files_of_one_name_do_not_mix(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        text = f"from tests.toy import make_recipe\nrecipe = make_recipe(name={folder!r})\n"
        (tmp_path / folder / "mine.py").write_text(text)
    assert load_recipe_file(tmp_path / "a" / "mine.py").name == "a"
    assert load_recipe_file(tmp_path / "b" / "mine.py").name == "b"


def test_a_recipe_file_that_fails_leaves_no_module(tmp_path: Path) -> None:
    before = set(sys.modules)
    (tmp_path / "bad.py").write_text("1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        load_recipe_file(tmp_path / "bad.py")
    assert not {name for name in set(sys.modules) - before if "recipe" in name}


@pytest.mark.parametrize("content", ["x = 1\n", "recipe = 'no recipe'\n"])
def test_a_file_without_a_recipe_is_a_usage_error(tmp_path: Path, content: str) -> None:
    path = tmp_path / "other.py"
    path.write_text(content)
    with pytest.raises(UsageError, match="does not define"):
        load_recipe_file(path)


def test_a_missing_file_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        load_recipe_file(tmp_path / "none.py")
