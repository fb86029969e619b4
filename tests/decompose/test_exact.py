"""Terms that keep every bit: what is recognised, what is not, and that it is the same bits."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.models.beit import gen_relative_position_index
from timm.models.swin_transformer import WindowAttention, get_relative_position_index

from flashbias_convert.decompose import (
    check_index,
    dense_term,
    is_row_constant,
    regions,
    relative_table,
)
from flashbias_convert.decompose.exact import LONG_ENOUGH
from flashbias_convert.errors import DecompositionError
from flashbias_convert.terms import RelativeTable

few = settings(max_examples=60, deadline=None)
#: grids of at least four tokens
shapes = st.one_of(
    st.tuples(st.integers(4, 24)),
    st.lists(st.integers(2, 5), min_size=2, max_size=3).map(tuple),
)


def random_table(size: int, heads: int = 3, seed: int = 0) -> torch.Tensor:
    return torch.randn(heads, size, generator=torch.Generator().manual_seed(seed))


def grid_bias(shape: tuple[int, ...], seed: int = 0, heads: int = 2) -> torch.Tensor:
    """A random value for every difference of two positions on a grid, (heads, N, N)."""
    axes = [torch.arange(s) for s in shape]
    at = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).flatten(0, -2)
    difference = at[:, None] - at[None, :] + torch.tensor(shape) - 1
    table = torch.randn(heads, *[2 * s - 1 for s in shape], generator=torch.manual_seed(seed))
    return table[(slice(None), *difference.unbind(-1))]


def same_bits(term: RelativeTable | None, bias: torch.Tensor) -> bool:
    assert term is not None
    term.check_codes()
    return torch.equal(term.dense(*bias.shape[-2:]).to(bias.dtype), bias)


# -- no term -------------------------------------------------------------------------------


def test_row_constant_heads():
    bias = torch.zeros(3, 4, 5)
    bias[1] = torch.arange(4.0)[:, None] * 1e4  # another constant for each row
    bias[2, 3, 4] = 1e-30
    assert is_row_constant(bias).tolist() == [True, True, False]
    assert is_row_constant(bias.expand(2, 3, 4, 5)).tolist() == [[True, True, False]] * 2


def test_a_bias_of_the_key_is_not_row_constant():
    assert is_row_constant(torch.arange(4.0).expand(1, 4, 4)).tolist() == [False]


def test_row_constant_where_it_is_visible():
    visible = torch.ones(5, 5).tril().bool()
    bias = torch.zeros(2, 5, 5).masked_fill(~visible, -9.0)
    bias[1, 3, 2] = 1
    assert is_row_constant(bias).tolist() == [False, False]
    assert is_row_constant(bias, visible).tolist() == [True, False]
    visible[3] = False  # a row that sees nothing decides nothing
    assert is_row_constant(bias, visible).tolist() == [True, True]


# -- relative tables with an index ---------------------------------------------------------


@pytest.mark.parametrize("window", [(2, 2), (7, 7), (8, 12), (12, 8), (1, 9), (9, 1)])
def test_swin_windows(window: tuple[int, int]):
    index = get_relative_position_index(*window)
    size = (2 * window[0] - 1) * (2 * window[1] - 1)
    table = random_table(size)
    bias = table[:, index]
    for term in (relative_table(bias, index), relative_table(bias, index.flatten())):
        assert same_bits(term, bias)
        assert torch.equal(term.table, table)
        assert term.u.dtype == term.v.dtype == torch.int32
    assert same_bits(relative_table(bias), bias)


def test_the_module_that_holds_a_rectangular_window():
    attention = WindowAttention(dim=12, num_heads=3, window_size=(4, 6))
    torch.nn.init.normal_(attention.relative_position_bias_table)
    bias = attention._get_rel_pos_bias().detach()[0]
    assert same_bits(relative_table(bias, attention.relative_position_index), bias)


def test_exchanged_rows_and_columns_are_not_taken_for_the_window():
    bias = random_table(7 * 11)[:, get_relative_position_index(4, 6)]
    term = relative_table(bias, get_relative_position_index(6, 4))  # the wrong window's index
    assert same_bits(term, bias)  # found by its values instead
    assert term.table.shape[-1] == 77


@pytest.mark.parametrize("window", [(2, 3), (5, 5), (14, 14)])
def test_beit_index_with_a_cls_token(window: tuple[int, int]):
    index = gen_relative_position_index(window)
    bias = random_table(int(index.max()) + 1)[:, index]
    for term in (relative_table(bias, index), relative_table(bias)):
        assert same_bits(term, bias)
        assert term.table.shape[-1] < index.numel()


def test_the_special_token_never_shares_an_entry_with_a_patch():
    index = gen_relative_position_index((3, 4))
    term = relative_table(random_table(int(index.max()) + 1)[:, index], index)
    code = term.u[:, None].long() + term.v[None, :]
    groups = (code[0, 0], code[0, 1:], code[1:, 0], code[1:, 1:])
    for one, other in itertools.combinations(groups, 2):
        assert not set(one.flatten().tolist()) & set(other.flatten().tolist())


def test_a_key_grid_larger_than_the_query_grid():
    at = torch.stack(torch.meshgrid(*[torch.arange(8)] * 2, indexing="ij"), -1).flatten(0, 1)
    inner = at.reshape(8, 8, 2)[2:6, 2:6].reshape(-1, 2)  # overlapping windows: 4 x 4 in 8 x 8
    difference = inner[:, None] - at[None, :] + 5
    index = difference[..., 0] * 11 + difference[..., 1]
    bias = random_table(121)[:, index]
    assert same_bits(relative_table(bias, index), bias)
    assert relative_table(bias, index).table.shape == (3, 121)
    assert same_bits(relative_table(bias), bias)


def test_window_with_absolute_depth_and_height():
    # Pangu's index: depth and height enter as pairs, only the width is relative
    depth, height, width = 2, 3, 4
    shape = [torch.arange(s) for s in (depth, height, width)]
    z, y, x = (a.flatten() for a in torch.meshgrid(*shape, indexing="ij"))
    row = (z[:, None] + depth * z[None, :]) * height**2 + (y[:, None] + height * y[None, :])
    index = row * (2 * width - 1) + (x[:, None] - x[None, :] + width - 1)
    bias = random_table(int(index.max()) + 1)[:, index]
    assert same_bits(relative_table(bias, index), bias)
    assert relative_table(bias) is None  # no grid explains it


@pytest.mark.parametrize("queries", [1, 3])
def test_decoding_at_an_offset(queries: int):
    keys = 17
    at = torch.arange(keys)
    index = at[keys - queries :, None] - at[None, :] + queries
    bias = random_table(2 * keys)[:, index]
    term = relative_table(bias, index)
    assert same_bits(term, bias)
    assert term.table.shape[-1] == queries + keys - 1


def test_buckets_are_found_as_a_table_of_distances():
    at = torch.arange(20)
    buckets = (at[None, :] - at[:, None]).abs().clamp(max=5)  # not additive
    bias = random_table(6)[:, buckets]
    term = relative_table(bias, buckets)
    assert same_bits(term, bias)
    assert term.table.shape == (3, 39)


@pytest.mark.parametrize("stride", [1, 2])
def test_absolute_offsets_between_two_resolutions(stride: int):
    keys = torch.stack(torch.meshgrid(*[torch.arange(7)] * 2, indexing="ij"), -1)
    queries = keys[::stride, ::stride].reshape(-1, 2)
    offset = (queries[:, None] - keys.reshape(-1, 2)[None, :]).abs()
    index = offset[..., 0] * 7 + offset[..., 1]
    bias = random_table(49)[:, index]
    assert same_bits(relative_table(bias, index), bias)


@pytest.mark.parametrize("spoil", [4595887523461469503, -4595887523461469503, -1, 2**20], ids=str)
def test_a_garbage_index_is_refused(spoil: int):
    index = get_relative_position_index(7, 7).clone()
    index[3, 5] = spoil
    bias = torch.zeros(3, 49, 49)
    with pytest.raises(DecompositionError, match=rf"of stage\.0 reaches from .*{spoil}"):
        relative_table(bias, index, name="stage.0")


def test_check_index_against_a_known_table():
    index = get_relative_position_index(7, 7)
    assert torch.equal(check_index(index.int().flatten(), 49, 49, 169), index)
    with pytest.raises(DecompositionError, match="reaches from 0 to 168, expected 0 to 167"):
        check_index(index, 49, 49, 168)
    with pytest.raises(DecompositionError, match=r"shape \(36, 36\), got \(49, 49\)"):
        check_index(index, 36, 36)
    with pytest.raises(DecompositionError, match="integers"):
        check_index(index.float(), 49, 49)


# -- relative tables without an index ------------------------------------------------------


@few
@given(
    shape=shapes,
    seed=st.integers(0, 10**6),
    special=st.booleans(),
)
def test_random_tables_on_random_grids_are_recognised(
    shape: tuple[int, ...], seed: int, special: bool
):
    bias = grid_bias(shape, seed)
    n = bias.shape[-1]
    if special:  # a token of its own row, column and corner
        framed = random_table((n + 1) ** 2, 2, seed).reshape(2, n + 1, n + 1)
        framed[:, 1:, 1:] = bias
        bias = framed
    term = relative_table(bias)
    assert same_bits(term, bias)
    assert term.table.shape[-1] < bias[0].numel()


@few
@given(
    shape=shapes,
    seed=st.integers(0, 10**6),
    data=st.data(),
)
def test_a_single_perturbed_cell_is_not_a_table(
    shape: tuple[int, ...], seed: int, data: st.DataObject
):
    bias = grid_bias(shape, seed)
    n = bias.shape[-1]
    # every grid gives all cells of the diagonal one entry (but for a first token's)
    at = data.draw(st.integers(1, n - 1))
    head = data.draw(st.integers(0, 1))
    bias[head, at, at] = torch.nextafter(bias[head, at, at], torch.tensor(9.0))
    assert relative_table(bias) is None


def test_the_smallest_table_is_taken():
    line = grid_bias((12,))  # also a function of every 2-D difference
    assert relative_table(line).table.shape[-1] == 23
    assert relative_table(torch.zeros(1, 12, 12)).table.shape[-1] == 23
    assert relative_table(grid_bias((3, 4))).table.shape[-1] == 35


def test_rows_that_the_first_look_skips_are_checked():
    bias = grid_bias((64,))
    probed = set(torch.linspace(0, 63, 16).long().tolist())
    row = next(r for r in range(1, 64) if r not in probed)
    bias[0, row, row] += 1
    assert relative_table(bias) is None


def test_a_decode_row_alone_is_no_table():
    assert relative_table(torch.randn(2, 1, 16)) is None


def test_batch_dimensions_share_the_codes():
    bias = torch.stack([grid_bias((3, 4), seed) for seed in range(5)]).reshape(5, 1, 2, 12, 12)
    term = relative_table(bias)
    assert term.table.shape == (5, 1, 2, 35)
    assert same_bits(term, bias)
    bias[4, 0, 1, 7, 7] += 1
    assert relative_table(bias) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_every_precision_keeps_its_bits(dtype: torch.dtype):
    bias = grid_bias((4, 4)).to(dtype)
    term = relative_table(bias)
    assert term.table.dtype == torch.float32
    assert same_bits(term, bias)


def test_float64_that_fp32_cannot_hold_is_not_exact():
    bias = grid_bias((4, 4)).double()
    assert same_bits(relative_table(bias), bias)
    assert relative_table(bias + 1e-12) is None


def test_nan_is_not_recognised():
    bias = grid_bias((4, 4))
    bias[:, torch.arange(16), torch.arange(16)] = float("nan")
    assert relative_table(bias) is None


# -- regions -------------------------------------------------------------------------------


def swin_mask(size: int, window: int, shift: int) -> torch.Tensor:
    """The shift mask as Swin builds it, (windows, window ** 2, window ** 2)."""
    image = torch.zeros(size, size)
    cuts = (slice(0, -window), slice(-window, -shift), slice(-shift, None))
    for count, (rows, columns) in enumerate(itertools.product(cuts, cuts)):
        image[rows, columns] = count
    tiles = image.reshape(size // window, window, size // window, window)
    ids = tiles.transpose(1, 2).reshape(-1, window**2)
    return torch.where(ids[:, None, :] != ids[:, :, None], -100.0, 0.0)


def test_swin_shift_mask():
    mask = swin_mask(8, 4, 2)
    term = regions(mask)
    assert term.value == -100.0
    assert term.key_ids is None
    assert term.ids.shape == (4, 16)
    assert term.ids.dtype == torch.int32
    assert term.ids.max() == 3  # small ids, from 0 on, in every window
    assert term.ids.amin(-1).tolist() == [0] * 4
    assert torch.equal(term.dense(16, 16)[:, 0], mask)
    assert torch.equal(regions(mask[3]).dense(16, 16)[0], mask[3])


@few
@given(
    seed=st.integers(0, 10**6),
    shape=st.tuples(st.integers(1, 4), st.integers(2, 9), st.integers(2, 9)),
    value=st.sampled_from([-100.0, -3.5, 7.0, torch.finfo(torch.float32).min]),
)
def test_random_regions_are_recognised(seed: int, shape: tuple[int, int, int], value: float):
    generator = torch.Generator().manual_seed(seed)
    windows, n, m = shape
    ids, keys = (torch.randint(0, 4, (windows, k), generator=generator) for k in (n, m))
    apart = ids[:, :, None] != keys[:, None, :]
    mask = torch.where(apart, value, 0.0)
    term = regions(mask)
    if apart.all() or not apart.any():
        assert term is None  # one value only
    else:
        assert torch.equal(term.dense(n, m)[:, 0], mask)
        assert term.value == value


@few
@given(seed=st.integers(0, 10**6), data=st.data())
def test_regions_with_a_single_wrong_cell_are_not(seed: int, data: st.DataObject):
    # two regions of three tokens or more each: no other regions explain one changed cell
    order = torch.randperm(8, generator=torch.Generator().manual_seed(seed))
    ids = (order < data.draw(st.integers(3, 5))).long()
    mask = torch.where(ids[:, None] != ids, -100.0, 0.0)
    i, j = data.draw(st.tuples(st.integers(0, 7), st.integers(0, 7)))
    mask[i, j] = -100.0 - mask[i, j]
    assert regions(mask) is None


def test_masks_of_another_form_are_not_regions():
    n = 6
    causal = torch.zeros(n, n).masked_fill(~torch.ones(n, n).tril().bool(), -100.0)
    blocks = swin_mask(8, 4, 2)
    three = blocks.clone()
    three[-1, 0] *= 2
    for mask in (
        causal,
        blocks.masked_fill(blocks != 0, float("-inf")),
        torch.where(blocks != 0, blocks, 1.0),
        blocks.masked_fill(blocks != 0, float("nan")),
        torch.zeros(4, 4),
        torch.full((4, 4), -100.0),
        blocks != 0,
    ):
        assert regions(mask) is None
    assert three.unique().numel() == 3
    assert regions(three) is None


def test_regions_keep_batch_dimensions_and_padding_keys():
    mask = torch.zeros(2, 3, 5, 5)
    mask[1, 2, :, 3:] = -50.0  # keys that nobody meets: padding, one-sided
    term = regions(mask)
    assert term.ids.shape == (2, 3, 5)
    assert term.key_ids.shape == (2, 3, 5)
    assert torch.equal(term.dense(5, 5)[..., 0, :, :], mask)


# -- dense ---------------------------------------------------------------------------------


def test_the_dense_term_is_a_copy_in_the_same_precision():
    bias = torch.nn.Parameter(torch.randn(2, 3, 4).half())
    term = dense_term(bias, (0, 2))
    assert term.heads == (0, 2)
    assert torch.equal(term.bias, bias)
    assert term.bias.dtype == torch.float16
    assert not term.bias.requires_grad
    assert term.bias.data_ptr() != bias.data_ptr()
    assert dense_term(torch.zeros(1, 1, 1).expand(2, 3, 4)).bias.is_contiguous()


def test_long_tables_of_distances_say_so():
    """With the margin that a kernel for them needs; short ones are not made longer."""
    n = LONG_ENOUGH
    values = torch.randn(2, 2 * n - 1)
    token = torch.arange(n)
    bias = values[:, token[None] - token[:, None] + n - 1]
    term = relative_table(bias)
    assert term is not None and term.by_distance in (1, -1) and term.entries == 2 * n - 1
    term.check_codes()
    assert torch.equal(term.dense(n, n), bias)
    short = relative_table(bias[:, :-1, :-1])
    assert short is not None and short.by_distance == 0
