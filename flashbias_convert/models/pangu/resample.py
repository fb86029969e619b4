"""Between the two resolutions: four tokens become one with more channels, and back."""

from __future__ import annotations

from torch import Tensor, nn

from .windows import Size3, pad_end, padded


def coarser(resolution: Size3) -> Size3:
    """The map after `DownSample`: half the latitudes and longitudes, rounded up."""
    z, h, w = resolution
    return z, -(-h // 2), -(-w // 2)


class DownSample(nn.Module):
    """Merges 2 x 2 tokens of one level, zeros behind the last latitude and longitude.

    Args:
        dim: channels before.
        out_dim: channels after.
        resolution: of the map before.
    """

    def __init__(self, dim: int, out_dim: int, resolution: Size3) -> None:
        super().__init__()
        self.resolution = resolution
        self.linear = nn.Linear(4 * dim, out_dim, bias=False)
        self.norm = nn.LayerNorm(4 * dim)

    def forward(self, x: Tensor) -> Tensor:
        """Shape (B, Z * H * W, C) to (B, Z * (H / 2) * (W / 2), out_dim)."""
        field = x.unflatten(1, self.resolution)
        field = pad_end(field, padded(self.resolution, (1, 2, 2)))
        field = field.unflatten(3, (-1, 2)).unflatten(2, (-1, 2))  # (B, Z, H/2, 2, W/2, 2, C)
        merged = field.transpose(3, 4).flatten(4).flatten(1, 3)
        out: Tensor = self.linear(self.norm(merged))
        return out


class UpSample(nn.Module):
    """Splits each token into 2 x 2 and crops what `DownSample` padded.

    Args:
        dim: channels before.
        out_dim: channels after.
        resolution: of the map after.
    """

    def __init__(self, dim: int, out_dim: int, resolution: Size3) -> None:
        super().__init__()
        self.resolution = resolution
        self.linear1 = nn.Linear(dim, 4 * out_dim, bias=False)
        self.linear2 = nn.Linear(out_dim, out_dim, bias=False)
        self.norm = nn.LayerNorm(out_dim)

    def forward(self, x: Tensor) -> Tensor:
        """Shape (B, Z * (H / 2) * (W / 2), C) to (B, Z * H * W, out_dim)."""
        _, h, w = self.resolution
        field = self.linear1(x).unflatten(1, coarser(self.resolution)).unflatten(-1, (2, 2, -1))
        field = field.transpose(3, 4)  # (B, Z, H/2, 2, W/2, 2, out_dim)
        field = field.flatten(4, 5).flatten(2, 3)[:, :, :h, :w]
        out: Tensor = self.linear2(self.norm(field.flatten(1, 3)))
        return out
