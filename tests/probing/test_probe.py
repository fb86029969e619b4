"""Probing changes nothing, says what it cannot do, and tells one input from another."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashbias_convert import UsageError, patch_model, probe_model
from flashbias_convert.inputs import Batch
from flashbias_convert.probing.changed import alike, changed
from tests.toy import TOY, BiasedAttention, make_input, make_model


def state(model: nn.Module) -> dict[str, Any]:
    """Everything of a model that a probe might leave changed."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_always_called")
    return {
        "modes": [m.training for m in model.modules()],
        "classes": [type(m) for m in model.modules()],
        "hooks": [len(getattr(m, h)) for m in model.modules() for h in hooks],
        "attributes": [sorted(vars(m)) for m in model.modules()],
        "weights": {k: v.clone() for k, v in model.state_dict().items()},
        "grad": torch.is_grad_enabled(),
        "random": torch.random.get_rng_state(),
    }


def same(before: dict[str, Any], after: dict[str, Any]) -> bool:
    weights = all(torch.equal(v, after["weights"][k]) for k, v in before["weights"].items())
    others = [k for k in before if k not in ("weights", "random")]
    random = torch.equal(before["random"], after["random"])
    return weights and random and all(before[k] == after[k] for k in others)


def test_the_model_is_left_as_it_was() -> None:
    model = make_model()
    model.train()
    model.blocks[1].eval()
    before = state(model)
    assert len(probe_model(model, make_input()).sites) == 3
    assert same(before, state(model))


class Breaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = BiasedAttention()

    def forward(self, x: Tensor) -> Tensor:
        self.attn(x)
        raise RuntimeError("out of order")


def test_it_is_left_as_it_was_by_a_failure_too() -> None:
    model = Breaks().train()
    before = state(model)
    with pytest.raises(UsageError, match="does not run with these inputs: RuntimeError: out of"):
        probe_model(model, make_input())
    assert same(before, state(model))
    x = torch.zeros(2, requires_grad=True)
    assert (x * 2).requires_grad, "no mode is left behind"


def test_training_mode_does_not_matter() -> None:
    """With its dropout on, two runs would differ."""
    model = make_model().train()
    assert probe_model(model, make_input()).counts() == {"low rank": 3}


def test_a_bias_of_low_rank_and_its_numbers() -> None:
    model = make_model(depth=1)
    (site,) = probe_model(model, make_input()).sites
    assert (site.site, site.kind, site.term) == ("blocks.0.attn", "low rank", "low_rank")
    assert site.ranks is not None and max(site.ranks) <= 4  # three columns and a row constant
    assert site.attention_errors is not None and all(0 <= e <= 1 for e in site.attention_errors)
    (attention,) = [m for m in model.modules() if isinstance(m, BiasedAttention)]
    assert site.bias is not None and torch.equal(site.bias[0], attention.table.detach())
    whole = probe_model(model, make_input(), energy=1.0).sites[0]
    assert whole.ranks is not None and min(whole.ranks) > max(site.ranks)


def test_own_recipes_are_known() -> None:
    found = probe_model(make_model(depth=1), make_input(), recipes=[TOY])
    assert found.sites[0].recipe == "toy"
    assert probe_model(make_model(depth=1), make_input()).sites[0].recipe is None


def test_to_dict_is_json() -> None:
    found = probe_model(make_model(depth=1), make_input())
    data = json.loads(json.dumps(found.to_dict()))
    assert data["counts"] == {"low rank": 1} and data["sites"][0]["n"] == 36
    assert "bias" not in data["sites"][0] and "terms" not in data["sites"][0]


def test_refusals() -> None:
    model = make_model(depth=1)
    with pytest.raises(UsageError, match="no inputs"):
        probe_model(model, [])
    with pytest.raises(UsageError, match="energy must be"):
        probe_model(model, make_input(), energy=0.0)
    with pytest.raises(UsageError, match="nothing that could be changed"):
        probe_model(model, torch.ones(2, 3, 16, dtype=torch.bool))
    with pytest.raises(UsageError, match="does not take these inputs"):
        probe_model(model, {"attention_mask": torch.ones(2, 3, dtype=torch.long)})
    with pytest.raises(UsageError, match="wrapped by DataParallel"):
        probe_model(nn.DataParallel(model), make_input())
    patch_model(model, recipes=[TOY], method="exact", force_all=True)
    with pytest.raises(UsageError, match="the model is patched"):
        probe_model(model, make_input())


def test_nothing_seen_is_said() -> None:
    (note,) = probe_model(nn.Linear(4, 4), torch.randn(2, 4)).notes
    assert "no attention was seen" in note


def test_nan_in_a_bias_is_not_understood() -> None:
    model = make_model(depth=1)
    for module in model.modules():
        if isinstance(module, BiasedAttention):
            module.table.data[0, 3, 4] = float("nan")
    (site,) = probe_model(model, make_input()).sites
    assert site.kind == "unknown" and "not finite" in site.detail


def test_a_site_that_breaks_the_prober_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from flashbias_convert.probing import probe, run

    original = run.of_scores
    broken: list[int] = []

    def sometimes(*args: Any) -> Any:
        broken.append(1)
        if len(broken) in (1, 4):  # the first site of both runs
            raise ArithmeticError("no")
        return original(*args)

    monkeypatch.setattr(run, "of_scores", sometimes)
    found = probe_model(make_model(depth=3), make_input())
    assert [site.site for site in found.sites] == ["blocks.1.attn", "blocks.2.attn"]
    assert found.notes == ("blocks.0.attn could not be looked at: ArithmeticError: no",)
    monkeypatch.undo()

    def classify(*args: Any) -> Any:
        raise ArithmeticError("no")

    monkeypatch.setattr(probe, "classify", classify)
    (site,) = probe_model(make_model(depth=1), make_input()).sites
    assert (site.kind, site.detail) == ("unknown", "ArithmeticError: no")


# -- inputs ----------------------------------------------------------------------------------


def test_two_batches_are_taken_as_they_are() -> None:
    two = [make_input(1), make_input(2)]
    assert "two batches" in probe_model(make_model(1), two).inputs
    again = probe_model(make_model(1), [make_input(1), make_input(1)]).inputs
    assert "with other values" in again  # equal batches tell nothing apart


def test_a_second_input_of_the_same_kind() -> None:
    ids = torch.arange(12).view(2, 6)
    batch = Batch((torch.ones(2, 3),), {"ids": ids, "attention_mask": ids, "flag": True})
    other = changed(batch)
    assert other is not None
    assert other.args[0].shape == (2, 3) and not torch.equal(other.args[0], batch.args[0])
    assert not torch.equal(other.kwargs["ids"], ids)
    assert torch.equal(other.kwargs["ids"].sort(-1).values, ids)
    assert other.kwargs["attention_mask"] is ids and other.kwargs["flag"] is True
    assert alike(batch, other) and not alike(batch, batch)
    assert changed(Batch(kwargs={"mask": ids})) is None
    assert not alike(batch, Batch((torch.ones(2, 4),), batch.kwargs))


def test_ids_that_are_all_the_same_cannot_be_changed() -> None:
    assert changed(Batch((torch.ones(2, 5, dtype=torch.long),))) is None


class OneByOne(nn.Module):
    """A head with a call of its own, in windows: scores are (windows, N, N)."""

    num_heads = 4  # as many as windows

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(9, 9))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.mT * 0.5 + self.bias).softmax(-1) @ x


def test_windows_of_one_head_are_no_heads() -> None:
    (site,) = probe_model(OneByOne(), torch.randn(4, 9, 8)).sites
    assert (site.heads, site.batch, site.dense_bytes) == (1, 4, 4 * 9 * 9)
