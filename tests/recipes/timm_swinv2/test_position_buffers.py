"""Buffers that no checkpoint holds, and weights that are not numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashbias_convert import inspect_model

from .models import check_model, image, make, patch, shifted_block, swin


def garbage_index(attn: Any) -> None:
    attn.relative_position_index.fill_(4595887523461469503)


def zero_index(attn: Any) -> None:
    attn.relative_position_index.zero_()


def garbage_table(attn: Any) -> None:
    attn.relative_coords_table.fill_(float("nan"))


def zero_table(attn: Any) -> None:
    attn.relative_coords_table.zero_()


@pytest.mark.parametrize("spoil", [garbage_index, zero_index, garbage_table, zero_table])
def test_garbage_in_the_position_buffers_is_refused(spoil: Callable[[Any], None]) -> None:
    model, _, attn = shifted_block()
    spoil(attn)
    plan = inspect_model(model, method="exact")
    assert [site.status for site in plan.sites] == ["patched", "unsupported", "patched"]
    assert "init_non_persistent_buffers" in plan.sites[1].reason
    attn.init_non_persistent_buffers()
    assert inspect_model(model, method="exact").sites[1].status == "patched"


def test_a_model_made_on_the_meta_device_and_filled() -> None:
    with torch.device("meta"):
        model = swin.SwinTransformerV2(
            img_size=32, patch_size=2, embed_dim=32, depths=(2, 1), num_heads=(2, 4),
            window_size=8, num_classes=5,
        )  # fmt: skip
    source = make()
    model.to_empty(device="cpu").load_state_dict(source.state_dict())
    for buffer in model.buffers():
        buffer.fill_(3)  # memory may hold by chance what a model before this one had there
    plan = inspect_model(model, method="exact")
    assert {site.status for site in plan.sites} == {"unsupported"}
    for module in model.modules():
        if hasattr(module, "init_non_persistent_buffers"):
            module.init_non_persistent_buffers()
    check_model(model.eval(), image())


def test_weights_that_are_not_numbers_fail_their_site() -> None:
    model, _, attn = shifted_block()
    with torch.no_grad():
        attn.cpb_mlp[0].weight[3] = float("nan")
    plan = patch(model)
    assert [site.status for site in plan.sites] == ["patched", "failed", "patched"]
    assert type(attn) is swin.WindowAttention
