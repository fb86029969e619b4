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
