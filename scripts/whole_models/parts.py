"""What real models are put together from: makers, and sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import timm
import torch
import transformers
from torch import Tensor, nn

from .case import EXACT, FORCED, FUSED, ORIGINAL, OURS, Case, converted
from .given import Inputs

#: parts of the names of parameters that biases are made of; they become normal, variance one
_TABLES = ("relative_position_bias", "relative_attention_bias", "rel_pos", "rel_attn_embed",
           "rel_2d_pos", "attention_biases", "bias_table", "bias_values", "height_rel",
           "width_rel")  # fmt: skip
_LAYERS = 4
#: what is measured of each
FAMILY_WAYS, FAMILY_MODES = (ORIGINAL, OURS, EXACT), ("eager", "compiled")

#: by name: batch, tokens of a call, what makes the model, what goes through it
Parts = dict[str, tuple[int, int, Callable[[], nn.Module], Inputs]]


@torch.no_grad()
def with_biases(model: nn.Module) -> nn.Module:
    """Tables of biases drawn anew, norms of ones."""
    for name, parameter in model.named_parameters():
        if any(word in name for word in _TABLES) and "mlp" not in name:
            parameter.normal_()
        elif "norm" in name and name.endswith("weight"):
            parameter.fill_(1)  # some start at zero: blocks would do nothing
    return model


@torch.no_grad()
def lively(model: nn.Module, given: Inputs) -> nn.Module:
    """Weights that keep the size of what goes through, so that every block adds something.

    Fresh ones of LeViT and its kind hide attention: norms and scales of layers begin near zero.

    Args:
        model: on the CPU.
        given: what goes through it.
    """
    for name, parameter in with_biases(model).named_parameters():
        if parameter.dim() > 1 and "attention_biases" not in name:
            nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
        elif name.endswith(("bn.weight", "batch_norm.weight", "gamma")):
            nn.init.ones_(parameter)
    return settled(model, given)


@torch.no_grad()
def settled(model: nn.Module, given: Inputs) -> nn.Module:
    """A model whose batch norms divide by the size of what goes through them.

    Fresh ones divide by one, and each block of a residual network multiplies what it gets: of 35
    blocks scores were so large that kernels of attention had NaN. Norms that knew mean and variance
    of each channel would magnify the little in which images of noise differ, and all rounding.
    """
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    model.eval()  # returns nothing, where an attention does not return itself
    hooks = [norm.register_forward_pre_hook(_take_size) for norm in norms]
    args, kwargs = given(2, torch.device("cpu"), torch.float32)
    model(*args, **kwargs)
    for hook in hooks:
        hook.remove()
    model.train()  # as it came; forgets the biases that it has cached
    return model


def _take_size(norm: nn.Module, args: tuple[Tensor, ...]) -> None:
    norm.running_var.fill_(args[0].square().mean())  # type: ignore[union-attr, operator]


def of_timm(name: str, **args: Any) -> Callable[[], nn.Module]:
    """A model of timm, without weights."""
    return lambda: timm.create_model(name, **args)


def of_transformers(name: str, config: str, **args: Any) -> Callable[[], nn.Module]:
    """A model of transformers."""
    return lambda: getattr(transformers, name)(getattr(transformers, config)(**args))


def of_torchvision(n: int, heads: list[int], dim: int) -> Callable[[], nn.Module]:
    """A Swin of torchvision with windows of n x n."""

    def make() -> nn.Module:
        from torchvision.models.swin_transformer import SwinTransformer

        return SwinTransformer([4, 4], dim, [2] * len(heads), heads, [n, n])

    return make


#: recipes whose originals timm's experimental switch changes
SWITCHED = ("timm_swin",)
#: how models begin that a plan leaves alone, since they gain nothing
LEFT_ALONE = "timm_rel_pos, ViT"


def with_fused_attention(model: nn.Module) -> nn.Module:
    """As timm builds it after `set_fused_attn(experimental=True)`, which modules ask once.

    Raises:
        RuntimeError: no module changes.
    """
    off = [m for m in model.modules() if getattr(m, "fused_attn", None) is False]
    if not off:
        raise RuntimeError("no attention that is not fused already")
    for module in off:
        module.fused_attn = True
    return model


def family(
    name: str, batch: int, n: int, make: Callable[[], nn.Module], given: Inputs, *, tiny: bool
) -> Case:
    """A case with the original and both ways to convert; of a tiny one all sites are patched."""
    more = (FUSED,) if name.partition(",")[0] in SWITCHED else ()
    ours = FORCED if name.startswith(LEFT_ALONE) else OURS

    def build(device: torch.device) -> nn.Module:
        return with_biases(make()).to(device)

    def inputs(_: Any, __: str, device: torch.device, dtype: torch.dtype, count: int) -> Any:
        return given(count, device, dtype)

    def alter(model: nn.Module, way: str) -> nn.Module:
        return with_fused_attention(model) if way == FUSED else converted(model, way, force=tiny)

    ways = (ORIGINAL, ours, EXACT, *more)
    return Case(name, batch, n, ways, build, inputs, alter, FAMILY_MODES)


class Sizes:
    """Widths of base models, or tiny ones, and samples per call.

    `batch` is that of most models, and `few` that of large images and of texts. Where a compiled
    original takes less than about 8 ms for those on an H200, measured or by its size, the host may
    decide what is measured, not the card: such models have four times as many samples, `many` and
    `batch`. By estimate all of them stay below 25 GB, since processes share a card.
    """

    def __init__(self, tiny: bool) -> None:
        self.tiny = tiny
        self.dim, self.heads, self.layers = (32, 2, 1) if tiny else (768, 12, _LAYERS)
        self.few, self.batch, self.many = (1, 1, 1) if tiny else (16, 64, 256)
        self.text, self.image = (32, 32) if tiny else (1024, 224)
        self.vocabulary = 97 if tiny else 32000

    def bert(self) -> dict[str, int]:
        """As most configurations of transformers call them."""
        return {
            "hidden_size": self.dim, "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads, "intermediate_size": 4 * self.dim,
        }  # fmt: skip
