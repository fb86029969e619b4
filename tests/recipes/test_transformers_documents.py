"""LayoutLMv2 and the reading order of PP-DocLayoutV2, patched, against the originals."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashbias_convert import fallback, inspect_model, load_model, patch_model, save_model
from flashbias_convert.attention.backends import BackendFallbackWarning
from flashbias_convert.modules import ScoreBiasModule
from tests.recipes import model_parity as parity
from tests.recipes.model_parity import PATHS, Case, randomised

transformers = pytest.importorskip("transformers")

N = 20
SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32,
    "rel_pos_bins": 8, "max_rel_pos": 16, "rel_2d_pos_bins": 8, "max_rel_2d_pos": 24,
}  # fmt: skip


def padding() -> Tensor:
    mask = torch.ones(3, N, dtype=torch.long)
    mask[0, -7:], mask[1, -3:] = 0, 0
    return mask


def boxes() -> Tensor:
    """Boxes (x0, y0, x1, y1) on a page of 100."""
    corners = torch.randint(0, 50, (3, N, 4), generator=torch.Generator().manual_seed(2))
    corners[..., 2:] += corners[..., :2] + 1
    return corners


# -- LayoutLMv2 ----------------------------------------------------------------------------


class Reader(nn.Module):
    """The encoder of LayoutLMv2, whose model wants detectron2, called as the model does."""

    def __init__(self, **changes: Any) -> None:
        super().__init__()
        config = transformers.LayoutLMv2Config(**SIZES | changes)
        module = importlib.import_module("transformers.models.layoutlmv2.modeling_layoutlmv2")
        self.encoder = module.LayoutLMv2Encoder(config)

    def forward(self, states: Tensor, mask: Tensor, boxes: Tensor, **kwargs: Any) -> Any:
        places = torch.arange(states.shape[1]).expand(len(states), -1)
        additive = (1.0 - mask[:, None, None].to(states.dtype)) * torch.finfo(states.dtype).min
        call = {"attention_mask": additive, "bbox": boxes, "position_ids": places}
        return self.encoder(states, **call, **kwargs).last_hidden_state


def reader(**changes: Any) -> Any:
    return randomised(Reader(**changes), rel_pos=2.0)


def written_out(
    self: Any, x: Tensor, mask: Tensor, rel_pos: Any = None, rel_2d_pos: Any = None, **_: Any
) -> tuple[Tensor, None]:
    """The original's attention, whose own forward cannot run in float64."""
    heads = (part.unflatten(-1, (self.num_attention_heads, -1)) for part in self.compute_qkv(x))
    q, k, v = (part.transpose(1, 2) for part in heads)
    scores = q @ k.mT / self.attention_head_size**0.5
    for bias in (rel_pos, rel_2d_pos):
        scores = scores if bias is None else scores + bias
    probabilities = scores.masked_fill(mask != 0, -torch.inf).softmax(-1)
    return (probabilities @ v).transpose(1, 2).flatten(2), None


def read(model: Any, mask: Tensor | None = None) -> Tensor:
    made = torch.randn(3, N, 32, generator=torch.Generator().manual_seed(1))
    states = made.bfloat16().half().to(next(model.parameters()).dtype)
    mask = torch.ones(3, N) if mask is None else mask
    with pytest.MonkeyPatch.context() as context:
        if states.dtype == torch.float64:
            attention = type(model.encoder.layer[0].attention.self)
            context.setattr(attention, "forward", written_out)
        out: Tensor = model(states, mask, boxes())
    return out[mask.bool()]


def test_what_is_written_out_is_the_original() -> None:
    model = reader()
    attention = model.encoder.layer[0].attention.self
    x, bias = torch.randn(3, N, 32), torch.randn(3, 4, N, N)
    mask = (1.0 - padding()[:, None, None].float()) * torch.finfo(torch.float32).min
    with torch.no_grad():
        found = written_out(attention, x, mask, bias, bias)[0]
        torch.testing.assert_close(found, attention(x, mask, bias, bias)[0])


# -- PP-DocLayoutV2 ------------------------------------------------------------------------


def order(eager: bool = False, **changes: Any) -> Any:
    settings: dict[str, Any] = SIZES | {
        "max_position_embeddings": 64, "max_2d_position_embeddings": 128, "coordinate_size": 5,
        "shape_size": 6, "num_classes": 5, "relation_bias_embed_dim": 4, "relation_bias_scale": 1,
        "global_pointer_head_size": 8,
    }  # fmt: skip
    module = "transformers.models.pp_doclayout_v2"
    configs = importlib.import_module(f"{module}.configuration_pp_doclayout_v2")
    models = importlib.import_module(f"{module}.modeling_pp_doclayout_v2")
    config = configs.PPDocLayoutV2ReadingOrderConfig(**settings | changes)
    if eager:
        config._attn_implementation = "eager"  # else sdpa, where the model offers it
    return randomised(models.PPDocLayoutV2ReadingOrder(config), pos_proj=1.0)


def ordered(model: Any, mask: Tensor | None = None) -> Tensor:
    labels = torch.randint(0, 5, (3, N), generator=torch.Generator().manual_seed(4))
    mask = torch.ones(3, N, dtype=torch.long) if mask is None else mask
    page = boxes().to(next(model.parameters()).dtype)
    out: Tensor = model(page, labels=labels, mask=mask)
    real = mask.bool()[:, :, None] & mask.bool()[:, None]
    above = torch.ones(N, N, dtype=torch.bool).triu(1)  # the others are set to a large number
    return out[real & above]


BOXES = ("rel_bias_module.pos_proj.weight", "rel_bias_module.pos_proj.bias")
ALL = {"patched": 2}
CASES = {
    "layoutlmv2": Case(reader, read, ("bias.weight",), ALL),
    "layoutlmv2 padded": Case(reader, lambda m: read(m, padding()), ("bias.weight",), ALL),
    "layoutlmv2 of three projections": Case(
        lambda: reader(fast_qkv=False), lambda m: read(m, padding()), ("bias.weight",), ALL
    ),
    "layoutlmv2 text": Case(
        lambda: reader(has_spatial_attention_bias=False), read, ("bias.weight",), ALL
    ),
    "layoutlmv2 page": Case(
        lambda: reader(has_relative_attention_bias=False), read, ("bias.weight",), ALL
    ),
    "order": Case(order, ordered, BOXES, ALL),
    "order padded": Case(order, lambda m: ordered(m, padding()), BOXES, ALL),
    "order eager": Case(
        lambda: order(eager=True), lambda m: ordered(m, padding()), BOXES, ALL
    ),
}  # fmt: skip
PADDED = ("layoutlmv2 padded", "order padded")


#: in float16 the reading order divides by the size of an empty box, which overflows
TRIED = [
    (name, *path)
    for name in CASES
    for path in PATHS
    if not (name.startswith("order") and path[0] == torch.float16)
]


@pytest.mark.parametrize(("name", "dtype", "backend"), TRIED)
def test_values(name: str, dtype: torch.dtype, backend: str) -> None:
    parity.check_values(CASES[name], dtype, backend)


@pytest.mark.parametrize("name", PADDED)
def test_changes(name: str) -> None:
    parity.check_comes_and_goes(CASES[name])
    parity.check_follows_weights(CASES[name])


@pytest.mark.parametrize("name", PADDED)
def test_values_in_inference_mode(name: str) -> None:
    """Whose tensors do not say whether they have changed."""
    case = CASES[name]
    model = case.make()
    case.patched(model)
    out = case.output(model)
    with torch.inference_mode():
        assert torch.equal(case.run(model), out)


def test_training_is_the_original() -> None:
    parity.check_training(CASES["order padded"], together=True)
    # the original gives its tables no gradients: see whether one of another parameter is there
    case = CASES["layoutlmv2 padded"]
    parity.check_training(Case(case.make, case.run, ("qkv_linear.weight",), ALL))


class Part(nn.Module):
    """The reading order as part of a model; its own config has no type that a file could name."""

    def __init__(self) -> None:
        super().__init__()
        self.order = order()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.order(*args, **kwargs)


FILES = {
    "layoutlmv2": CASES["layoutlmv2 padded"],
    "order": Case(lambda: Part().eval(), CASES["order padded"].run, BOXES, ALL),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_loads(name: str, tmp_path: Path) -> None:
    case = FILES[name]
    model = case.make()
    case.patched(model)
    save_model(model, tmp_path / "model.safetensors")
    loaded = load_model(tmp_path / "model.safetensors", arch=case.make, backend="sdpa")
    assert torch.equal(case.output(loaded), case.output(model))


def test_without_a_bias_they_are_left_alone() -> None:
    neither = {"has_spatial_attention_bias": False, "has_relative_attention_bias": False}
    for model in (reader(**neither), order(**neither)):
        plan = inspect_model(model)
        assert plan.counts() == {"left alone": 2} and "without" in plan.sites[0].reason


@pytest.mark.parametrize("name", PADDED)
def test_the_padding_goes_along_as_a_mask_of_keys(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    forward = ScoreBiasModule.forward

    def counted(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        calls.append(kwargs)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(ScoreBiasModule, "forward", counted)
    model = CASES[name].make()
    patch_model(model, backend="sdpa", force_all=True)
    CASES[name].output(model)
    assert len(calls) == 2 and all(not call["key_mask"].all() for call in calls)
    # LayoutLMv2 has one bias for all layers, not one more in each
    assert len({call["built"]["dense"]["bias"].data_ptr() for call in calls}) == 1


def test_a_mask_that_is_no_padding_mask_runs_the_original() -> None:
    model = reader()
    states = torch.randn(3, N, 32, generator=torch.Generator().manual_seed(1))
    hidden = torch.ones(N, N).triu(1).bool().expand(3, 1, N, N)
    call = {"attention_mask": hidden, "bbox": boxes(), "position_ids": torch.arange(N)[None]}
    with torch.no_grad():
        plain = model.encoder(states, **call).last_hidden_state
        patch_model(model, backend="sdpa", force_all=True)
        fallback._warn.cache_clear()
        with pytest.warns(BackendFallbackWarning, match="no padding mask"):
            out = model.encoder(states, **call).last_hidden_state
        assert torch.equal(out, plain)
