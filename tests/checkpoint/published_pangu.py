"""Builds an ONNX file as the authors of Pangu-Weather published theirs, at a reduced size.

The exporter of TorchScript, which they used, names what belongs to a module after its place in
the model, and makes anonymous, transposed constants of the matrices of linear layers.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flashbias_convert.models.pangu import PanguModel


class Perceptron(nn.Module):
    """Two layers under the names that the published program has for them."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.fc1, self.fc2 = mlp.linear1, mlp.linear2


class Published(nn.Module):
    """The layers of a model under the names ``b1.a1`` to ``b1.a143``, or as far as they go.

    Numbers between them belonged to layers without weights.
    """

    def __init__(self, model: PanguModel) -> None:
        super().__init__()
        self.b1 = nn.Module()
        self._model = (model,)  # hidden from nn.Module: its own names must not be found
        self._number = 0
        self._biases: list[tuple[Any, nn.Parameter]] = []
        embed: Any = model._input_layer
        recover: Any = model._output_layer
        self._add(embed.conv, embed.conv_surface)
        for i, layer in enumerate(model.layers):
            blocks: Any = layer.blocks
            for block in blocks:
                self._number += 3
                attention = block.attention
                mlp = Perceptron(block.linear)
                self._add(attention.linear1, attention.linear2, block.norm1, block.norm2, mlp)
                self._biases.append((attention, self._stored(attention)))
            if i == 0:
                self._add(model.downsample.linear, model.downsample.norm)
            if i == 2:
                self._add(model.upsample.linear1, model.upsample.linear2, model.upsample.norm)
        self._add(recover.conv, recover.conv_surface)

    def _add(self, *layers: nn.Module) -> None:
        for layer in layers:
            self._number += 1
            self.b1.add_module(f"a{self._number}", layer)

    def _stored(self, attention: Any) -> nn.Parameter:
        """The bias as a parameter of ours that the forward still has to turn round."""
        stored = nn.Parameter(attention.earth_specific_bias.detach().transpose(-1, -2).contiguous())
        del attention.earth_specific_bias
        self.b1.register_parameter(f"bias{self._number}", stored)
        return stored

    def forward(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        for attention, stored in self._biases:
            # the exporter makes a constant of it
            attention.earth_specific_bias = stored.transpose(-1, -2)
        out: tuple[Tensor, Tensor] = self._model[0](*inputs)
        return out


def write_published(model: PanguModel, inputs: tuple[Tensor, ...], path: Path) -> Path:
    """Export a model in evaluation mode; returns the path."""
    published = Published(copy.deepcopy(model)).eval()
    with torch.no_grad():
        published(*inputs)  # makes the masks, which the exporter cannot
        torch.onnx.export(published, inputs, path, dynamo=False, verbose=False)
    return path
