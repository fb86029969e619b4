"""The task of the small Pangu: what training may see, what is scored, and how the bias is tied."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flashbias_convert import DecomposeOptions, RelativeTable
from flashbias_convert.decompose import decompose
from flashbias_convert.errors import UsageError
from flashbias_convert.models.pangu import build

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import era_interim as era
import train_pangu_era as training

CPU = torch.device("cpu")


def fields(seed: int = 0) -> Tensor:
    """Noise in place of the weather: (month, variable, level, 241, 480)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 3, 3, 241, 480, generator=generator)


# -- the data --------------------------------------------------------------------------------


def test_batches_never_show_or_ask_for_longitudes_that_are_held_out() -> None:
    marked = fields().clamp(-5, 5)
    marked[..., era.held_out()] = 1e6
    hyper = training.Hyperparameters(batch=8)
    seen_columns = torch.zeros(480, dtype=torch.bool)
    for batch, visible, wanted in itertools.islice(training.Batches(marked, hyper, CPU, 0), 3):
        assert batch.shape == (8, 3, 3, 120, 480) and visible.shape == wanted.shape
        used = (visible | wanted)[:, None, None].expand_as(batch)
        assert batch[used].abs().max() < 100
        assert not (visible & wanted).any()
        assert 0.4 < visible.sum() / (visible.sum() + wanted.sum()) < 0.6
        seen_columns |= (visible | wanted).any((0, 1))
    assert seen_columns.all()  # the globe is turned: what is held out is no place in the map


def test_batches_follow_their_seed() -> None:
    hyper = training.Hyperparameters(batch=2)
    first, again, other = (
        next(iter(training.Batches(fields(), hyper, CPU, seed))) for seed in (1, 1, 2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])


def test_blocks_are_hidden_as_a_whole() -> None:
    visible = era.visible_blocks(4, torch.Generator().manual_seed(0))
    blocks = visible.reshape(4, 15, 8, 60, 8).transpose(2, 3).flatten(3)
    assert visible.shape == (4, 120, 480)
    assert ((blocks.sum(-1) == 0) | (blocks.sum(-1) == 64)).all()
    assert 0.45 < visible.float().mean() < 0.55


def test_pairs_of_latitudes_are_averaged() -> None:
    x = torch.arange(241.0)[:, None].expand(241, 480)
    assert torch.equal(era.coarsen(x)[:, 0], torch.arange(120) * 2 + 0.5)
    assert torch.equal(era.coarsen(x, 1)[:, 0], torch.arange(120) * 2 + 1.5)


def test_rows_weigh_by_their_area() -> None:
    weight = era.area()[:, 0]
    assert weight.argmax() in (59, 60) and float(weight.mean()) == pytest.approx(1)
    latitude = torch.deg2rad(90 - 0.75 * (2 * torch.arange(120) + 0.5))
    assert torch.allclose(weight / weight.max(), latitude.cos() / latitude.cos().max(), atol=1e-5)


def test_normalisation_knows_the_training_longitudes_only() -> None:
    raw = fields() * 3 + 7
    spoiled = raw.clone()
    spoiled[..., era.held_out()] = 1e6
    norm, same = era.Normalisation.of(raw), era.Normalisation.of(spoiled)
    assert torch.equal(norm.mean, same.mean) and torch.equal(norm.std, same.std)
    normal = norm.apply(raw)[..., ~era.held_out()]
    assert normal.mean((0, 3, 4)).abs().max() < 1e-3
    assert (normal.std((0, 3, 4)) - 1).abs().max() < 1e-3
    again = era.Normalisation.from_json(norm.to_json())
    assert torch.equal(again.mean, norm.mean) and torch.equal(again.std, norm.std)


# -- the evaluation --------------------------------------------------------------------------


def test_only_hidden_points_of_unseen_longitudes_are_scored() -> None:
    evaluation = era.Evaluation.of(fields(), CPU)
    assert len(evaluation.fields) == 2 * era.PATTERNS
    assert not (evaluation.scored & evaluation.visible).any()
    assert not evaluation.scored[..., ~era.held_out()].any() and evaluation.scored.any()
    right = evaluation.fields.double()
    assert float(evaluation.rmse(right).max()) == 0
    elsewhere = right + 10 * ~evaluation.scored[:, None, None]
    assert float(evaluation.rmse(elsewhere).max()) == 0
    off = right + 2 * evaluation.scored[:, None, None]
    assert torch.allclose(evaluation.rmse(off), torch.full((3, 3), 2.0, dtype=torch.float64))


def test_the_zonal_mean_uses_visible_points_only() -> None:
    evaluation = era.Evaluation.of(fields(), CPU)
    guess = evaluation.zonal_mean()
    row = evaluation.fields[3, 1, 2, 50][evaluation.visible[3, 50]]
    assert float(guess[3, 1, 2, 50, 7]) == pytest.approx(float(row.double().mean()))


def test_hidden_points_do_not_reach_the_model() -> None:
    args = {**era.MODEL_ARGS, **training.TINY}
    torch.manual_seed(0)
    model = build(**args).eval()
    x, visible = era.coarsen(fields())[:1], era.visible_blocks(1, torch.Generator())
    changed = torch.where(visible[:, None, None], x, torch.full_like(x, 1e3))
    with torch.no_grad():
        out = era.fill_in(model, x, visible)
        assert out.shape == x.shape
        assert torch.equal(era.fill_in(model, changed, visible), out)
        assert not torch.equal(era.fill_in(model, x + 1, visible), out)


# -- the model and its training --------------------------------------------------------------


def test_the_model_is_small_enough_to_ship() -> None:
    with torch.device("meta"):
        model = build(**era.MODEL_ARGS)
    parameters = sum(p.numel() for p in model.parameters())
    assert parameters < 4_500_000 and 2 * parameters < 9e6
    types = [m.type_of_windows for _, m in training.attentions(model)]
    assert types == [5, 5, 3, 3, 3, 3, 5, 5]
    assert all(m.earth_specific_bias.shape[-1] == 144 for _, m in training.attentions(model))


def small() -> Any:
    torch.manual_seed(0)
    args = {**era.MODEL_ARGS, **training.TINY, "grid": [16, 32], "window_size": [2, 3, 4]}
    return build(**args)


def test_a_tied_bias_is_a_table_and_becomes_dense_again() -> None:
    model = small()
    names = list(model.state_dict())
    before = training.attentions(model)[0][1].earth_specific_bias.detach().clone()
    training.tie(model)
    attention = training.attentions(model)[0][1]
    (table,) = [p for n, p in attention.named_parameters() if training.BIAS in n]
    dense = attention.earth_specific_bias
    assert table.shape == (attention.type_of_windows, 2, 252)
    assert dense.shape == before.shape and torch.equal(dense[..., 0, 0], dense[..., 1, 1])
    assert torch.isin(dense, before).all()
    dense.sum().backward()
    assert table.grad is not None and float(table.grad.sum()) == before.numel()
    training.untie(model)
    assert list(model.state_dict()) == names
    bias = training.attentions(model)[0][1].earth_specific_bias
    assert torch.equal(bias, dense)
    index = training.earth_position_index((2, 3, 4))
    rounded = bias[0].detach().half().float()
    term = decompose(rounded, DecomposeOptions(method="exact"), index=index).bias.terms[0]
    assert isinstance(term, RelativeTable) and term.table.shape[-1] == 252


def test_every_parameter_is_trained_and_biases_move_faster() -> None:
    model = small()
    training.tie(model)
    hyper = training.Hyperparameters()
    groups = training.make_optimizer(model, hyper).param_groups
    assert len(groups[0]["params"]) == 8 and groups[0]["lr"] == hyper.bias_lr
    assert sum(len(g["params"]) for g in groups) == len(list(model.parameters()))


def test_the_learning_rate_rises_and_falls_to_zero() -> None:
    values = [training.schedule(i / 100, 0.05) for i in range(101)]
    assert values[0] == 0 and max(values) == values[5] == 1 and values[100] < 1e-9
    assert values[5:] == sorted(values[5:], reverse=True)


# -- the file --------------------------------------------------------------------------------


def write_file(path: Path, levels: tuple[int, ...] = (200, 500, 850)) -> np.ndarray:
    """A small-integer file like the real one, and the fields that it holds."""
    netcdf = pytest.importorskip("scipy.io").netcdf_file
    packed = np.random.default_rng(0).integers(-999, 999, (3, 2, 3, 241, 480)).astype("i2")
    with netcdf(path, "w", version=2) as file:
        sizes = {"month": 2, "level": 3, "latitude": 241, "longitude": 480}
        for name, size in sizes.items():
            file.createDimension(name, size)
        file.createVariable("level", "i4", ("level",))[:] = levels
        file.createVariable("latitude", "f4", ("latitude",))[:] = np.linspace(90, -90, 241)
        for name, values in zip(era.VARIABLES, packed, strict=True):
            variable = file.createVariable(name, "i2", tuple(sizes))
            variable[:] = values
            variable.scale_factor, variable.add_offset = 0.5, 3.0
    return packed.transpose(1, 0, 2, 3, 4) * 0.5 + 3.0


def test_fields_are_unpacked_and_ordered_upwards(tmp_path: Path) -> None:
    stored = write_file(tmp_path / "era.nc")
    read = era.read_fields(tmp_path / "era.nc")
    assert read.dtype == torch.float32
    assert np.array_equal(read.numpy(), stored[:, :, ::-1].astype(np.float32))


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        era.read_fields(tmp_path / "none.nc")
    write_file(tmp_path / "era.nc", levels=(100, 500, 850))
    with pytest.raises(UsageError, match="has levels"):
        era.read_fields(tmp_path / "era.nc")
