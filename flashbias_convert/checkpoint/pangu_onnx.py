"""The weights of Pangu-Weather as its authors published them: initialisers of an ONNX graph.

The exporter kept the names of few tensors (``b1.a12.bias``). Matrices of linear layers became
anonymous and transposed (``onnx::MatMul_8946``), and the position biases became anonymous, too
(``onnx::Add_8950``). Numbers rise along the graph, so the order of the layers says what is what,
whatever the numbers of a file are.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor

from ..errors import CheckpointError, UsageError

_ANONYMOUS = re.compile(r"onnx::(MatMul|Add)_(\d+)")
_NAMED = re.compile(r"b1\.a(\d+)\.((?:fc[12]\.)?(?:weight|bias))")
#: names of a block's tensors with names of their own, in the order of their numbers
_BLOCK = (
    ("attention.linear1", ("bias",)),
    ("attention.linear2", ("bias",)),
    ("norm1", ("weight", "bias")),
    ("norm2", ("weight", "bias")),
    ("linear", ("fc1.bias", "fc2.bias")),
)


def read_pangu_onnx(path: Path) -> tuple[dict[str, Tensor], list[str]]:
    """The weights under the names of `PanguModel`, and notes for the user.

    Raises:
        UsageError: the package onnx is not installed.
        CheckpointError: damaged, with tensors in other files, or not of this layout.
    """
    found = _initialisers(path)
    matrices = [(int(m[2]), m[1], t) for n, t in found.items() if (m := _ANONYMOUS.fullmatch(n))]
    named: dict[int, dict[str, Tensor]] = {}
    for name, tensor in found.items():
        if match := _NAMED.fullmatch(name):
            named.setdefault(int(match[1]), {})[match[2]] = tensor
    try:
        weights = _Walk(matrices, named).weights()
    except _Unexpected as error:
        raise CheckpointError(
            f"{path} does not have the layout of Pangu-Weather's ONNX files: {error}",
            "other ONNX files are not read; save the model's state_dict()",
        ) from error
    rest = len(found) - len(weights)
    notes = ["matrices of linear layers were transposed, as in the original program"]
    if rest:
        notes.append(f"left out {rest} constants of the graph that are no weights")
    return weights, notes


def _initialisers(path: Path) -> dict[str, Tensor]:
    try:
        import onnx
        from onnx import numpy_helper
    except ImportError as error:
        raise UsageError(
            "reading an ONNX file needs the package onnx", "pip install flashbias-convert[onnx]"
        ) from error
    try:
        graph = onnx.load(path, load_external_data=False).graph
    except Exception as error:  # the parser raises its own
        raise CheckpointError(f"{path} is damaged or no ONNX file: {error}") from error
    outside = [t.name for t in graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL]
    if outside:
        raise CheckpointError(f"{path} keeps its tensors in other files, such as {outside[0]!r}")
    # a copy, because arrays of a message cannot be written to
    return {t.name: torch.tensor(numpy_helper.to_array(t)) for t in graph.initializer}


class _Unexpected(Exception):
    """What came where something else was to come."""


class _Walk:
    """Goes through the layers of the graph from its input to its output.

    Args:
        anonymous: number, kind of node and tensor of the anonymous initialisers.
        named: number -> rest of the name -> tensor, of the others.
    """

    def __init__(
        self, anonymous: list[tuple[int, str, Tensor]], named: dict[int, dict[str, Tensor]]
    ) -> None:
        ordered = [(kind, tensor) for _, kind, tensor in sorted(anonymous, key=lambda a: a[0])]
        matrices = [t for kind, t in ordered if kind == "MatMul" and t.dim() == 2]
        # other constants are added, too, such as masks
        biases = [t for kind, t in ordered if kind == "Add" and _is_bias(t)]
        self._depths = _depths([t.shape[0] for t in matrices if _is_qkv(t)], len(biases))
        self._matrices, self._biases = iter(matrices), iter(biases)
        self._named = iter(sorted(named.items()))
        self._weights: dict[str, Tensor] = {}

    def weights(self) -> dict[str, Tensor]:
        self._convolutions("_input_layer")
        for layer, depth in enumerate(self._depths):
            for block in range(depth):
                self._block(f"layers.EarthSpecificLayer{layer}.blocks.EarthSpecificBlock{block}")
            if layer == 0:
                self._matrix("downsample.linear")
                self._take("downsample.norm", ("weight", "bias"))
            elif layer == 2:
                self._matrix("upsample.linear1")
                self._matrix("upsample.linear2")
                self._take("upsample.norm", ("weight", "bias"))
        self._convolutions("_output_layer")
        more = [f"b1.a{number}" for number, _ in self._named]
        more += [f"a matrix {_shape(t)}" for t in self._matrices]
        if more:
            raise _Unexpected(f"{more[0]} comes after the last layer")
        return self._weights

    def _convolutions(self, name: str) -> None:
        for layer in ("conv", "conv_surface"):
            self._take(f"{name}.{layer}", ("weight", "bias"))

    def _block(self, name: str) -> None:
        self._weights[f"{name}.attention.earth_specific_bias"] = next(self._biases)
        for part in ("attention.linear1", "attention.linear2", "linear.linear1", "linear.linear2"):
            self._matrix(f"{name}.{part}")
        for part, names in _BLOCK:
            self._take(f"{name}.{part}", names)

    def _matrix(self, name: str) -> None:
        tensor = next(self._matrices, None)
        if tensor is None:
            raise _Unexpected(f"there is no matrix for {name}")
        self._weights[f"{name}.weight"] = tensor.T.contiguous()

    def _take(self, name: str, wanted: tuple[str, ...]) -> None:
        number, found = next(self._named, (0, {}))
        if set(found) != set(wanted):
            raise _Unexpected(
                f"b1.a{number} has {sorted(found)}, not the {sorted(wanted)} of {name}"
            )
        for own, tensor in found.items():
            own = own.replace("fc", "linear") if own.startswith("fc") else own
            self._weights[f"{name}.{own}"] = tensor


def _depths(widths: list[int], biases: int) -> tuple[int, int, int, int]:
    """Blocks per layer, from the widths of all attention layers: fine ones, and wider coarse ones.

    Raises:
        _Unexpected: they are not of two widths, or no halves of them are alike.
    """
    fine = widths.count(min(widths, default=0))
    coarse = len(widths) - fine
    if biases != len(widths) or not fine or not coarse or fine % 2 or coarse % 2:
        raise _Unexpected(f"{biases} position biases for {fine} fine and {coarse} coarse blocks")
    return fine // 2, coarse // 2, coarse // 2, fine // 2


def _is_qkv(tensor: Tensor) -> bool:
    return tensor.dim() == 2 and tensor.shape[1] == 3 * tensor.shape[0]


def _is_bias(tensor: Tensor) -> bool:
    """Shape (1, T, H, N, N); a mask of the same shape has one for all heads."""
    shape = tuple(tensor.shape)
    return len(shape) == 5 and shape[0] == 1 and shape[2] > 1 and shape[3] == shape[4]


def _shape(tensor: Tensor) -> str:
    return f"of shape {tuple(tensor.shape)}"
