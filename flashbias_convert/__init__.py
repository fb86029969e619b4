"""Convert pretrained models with attention biases to FlashBias attention."""

__version__ = "0.1.0"
