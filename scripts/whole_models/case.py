"""What is measured: a model, its inputs, and the ways to compute its attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flashbias_convert import LowRank, Plan, ScoreBias, inspect_model, patch_model
from flashbias_convert.decompose.svd import svd_factors
from flashbias_convert.patching import apply_plan

#: of the repository
ROOT = Path(__file__).resolve().parents[2]

ORIGINAL = "original"
#: with the library's own switch for fused attention, where that is off and would change something
FUSED = "original-fused"
SDPA = "sdpa"
FLEX = "flex"
FLEX_ALIBI = "flex-alibi"
NO_BIAS = "none"
#: as these, with cuDNN's attention: torch chooses it on few cards by itself
SDPA_CUDNN, NONE_CUDNN = "sdpa-cudnn", "none-cudnn"
CUDNN = {SDPA_CUDNN: SDPA, NONE_CUDNN: NO_BIAS}
#: no bias either
NONE_FLEX = "none-flex"
OURS = "ours"
EXACT = "exact"
#: as ours, where a plan leaves every site alone: what shows whether it is right
FORCED = "forced"
#: truncated as the paper truncates Pangu-Weather's biases
SVD_56 = "svd-56"
#: the original's formula, a few rows at a time: the truth where the original is out of memory
BY_ROWS = "by-rows"
#: what each way is, in words
WAYS = {
    ORIGINAL: "original",
    FUSED: "original, with timm's experimental fused attention",
    SDPA: "by hand, dense bias, SDPA",
    SDPA_CUDNN: "by hand, dense bias, SDPA with cuDNN",
    FLEX: "by hand, dense bias, FlexAttention",
    FLEX_ALIBI: "by hand, FlexAttention, ALiBi in its score_mod",
    NO_BIAS: "no bias, SDPA",
    NONE_CUDNN: "no bias, SDPA with cuDNN",
    NONE_FLEX: "no bias, FlexAttention",
    OURS: "ours",
    EXACT: "ours, exact",
    FORCED: "ours, although a plan leaves it alone",
    SVD_56: "ours, rank 56 at the fine scale, elsewhere by hand, dense bias, SDPA",
}
#: ways that compute another function on purpose
WITHOUT_BIAS = (NO_BIAS, NONE_CUDNN, NONE_FLEX)
#: eager; compiled; compiled with CUDA graphs; compiled after a call in eager mode; its blocks
#: compiled one by one, which takes seconds where a whole model takes minutes
MODES = ("eager", "compiled", "graphs", "warm", "layers")
#: of a model that was converted
_APPROXIMATE = "flashbias_approximate"


@dataclass(eq=False)
class Prepared:
    """A model that is ready for its call.

    Attributes:
        model: on the device, in the dtype, in evaluation mode.
        args, kwargs: of its forward.
        approximate: whether biases were truncated, on purpose.
    """

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    approximate: bool = False


@dataclass(frozen=True, eq=False)
class Case:
    """A model and its inputs.

    Attributes:
        name: of its rows.
        batch: samples per call.
        tokens: per attention call, for the table.
        ways: those that it has, in order.
        build: makes the original in float32 on a device; always with the same weights.
        inputs: called with the model, its way, the device, the dtype and the batch; returns
            arguments and keyword arguments. Sample 0 is the same for any batch.
        alter: called with the original in float32 and the way, for ways that are not the
            original's; returns the model that computes it, most often the same one, changed.
        modes: those that make sense.
        seed: of the weights.
        pads_strides: False where torch's compiler must not pad strides, since releases of it get
            the model wrong if it does (`flashbias_convert.compiler_faults`).
    """

    name: str
    batch: int
    tokens: int
    ways: tuple[str, ...]
    build: Callable[[torch.device], nn.Module]
    inputs: Callable[
        [nn.Module, str, torch.device, torch.dtype, int], tuple[tuple[Any, ...], dict[str, Any]]
    ]
    alter: Callable[[nn.Module, str], nn.Module]
    modes: tuple[str, ...] = MODES
    seed: int = 0
    pads_strides: bool = True

    def variants(self) -> list[str]:
        """Such as "original" and "original-compiled"."""
        return [
            way if mode == "eager" else f"{way}-{mode}"
            for way in self.ways
            for mode in self.modes
            if mode != "warm" or way in (OURS, EXACT)  # only these prepare anything in a call
        ]

    @torch.no_grad()
    def prepare(
        self,
        way: str,
        device: torch.device,
        dtype: torch.dtype,
        *,
        weights: torch.dtype | None = None,
        batch: int | None = None,
    ) -> Prepared:
        """Build the model for one way.

        Args:
            way: one of `ways`, or `BY_ROWS`.
            device: where.
            dtype: of model and inputs.
            weights: what the weights are rounded to first, so that a model in float32 is the
                truth for one in `weights`; default `dtype`.
            batch: samples; default `self.batch`.
        """
        torch.manual_seed(self.seed)
        model = self.build(device).eval()
        for parameter in model.parameters():
            parameter.copy_(parameter.to(weights or dtype))
        if way != ORIGINAL:
            # in float32: whoever writes it by hand, or converts, rounds a bias once, at the end
            model = self.alter(model, way)
        model = model.to(dtype).eval()
        given = self.inputs(model, way, device, dtype, batch or self.batch)
        return Prepared(model, *given, getattr(model, _APPROXIMATE, False))


def split_variant(variant: str) -> tuple[str, str]:
    """Way and mode of a variant."""
    for mode in MODES[1:]:
        if variant.endswith(f"-{mode}"):
            return variant.removesuffix(f"-{mode}"), mode
    return variant, MODES[0]


def converted(
    model: nn.Module, way: str, *, force: bool = False, method: str = "auto", **how: Any
) -> nn.Module:
    """Patch a model: `OURS` as this package decides, `EXACT` with every bit of the bias.

    `FORCED` is as `OURS`, of sites that a plan would leave alone.

    Args:
        model: the original.
        way: one of these three.
        force: patch sites that this package would leave alone, too, as `EXACT` and `FORCED`
            always do.
        method: of `OURS`.
        **how: of `patch_model`.

    Raises:
        RuntimeError: a site is not patched.
    """
    method = "exact" if way == EXACT else method
    force = force or way in (EXACT, FORCED)
    plan = patch_model(model, method=method, force_all=force, **how)
    return _kept(model, plan)


def converted_at_rank(model: nn.Module, rank: int, bias_of: Callable[[Any], Tensor]) -> nn.Module:
    """Patch a model with every position bias cut at one rank, however much that loses.

    Args:
        model: the original, whose position biases are known when it is planned.
        rank: of every head.
        bias_of: called with the module of a site; returns its position bias, (*batch, H, N, N).

    Raises:
        RuntimeError: a site is not patched.
    """
    # any energy: a truncation takes the place of the one that is chosen
    how = {"method": "svd", "energy": 0.5, "max_attention_error": 1.0, "force_all": True}
    plan = inspect_model(model, **how)
    for site in plan.patched:
        assert site.bias is not None
        cut = svd_factors(bias_of(model.get_submodule(site.name)), energy=1.0, max_rank=rank)
        terms = tuple(cut if isinstance(term, LowRank) else term for term in site.bias.terms)
        site.bias = ScoreBias(terms, site.bias.num_heads)
        site.spec = site.bias.spec()
    apply_plan(model, plan)
    return _kept(model, plan)


#: recipes that convert nothing; EfficientFormer V2 has their attention beside its downsampling
_BESIDE = ("timm_talking_heads",)


def _kept(model: nn.Module, plan: Plan) -> nn.Module:
    problems = [site for site in plan.sites if site.status in ("failed", "unsupported")]
    left = [site for site in problems if site.recipe not in _BESIDE]
    if left or not plan.patched:
        raise RuntimeError(f"not converted: {left[0].name if left else 'no site'}")
    setattr(model, _APPROXIMATE, not all(site.is_exact() for site in plan.patched))
    return model


def drawn(shape: tuple[int, ...], batch: int, seed: int = 1) -> Tensor:
    """Normal numbers (batch, *shape) on the CPU; the first samples are the same for any batch."""
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randn(shape, generator=generator) for _ in range(batch)])
