"""Elsewhere than in Python: torch.export, and ONNX files that onnxruntime runs, through sdpa.

The reference is the original model: a converted one with exact terms must be as close to its
float64 result as it is itself in float32.
"""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.export import Dim

from flashbias_convert import Dense, Lookup, ScoreBias, Term, patch_model, unpatch_model
from flashbias_convert.attention import flashbias_attention
from tests.checkpoint.models import images, tiny_model

from .support import assert_parity
from .toy import TOY, make_input, make_model

pytestmark = pytest.mark.filterwarnings("ignore")
B, N = Dim("b", min=1, max=64), Dim("n", min=2, max=128)
IDS = torch.tensor([[7, 3, 9, 11, 2, 30], [1, 1, 5, 6, 7, 8]])
MASK = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])


class Language(nn.Module):
    """A language model that returns logits of tokens that are not padding, and zeros elsewhere."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        out: Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask)[0]
        # what padding attends to is nobody's promise
        return out.masked_fill(attention_mask[..., None] == 0, 0.0)


def language_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "bloom":
        bloom = transformers.BloomConfig(
            vocab_size=50, hidden_size=32, n_layer=2, n_head=4, use_cache=False
        )
        return Language(transformers.BloomForCausalLM(bloom)).eval()
    mpt = transformers.MptConfig(vocab_size=50, d_model=32, n_layers=2, n_heads=4, use_cache=False)
    return Language(transformers.MptForCausalLM(mpt)).eval()


def more_words() -> tuple[Tensor, Tensor]:
    """Another batch size, and left padding of another length."""
    mask = torch.ones(3, 6, dtype=torch.long)
    mask[1, :4] = 0
    return torch.randint(0, 50, (3, 6), generator=torch.Generator().manual_seed(2)), mask


def longer_words() -> tuple[Tensor, Tensor]:
    mask = torch.ones(1, 9, dtype=torch.long)
    mask[0, :2] = 0
    return torch.randint(0, 50, (1, 9), generator=torch.Generator().manual_seed(3)), mask


#: name -> model, example, other inputs, and which of their sizes are left open
CASES: dict[str, tuple[Any, Any, Any, Any]] = {
    "swinv2": (tiny_model, (images(6),), (images(5),), ({0: B},)),
    "bloom": (lambda: language_model("bloom"), (IDS, MASK), more_words(), ({0: B}, {0: B})),
    "mpt": (
        lambda: language_model("mpt"),
        (IDS, MASK),
        longer_words(),
        ({0: B, 1: N}, {0: B, 1: N}),
    ),
}


class Case:
    """A converted model, and what the original says about two inputs."""

    def __init__(self, name: str) -> None:
        make, self.example, self.other, self.open = CASES[name]
        model = make()
        self.plain = {id(x): self.run(model, x) for x in (self.example, self.other)}
        wide = make().double()
        self.truth = {id(x): self.true_result(wide, x) for x in (self.example, self.other)}
        self.model = model
        plan = patch_model(model, backend="sdpa", method="exact", force_all=True)
        assert plan.patched and not plan.with_status("failed")

    @staticmethod
    @torch.no_grad()
    def run(model: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
        dtype = next(model.parameters()).dtype
        out: Tensor = model(*(x.to(dtype) if x.is_floating_point() else x for x in inputs))
        return out

    @classmethod
    def true_result(cls, wide: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
        """Row by row and without padding, with which the originals give NaN in float64."""
        if not isinstance(wide, Language):
            return cls.run(wide, inputs)
        ids, mask = inputs
        rows = []
        for row, real in zip(ids, mask.bool(), strict=True):
            own = row[real][None]
            out = cls.run(wide, (own, torch.ones_like(own)))[0]
            rows.append(torch.cat([out.new_zeros(int((~real).sum()), out.shape[-1]), out]))
        return torch.stack(rows)

    def check(self, function: Any) -> None:
        """Assert that `function` computes what the original does, for both inputs."""
        for inputs in (self.example, self.other):
            actual = function(*inputs)
            assert_parity(actual, self.plain[id(inputs)], self.truth[id(inputs)])


@pytest.mark.parametrize("name", CASES)
def test_exported_programs_compute_what_the_original_does(name: str) -> None:
    case = Case(name)
    with torch.no_grad():
        program = torch.export.export(case.model, case.example, dynamic_shapes=case.open)
        case.check(program.module())
        case.check(case.model)  # tracing left nothing behind


@pytest.mark.parametrize("name", CASES)
def test_onnx_files_compute_what_the_original_does(name: str, tmp_path: Path) -> None:
    for package in ("onnx", "onnxscript"):
        pytest.importorskip(package, reason=f"the export to ONNX needs {package}")
    runtime = pytest.importorskip("onnxruntime", reason="ONNX files are run by onnxruntime")
    case, path = Case(name), tmp_path / "model.onnx"
    with torch.no_grad():
        torch.onnx.export(
            case.model,
            case.example,
            path,
            dynamo=True,
            dynamic_shapes=case.open,
            verbose=False,
        )
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_inputs()]

    def run(*inputs: Tensor) -> Tensor:
        fed = {key: x.numpy() for key, x in zip(names, inputs, strict=True)}
        return torch.from_numpy(session.run(None, fed)[0])

    case.check(run)


class BroughtAlong(nn.Module):
    """Attention with a term that each call brings: a dense one, or codes of a table."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.table = kind, nn.Parameter(torch.randn(2, 5))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, brought: Tensor) -> Tensor:
        bias = ScoreBias((self.term(brought),), 2)
        out: Tensor = flashbias_attention(q, k, v, bias, scale=0.5, backend="sdpa")
        return out

    def term(self, brought: Tensor) -> Term:
        if self.kind == "dense":
            return Dense(bias=brought)
        return Lookup(table=self.table, code=brought)

    def plain(self, q: Tensor, k: Tensor, v: Tensor, brought: Tensor) -> Tensor:
        bias = brought if self.kind == "dense" else self.table[:, brought.long()]
        return (0.5 * q @ k.mT + bias).softmax(-1) @ v


def brought_inputs(kind: str, n: int, m: int) -> tuple[Tensor, ...]:
    q, (k, v) = torch.randn(1, 2, n, 8), torch.randn(2, 1, 2, m, 8)
    code = torch.randint(5, (n, m), dtype=torch.uint8)
    return q, k, v, torch.randn(2, n, m) if kind == "dense" else code


@pytest.mark.parametrize("kind", ["dense", "lookup"])
def test_terms_that_calls_bring_are_exported_for_other_lengths(kind: str) -> None:
    """The lengths of the example are not those of the program."""
    torch.manual_seed(0)
    model, keys = BroughtAlong(kind).eval(), Dim("m", min=2, max=128)
    last = {0: N, 1: keys} if kind == "lookup" else {1: N, 2: keys}
    sizes = ({2: N}, {2: keys}, {2: keys}, last)
    with torch.no_grad():
        program = torch.export.export(model, brought_inputs(kind, 6, 9), dynamic_shapes=sizes)
        for n, m in ((6, 9), (11, 4), (3, 17)):
            inputs = brought_inputs(kind, n, m)
            wide = (x.double() if x.is_floating_point() else x for x in inputs)
            truth = BroughtAlong.plain(copy.deepcopy(model).double(), *wide)
            assert_parity(program.module()(*inputs), model.plain(*inputs), truth)


@pytest.mark.parametrize("strict", [False, True])
def test_any_backend_is_exported_as_what_it_is_on_this_machine(strict: bool) -> None:
    model = make_model(depth=1)
    patch_model(model, recipes=[TOY], method="svd", energy=0.9)
    x = make_input()
    with torch.no_grad():
        program = torch.export.export(model, (x,), strict=strict)
        torch.testing.assert_close(program.module()(x), model(x))


def test_a_program_can_be_saved_and_loaded(tmp_path: Path) -> None:
    model = make_model(depth=1)
    patch_model(model, recipes=[TOY], method="svd", energy=0.9, backend="sdpa")
    x = make_input()
    with torch.no_grad():
        torch.export.save(torch.export.export(model, (x,)), tmp_path / "x.pt2")
        loaded = torch.export.load(tmp_path / "x.pt2").module()
        assert torch.equal(loaded(x), model(x))


def test_patched_modules_keep_the_signature_of_their_forward() -> None:
    model: Any = language_model("mpt")
    classes = [type(module) for module in model.modules()]
    before = [inspect.signature(module.forward) for module in model.modules()]
    kept = list(model.modules())
    patch_model(model, force_all=True)
    assert [type(module) for module in kept] != classes
    assert [inspect.signature(module.forward) for module in kept] == before
    unpatch_model(model)
    assert [type(module) for module in kept] == classes
