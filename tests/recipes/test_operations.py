"""What patched sites do beside the attention: nothing that a call need not do."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from flashbias_convert import patch_model, unpatch_model
from flashbias_convert.models.alibi_gpt2 import AlibiGPT2Config, AlibiGPT2LMHeadModel
from flashbias_convert.models.pangu.attention import EarthAttention3D
from flashbias_convert.patched_attention import PatchedAttention
from tests.kernel_calls import Launches

pytestmark = pytest.mark.filterwarnings("ignore")

#: the kernel, and what is no work on a device: views, and memory that is handed out
FREE = {
    "attention", "view", "_unsafe_view", "t", "transpose", "permute", "unbind", "select", "slice",
    "expand", "unsqueeze", "squeeze", "empty", "new_empty", "alias", "detach", "as_strided",
    "promote_types",
}  # fmt: skip
#: projections of one for q, k and v and of the output
PROJECTIONS = {"addmm": 2}


class Operations(TorchDispatchMode):
    """Counts what runs on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name not in FREE:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    return Launches(monkeypatch)


def of_sites(model: nn.Module, *args: Any, **kwargs: Any) -> list[dict[str, int]]:
    """What the patched sites of a model do in its second call, one by one."""
    found: list[dict[str, int]] = []
    sites = [m for m in model.modules() if isinstance(m, PatchedAttention)]

    def counted(forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with Operations() as mode:
                out = forward(*args, **kwargs)
            found.append(dict(mode.counts))
            return out

        return call

    with torch.no_grad():
        model(*args, **kwargs)
        for site in sites:
            site.flashbias_forward = counted(site.flashbias_forward)  # type: ignore[method-assign]
        model(*args, **kwargs)
    assert len(found) == len(sites) > 0
    return found


def patched(model: nn.Module, **options: Any) -> Any:
    model = model.eval().bfloat16()
    patch_model(model, force_all=True, **options)
    return model


def image() -> Tensor:
    return torch.randn(1, 3, 16, 16, dtype=torch.bfloat16)


@pytest.mark.parametrize("method", ["exact", "svd"])
def test_swinv2(method: str) -> None:
    sizes = {"img_size": 16, "patch_size": 2, "embed_dim": 16, "depths": [2], "num_heads": [2]}
    model = patched(
        timm.create_model("swinv2_tiny_window8_256", **{**sizes, "window_size": 4}), method=method
    )
    # the biases of q and v are joined as in the original
    expected = {"addmm": 2, "cat": 1}
    assert of_sites(model, image()) == [expected] * 2  # with a mask and without


def test_the_scale_of_swinv2_is_that_of_its_weights() -> None:
    """It is kept between calls, but not for longer than the weights stay the same."""
    sizes = {"img_size": 16, "patch_size": 2, "embed_dim": 16, "depths": [1], "num_heads": [2]}

    def make(factor: float) -> Any:
        torch.manual_seed(0)
        model = timm.create_model("swinv2_tiny_window8_256", **{**sizes, "window_size": 4})
        block: Any = model.layers[0].blocks[0]
        with torch.no_grad():
            block.attn.logit_scale.mul_(factor)
            block.norm1.weight.fill_(1)  # zero at first: the block would do nothing
        patch_model(model.eval(), method="exact", force_all=True, backend="sdpa")
        return model

    def result(model: Any, dtype: torch.dtype = torch.float32) -> Tensor:
        torch.manual_seed(1)
        with torch.no_grad():
            out: Tensor = model(torch.randn(1, 3, 16, 16).to(dtype))
        return out

    model, other = make(1.0), make(1.7)
    site, wanted = model.layers[0].blocks[0].attn, result(other)
    assert not torch.equal(result(model), wanted)
    model.load_state_dict(other.state_dict())
    assert torch.equal(result(model), wanted)
    assert torch.equal(result(copy.deepcopy(model)), wanted)
    assert torch.equal(result(model.double(), torch.float64), result(other.double(), torch.float64))
    (scale,) = site.score_bias.sealed.values()
    assert scale.dtype == torch.float64 and not scale.requires_grad
    model(torch.randn(1, 3, 16, 16).double()).sum().backward()  # with gradients, where they flow
    assert site.logit_scale.grad is not None and site.logit_scale.grad.abs().sum() > 0
    unpatch_model(model)
    assert not any("sealed" in vars(module) for module in model.modules())


@pytest.mark.parametrize("method", ["exact", "svd"])
def test_swin(method: str) -> None:
    sizes = {"img_size": 16, "patch_size": 2, "embed_dim": 16, "depths": [2], "num_heads": [2]}
    model = timm.create_model("swin_tiny_patch4_window7_224", **{**sizes, "window_size": 4})
    assert of_sites(patched(model, method=method), image()) == [PROJECTIONS] * 2


def test_beit() -> None:
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2}
    model = patched(timm.create_model("beit_base_patch16_224", **sizes), method="exact")
    assert of_sites(model, image()) == [{"addmm": 2, "cat": 1}] * 2


def test_blocks_of_beit_share_what_the_first_one_made() -> None:
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 3, "num_heads": 2}
    shared = {"use_rel_pos_bias": False, "use_shared_rel_pos_bias": True}
    model = patched(timm.create_model("beit_base_patch16_224", **sizes, **shared), method="exact")
    first, *others = of_sites(model, image())
    assert first["cat"] > 1
    assert others == [{"addmm": 2, "cat": 1}] * 2


def tokens(n: int = 8) -> Tensor:
    return torch.arange(n)[None].expand(2, n)


def padding(n: int = 8) -> Tensor:
    mask = torch.ones(2, n, dtype=torch.long)
    mask[1, :3] = 0
    return mask


def gpt2() -> nn.Module:
    sizes = {"vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 4, "use_cache": False}
    return AlibiGPT2LMHeadModel(AlibiGPT2Config(**sizes, bos_token_id=1, eos_token_id=2))


def bloom() -> nn.Module:
    sizes = {"vocab_size": 50, "hidden_size": 32, "n_layer": 2, "n_head": 4, "use_cache": False}
    return transformers.BloomModel(transformers.BloomConfig(**sizes))


def mpt() -> nn.Module:
    sizes = {"vocab_size": 50, "d_model": 32, "n_layers": 2, "n_heads": 4, "use_cache": False}
    return transformers.MptModel(transformers.MptConfig(**sizes))


#: model, its projections, and what else the original's attention does
LANGUAGE = {
    "gpt2": (gpt2, {"addmm": 2}),
    "bloom": (bloom, {"addmm": 2, "add": 1}),  # the residual
    "mpt": (mpt, {"mm": 2}),
}


@pytest.mark.parametrize("name", LANGUAGE)
def test_language_models(name: str) -> None:
    make, expected = LANGUAGE[name]
    assert of_sites(patched(make()), tokens()) == [expected] * 2


@pytest.mark.parametrize("name", LANGUAGE)
def test_layers_share_what_they_make_of_the_padding(name: str) -> None:
    make, expected = LANGUAGE[name]
    first, second = of_sites(patched(make()), tokens(), attention_mask=padding())
    # the places; and where the bias follows them, slopes and places of the term for all layers
    copies = 1 if name == "mpt" else 3
    assert first == {**expected, "clone": copies, "ne": 1}
    assert second == expected


def test_layers_share_the_table_of_t5() -> None:
    sizes = {"vocab_size": 50, "d_model": 32, "d_kv": 8, "d_ff": 16, "num_heads": 4}
    config = transformers.T5Config(**sizes, num_layers=3)
    first, *others = of_sites(patched(transformers.T5EncoderModel(config)), tokens())
    assert first["arange"] > 2
    assert others == [{"mm": 4}] * 2


def test_layers_share_the_table_of_mpnet() -> None:
    sizes = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = transformers.MPNetModel(transformers.MPNetConfig(**sizes, intermediate_size=16))
    first, second = of_sites(patched(model), tokens())
    assert first == {"addmm": 4, "arange": 2, "clone": 1, "constant_pad_nd": 1}
    assert second == {"addmm": 4}


def test_pangu() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = EarthAttention3D(16, 2, (2, 2, 4), 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.attn(x)
            return out

    model = patched(Block(), method="exact")
    x = torch.randn(4, 3, 16, 16, dtype=torch.bfloat16)
    assert of_sites(model, x) == [PROJECTIONS]
