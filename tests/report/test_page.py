"""The page: complete, self-contained, and drawn by its own script."""

from __future__ import annotations

import base64
import json
import math
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flashbias_convert import inspect_model
from flashbias_convert.plan import Plan
from flashbias_convert.report import write_page
from flashbias_convert.report.data import overview, site_details
from flashbias_convert.report.maps import BUDGET, LARGEST, encode_map, side_and_heads
from flashbias_convert.views import site_views
from tests.toy import TOY, make_model

EVIL = "</script><script>alert('x')</script>"


class Page(HTMLParser):
    """Elements of a page, and the text of its scripts and styles."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self._inside = ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        self._inside = dict(attributes).get("id") or tag

    def handle_data(self, text: str) -> None:
        self.texts[self._inside] = self.texts.get(self._inside, "") + text

    def data(self, name: str) -> Any:
        return json.loads(self.texts[name])


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Plan]:
    model = make_model(3)
    options: dict[str, Any] = {"method": "svd", "energy": 0.9, "exclude": ["blocks.1.attn"]}
    plan = inspect_model(model, recipes=[TOY], **options)
    plan.sites[0] = replace(plan.sites[0], reason=EVIL, gain=1.875)
    path = tmp_path_factory.mktemp("page") / "page.html"
    write_page(path, model, plan, title=f"model {EVIL}", notes=(EVIL,), recipes=[TOY])
    return path, plan


def test_nothing_comes_from_elsewhere(written: tuple[Path, Plan]) -> None:
    page = Page(written[0])
    assert {tag for tag, _ in page.tags} <= {
        *("html", "head", "meta", "title", "style", "body", "header", "main", "section", "script"),
    }
    attributes = [name for _, found in page.tags for name in found]
    assert not {"src", "href", "onload", "onclick"} & set(attributes)
    policy = next(a["content"] for t, a in page.tags if a.get("http-equiv"))
    assert policy is not None and policy.startswith("default-src 'none'")
    text = written[0].read_text().replace("http://www.w3.org/2000/svg", "")
    assert "http://" not in text and "https://" not in text and "@import" not in text


def test_names_in_a_model_cannot_leave_their_place(written: tuple[Path, Plan]) -> None:
    page = Page(written[0])
    assert sum(tag == "script" for tag, _ in page.tags) == 1 + 3 + 1
    assert page.data("overview")["title"] == f"model {EVIL}"
    assert page.data("site-0")["reason"] == EVIL
    assert "innerHTML" not in page.texts["script"]


def test_the_numbers_are_those_of_the_plan(written: tuple[Path, Plan]) -> None:
    path, plan = written
    page = Page(path)
    found = page.data("overview")
    assert found["counts"] == plan.counts() and found["options"] == plan.options.to_json()
    for number, (line, site) in enumerate(zip(found["sites"], plan.sites, strict=True)):
        assert (line["name"], line["status"]) == (site.name, site.status)
        assert (line["ranks"], line["gain"]) == (site.ranks(), site.gain)
        details = page.data(f"site-{number}")
        assert details["decisions"] == [d.to_json() for d in site.decisions]
    assert found["sites"][1]["energy"] is None and found["sites"][1]["attention"] == []


def test_maps_are_the_matrices_to_a_127th(written: tuple[Path, Plan]) -> None:
    page, plan = Page(written[0]), written[1]
    for number, view in enumerate(site_views(make_model(3), plan, [TOY])):
        maps = page.data(f"site-{number}")["maps"]
        assert set(maps) == {"0", "1"}
        for head, kinds in maps.items():
            shown = {"bias": view.bias, "terms": view.approximation, "residual": view.residual()}
            wanted = {kind: t for kind, t in shown.items() if t is not None}
            assert set(kinds) == set(wanted)
            for kind, tensor in wanted.items():
                matrix, found = tensor[int(head)].numpy(), decode(kinds[kind])
                assert found.shape == matrix.shape
                assert np.abs(found - matrix).max() <= np.abs(matrix).max() / 127


def decode(entry: dict[str, Any]) -> np.ndarray:
    steps = np.frombuffer(base64.b64decode(entry["data"]), dtype=np.int8)
    return steps.reshape(entry["rows"], entry["cols"]) * (entry["scale"] / 127)


def test_large_maps_are_reduced_and_residuals_keep_their_peaks() -> None:
    matrix = torch.zeros(300, 200)
    matrix[7, 11] = -5.0
    mean, peak = encode_map(matrix, 64), encode_map(matrix, 64, extreme=True)
    assert (mean["rows"], mean["cols"]) == (peak["rows"], peak["cols"]) == (64, 64)
    assert decode(peak).min() == pytest.approx(-5.0) and decode(mean).min() > -1.0
    zero = encode_map(torch.zeros(4, 4), 64)
    assert zero["scale"] == 0.0 and not decode(zero).any()


@pytest.mark.parametrize(("sites", "heads"), [(1, 8), (10, 8), (2000, 1), (2000, 32), (50_000, 64)])
def test_the_size_of_a_page_is_bounded(sites: int, heads: int) -> None:
    side, shown = side_and_heads(sites, heads)
    assert 16 <= side <= LARGEST and 1 <= shown <= heads
    at_least = 3 * 16 * 16 * sites  # one small head per site is always there
    assert 3 * side * side * shown * sites <= max(BUDGET, at_least)


def test_heads_without_maps_are_those_that_lose_least(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashbias_convert.report.data.side_and_heads", lambda s, h: (16, 1))
    model = make_model(1)
    plan = inspect_model(model, recipes=[TOY], method="svd", energy=0.9)
    (view,) = site_views(model, plan, [TOY])
    details = site_details(view, 1)
    worst = max(plan.sites[0].decisions, key=lambda d: d.attention_error).head
    assert list(details["maps"]) == [str(worst)] and details["heads_without_maps"] == 1
    assert details["reduced"] and details["maps"][str(worst)]["bias"]["rows"] == 16


def test_curves_are_short_and_reach_the_end() -> None:
    model = make_model(1)
    plan = inspect_model(model, recipes=[TOY], force_all=True)
    (view,) = site_views(model, plan, [TOY])
    curves = site_details(view, 1)["energy"]
    assert view.energy is not None
    for head, values in enumerate(curves["lost"]):
        expected = [1 - float(view.energy[head, rank - 1]) for rank in curves["ranks"]]
        assert values == pytest.approx(expected, rel=1e-3, abs=1e-12)
    assert (1 - max(v[-1] for v in curves["lost"])) > 0.9999
    long = replace(view, energy=torch.linspace(0.1, 1, 4000, dtype=torch.float64)[None])
    ranks = site_details(long, 1)["energy"]["ranks"]
    assert len(ranks) <= 161 and ranks[0] == 1 and ranks[-1] == math.ceil(0.9999 * 4000)


def test_a_plan_of_nothing_has_a_page(tmp_path: Path) -> None:
    plan = Plan(inspect_model(make_model(1), recipes=[TOY]).options, [])
    write_page(tmp_path / "x.html", make_model(1), plan, title="empty")
    assert Page(tmp_path / "x.html").data("overview")["sites"] == []
    assert overview(plan, "t", ())["counts"] == {}


# -- the script ----------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_the_script_is_valid(tmp_path: Path) -> None:
    root = resources.files("flashbias_convert.report")
    script = tmp_path / "all.js"
    script.write_text("".join((root / n).read_text() for n in ("charts.js", "page.js")))
    subprocess.run(["node", "--check", str(script)], check=True)


def browser() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    return next((found for name in names if (found := shutil.which(name))), None)


@pytest.fixture(scope="module")
def drawn(written: tuple[Path, Plan], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """The page after its script ran, with the third site chosen in its address."""
    program = browser()
    if program is None:
        pytest.skip("no browser is installed")
    profile = tmp_path_factory.mktemp("profile")
    command = [
        *(program, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"),
        *("--virtual-time-budget=5000", "--dump-dom"),
        f"file://{written[0]}#blocks.2.attn",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    result = profile / "drawn.html"
    result.write_text(done.stdout)
    yield Page(result)


def test_a_browser_draws_the_table_and_the_chosen_site(drawn: Page) -> None:
    rows = [a for tag, a in drawn.tags if tag == "tr" and "data-index" in a]
    assert [row["data-index"] for row in rows] == ["0", "1", "2"]
    assert [row.get("class") or "" for row in rows] == ["", "", "chosen"]
    assert sum(tag == "canvas" for tag, _ in drawn.tags) == 2 * 3
    assert sum(tag == "polyline" for tag, _ in drawn.tags) == 2
    assert sum(tag == "svg" for tag, _ in drawn.tags) == 4
    assert "blocks.2.attn" in drawn.texts["h2"]
    assert "1.9x" in drawn.texts["td"]
