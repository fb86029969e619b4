"""Recipes that make terms of weights once: a patched model against its original.

A test file lists `Case`s and runs every one of `CHECKS` on each, and `ONCE` on some. Terms go stale
with the weights here; `model_parity` is for models that make their bias in each call.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flashbias_convert.modules as modules
from flashbias_convert import Plan, inspect_model, patch_model, unpatch_model
from flashbias_convert.attention.prepared import PreparedBias
from flashbias_convert.errors import StaleTermsError
from flashbias_convert.swap import patched_modules
from flashbias_convert.terms import ScoreBias
from tests.adapters import add_adapters
from tests.support import Float64Throughout, Nearby, assert_parity, nudged

#: parameters that make nothing but biases of scores; zeros in them leave no bias
BIASES = re.compile(
    r"relative_position_bias_table|(cpb_mlp|position_bias_mlp)\.2\.weight|attention_biases"
    r"|rel_pos\.(relative_position_bias_table|mlp\.fc2)|meta_mlp\.fc2"
)
#: removing the bias must change the output by this many tolerances
MATTERS = 20.0


def _output(model: nn.Module, *inputs: Tensor) -> Tensor:
    out: Tensor = model(*inputs)
    return out


@dataclass(frozen=True)
class Case:
    """A small model and what goes through it.

    Attributes:
        name: for the test's id.
        make: builds the model; weights are drawn anew by `randomise`.
        size: shape of the input, random numbers.
        run: (model, input) -> output; more numbers show more errors.
        sites: how many attention modules are patched; the others have no bias.
        masked: whether a shift mask changes the output.
        options: of `patch_model`.
    """

    name: str
    make: Callable[[], nn.Module]
    size: tuple[int, ...] = (2, 3, 32, 32)
    run: Callable[[nn.Module, Tensor], Tensor] = _output
    sites: int = 3
    masked: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    def model(self) -> Any:
        """A model in eval mode, always the same."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = self.make()
            randomise(model)
        model.eval()  # TinyViT's attention does not return itself
        return model

    def inputs(self, seed: int = 1) -> Tensor:
        return torch.randn(self.size, generator=torch.Generator().manual_seed(seed))

    @torch.no_grad()
    def output(self, model: nn.Module, x: Tensor) -> Tensor:
        return self.run(model, x)

    def truth(self, model: nn.Module, x: Tensor) -> Tensor:
        """What the original computes in float64 from the same weights."""
        wide = original(model).double()
        wide.train()  # TinyViT of older versions of timm keeps a bias of the old dtype until then
        wide.eval()
        with Float64Throughout():
            return self.output(wide, x.double())

    def nearby(self, model: nn.Module, x: Tensor) -> Nearby:
        """For `assert_parity`, of the original."""

        def draw(number: int) -> tuple[Tensor, Tensor]:
            twin = nudged(original(model), number)
            return self.output(twin, x), self.truth(twin, x)

        return draw

    def agrees(self, model: nn.Module, x: Tensor) -> None:
        """Assert that a patched model computes what its original does."""
        plain, truth = self.output(original(model), x), self.truth(model, x)
        assert_parity(self.output(model, x), plain, truth, nearby=self.nearby(model, x))

    def patch(self, model: nn.Module, **options: Any) -> Plan:
        settings = {"method": "exact", "backend": "sdpa", "force_all": True}
        plan = patch_model(model, **{**settings, **self.options, **options})
        counts = plan.counts()
        assert counts.get("patched") == self.sites, [(s.name, s.reason) for s in plan.sites]
        assert set(counts) <= {"patched", "left alone"}
        return plan


def original(model: nn.Module) -> Any:
    """A copy of a model that is not patched."""
    twin = copy.deepcopy(model)
    unpatch_model(twin)
    return twin


@torch.no_grad()
def randomise(model: nn.Module) -> None:
    """Weights at which the bias, the scales and the attention itself all matter.

    Libraries start tables, norms and layer scales at zero or one value.
    """
    norms = [m for m in model.modules() if "Norm" in type(m).__name__]
    of_norms = {id(p) for m in norms for p in m.parameters(recurse=False)}
    for name, p in model.named_parameters():
        if "logit_scale" in name:
            p.uniform_(0.5, 5.0)  # on both sides of SwinV2's clamp
        elif re.search(r"(cpb_mlp|position_bias_mlp)\.0|(rel_pos\.mlp|meta_mlp)\.fc1", name):
            p.normal_()
        elif re.search(r"(cpb_mlp|position_bias_mlp)\.2|(rel_pos\.mlp|meta_mlp)\.fc2", name):
            p.normal_(0, 0.1)
        elif BIASES.search(name):
            p.normal_(0, 1.5)
        elif id(p) in of_norms or re.search("gamma|lambda|layer_scale|ls[12]", name):
            p.normal_(1.0 if name.endswith("weight") or p.dim() == 0 else 0.2, 0.3)
        elif p.dim() >= 2:
            p.normal_(0, (p[0].numel()) ** -0.5)
        else:
            p.normal_(0, 0.2)


# -- what every case is put through --------------------------------------------------------


def compare(case: Case, dtype: torch.dtype, **options: Any) -> Plan:
    """Patch the model in `dtype` and compare it with itself before."""
    model, x = case.model().to(dtype), case.inputs().to(dtype)
    plain, truth = case.output(model, x), case.truth(model, x)
    plan = case.patch(model, **options)
    assert_parity(case.output(model, x), plain, truth, nearby=case.nearby(model, x))
    return plan


def check_float32(case: Case) -> None:
    compare(case, torch.float32)


def check_bfloat16(case: Case) -> None:
    compare(case, torch.bfloat16)


def check_float16(case: Case) -> None:
    """With the reference: torch's own attention has half precision on some CPUs only."""
    compare(case, torch.float16, backend="eager")


def check_the_bias_matters(case: Case) -> None:
    model, x = case.model(), case.inputs()
    plain, truth = case.output(model, x), case.truth(model, x)
    tolerance = 2 * float((plain.double() - truth).abs().max()) + 1e-6 * float(truth.abs().max())
    model = case.model()  # another one: TinyViT keeps the bias that it has seen
    found = [p for name, p in model.named_parameters() if BIASES.search(name)]
    assert found
    for parameter in found:
        nn.init.zeros_(parameter)
    assert float((case.output(model, x) - plain).abs().max()) > MATTERS * tolerance


def check_masks_are_not_dropped(case: Case) -> None:
    """Without its shift masks the patched model is wrong, so the comparison sees them.

    What differs from window to window is a mask, planned or arrived.
    """
    if not case.masked:
        return
    right = modules.flashbias_attention

    def unmasked(q: Tensor, k: Tensor, v: Tensor, bias: Any, **kwargs: Any) -> Tensor:
        terms = bias.bias if isinstance(bias, PreparedBias) else bias
        kept = tuple(term for term in terms.terms if not term.batch_shape())
        return right(q, k, v, ScoreBias(kept, terms.num_heads), **kwargs)

    with pytest.MonkeyPatch.context() as context:
        context.setattr(modules, "flashbias_attention", unmasked)
        with pytest.raises(AssertionError, match="error"):
            compare(case, torch.float32)


CHECKS = (check_float32, check_bfloat16, check_the_bias_matters, check_masks_are_not_dropped)


# -- what some cases are put through -------------------------------------------------------


def check_truncated(case: Case) -> None:
    """Low rank, with the masks still exact: more energy comes closer."""
    model, x = case.model(), case.inputs()
    plain, errors = case.output(model, x), []
    for energy in (0.8, 0.99999):
        twin = copy.deepcopy(model)
        settings = {"method": "svd", "max_attention_error": 1.0, "fill": False}
        case.patch(twin, energy=energy, **settings)
        errors.append(float((case.output(twin, x) - plain).abs().max()))
    assert errors[0] > 3 * errors[1]


def check_cast_after_patching(case: Case) -> None:
    model, x = case.model(), case.inputs().bfloat16()
    case.patch(model)
    model.bfloat16()
    case.agrees(model, x)


def check_training(case: Case) -> None:
    """In training mode the original runs, dropout and gradients to the bias included."""
    model, x = case.model(), case.inputs()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.2
    reference = copy.deepcopy(model)
    case.patch(model)
    for each in (model, reference):
        each.train()
        torch.manual_seed(4)
        case.run(each, x).square().sum().backward()
    theirs = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        expected = theirs[name].grad
        assert (parameter.grad is None) == (expected is None), name
        assert expected is None or torch.equal(parameter.grad, expected), name
    assert any(BIASES.search(name) and p.grad is not None for name, p in model.named_parameters())
    model.eval()
    model.zero_grad()
    case.agrees(model, x)


def check_stale(case: Case) -> None:
    """Another bias: in place, by assignment, from a state dict; never computed with old terms."""
    x = case.inputs()

    def change_in_place(model: Any, name: str) -> None:
        nn.init.normal_(model.get_parameter(name))

    def assign(model: Any, name: str) -> None:
        owner, _, leaf = name.rpartition(".")
        parameter = nn.Parameter(model.get_parameter(name).detach() + 1)
        setattr(model.get_submodule(owner), leaf, parameter)

    def load(model: Any, name: str) -> None:
        model.load_state_dict({name: model.get_parameter(name).detach() * 2}, strict=False)

    for change in (change_in_place, assign, load):
        model = case.model()
        case.patch(model)
        names = [name for name, _ in model.named_parameters() if BIASES.search(name)]
        change(model, names[-1])
        with pytest.raises(StaleTermsError):
            case.output(model, x)
        unpatch_model(model)
        case.patch(model)
        case.agrees(model, x)


def check_adapters_of_the_bias(case: Case) -> None:
    """To switch them changes the bias, and nothing that a patched module could look at."""
    model = case.model()
    weights = [name for name, _ in model.named_parameters() if BIASES.search(name)]
    layers = {name.removesuffix(".weight") for name in weights}
    if not add_adapters(model, layers.__contains__):
        return  # the bias is a parameter
    plan = inspect_model(model, method="exact", force_all=True)
    assert [site.status for site in plan.sites].count("unsupported") == case.sites
    assert all("Adapter" in site.reason for site in plan.sites if site.status == "unsupported")


def check_state_dict(case: Case) -> None:
    """The terms travel in a state dict; without them the keys are the original's."""
    model, x = case.model(), case.inputs()
    keys = set(model.state_dict())
    case.patch(model)
    state = model.state_dict()
    assert {key for key in state if ".score_bias." not in key} == keys
    twin = case.model()
    generator = torch.Generator().manual_seed(2)
    for parameter in twin.parameters():  # always the same: other weights may make other terms
        nn.init.normal_(parameter, generator=generator)
    case.patch(twin)
    twin.load_state_dict(state)
    assert torch.equal(case.output(twin, x), case.output(model, x))
    assert len(patched_modules(model)) == case.sites
    unpatch_model(twin)
    assert set(twin.state_dict()) == keys


def check_compiled(case: Case) -> None:
    model, x = case.model(), case.inputs()
    case.patch(model)
    expected = case.output(model, x)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(case.output(compiled, x), expected)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert torch.equal(case.output(compiled, x), expected)


def check_handed_index(case: Case, name: str) -> None:
    """A network whose layers are handed its buffer `name`: compiled whole, for that index alone.

    One that a call in eager mode had before is remembered: compiled code runs the original then.
    """
    model, x = case.model(), case.inputs()
    case.patch(model)
    expected, handed = case.output(model, x), model.get_buffer(name)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.allclose(case.output(compiled, x), expected, atol=1e-6)
    handed.copy_(handed.flip(0))
    with pytest.raises(RuntimeError, match="is another one than this was compiled for"):
        case.output(compiled, x)
    wanted = case.output(model, x)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager")
    assert torch.allclose(case.output(compiled, x), wanted, atol=1e-6)


ONCE = (
    check_float16,
    check_truncated,
    check_cast_after_patching,
    check_training,
    check_stale,
    check_adapters_of_the_bias,
    check_state_dict,
    check_compiled,
)
