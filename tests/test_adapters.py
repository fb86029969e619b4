"""Adapters on projections (LoRA): their change is in the outputs of a patched model, too."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
import transformers
from torch import Tensor, nn

from flashbias_convert import patch_model, unpatch_model
from flashbias_convert.patched_attention import PatchedAttention

#: Terms are float32, whatever the dtype of the model: a few of its units, of outputs of about one.
AS_TERMS = {"rtol": 0.0, "atol": 16 * torch.finfo(torch.float32).eps}


class Lora(nn.Module):
    """A layer with a low-rank change beside it; it has the weight and the sizes of the layer."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.enabled = base, True
        self.in_features, self.out_features = base.in_features, base.out_features
        generator = torch.Generator().manual_seed(0)
        self.a = nn.Parameter(torch.randn(4, base.in_features, generator=generator))
        self.b = nn.Parameter(torch.randn(base.out_features, 4, generator=generator) / 4)

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    @property
    def bias(self) -> Tensor | None:
        return self.base.bias

    def forward(self, x: Tensor) -> Any:
        out = self.base(x)
        return out + x @ self.a.T @ self.b.T if self.enabled else out


class Wrapper(nn.Module):
    """What libraries of adapters put around a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model(*args, **kwargs)


def swin() -> tuple[nn.Module, dict[str, Any], str]:
    torch.manual_seed(0)
    options = {"img_size": 32, "patch_size": 4, "embed_dim": 16, "depths": (1, 1)}
    model = timm.create_model("swin_tiny_patch4_window7_224", num_heads=(1, 2), window_size=4,
                              num_classes=5, **options)  # fmt: skip
    return model, {"x": torch.randn(2, 3, 32, 32)}, "qkv"


def t5() -> tuple[nn.Module, dict[str, Any], str]:
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=50, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4
    )
    model = transformers.T5EncoderModel(config)
    return model, {"input_ids": torch.randint(50, (2, 20))}, "q"


def bloom() -> tuple[nn.Module, dict[str, Any], str]:
    torch.manual_seed(0)
    config = transformers.BloomConfig(vocab_size=50, hidden_size=32, n_layer=1, n_head=4)
    model = transformers.BloomModel(config)
    return model, {"input_ids": torch.randint(50, (2, 20))}, "query_key_value"


def adapted(make: Any) -> tuple[nn.Module, dict[str, Any], list[Lora]]:
    """A wrapped model with an adapter on every projection of a name."""
    model, inputs, name = make()
    adapters = []
    for module in list(model.modules()):
        if isinstance(getattr(module, name, None), nn.Linear):
            adapters.append(Lora(getattr(module, name)))
            setattr(module, name, adapters[-1])
    return Wrapper(model).double().eval(), inputs, adapters


@torch.no_grad()
def run(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    known = {k: x.double() if x.is_floating_point() else x for k, x in inputs.items()}
    out = model(**known)
    return out if isinstance(out, Tensor) else out[0]


@pytest.mark.parametrize("make", [swin, t5, bloom])
def test_adapters_on_and_off_change_a_patched_model_as_the_original(make: Any) -> None:
    model, inputs, adapters = adapted(make)
    assert adapters
    on = run(model, inputs)
    for adapter in adapters:
        adapter.enabled = False
    off = run(model, inputs)
    assert (on - off).abs().max() > 1e-3

    plan = patch_model(model, method="exact", force_all=True, backend="eager")
    sites = [name for name, m in model.named_modules() if isinstance(m, PatchedAttention)]
    assert sites and len(sites) == len(plan.patched)
    assert all(name.startswith("base_model.") for name in sites)  # the inner ones
    torch.testing.assert_close(run(model, inputs), off, **AS_TERMS)
    for adapter in adapters:
        adapter.enabled = True
    torch.testing.assert_close(run(model, inputs), on, **AS_TERMS)
    assert "Lora" in repr(model)

    unpatch_model(model)
    assert torch.equal(run(model, inputs), on)


class Int8Linear(nn.Module):
    """A layer whose weight is whole numbers and a scale, as quantisers leave it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = (
            base.in_features,
            base.out_features,
            base.bias,
        )
        scale = base.weight.detach().abs().amax() / 127
        self.register_buffer("weight", (base.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)


@pytest.mark.parametrize("make", [swin, t5, bloom])
def test_quantised_projections_are_called(make: Any) -> None:
    """Not read: their weight is not what they multiply with."""
    model, inputs, name = make()
    for module in list(model.modules()):
        if isinstance(getattr(module, name, None), nn.Linear):
            setattr(module, name, Int8Linear(getattr(module, name)))
    model = model.double().eval()
    expected = run(model, inputs)
    plan = patch_model(model, method="exact", force_all=True, backend="eager")
    assert plan.patched
    torch.testing.assert_close(run(model, inputs), expected, **AS_TERMS)


def test_a_projection_whose_weight_is_read_is_quantised_in_vain() -> None:
    """SwinV2 multiplies with the weight itself: so it does when it is patched, or it is refused."""
    torch.manual_seed(0)
    model = timm.create_model(
        "swinv2_tiny_window8_256", img_size=16, patch_size=2, embed_dim=16, depths=(1,),
        num_heads=(2,), window_size=4, num_classes=5,
    ).eval()  # fmt: skip
    attention: Any = next(m for m in model.modules() if hasattr(m, "cpb_mlp"))
    attention.qkv = Int8Linear(attention.qkv)
    x = torch.randn(1, 3, 16, 16)
    with pytest.raises(RuntimeError):
        model(x)
    plan = patch_model(model, method="exact", force_all=True)
    if plan.patched:
        with pytest.raises(RuntimeError), torch.no_grad():
            model(x)


@pytest.mark.parametrize("make", [swin, t5, bloom])
def test_no_key_of_a_term_extends_the_name_of_a_parameter(make: Any) -> None:
    """Loading such a key into the original breaks it instead of telling of it."""
    model, _, _ = make()
    before = set(model.state_dict())
    original = {k: v.clone() for k, v in model.state_dict().items()}
    patch_model(model, method="exact", force_all=True)
    after = model.state_dict()
    added = set(after) - before
    assert added and before <= set(after)
    assert not [key for key in added if any(key.startswith(f"{old}.") for old in before)]
    fresh, _, _ = make()
    told = fresh.load_state_dict(after, strict=False)
    assert set(told.unexpected_keys) == added and not told.missing_keys
    assert all(torch.equal(v, original[k]) for k, v in fresh.state_dict().items())
