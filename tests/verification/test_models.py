"""Comparing two models in memory: what passes, what fails, and that nothing is changed."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashbias_convert import patch_model, verify_model
from flashbias_convert.errors import StaleTermsError, UsageError
from flashbias_convert.plan import Plan
from flashbias_convert.verification import Verification
from tests.toy import TOY, ToyModel, make_input, make_model

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
SITES = [f"blocks.{i}.attn" for i in range(3)]


def pair(**options: Any) -> tuple[ToyModel, ToyModel, Plan]:
    """An original, its conversion, and the plan of that."""
    converted = make_model()
    plan = patch_model(converted, recipes=[TOY], force_all=True, **options)
    return make_model(), converted, plan


def compared(original: nn.Module, converted: nn.Module, **options: Any) -> Verification:
    return verify_model(original, converted, make_input(), **options)


def spoil(terms: Any) -> None:
    """Change one entry of a dense bias, the largest of its row, by a hundredth."""
    row = terms.get_buffer("dense.bias")[0, 3]
    with torch.no_grad():
        row[row.argmax()] += 1e-2
    terms._forget()


# -- exact ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_exact_conversion_is_within_rounding_in_every_dtype(dtype: torch.dtype) -> None:
    original, converted, plan = pair(method="exact")
    found = compared(original, converted, plan=plan, dtype=dtype)
    assert found.passed and found.mode == "exact"
    assert [site.name for site in found.sites] == SITES
    assert {one.verdict for one in (*found.outputs, *found.sites)} == {"within rounding"}
    assert found.dtype == str(dtype).removeprefix("torch.")
    assert found.wide_dtype == ("float64" if dtype == torch.float32 else "float32")
    assert all(site.calls == 1 for site in found.sites)


class Keeps(nn.Linear):
    """Keeps what it made of its weights, as TinyViT of older versions of timm does."""

    kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = self.weight.detach().tanh()
        return nn.functional.linear(x, self.kept, self.bias)

    def train(self, mode: bool = True) -> Any:
        if mode:
            self.kept = None
        return super().train(mode)


def test_what_modules_keep_of_their_weights_follows_a_cast() -> None:
    original, converted, plan = pair(method="exact")
    for model in (original, converted):
        torch.manual_seed(3)
        model.blocks[1]["mlp"] = Keeps(16, 16)  # type: ignore[index]
        model.bfloat16().eval()
    for _ in range(2):  # the first one leaves something behind
        assert compared(original, converted, plan=plan).passed
    assert compared(original, converted, plan=plan, dtype=torch.float32).passed


def test_the_numbers_are_those_of_three_runs() -> None:
    original, converted, plan = pair(method="svd", energy=0.9)
    found = compared(original, converted, plan=plan).outputs[0].difference
    assert found is not None
    x = make_input()
    with torch.no_grad():
        a, b = original(x).double(), converted(x).double()
        truth = copy.deepcopy(original).double()(x.double())
    for name, value in (
        ("difference", (b - a)),
        ("rounding", (a - truth)),
        ("error", (b - truth)),
    ):
        assert getattr(found, f"{name}_max") == pytest.approx(float(value.abs().max()), rel=1e-9)
        rms = float(value.square().mean().sqrt())
        assert getattr(found, f"{name}_rms") == pytest.approx(rms, rel=1e-9)
    eps, rms = torch.finfo(torch.float32).eps, float(truth.square().mean().sqrt())
    assert found.allowed_max == pytest.approx(2 * found.rounding_max + eps * found.largest)
    assert found.allowed_rms == pytest.approx(2 * found.rounding_rms + eps * rms)


def test_a_tiny_fault_in_one_site_of_an_exact_conversion_is_found() -> None:
    original, converted, plan = pair(method="exact")
    spoil(converted.blocks[1]["attn"].score_bias)
    found = compared(original, converted, plan=plan)
    assert not found.passed
    by_name = {site.name: site.verdict for site in found.sites}
    assert by_name[SITES[0]] == "within rounding" and by_name[SITES[1]] == "exceeds rounding"
    assert "rounding allows" in " ".join(found.reasons)


def test_another_model_is_no_exact_conversion() -> None:
    _, converted, plan = pair(method="exact")
    found = compared(make_model(seed=5), converted, plan=plan)
    assert not found.passed and len(found.reasons) == 2
    assert found.reasons[1].startswith(f"site {SITES[0]}: exceeds rounding")


# -- truncated -----------------------------------------------------------------------------


def test_a_truncated_conversion_is_reported_and_passes_without_limits() -> None:
    original, converted, plan = pair(method="svd", energy=0.9)
    found = compared(original, converted, plan=plan)
    assert found.passed and found.mode == "approximate"
    assert {one.verdict for one in (*found.outputs, *found.sites)} == {"approximate"}
    for one in (*found.outputs, *found.sites):
        assert one.difference is not None
        assert one.difference.difference_max > 100 * one.difference.rounding_max > 0


@pytest.mark.parametrize(
    ("limits", "missed"),
    [
        ({"max_difference": 1e-6}, "outputs differ by"),
        ({"max_difference": 1e6}, ""),
        ({"min_agreement": 1.0}, "agreement is"),
        ({"min_agreement": 0.0}, ""),
        ({"max_difference": 1e6, "min_agreement": 1.0}, "agreement is"),
    ],
)
def test_limits_decide_over_a_truncated_conversion(limits: dict[str, float], missed: str) -> None:
    rough = {"energy": 0.3, "max_attention_error": 1.0, "fill": False}
    original, converted, plan = pair(method="svd", **rough)
    found = compared(original, converted, plan=plan, **limits)
    assert found.agreement is not None and found.agreement < 1 == found.own_agreement
    assert found.passed is not bool(missed)
    assert missed in " ".join(found.reasons)


def test_limits_count_for_exact_conversions_too() -> None:
    original, converted, plan = pair(method="exact")
    assert not compared(original, converted, plan=plan, max_difference=0.0).passed


def test_sites_before_the_first_truncated_one_stay_exact() -> None:
    converted = make_model()
    options: dict[str, Any] = {"recipes": [TOY], "force_all": True}
    plan = patch_model(converted, method="exact", **options)
    rough = patch_model(make_model(), method="svd", energy=0.9, **options)
    plan.sites[1] = rough.sites[1]
    from flashbias_convert import apply_plan

    apply_plan(converted, plan, recipes=[TOY])
    found = compared(make_model(), converted, plan=plan)
    assert [site.mode for site in found.sites] == ["exact", "approximate", "approximate"]
    assert found.sites[0].verdict == "within rounding"
    assert found.mode == "approximate" and found.passed
    # and a fault in the exact one is no approximation
    spoil(converted.blocks[0]["attn"].score_bias)
    again = compared(make_model(), converted, plan=plan)
    assert not again.passed and again.sites[0].verdict == "exceeds rounding"


def test_without_a_plan_low_rank_terms_count_as_truncated() -> None:
    original, converted, _ = pair(method="exact")
    assert compared(original, converted).mode == "exact"
    original, converted, _ = pair(method="svd", energy=0.9)
    assert compared(original, converted).mode == "approximate"


# -- NaN -----------------------------------------------------------------------------------


class Spoiling(nn.Module):
    """Adds a value to one entry of the output of a model."""

    def __init__(self, model: nn.Module, value: float) -> None:
        super().__init__()
        self.blocks = model.blocks
        self.model = [model]
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        out = self.model[0](x)
        out[0, 0, 0] += self.value
        return out


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("method", ["exact", "svd"])
@pytest.mark.parametrize("which", ["original", "converted"])
def test_nan_and_infinity_never_pass(value: float, method: str, which: str) -> None:
    original, converted, plan = pair(method=method)
    models: list[nn.Module] = [original, converted]
    at = ["original", "converted"].index(which)
    models[at] = Spoiling(models[at], value).eval()
    found = compared(*models, plan=plan, max_difference=1e9, min_agreement=0.0)
    assert not found.passed
    assert found.outputs[0].verdict == "not finite"
    assert which in found.outputs[0].reason
    assert json.loads(json.dumps(found.to_json(), allow_nan=False))["passed"] is False


def test_nan_in_both_is_no_agreement() -> None:
    original, converted, plan = pair(method="svd")
    x = make_input()
    x[0, 0, 0] = math.nan
    found = verify_model(original, converted, x, plan=plan)
    assert not found.passed and "not finite" in found.reasons[0]


class Delicate(nn.Module):
    """Does something to the output of a model in one dtype only."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, change: Any) -> None:
        super().__init__()
        self.blocks, self.model = model.blocks, [model]
        self.dtype, self.change = dtype, change

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.model[0].to(x.dtype)(x)
        return self.change(out) if x.dtype == self.dtype else out


def overflow(x: Tensor) -> Tensor:
    return x * torch.finfo(x.dtype).max * 4


def fail(_: Tensor) -> Tensor:
    raise RuntimeError('"special_lu" not implemented for this dtype')


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_an_original_that_overflows_in_half_precision_is_told(dtype: torch.dtype) -> None:
    """It is not the conversion that spoils it, and it does not pass for that."""
    original, converted, plan = pair(method="exact")
    name = str(dtype).removeprefix("torch.")
    models = [Delicate(model, dtype, overflow).eval() for model in (original, converted)]
    found = verify_model(*models, make_input(), plan=plan, dtype=dtype)
    assert not found.passed and found.outputs[0].verdict == "not finite"
    (note,) = found.notes
    assert f"original itself has NaN or infinity in {name}" in note and "none in float32" in note
    assert f"judged in {name}" in note
    assert verify_model(*models, make_input(), plan=plan, dtype=torch.float32).notes == ()


def test_a_conversion_that_overflows_alone_is_not_blamed_on_the_original() -> None:
    original, converted, plan = pair(method="exact")
    spoiled = Delicate(converted, torch.bfloat16, overflow).eval()
    found = verify_model(original, spoiled, make_input(), plan=plan, dtype=torch.bfloat16)
    assert not found.passed and "the converted model" in found.outputs[0].reason
    assert found.notes == ()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_an_original_that_fails_in_half_precision_is_told(dtype: torch.dtype) -> None:
    original, converted, plan = pair(method="exact")
    name = str(dtype).removeprefix("torch.")
    delicate = Delicate(original, dtype, fail).eval()
    said = (
        rf"original itself fails in {name}, and runs in float32: RuntimeError.*compare in float32"
    )
    with pytest.raises(UsageError, match=said):
        verify_model(delicate, converted, make_input(), plan=plan, dtype=dtype)
    assert verify_model(delicate, converted, make_input(), plan=plan, dtype=torch.float32).passed


def test_a_conversion_that_fails_is_not_blamed_on_the_original() -> None:
    original, converted, plan = pair(method="exact")
    failing = Delicate(converted, torch.bfloat16, fail).eval()
    with pytest.raises(RuntimeError, match="special_lu"):
        verify_model(original, failing, make_input(), plan=plan, dtype=torch.bfloat16)


# -- shapes of inputs and outputs ----------------------------------------------------------


class Wrapped(nn.Module):
    """Gives the output of a model another form."""

    def __init__(self, model: ToyModel, form: Any) -> None:
        super().__init__()
        self.blocks = model.blocks
        self.form = form

    def forward(self, x: Tensor, shift: float = 0.0) -> Any:
        for block in self.blocks:
            x = x + block["mlp"](block["attn"](x))
        return self.form(x + shift)


def wrapped(form: Any) -> tuple[nn.Module, nn.Module, Plan]:
    original, converted, plan = pair(method="svd", energy=0.9)
    return Wrapped(original, form).eval(), Wrapped(converted, form).eval(), plan


@pytest.mark.parametrize(
    ("form", "names", "has_logits"),
    [
        (lambda x: (x, 2 * x), ["0", "1"], True),
        (lambda x: {"state": x, "logits": x[:, 0]}, ["state", "logits"], True),
        (lambda x: {"state": x}, ["state"], False),
        (lambda x: [x, (x, None, 3, torch.ones(2, dtype=torch.int64))], ["0", "1.0"], True),
        (lambda x: x[None], ["output"], False),
    ],
)
def test_outputs_of_any_form(form: Any, names: list[str], has_logits: bool) -> None:
    original, converted, plan = wrapped(form)
    found = compared(original, converted, plan=plan)
    assert [one.name for one in found.outputs] == names
    assert (found.agreement is not None) is has_logits


def test_outputs_of_transformers() -> None:
    from transformers.modeling_outputs import ImageClassifierOutput

    original, converted, plan = wrapped(lambda x: ImageClassifierOutput(logits=x[:, 0]))
    found = compared(original, converted, plan=plan)
    assert [one.name for one in found.outputs] == ["logits"] and found.agreement is not None


def test_an_output_that_is_missing_is_no_agreement() -> None:
    original, converted, plan = wrapped(lambda x: {"a": x, "b": x})
    converted.form = lambda x: {"a": x}
    found = compared(original, converted, plan=plan)
    assert not found.passed and "the converted model returns nothing" in found.reasons[0]


@pytest.mark.parametrize(
    "inputs",
    [
        lambda x: x,
        lambda x: (x,),
        lambda x: {"x": x},
        lambda x: [x[:1], (x[1:],)],
        lambda x: iter([{"x": x[:1]}, {"x": x[1:]}]),
    ],
)
def test_inputs_of_any_form(inputs: Any) -> None:
    original, converted, plan = wrapped(lambda x: x)
    found = verify_model(original, converted, inputs(make_input()), plan=plan)
    assert found.samples == 2
    reference = compared(original, converted, plan=plan)
    numbers = [f.outputs[0].difference for f in (found, reference)]
    assert numbers[0] is not None and numbers[1] is not None
    assert numbers[0].difference_max == pytest.approx(numbers[1].difference_max, rel=1e-4)


def test_inputs_of_a_wrong_size_are_told() -> None:
    original, converted, plan = pair(method="exact")
    with pytest.raises(UsageError, match=r"ToyModel does not run with these inputs: .*Error"):
        verify_model(original, converted, make_input()[..., :5], plan=plan)


def test_labels_give_the_accuracy_of_both() -> None:
    original, converted, plan = wrapped(lambda x: x[:, 0])
    with torch.no_grad():
        labels = original(make_input()).argmax(-1)
    labels[1] = (labels[1] + 1) % 16
    found = compared(original, converted, plan=plan, labels=labels)
    assert found.scores["original"]["top1"] == 0.5 and found.scores["original"]["labels"] == 2
    assert set(found.scores) == {"original", "converted"}
    with pytest.raises(UsageError, match="expected 2 labels"):
        compared(original, converted, plan=plan, labels=labels[:1])


# -- sites ---------------------------------------------------------------------------------


class Direct(ToyModel):
    """Calls the forward of its attention past every hook."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block["mlp"](block["attn"].forward(x))
        return x


def test_sites_are_seen_past_call() -> None:
    original, converted, plan = pair(method="exact")
    original.__class__ = converted.__class__ = Direct
    found = compared(original, converted, plan=plan)
    assert found.passed and [site.calls for site in found.sites] == [1, 1, 1]


class Lazy(ToyModel):
    """Leaves out its last block."""

    def forward(self, x: Tensor) -> Tensor:
        for block in list(self.blocks)[:-1]:
            x = x + block["mlp"](block["attn"](x))
        return x


def test_a_site_that_did_not_run_is_not_verified() -> None:
    original, converted, plan = pair(method="exact")
    original.__class__ = converted.__class__ = Lazy
    found = compared(original, converted, plan=plan)
    assert not found.passed and found.sites[2].verdict == "not run"
    assert f"site {SITES[2]}: not run" in found.reasons[0]


def test_models_are_as_before_even_after_an_exception() -> None:
    original, converted, plan = pair(method="exact")
    state = {k: v.clone() for k, v in original.state_dict().items()}
    compared(original, converted, plan=plan, dtype=torch.float16)
    with pytest.raises(UsageError, match="does not run with these inputs"):
        verify_model(original, converted, torch.zeros(1, 7, 16), plan=plan)
    for model in (original, converted):
        assert all("forward" not in vars(module) for module in model.modules())
        assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert all(torch.equal(v, original.state_dict()[k]) for k, v in state.items())


# -- refusals ------------------------------------------------------------------------------


def test_what_cannot_be_compared_is_refused() -> None:
    original, converted, plan = pair(method="exact")
    with pytest.raises(UsageError, match="no module of the converted model is patched"):
        compared(original, original)
    with pytest.raises(UsageError, match="the original is patched"):
        compared(converted, converted)
    with pytest.raises(UsageError, match=r"training mode.*eval"):
        compared(original, copy.deepcopy(converted).train())
    with pytest.raises(UsageError, match="has no module"):
        compared(nn.Linear(2, 2).eval(), converted)
    with pytest.raises(UsageError, match="float64 has no wider dtype"):
        compared(original, converted, plan=plan, dtype=torch.float64)
    with pytest.raises(UsageError, match="no inputs"):
        verify_model(original, converted, [])
    with pytest.raises(UsageError, match="must be tensors"):
        verify_model(original, converted, 3)
    for limits in ({"max_difference": math.nan}, {"min_agreement": 1.5}, {"min_agreement": -1.0}):
        with pytest.raises(UsageError, match=r"must be (at least 0|in \[0, 1\])"):
            compared(original, converted, **limits)


def test_an_agreement_that_cannot_be_judged_is_refused() -> None:
    original, converted, plan = wrapped(lambda x: {"state": x})
    with pytest.raises(UsageError, match="no logits"):
        compared(original, converted, plan=plan, min_agreement=0.5)


def test_stale_terms_are_not_verified() -> None:
    original, converted, plan = pair(method="exact")
    with torch.no_grad():
        converted.blocks[0]["attn"].table.add_(1)
    with pytest.raises(StaleTermsError):
        compared(original, converted, plan=plan)


# -- language models -----------------------------------------------------------------------


class Language(nn.Module):
    """Tokens through one biased attention to logits, causal or not."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 16)
        self.attn = ToyModel(1).blocks[0]["attn"]
        self.head = nn.Linear(16, 256)
        if causal:
            with torch.no_grad():
                self.attn.table += torch.full((36, 36), -1e4).triu(1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.attn(self.embed(ids)))


def language(causal: bool) -> Iterator[nn.Module]:
    for converted in (False, True):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = Language(causal).eval()
        if converted:
            patch_model(model, method="exact", recipes=[TOY], force_all=True)
        yield model


def tokens() -> Any:
    from flashbias_convert.inputs import Batch, Inputs

    ids = torch.randint(0, 256, (3, 36), generator=torch.Generator().manual_seed(0))
    return Inputs([Batch((ids,), size=3, labels=ids)], "tokens", task="next token")


def test_perplexity_of_a_causal_model() -> None:
    original, converted = language(causal=True)
    found = verify_model(original, converted, tokens())
    ids = tokens().batches[0].args[0]
    with torch.no_grad():
        logits = original(ids)
    loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert found.scores["original"]["perplexity"] == pytest.approx(float(loss.exp()), rel=1e-5)
    assert found.scores["converted"]["perplexity"] == pytest.approx(float(loss.exp()), rel=1e-5)
    assert found.scores["original"]["labels"] == 3 * 35


def test_no_perplexity_for_a_model_that_sees_the_future() -> None:
    found = verify_model(*language(causal=False), tokens())
    assert found.scores == {}
    assert found.notes == ("no perplexity: a token's logits depend on later tokens",)
