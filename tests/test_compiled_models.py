"""Whole patched models under torch.compile, in inference mode and under autocast.

What is compiled is run as it was traced (backend "eager"), so that results agree to the last bit
and no compiler for C++ is needed; compilations are counted.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import transformers
from torch import Tensor, nn

from flashbias_convert import LowRank, Regions, ScoreBias, patch_model
from flashbias_convert.attention import flashbias_attention
from flashbias_convert.attention.packing import pack
from flashbias_convert.models.alibi_gpt2 import AlibiGPT2Config, AlibiGPT2LMHeadModel
from flashbias_convert.modules import ScoreBiasModule
from flashbias_convert.terms.score_bias import TERM_KINDS
from flashbias_convert.verification.outputs import tensors_of
from tests.checkpoint.models import images, tiny_model
from tests.kernel_calls import Graphs, Launches
from tests.toy import TOY, make_input, make_model

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

from whole_models import families

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore")


class Counter:
    """A backend that runs what was traced, and counts."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        self.count += 1
        return graph.forward


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch.compiler.reset()


# -- layers that are compiled one by one ---------------------------------------------------------


def swinv2() -> tuple[nn.Module, list[nn.Module], tuple[Any, ...]]:
    sizes = {"img_size": 16, "patch_size": 2, "embed_dim": 16, "depths": [3], "num_heads": [2]}
    model: Any = timm.create_model("swinv2_tiny_window8_256", **sizes, drop_path_rate=0.0)
    for block in model.layers[0].blocks:  # zero: blocks would add nothing to what comes in
        nn.init.ones_(block.norm1.weight)
        nn.init.ones_(block.norm2.weight)
    return model, list(model.layers[0].blocks), (torch.randn(2, 3, 16, 16),)


def bloom() -> tuple[nn.Module, list[nn.Module], tuple[Any, ...]]:
    sizes = {"vocab_size": 50, "hidden_size": 32, "n_layer": 3, "n_head": 4, "use_cache": False}
    model: Any = transformers.BloomModel(transformers.BloomConfig(**sizes))
    return model, list(model.h), (torch.arange(12)[None],)


def gpt2() -> tuple[nn.Module, list[nn.Module], tuple[Any, ...]]:
    sizes = {"vocab_size": 50, "n_embd": 32, "n_layer": 3, "n_head": 4, "use_cache": False}
    model = AlibiGPT2LMHeadModel(AlibiGPT2Config(**sizes, bos_token_id=1, eos_token_id=2))
    return model, list(model.transformer.h), (torch.arange(12)[None],)


@pytest.mark.parametrize("make", [swinv2, bloom, gpt2])
def test_outputs_depend_on_attention(make: Callable[[], Any]) -> None:
    """Or no test that compares them could fail."""
    model, layers, inputs = make()
    model.eval()
    with torch.no_grad():
        (before,) = tensors_of(model(*inputs)).values()
        for layer in layers:
            for name, parameter in layer.named_parameters():
                if re.search(r"qkv|query_key_value|c_attn", name):
                    parameter.mul_(-3)
        (after,) = tensors_of(model(*inputs)).values()
    assert float((after - before).abs().max()) > 1e-2 * float(before.abs().max())


@pytest.mark.parametrize("make", [swinv2, bloom, gpt2])
def test_layers_of_one_kind_are_compiled_once(make: Callable[[], Any]) -> None:
    model, layers, inputs = make()
    patch_model(model.eval(), method="exact", force_all=True)
    counter = Counter()
    with torch.no_grad():
        expected = tensors_of(model(*inputs))
        for layer in layers:
            layer.compile(backend=counter, fullgraph=True)
        found = tensors_of(model(*inputs))
    assert expected and all(torch.equal(found[name], x) for name, x in expected.items())
    assert counter.count == 1 < len(layers)


# -- whole models --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "transformers_bloom",
        "transformers_t5",
        "transformers_wavlm",
        "transformers_donut_swin",
        "gated_audio",
        "gated_wavlm",
    ],
)
def test_models_are_compiled_once_in_one_graph(name: str) -> None:
    cases = families.cases(tiny=True)
    case = next(case for key, case in cases.items() if key.startswith(f"family-{name}"))
    ready = case.prepare("exact", CPU, torch.float32)
    counter = Counter()
    compiled: Any = torch.compile(ready.model, backend=counter, fullgraph=True)
    with torch.no_grad():
        first = tensors_of(compiled(*ready.args, **ready.kwargs))  # cold: nothing ran before
        with torch.compiler.set_stance("fail_on_recompile"):
            again = tensors_of(compiled(*ready.args, **ready.kwargs))
        expected = tensors_of(ready.model(*ready.args, **ready.kwargs))
    assert expected and counter.count == 1
    for key, x in expected.items():
        assert torch.equal(first[key], x) and torch.equal(again[key], x)


@pytest.mark.parametrize("prepared", [False, True])
def test_terms_that_are_left_out_do_not_compile_twice(prepared: bool) -> None:
    phi_q, phi_k = torch.randn(2, 2, 8, 3).unbind(0)
    regions = Regions(ids=torch.arange(8) // 4)
    terms = ScoreBiasModule(ScoreBias((LowRank(phi_q=phi_q, phi_k=phi_k), regions), 2), "sdpa")
    q, k, v = torch.randn(3, 1, 2, 8, 4).unbind(0)
    if prepared:
        terms.prepare()
    counter = Counter()

    @torch.compile(backend=counter, fullgraph=True)
    def call() -> Tensor:
        out: Tensor = terms(q, k, v, without=(Regions.kind,))
        return out

    out = call()
    with torch.compiler.set_stance("fail_on_recompile"):
        assert torch.equal(call(), out)
    assert counter.count == 1
    assert torch.equal(terms(q, k, v, without=(Regions.kind,)), out)
    assert not torch.allclose(terms(q, k, v), out)


def terms_of(kind: str, n: int) -> dict[str, Tensor]:
    """Tensors of a term for two heads and n tokens."""
    if kind == "low_rank":
        return {"phi_q": torch.randn(2, n, 3), "phi_k": torch.randn(2, n, 3)}
    if kind == "relative_table":
        places = torch.arange(n, dtype=torch.int32)
        return {"table": torch.randn(2, 2 * n - 1), "u": places, "v": places.flip(0)}
    return {"bias": torch.randn(2, n, n)}


@pytest.mark.parametrize("kind", ["low_rank", "relative_table", "dense"])
def test_lengths_that_change_with_their_terms_are_compiled_once(kind: str) -> None:
    """Terms that are made in each call are for its size, and no message says which it was."""
    counter = Counter()

    def call(q: Tensor, k: Tensor, v: Tensor, tensors: dict[str, Tensor]) -> Tensor:
        bias = ScoreBias((TERM_KINDS[kind](**tensors),), 2)
        return flashbias_attention(q, k, v, bias, backend="sdpa")

    compiled: Any = torch.compile(call, backend=counter, fullgraph=True, dynamic=True)
    for n in (49, 64, 100, 144, 197):
        inputs = (*torch.randn(3, 1, 2, n, 8).unbind(0), terms_of(kind, n))
        torch.testing.assert_close(compiled(*inputs), call(*inputs))
    assert counter.count == 1


def test_a_model_that_makes_its_bias_in_each_call_is_compiled_once_for_all_lengths() -> None:
    sizes = {"vocab_size": 50, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1}
    model: Any = transformers.T5EncoderModel(transformers.T5Config(**sizes, num_heads=2)).eval()
    patch_model(model, backend="sdpa", force_all=True)
    counter = Counter()
    compiled: Any = torch.compile(model, backend=counter, dynamic=True)
    with torch.no_grad():
        for n in (12, 17, 33):
            ids = torch.arange(n)[None]
            found, expected = compiled(ids)[0], model(ids)[0]
            torch.testing.assert_close(found, expected)
    assert counter.count == 1


# -- inference mode and autocast -----------------------------------------------------------------


def test_inference_mode_changes_nothing() -> None:
    model, x = tiny_model(), images()
    patch_model(model, force_all=True)
    with torch.no_grad():
        expected = model(x)
    with torch.inference_mode():
        assert torch.equal(model(x), expected)
        compiled = torch.compile(model, backend=Counter(), fullgraph=True)
        assert torch.equal(compiled(x), expected)
    assert torch.equal(model(x).detach(), expected)  # and leaves nothing behind that cannot train


def test_a_model_that_was_made_and_patched_in_inference_mode() -> None:
    with torch.inference_mode():
        model, x = tiny_model(), images()
        plain = model(x)
        patch_model(model, method="exact", force_all=True)
        out = model(x)
    assert not torch.equal(out, plain)  # other kernels ran
    torch.testing.assert_close(out, plain)


@pytest.mark.parametrize("make", [tiny_model, lambda: gpt2()[0].eval()])
def test_autocast_compiles_to_what_eager_mode_computes(make: Callable[[], Any]) -> None:
    model = make()
    x = images() if hasattr(model, "layers") else torch.arange(12)[None]
    patch_model(model, method="exact", force_all=True)
    compiled: Any = torch.compile(model, backend=Counter(), fullgraph=True)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected, found = tensors_of(model(x)), tensors_of(compiled(x))
    assert any(value.dtype == torch.bfloat16 for value in expected.values())
    assert all(torch.equal(found[name], value) for name, value in expected.items())


# -- the kernel's forms of the terms -------------------------------------------------------------


class Compiled:
    """A small converted model, compiled before any call in eager mode, and its launches."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launches, self.graphs = Launches(monkeypatch), Graphs()
        self.model: Any = make_model(depth=2)
        patch_model(self.model, recipes=[TOY], method="svd", energy=0.9)
        self.compile()

    def compile(self) -> None:
        self.run: Any = torch.compile(self.model, backend=self.graphs, fullgraph=True)

    def check(self, x: Tensor, half: bool, autocast: bool = False) -> None:
        """Assert that a call reads the model's own factors as they are now, and packs nothing."""
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            launched = self.launches.of(lambda: self.run(x))
        expected: list[Tensor] = []
        for block in self.model.blocks:
            terms = block["attn"].score_bias.bias
            packed = pack(terms, half=half, scale=8**-0.5 if half else None)
            expected += [t for t in packed.tensors if t.dim() == 3][::2]
        found = [tensors["phi_q"] for tensors in launched]
        assert len(found) == len(expected) > 0
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        assert "log2" not in self.graphs.operations()


def test_the_forms_of_terms_that_are_loaded_take_the_place_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case, x = Compiled(monkeypatch), make_input()
    case.check(x, half=False)
    state = case.model.state_dict()
    with torch.compiler.set_stance("fail_on_recompile"):
        case.model.load_state_dict({k: 2 * v if "phi_" in k else v for k, v in state.items()})
        case.check(x, half=False)
        weights = {k: v for k, v in case.model.state_dict().items() if "score_bias" not in k}
        case.model.load_state_dict(weights, strict=False)
        case.check(x, half=False)
        with torch.no_grad():
            case.model(x)
        case.check(x, half=False)


def test_the_forms_follow_moves_casts_and_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    case, x = Compiled(monkeypatch), make_input()
    case.check(x, half=False)
    with torch.compiler.set_stance("fail_on_recompile"):
        case.model.to("cpu")
        case.check(x, half=False)
    case.model.bfloat16()
    case.check(x.bfloat16(), half=True)
    case.model = copy.deepcopy(case.model)
    with torch.no_grad():
        for block in case.model.blocks:
            block["attn"].score_bias.low_rank.phi_q.mul_(3)
    case.model.float()  # forgets what was made of other factors
    case.compile()
    case.check(x, half=False)
    assert case.graphs.count == 3


def test_autocast_has_forms_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    case, x = Compiled(monkeypatch), make_input()
    case.check(x, half=True, autocast=True)
    sites = [block["attn"].score_bias for block in case.model.blocks]
    assert all(site.prepared().traced == {("attention", True, 8**-0.5)} for site in sites)


@torch.no_grad()
def test_layers_whose_scores_differ_in_size_are_compiled_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a card in half precision, where the kernel is told whether scores are small."""
    Launches(monkeypatch)
    model, layers, inputs = swinv2()
    patch_model(model.eval().bfloat16(), method="exact", force_all=True)
    bounds = {layer.attn.score_bias.score_bound for layer in layers}  # type: ignore[union-attr]
    graphs = Graphs()
    for layer in layers:
        layer.compile(backend=graphs, fullgraph=True)
    model(inputs[0].bfloat16())
    assert len(bounds) == len(layers) > graphs.count == 1


@torch.no_grad()
def test_heads_that_are_called_one_by_one_have_forms_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    msra = pytest.importorskip("timm.models.efficientvit_msra")
    launches, graphs = Launches(monkeypatch), Graphs()
    sizes = {"key_dim": 8, "num_heads": 3, "attn_ratio": 2, "resolution": 4, "kernels": (3, 3, 3)}
    attention = msra.CascadedGroupAttention(48, **sizes)
    nn.init.normal_(attention.attention_biases)
    model = nn.Sequential(attention).eval()
    plan = patch_model(
        model, method="svd", energy=0.8, max_attention_error=1.0, fill=False, force_all=True
    )
    assert plan.sites[0].terms() == ("low_rank",)
    compiled: Any = torch.compile(model, backend=graphs, fullgraph=True)
    x, terms = torch.randn(2, 48, 4, 4), model[0].score_bias

    def check() -> None:
        launched = launches.of(lambda: compiled(x))
        assert len(launched) == 3
        for head, tensors in enumerate(launched):
            packed = pack(terms.bias.select_heads([head]), half=False, scale=None)
            assert any(torch.equal(tensors["phi_q"], own) for own in packed.tensors)
        assert "log2" not in graphs.operations()

    check()
    with torch.compiler.set_stance("fail_on_recompile"):
        state = model.state_dict()
        model.load_state_dict({k: 2 * v if "phi_" in k else v for k, v in state.items()})
        check()
        model.to("cpu")
        check()
    assert graphs.count == 1
