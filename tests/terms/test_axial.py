"""Rows per query, one for each axis of an image."""

from __future__ import annotations

import pytest
import torch

from flashbias_convert.terms import Axial

from .builders import Maker


def parts(height: int = 2, width: int = 3, batch: tuple[int, ...] = ()) -> dict[str, torch.Tensor]:
    x, m = Maker(), height * width
    return {
        "rel_h": x.numbers(*batch, 3, 4, height),
        "rel_w": x.numbers(*batch, 3, 4, width),
        "y": torch.arange(m) // width,
        "x": torch.arange(m) % width,
    }


def test_each_key_gets_the_entry_of_its_row_and_that_of_its_column() -> None:
    own = parts(batch=(2,))
    term = Axial(**own)
    dense = term.dense(4, 6)
    assert dense.shape == (2, 3, 4, 6) and term.batch_shape() == (2,)
    for y in range(2):
        for x in range(3):
            assert torch.equal(dense[..., 3 * y + x], own["rel_h"][..., y] + own["rel_w"][..., x])


def test_it_is_the_decomposed_position_bias_of_sam() -> None:
    """SAM adds rel_h[:, :, :, None] + rel_w[:, :, None, :] to scores (B, N, kH, kW)."""
    own = parts()
    original = own["rel_h"][..., :, None] + own["rel_w"][..., None, :]
    assert torch.equal(Axial(**own).dense(4, 6), original.flatten(-2))


def test_rows_follow_the_dtype_of_the_model_and_coordinates_do_not() -> None:
    half = Axial(**parts()).to(dtype=torch.float16)
    assert half.rel_h.dtype == half.rel_w.dtype == torch.float16
    assert half.y.dtype == half.x.dtype == torch.int64


def test_what_does_not_fit_is_refused_by_name() -> None:
    own = parts()
    for name in ("rel_h", "rel_w"):
        with pytest.raises(ValueError, match=f"^{name} must have shape"):
            Axial(**{**own, name: own[name][0]})
    for name in ("y", "x"):
        with pytest.raises(TypeError, match=f"^{name} must hold integers"):
            Axial(**{**own, name: own[name].float()})
        with pytest.raises(ValueError, match=f"^{name} must be one-dimensional"):
            Axial(**{**own, name: own[name][None]})
    with pytest.raises(ValueError, match="axial: rel_h is for 4 queries, the call has 5"):
        Axial(**own).dense(5, 6)
    with pytest.raises(ValueError, match="axial: x is for 5 keys, the call has 6"):
        Axial(**{**own, "x": own["x"][:5]}).dense(4, 6)
