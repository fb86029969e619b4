"""Recipes on the classes of repositories that are no packages; needs scripts/fetch_sources.py."""

from __future__ import annotations

import copy
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashbias_convert.patched_attention import PatchedAttention
from scripts.fetch_sources import ALIBI, MOSAIC, UNILM, Source, is_complete
from tests.recipes import model_parity as parity
from tests.recipes.model_parity import PATHS, Case, randomised

NAMED = os.environ.get("FLASHBIAS_SOURCES")
FOLDER = Path(NAMED) if NAMED else None
pytestmark = [
    pytest.mark.skipif(
        FOLDER is None or not is_complete(FOLDER),
        reason="set FLASHBIAS_SOURCES to the folder that scripts/fetch_sources.py prints",
    ),
    # of the sources themselves
    pytest.mark.filterwarnings("ignore:Unable to import Triton"),
    pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated"),
    pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask"),
]

WIDTH, HEADS, N = 24, 3, 23
#: modules by source and name, each imported once
_IMPORTED: dict[tuple[str, str], ModuleType] = {}


@contextmanager
def importable(folder: Path, stubs: Mapping[str, ModuleType]) -> Iterator[None]:
    """Inside, the files of a folder are modules; none of them stays, as several share a name."""
    before = dict(sys.modules)
    sys.path.insert(0, str(folder))
    sys.modules.update(stubs)
    try:
        yield
    finally:
        sys.path[:] = [place for place in sys.path if place != str(folder)]  # some add themselves
        for name in set(sys.modules) - set(before):
            file = getattr(sys.modules[name], "__file__", None)
            if name in stubs or (file and Path(file).is_relative_to(folder)):
                del sys.modules[name]


def of(source: Source, below: str, name: str, *missing: str) -> Any:
    """A module of a source.

    Args:
        source: whose.
        below: the folder in it that its imports start from.
        name: of the module.
        *missing: modules that it imports, and whose contents are not needed.
    """
    key = (f"{source.repository}/{below}", name)
    if key not in _IMPORTED:
        assert FOLDER is not None
        stubs = {module: ModuleType(module) for module in missing if not _is_there(module)}
        for path, stub in stubs.items():
            above, _, child = path.rpartition(".")
            if above:
                setattr(stubs[above], child, stub)
        with importable(source.within(FOLDER) / below, stubs):
            _IMPORTED[key] = importlib.import_module(name)
    return _IMPORTED[key]


def _is_there(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


def numbers(model: nn.Module, *shape: int) -> Tensor:
    """Normal ones, always the same."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    return x.bfloat16().half().to(next(model.parameters()).dtype)


# -- ALiBi of jaketae ----------------------------------------------------------------------


def alibi(causal: bool) -> Any:
    config = of(ALIBI, "", "alibi.config").ALiBiConfig(
        num_layers=2, d_model=WIDTH, num_heads=HEADS, max_len=40, causal=causal
    )
    return randomised(of(ALIBI, "", "alibi.model").ALiBiTransformer(config), std=0.5)


def alibi_case(causal: bool) -> Case:
    def run(model: Any) -> Tensor:
        out: Tensor = model(numbers(model, 2, N, WIDTH))
        return out

    return Case(lambda: alibi(causal), run, ("kqv.weight",), {"patched": 2})


# -- MosaicBERT ----------------------------------------------------------------------------


def mosaic(**changes: Any) -> Any:
    pytest.importorskip("einops")
    pytest.importorskip("transformers")
    below = "examples/benchmarks/bert/src"
    layers = of(MOSAIC, below, "bert_layers")
    config = of(MOSAIC, below, "configuration_bert").BertConfig(
        vocab_size=50, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=HEADS,
        intermediate_size=16, alibi_starting_size=32, attention_probs_dropout_prob=0.1, **changes,
    )  # fmt: skip
    return randomised(layers.BertModel(config), std=0.3)


def words() -> tuple[Tensor, Tensor]:
    ids = torch.randint(3, 50, (3, N), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(3, N, dtype=torch.long)
    mask[0, -7:], mask[1, -2:] = 0, 0
    return ids, mask


def mosaic_case(padded: bool = True, autocast: bool = False) -> Case:
    def run(model: Any) -> Tensor:
        ids, mask = words()
        # it keeps its matrix in float32, and without its kernel fails in half precision, then
        model.encoder.alibi = model.encoder.alibi.to(next(model.parameters()).dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out: Tensor = model(ids, attention_mask=mask if padded else torch.ones_like(mask))[0]
        return out[mask == 1] if padded else out

    return Case(mosaic, run, ("Wqkv.weight",), {"patched": 2})


# -- BEATs and WavLM -----------------------------------------------------------------------

ENCODER: dict[str, Any] = {
    "encoder_layers": 2, "encoder_embed_dim": WIDTH, "encoder_ffn_embed_dim": 16,
    "encoder_attention_heads": HEADS, "conv_pos": 4, "conv_pos_groups": 2,
    "relative_position_embedding": True, "num_buckets": 16, "max_distance": 20,
}  # fmt: skip
LIVELY = {"relative_attention_bias": 2.0, "grep_a": 1.0, "grep_linear": 1.0}
TABLE = ("relative_attention_bias.weight",)


def unchanged(source: Tensor, **_: Any) -> Tensor:
    """Takes the place of what makes a spectrogram of sound, with a package of its own."""
    return source


def beats(**changes: Any) -> Any:
    needed = ("torchaudio", "torchaudio.compliance", "torchaudio.compliance.kaldi")
    file = of(UNILM, "beats", "BEATs", *needed)
    settings = {"input_patch_size": 4, "embed_dim": 16, "gru_rel_pos": True, "deep_norm": True}
    model = file.BEATs(file.BEATsConfig({**ENCODER, **settings, **changes}))
    model.preprocess = unchanged
    return warm(randomised(model, std=0.3, **LIVELY), heard_patches)


def wavlm(**changes: Any) -> Any:
    file = of(UNILM, "wavlm", "WavLM")
    settings = {"conv_feature_layers": "[(8, 8, 4)] * 2", "gru_rel_pos": True}
    model = file.WavLM(file.WavLMConfig({**ENCODER, **settings, **changes}))
    return warm(randomised(model, std=0.3, **LIVELY), heard_sound)


def warm(model: Any, run: Callable[[Any, bool], Tensor]) -> Any:
    """After a call, without which torch's older weight norm cannot be copied."""
    with torch.no_grad():
        run(model, False)
    return model


def heard_patches(model: Any, padded: bool) -> Tensor:
    """8 x 4 patches of 4 frames, in bands of 4."""
    frames, mask = numbers(model, 2, 32, 16), None
    if padded:
        mask = torch.zeros(2, 32, dtype=torch.bool)
        mask[0, -9:] = True
    states, hidden = model.extract_features(frames, padding_mask=mask)
    found: Tensor = states if hidden is None else states[~hidden]
    return found


def heard_sound(model: Any, padded: bool) -> Tensor:
    wave, mask = numbers(model, 2, 16 * N + 24), None
    if padded:
        mask = torch.zeros(2, wave.shape[1], dtype=torch.bool)
        mask[0, -100:] = True
    states, hidden = model.extract_features(wave, padding_mask=mask)
    found: Tensor = states if hidden is None else states[~hidden]
    return found


def beats_case(padded: bool, **changes: Any) -> Case:
    return Case(lambda: beats(**changes), lambda m: heard_patches(m, padded), TABLE, {"patched": 2})


def wavlm_case(padded: bool, **changes: Any) -> Case:
    return Case(lambda: wavlm(**changes), lambda m: heard_sound(m, padded), TABLE, {"patched": 2})


CASES = {
    "alibi": alibi_case(causal=False),
    "alibi causal": alibi_case(causal=True),
    "mosaic": mosaic_case(padded=False),
    "mosaic padded": mosaic_case(),
    "beats": beats_case(padded=False),
    "beats padded": beats_case(padded=True),
    "beats, norms first": beats_case(padded=True, layer_norm_first=True, deep_norm=False),
    "beats without gates": beats_case(padded=True, gru_rel_pos=False),
    "wavlm": wavlm_case(padded=False),
    "wavlm padded": wavlm_case(padded=True),
    "wavlm large": wavlm_case(padded=True, layer_norm_first=True, extractor_mode="layer_norm"),
    "wavlm without gates": wavlm_case(padded=True, gru_rel_pos=False),
}
GATED = [name for name in CASES if name.startswith(("beats", "wavlm"))]
ONE_OF_EACH = ("alibi causal", "mosaic padded", "beats padded", "wavlm padded")


@pytest.mark.parametrize(("dtype", "backend"), PATHS)
@pytest.mark.parametrize("name", CASES)
def test_values(name: str, dtype: torch.dtype, backend: str) -> None:
    check = parity.check_values if name in GATED else parity.compare
    check(CASES[name], dtype, backend)


def test_mosaic_under_autocast() -> None:
    parity.compare(mosaic_case(autocast=True), torch.float32)


@torch.no_grad()
def test_slopes_matter() -> None:
    """Those of the two whose bias is no parameter."""
    for name in ("alibi causal", "mosaic padded"):
        case = CASES[name]
        model, bare = case.make(), case.make()
        for module in bare.modules():
            if hasattr(module, "alibi"):
                module.alibi.zero_()
            elif hasattr(module, "kqv"):
                module.m.zero_()
        assert (case.output(model) - case.output(bare)).abs().max() > 1e-2


@torch.no_grad()
@pytest.mark.parametrize("name", ["mosaic", "beats", "wavlm"])
def test_padding_matters(name: str) -> None:
    model = CASES[name].make()
    whole, padded = CASES[name].output(model), CASES[f"{name} padded"]
    CASES[name].patched(model)
    seen = padded.output(model)
    assert seen.numel() < whole.numel()
    assert (seen[0] - whole.flatten(0, -2)[0]).abs().max() > 1e-2


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_comes_and_goes(name: str) -> None:
    parity.check_comes_and_goes(CASES[name], pickles=False)


@pytest.mark.parametrize("name", ["beats padded", "wavlm padded"])
def test_other_weights_bring_their_bias(name: str) -> None:
    parity.check_follows_weights(CASES[name])


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_training_is_the_original(name: str) -> None:
    parity.check_training(CASES[name], together=not name.startswith("alibi"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_file_loads(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    parity.check_file(CASES[name], tmp_path, dtype)


@torch.no_grad()
def test_alibi_compiles_in_one_graph() -> None:
    case = CASES["alibi causal"]
    model = case.make()
    case.patched(model)
    expected = case.output(model)
    torch.compiler.reset()
    model.compile(backend="eager", fullgraph=True)
    assert torch.equal(case.output(model), expected)


@torch.no_grad()
@pytest.mark.parametrize("name", ["beats padded", "wavlm padded"])
def test_compiled_encoders_hand_on_tables(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In several graphs: they draw a random number in each layer."""
    model = CASES[name].make()
    CASES[name].patched(model)
    expected = CASES[name].output(model)
    calls: list[None] = []
    original = PatchedAttention.original_forward

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(PatchedAttention, "original_forward", counted)
    torch.compiler.reset()
    model.encoder.compile(backend="eager")
    assert torch.equal(CASES[name].output(model), expected) and not calls


@torch.no_grad()
def test_texts_longer_than_the_matrix_of_mosaic_need_none() -> None:
    model = mosaic(max_position_embeddings=64)
    plain = copy.deepcopy(model)
    CASES["mosaic"].patched(model)
    ids, mask = (torch.cat([x, x], 1) for x in words())
    out = model(ids, attention_mask=mask)[0]
    assert model.encoder.alibi.shape[-1] == 32
    with pytest.warns(UserWarning, match="Increasing alibi size"):
        expected = plain(ids, attention_mask=mask)[0]
    torch.testing.assert_close(out[mask == 1], expected[mask == 1], rtol=1e-4, atol=1e-5)
