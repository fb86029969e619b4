"""Pangu-Weather: names, shapes, windows, masks and patches."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashbias_convert.errors import UsageError
from flashbias_convert.models.pangu import PanguModel, build, earth_position_index
from flashbias_convert.models.pangu.blocks import EarthSpecificBlock
from flashbias_convert.models.pangu.patches import PatchEmbedding, cut, paste
from flashbias_convert.models.pangu.resample import DownSample, UpSample
from flashbias_convert.models.pangu.windows import partition, reverse, shift_mask
from tests.pangu import SMALL, fields, make, run

# -- names and shapes ------------------------------------------------------------------------


def block_shapes(layer: int, block: int, dim: int, heads: int, types: int) -> dict[str, Any]:
    prefix = f"layers.EarthSpecificLayer{layer}.blocks.EarthSpecificBlock{block}."
    own = {
        "norm1.weight": (dim,),
        "norm1.bias": (dim,),
        "norm2.weight": (dim,),
        "norm2.bias": (dim,),
        "linear.linear1.weight": (4 * dim, dim),
        "linear.linear1.bias": (4 * dim,),
        "linear.linear2.weight": (dim, 4 * dim),
        "linear.linear2.bias": (dim,),
        "attention.earth_specific_bias": (1, types, heads, 144, 144),
        "attention.linear1.weight": (3 * dim, dim),
        "attention.linear1.bias": (3 * dim,),
        "attention.linear2.weight": (dim, dim),
        "attention.linear2.bias": (dim,),
    }
    return {prefix + name: shape for name, shape in own.items()}


def test_names_and_shapes_of_a_small_model() -> None:
    model = build(
        variables=3,
        levels=3,
        surface_variables=2,
        grid=[48, 96],
        surface_constants=2,
        depths=[1, 2, 1, 1],
        dims=[16, 32, 32, 16],
        heads=[2, 4, 4, 2],
    )
    # 3 levels make 2 patches, 3 with the surface, 4 padded: 2 windows; 12 latitudes: 2 windows
    wanted = {
        "_input_layer.conv.weight": (16, 4 * 32, 1),
        "_input_layer.conv.bias": (16,),
        "_input_layer.conv_surface.weight": (16, 4 * 16, 1),
        "_input_layer.conv_surface.bias": (16,),
        "downsample.linear.weight": (32, 64),
        "downsample.norm.weight": (64,),
        "downsample.norm.bias": (64,),
        **block_shapes(0, 0, 16, 2, types=4),
        **block_shapes(1, 0, 32, 4, types=2),
        **block_shapes(1, 1, 32, 4, types=2),
        **block_shapes(2, 0, 32, 4, types=2),
        **block_shapes(3, 0, 16, 2, types=4),
        "upsample.linear1.weight": (64, 32),
        "upsample.linear2.weight": (16, 16),
        "upsample.norm.weight": (16,),
        "upsample.norm.bias": (16,),
        "_output_layer.conv.weight": (3 * 32, 32, 1),
        "_output_layer.conv.bias": (3 * 32,),
        "_output_layer.conv_surface.weight": (2 * 16, 32, 1),
        "_output_layer.conv_surface.bias": (2 * 16,),
    }
    found = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert found == wanted and list(found) == list(wanted)


def test_the_defaults_have_the_names_and_shapes_of_the_reproduction() -> None:
    with torch.device("meta"):
        model = PanguModel()
    state = model.state_dict()
    assert len(state) == 223
    assert sum(t.numel() for t in state.values()) == 276_659_936
    # of the state dict of pangu-pytorch's PanguModel(), written in the same way
    text = "\n".join(f"{name} {list(tensor.shape)}" for name, tensor in state.items())
    digest = hashlib.sha256(text.encode()).hexdigest()
    assert digest == "3e5900a34a88d5a78cbacee4d92d85bc511e685c09580e0021893b377adb0376"


def test_stochastic_depth_rises_over_the_blocks() -> None:
    with torch.device("meta"):
        model = PanguModel()
    rates = [
        getattr(block.drop_path, "drop_prob", 0.0)
        for block in model.modules()
        if isinstance(block, EarthSpecificBlock)
    ]
    assert len(rates) == 16
    assert rates == pytest.approx([0.2 * i / 15 for i in range(16)])


# -- whole models --------------------------------------------------------------------------

GRIDS = {
    "padded": {},
    "levels that fill windows": {"levels": 6},
    "one window": {"grid": (12, 16), "levels": 2},
    "odd longitudes": {"grid": (17, 37)},
    "no constants": {"constants": 0, "surface_constants": 0},
    "published windows": {"window_size": (2, 6, 12), "levels": 3, "grid": (24, 48)},
    "windows of one level": {"window_size": (1, 3, 4)},
    "other patches": {"patch_size": (1, 2, 3)},
    "unequal ends": {"dims": (8, 32, 32, 16), "heads": (1, 2, 4, 2)},
}


@pytest.mark.parametrize("name", GRIDS)
def test_outputs_have_the_shapes_of_the_inputs(name: str) -> None:
    model = make(**GRIDS[name])
    air, surface, constants, surface_constants = fields(model)
    if name == "no constants":
        out = model(air, surface)
    else:
        out = model(air, surface, constants, surface_constants)
    assert [o.shape for o in out] == [air.shape, surface.shape]
    assert all(o.isfinite().all() for o in out)


def test_inputs_of_a_batch_do_not_meet() -> None:
    model = make().double()
    inputs = tuple(x.double() for x in fields(model, batch=3))
    with torch.no_grad():
        together = model(*inputs)
        alone = model(inputs[0][1:2], inputs[1][1:2], *inputs[2:])
    for both, one in zip(together, alone, strict=True):
        assert torch.allclose(both[1:2], one, atol=1e-12)


def test_every_field_and_constant_matters() -> None:
    model = make()
    inputs = fields(model)
    plain = run(model, inputs)
    for i, x in enumerate(inputs):
        changed = tuple(0.5 * y if y is x else y for y in inputs)
        assert not torch.allclose(run(model, changed), plain), i


def test_the_globe_has_no_seam_where_longitudes_fill_the_windows() -> None:
    # 16 patches, 8 on the coarse map: two windows of 4, which a turn by 32 columns exchanges
    wide = make(grid=(23, 64)).double()
    inputs = tuple(x.double() for x in fields(wide))
    with torch.no_grad():
        plain = wide(*inputs)
        out = wide(*(x.roll(32, -1) for x in inputs))
    for a, b in zip(out, plain, strict=True):
        assert torch.allclose(a, b.roll(32, -1), atol=1e-12)


def test_training_reaches_every_parameter() -> None:
    model = make(depths=(2, 2, 2, 2), drop_path=0.0).train()
    air, surface = model(*fields(model))
    (air.square().mean() + surface.square().mean()).backward()
    flat = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert flat == []


def test_it_builds_from_json() -> None:
    again = json.loads(json.dumps(SMALL))
    model, same = make(), build(**again)
    same.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(run(same.eval(), fields(model)), run(model, fields(model)))


def test_random_numbers_outside_are_the_only_difference_between_builds() -> None:
    states = []
    for _ in range(2):
        torch.manual_seed(3)
        states.append(build(**SMALL).state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


# -- wrong input ---------------------------------------------------------------------------

WRONG = {
    "no level": ({"levels": 0}, "levels must be a positive integer, got 0"),
    "a grid of three": ({"grid": (2, 3, 4)}, "grid must be 2 positive integers"),
    "flat windows": ({"window_size": (6, 12)}, "window_size must be 3 positive integers"),
    "three layers": ({"depths": (2, 2, 2)}, "depths must be 4 positive integers"),
    "a step in the middle": ({"dims": (16, 32, 48, 16)}, "two dims in the middle must be equal"),
    "heads that do not divide": ({"heads": (3, 4, 4, 2)}, "must be multiples of heads"),
    "an unknown argument": ({"colour": 1}, "cannot build a PanguModel: .*colour"),
    "a number for a list": ({"depths": 2}, "cannot build a PanguModel"),
}


@pytest.mark.parametrize("name", WRONG)
def test_sizes_that_make_no_model_are_refused(name: str) -> None:
    changes, message = WRONG[name]
    with pytest.raises(UsageError, match=message):
        build(**{**SMALL, **changes})


def test_fields_of_other_shapes_are_refused() -> None:
    model = make()
    air, surface, constants, surface_constants = fields(model)
    with pytest.raises(UsageError, match="air must have shape"):
        model(air[:, :, :, :-1], surface, constants, surface_constants)
    with pytest.raises(UsageError, match="surface must have shape"):
        model(air, surface[:, :1], constants, surface_constants)
    with pytest.raises(UsageError, match=r"constants of surface must .* got None"):
        model(air, surface, constants)
    with pytest.raises(UsageError, match="constants of air must have shape"):
        model(air, surface, constants[..., :-1], surface_constants)


# -- the position index --------------------------------------------------------------------


def test_the_position_index_counts_distances_along_longitude_alone() -> None:
    window = (2, 3, 4)
    index = earth_position_index(window)
    cells = list(itertools.product(*map(range, window)))
    seen: dict[int, set[tuple[int, ...]]] = {}
    for i, (z, h, w) in enumerate(cells):
        for j, (z2, h2, w2) in enumerate(cells):
            seen.setdefault(int(index[i, j]), set()).add((z, z2, h, h2, w - w2))
    assert all(len(meanings) == 1 for meanings in seen.values())
    assert sorted(seen) == list(range(2**2 * 3**2 * 7))


def test_the_position_index_of_the_published_windows() -> None:
    index = earth_position_index((2, 6, 12))
    assert index.shape == (144, 144) and int(index.max()) == 3311 and int(index.min()) == 0
    # the formula of the published pseudocode, written out for three cells
    assert int(index[0, 0]) == 11
    assert int(index[143, 0]) == 1 * 36 * 23 + 5 * 23 + 22
    assert int(index[0, 143]) == 2 * 36 * 23 + 30 * 23 + 0


# -- windows and masks -----------------------------------------------------------------------


def test_windows_are_cut_and_put_back() -> None:
    x = torch.arange(2 * 4 * 6 * 8).reshape(2, 4, 6, 8, 1)
    windows = partition(x, (2, 3, 4))
    assert windows.shape == (4, 4, 24, 1)
    assert torch.equal(reverse(windows, (2, 3, 4), (4, 6, 8)), x)
    # batch 1, second window around the globe; type 3: upper levels, southern latitudes
    expected = x[1, 2:4, 3:6, 4:8].reshape(24, 1)
    assert torch.equal(windows[3, 3], expected)


def reach(block: EarthSpecificBlock, tokens: int) -> Tensor:
    """bool (tokens, tokens): whether token j has an influence on the attention of token i."""
    x = torch.randn(1, tokens, 8, dtype=torch.float64, requires_grad=True)
    out = block._attend(x)[0].sum(-1)
    rows = [torch.autograd.grad(out[i], x, retain_graph=True)[0] for i in range(tokens)]
    return torch.cat(rows).abs().amax(-1) > 1e-20  # a masked token weighs about exp(-100)


@pytest.mark.parametrize("roll", [False, True])
def test_tokens_attend_to_their_neighbours_on_the_globe(roll: bool) -> None:
    torch.manual_seed(0)
    shape, window = (3, 8, 8), (2, 4, 4)  # a padded level
    block = EarthSpecificBlock(8, 2, shape, window, roll=roll).double().eval()
    found = reach(block, math.prod(shape))
    cells = list(itertools.product(*map(range, shape)))
    for i, j in itertools.product(range(len(cells)), repeat=2):
        shared = True
        for axis, (a, b) in enumerate(zip(cells[i], cells[j], strict=True)):
            if axis == 2 and roll:  # a ring of longitudes
                shared &= ((a - 2) % 8) // 4 == ((b - 2) % 8) // 4
            else:  # windows shifted by a half; what hangs over at the end is cut off
                step = window[axis] // 2 if roll else 0
                shared &= (a - step) // window[axis] == (b - step) // window[axis]
        assert bool(found[i, j]) == shared, (cells[i], cells[j])


def test_the_mask_of_a_shifted_block() -> None:
    mask = shift_mask((4, 6, 8), (2, 3, 4))
    assert mask.shape == (1, 4, 24, 24) and set(mask.unique().tolist()) == {-100.0, 0.0}
    assert not mask[0, 0].any()
    level = torch.arange(24) // 12
    last = torch.arange(24) % 12 // 4 >= 2  # the last third of 3 latitudes has come around
    apart = {1: last, 2: level, 3: 2 * level + last}
    for kind, ids in apart.items():
        assert torch.equal(mask[0, kind] != 0, ids[:, None] != ids[None, :]), kind


def test_a_single_window_along_latitude_keeps_the_quirk_of_the_reproduction() -> None:
    # the first latitudes are in no slice: their two levels stay together
    mask = shift_mask((2, 6, 4), (2, 6, 4))[0, 0]
    level, latitude = torch.arange(48) // 24, torch.arange(48) % 24 // 4
    ids = torch.where(latitude < 3, 0, 1 + level)
    assert torch.equal(mask != 0, ids[:, None] != ids[None, :])


def test_a_mask_is_made_once_and_follows_the_model() -> None:
    model = make()
    blocks = [m for m in model.modules() if isinstance(m, EarthSpecificBlock)]
    assert [block.roll for block in blocks] == [False, True, False, True, False, False]
    run(model, fields(model))
    kept = blocks[1]._mask
    run(model, fields(model))
    assert kept is not None and blocks[1]._mask is kept and blocks[0]._mask is None
    run(model.bfloat16(), fields(model))
    assert blocks[1]._mask is not None and blocks[1]._mask.dtype == torch.bfloat16
    assert all("mask" not in name for name in model.state_dict())
    assert torch.equal(run(copy.deepcopy(model), fields(model)), run(model, fields(model)))


def test_a_mask_that_was_made_for_inference_serves_training() -> None:
    model = make()
    with torch.inference_mode():
        model(*fields(model))
    twin = copy.deepcopy(model).train()
    sum(out.sum() for out in twin(*fields(twin))).backward()
    assert all(p.grad is not None for p in twin.parameters())


def test_it_compiles_into_one_graph() -> None:
    model = make()
    plain = run(model, fields(model))
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad(), torch.compiler.set_stance("default"):
        out = compiled(*fields(model))
    assert torch.equal(torch.cat([o.flatten() for o in out]), plain)


# -- patches and resolutions -----------------------------------------------------------------


@pytest.mark.parametrize("shape", [(13, 21, 24), (4, 8, 8), (1, 1, 1)])
def test_patches_are_cut_and_pasted(shape: tuple[int, int, int]) -> None:
    x = torch.randn(2, 3, *shape)
    cells = cut(x, (2, 4, 4))
    assert cells.shape[1] == 3 * 32
    assert torch.equal(paste(cells, (2, 4, 4), shape), x)


def test_the_embedding_is_a_convolution() -> None:
    embedding = PatchEmbedding(3, 2, (2, 4, 4), 8)
    air, surface = torch.randn(2, 3, 4, 8, 12), torch.randn(2, 2, 8, 12)
    weight = embedding.conv.weight.reshape(8, 3, 2, 4, 4)
    above = nn.functional.conv3d(air, weight, embedding.conv.bias, stride=(2, 4, 4))
    weight = embedding.conv_surface.weight.reshape(8, 2, 4, 4)
    below = nn.functional.conv2d(surface, weight, embedding.conv_surface.bias, stride=4)
    wanted = torch.cat([below.unsqueeze(2), above], 2).flatten(2).transpose(1, 2)
    assert torch.allclose(embedding(air, surface), wanted, atol=1e-5)


def test_four_tokens_become_one() -> None:
    down = DownSample(2, 3, (1, 3, 4))
    x = torch.randn(1, 12, 2)
    field = torch.nn.functional.pad(x.reshape(3, 4, 2), (0, 0, 0, 0, 0, 1))
    tokens = [
        torch.cat([field[2 * i, 2 * j], field[2 * i, 2 * j + 1],
                   field[2 * i + 1, 2 * j], field[2 * i + 1, 2 * j + 1]])
        for i, j in itertools.product(range(2), range(2))
    ]  # fmt: skip
    wanted = down.linear(down.norm(torch.stack(tokens)))
    assert torch.allclose(down(x)[0], wanted, atol=1e-6)


def test_one_token_becomes_four() -> None:
    up = UpSample(6, 2, (1, 3, 4))
    x = torch.randn(1, 4, 6)
    quarters = up.linear1(x).reshape(2, 2, 2, 2, 2)  # coarse row, column, fine row, column, C
    wanted = torch.stack(
        [quarters[i // 2, j // 2, i % 2, j % 2] for i in range(3) for j in range(4)]
    )
    assert torch.allclose(up(x)[0], up.linear2(up.norm(wanted)), atol=1e-6)
