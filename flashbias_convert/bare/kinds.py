"""Kinds of biases that tensors show by their names and shapes, and how each is computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import UsageError
from ..models.pangu import earth_position_index
from ..recipe import Description, UnsupportedSite
from ..relative_positions import log_coordinates, window_index
from ..terms import RelativeTable
from .positions import distance_buckets, sides_of_table, with_class_token
from .sizes import Sizes

Tensors = Mapping[str, Tensor]

#: the window of Pangu-Weather: levels, latitude, longitude
PANGU = (2, 6, 12)
_WINDOW = "name the architecture with --arch, or say which window: inspect FILE --window 16"
#: length of a sequence where nobody says one, as for T5 in transformers
TOKENS = 512


@dataclass(frozen=True)
class Kind:
    """A kind of bias.

    Attributes:
        name: for people.
        shows: the tensor, below the name of its site, that shows it.
        also: beginnings of names of other tensors of the site that belong to it.
        describe: (tensors of the site, what they do not say, name of the site) -> its bias.
    """

    name: str
    shows: str
    also: tuple[str, ...]
    describe: Callable[[Tensors, Sizes, str], Description]


def _description(bias: Tensor, index: Tensor | None, *warnings: str) -> Description:
    heads, n, m = bias.shape[-3:]
    return Description(bias, heads, n, m, 0, index=index, warnings=warnings)


# -- tables --------------------------------------------------------------------------------


def _table(tensors: Tensors, sizes: Sizes, site: str) -> Description:
    table = tensors["relative_position_bias_table"]
    if table.dim() != 2:
        raise UnsupportedSite(f"its table has the shape {tuple(table.shape)}, not (entries, heads)")
    index = _own_index(tensors, "relative_position_index", len(table))
    if index is None:
        found = sides_of_table(len(table), sizes.sides)
        if found is None:
            raise UnsupportedSite(
                f"a table of {len(table)} entries is of no square window; say which: --window 8x16"
            )
        index = window_index(found[0])
        index = with_class_token(index) if found[1] else index
    return _description(sizes.wide(table)[index].permute(2, 0, 1), index)


def _own_index(tensors: Tensors, name: str, entries: int) -> Tensor | None:
    """The index that the file holds, if it is one."""
    index = tensors.get(name)
    if index is None or index.dim() != 2 or index.is_floating_point() or index.is_complex():
        return None
    inside = index.numel() and int(index.min()) >= 0 and int(index.max()) < entries
    return index.long() if inside else None


# -- layers of SwinV2 ----------------------------------------------------------------------


def _continuous(tensors: Tensors, sizes: Sizes, site: str) -> Description:
    layers = {n.partition(".")[2]: sizes.wide(t) for n, t in tensors.items() if "_mlp." in n}
    coordinates = tensors.get("relative_coords_table")
    warnings: tuple[str, ...] = ()
    if coordinates is None or coordinates.dim() != 4 or coordinates.shape[-1] != 2:
        if len(sizes.sides) != 2:
            raise UsageError(f"no tensor of {site or 'the model'} shows its window", _WINDOW)
        coordinates = log_coordinates(sizes.sides)
        warnings = (
            "its window is the one of --window, and the one that it was trained with; nothing in "
            "the file shows it",
        )
    hidden = coordinates.to(layers["0.weight"])
    try:
        hidden = F.linear(hidden, layers["0.weight"], layers.get("0.bias")).relu()
        values = F.linear(hidden, layers["2.weight"], layers.get("2.bias")).flatten(0, -2)
    except (KeyError, RuntimeError) as error:
        raise UnsupportedSite("its layers are not the two of SwinV2") from error
    index = window_index([(side + 1) // 2 for side in coordinates.shape[1:3]])
    index = index.to(values.device)
    return _description(16 * values[index].permute(2, 0, 1).sigmoid(), index, *warnings)


# -- weather -------------------------------------------------------------------------------


def _earth(tensors: Tensors, sizes: Sizes, site: str) -> Description:
    bias = tensors["earth_specific_bias"]
    if bias.dim() != 5 or len(bias) != 1 or bias.shape[-1] != bias.shape[-2]:
        raise UnsupportedSite(f"its bias has the shape {tuple(bias.shape)}, not (1, T, H, N, N)")
    window = sizes.sides if len(sizes.sides) == 3 else PANGU
    index = earth_position_index((window[0], window[1], window[2]))
    return _description(sizes.wide(bias)[0], index if len(index) == bias.shape[-1] else None)


def _earth_table(tensors: Tensors, sizes: Sizes, site: str) -> Description:
    table = tensors["earth_position_bias_table"]
    if table.dim() != 3:
        raise UnsupportedSite(f"its table has the shape {tuple(table.shape)}, not (entries, T, H)")
    index = _own_index(tensors, "earth_position_index", len(table))
    if index is None:
        raise UnsupportedSite("the file holds no earth_position_index, which looks up its table")
    return _description(sizes.wide(table)[index].permute(2, 3, 0, 1), index)


# -- distances -----------------------------------------------------------------------------


def _distance(tensors: Tensors, sizes: Sizes, site: str) -> Description:
    """T5's: an encoder's is decomposed; a decoder's stays a table, half of which nobody sees."""
    weight = sizes.wide(tensors["relative_attention_bias.weight"])
    if weight.dim() != 2 or len(weight) < 4:
        raise UnsupportedSite(f"its table has the shape {tuple(weight.shape)}")
    n, decodes = sizes.tokens or TOKENS, "decoder" in site.split(".")
    buckets = distance_buckets(n, len(weight), both=not decodes).to(weight.device)
    table = weight[buckets].T.contiguous()  # (H, 2 N - 1), of key minus query
    place = torch.arange(n, device=weight.device)
    warning = f"looked at for {n} tokens and a farthest distance of 128, which no tensor shows"
    if not decodes:
        index = place[None, :] - place[:, None] + n - 1
        return _description(table[:, index], index, warning)
    term = RelativeTable.of_codes(table.float(), n - 1 - place, place, 1)
    return Description(
        None, len(table), n, n, 0, exact_terms=(term,), warnings=(f"{warning}; it is causal",)
    )


KINDS = (
    Kind("table", "relative_position_bias_table", ("relative_position_index",), _table),
    Kind("layers", "cpb_mlp.0.weight", ("cpb_mlp.", "relative_coords_table"), _continuous),
    Kind(
        "layers",
        "continuous_position_bias_mlp.0.weight",
        ("continuous_position_bias_mlp.", "relative_coords_table"),
        _continuous,
    ),
    Kind("earth", "earth_specific_bias", (), _earth),
    Kind("earth", "earth_position_bias_table", ("earth_position_index",), _earth_table),
    Kind("distance", "relative_attention_bias.weight", (), _distance),
)
