"""The kernel that projects pairs to a bias, beside its formula in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flashbias_convert.attention.projection import (
    MAX_CHANNELS,
    MAX_HEADS,
    fits,
    project_pairs,
    project_pairs_formula,
)

FORMS = {
    "whole": ("scale", "shift", "bias"),
    "no shift": ("scale",),
    "plain norm": (),
    "no norm": ("bias",),
}
SIZES = [(1, 1, 1, 1), (3, 19, 16, 2), (5, 33, 30, 3), (4, 70, 128, 16), (2, 9, 200, 20)]


def given(size: tuple[int, ...], form: str, dtype: torch.dtype, device: Any) -> dict[str, Any]:
    """Pairs far from zero, whose mean has to go first; weights of every kind."""
    n, m, channels, heads = size
    draw = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw).to(device, dtype)

    z = numbers(2, n, m, channels) * 2 + 5
    made = {"scale": numbers(channels), "shift": numbers(channels), "bias": numbers(heads)}
    own = {name: made[name] if name in FORMS[form] else None for name in made}
    return {"z": z, "weight": numbers(heads, channels), **own, "norms": form != "no norm"}


def formula(own: dict[str, Any], dtype: torch.dtype) -> Tensor:
    """In float64 throughout, or as torch computes it in a dtype."""
    wide = {k: v.to(dtype) if isinstance(v, Tensor) else v for k, v in own.items()}
    return project_pairs_formula(**wide, eps=1e-5, dtype=dtype)


def check(out: Tensor, own: dict[str, Any], dtype: torch.dtype) -> None:
    """At most twice what the formula loses in the same dtype; in fp32 a few units at least."""
    truth = formula(own, torch.float64)
    assert not truth.isnan().any()
    plain = (formula(own, dtype).double() - truth).abs().max()
    floor = 8 * torch.finfo(dtype).eps * truth.abs().max() if dtype == torch.float32 else 0
    assert out.shape == truth.shape and out.dtype == dtype
    assert (out.double() - truth).abs().max() <= 2 * plain + floor


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", SIZES)
def test_it_is_the_formula(
    size: tuple[int, ...], form: str, dtype: torch.dtype, device: torch.device
) -> None:
    own = given(size, form, dtype, device)
    check(project_pairs(**own), own, dtype)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("view", ["turned", "sliced", "no batch", "two batches", "channels first"])
def test_any_strides(view: str, dtype: torch.dtype, device: torch.device) -> None:
    own = given((6, 21, 24, 3), "whole", dtype, device)
    z = own["z"]
    own["z"] = {
        "turned": z.transpose(1, 2),
        "sliced": z[:, ::2, 1:],
        "no batch": z[1],
        "two batches": z[:, None].expand(-1, 3, -1, -1, -1),
        "channels first": z.movedim(-1, 1).contiguous().movedim(1, -1),
    }[view]
    check(project_pairs(**own), own, dtype)


@pytest.mark.usefixtures("kernel")
def test_the_product_can_be_in_another_dtype(device: torch.device) -> None:
    """As under autocast, where pairs and weights are fp32."""
    own = given((5, 33, 30, 3), "whole", torch.float32, device)
    truth = formula(own, torch.float64)
    plain = project_pairs_formula(**own, eps=1e-5, dtype=torch.float16).double()
    out = project_pairs(**own, dtype=torch.float16)
    assert out.dtype == torch.float16
    assert (out.double() - truth).abs().max() <= 2 * (plain - truth).abs().max()


@pytest.mark.usefixtures("kernel")
def test_rows_begin_where_the_attention_kernel_reads_them(device: torch.device) -> None:
    own = given((5, 33, 30, 3), "whole", torch.float16, device)
    out = project_pairs(**own)
    assert out.stride() == (3 * 5 * 48, 5 * 48, 48, 1)


@pytest.mark.usefixtures("kernel")
def test_nothing_to_do(device: torch.device) -> None:
    own = given((5, 33, 30, 3), "whole", torch.float16, device)
    for empty in (own["z"][:0], own["z"][:, :0], own["z"][:, :, :0]):
        out = project_pairs(**{**own, "z": empty})
        assert out.shape == (*empty.shape[:-3], 3, *empty.shape[-3:-1])


@pytest.mark.usefixtures("kernel")
def test_gradients_are_refused(device: torch.device) -> None:
    own = given((5, 9, 30, 3), "whole", torch.float32, device)
    own["weight"].requires_grad_()
    with pytest.raises(RuntimeError, match="no backward pass"):
        project_pairs(**own).sum().backward()


@pytest.mark.parametrize("change", ["channels", "heads", "dtype", "dimensions", "other channels"])
def test_what_does_not_fit_is_refused(change: str) -> None:
    z, weight = torch.zeros(2, 3, 4, 8), torch.zeros(5, 8)
    assert fits(z, weight, z.dtype)
    changed = {
        "channels": (torch.zeros(1, 1, 1, MAX_CHANNELS + 1), torch.zeros(5, MAX_CHANNELS + 1)),
        "heads": (z, torch.zeros(MAX_HEADS + 1, 8)),
        "dtype": (z.double(), weight),
        "dimensions": (z[0, 0], weight),
        "other channels": (z, torch.zeros(5, 7)),
    }
    with pytest.raises(ValueError, match="cannot project"):
        project_pairs(changed[change][0], None, None, changed[change][1])
