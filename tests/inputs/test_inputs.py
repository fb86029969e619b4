"""Inputs from everywhere: what a model takes, in batches, and the same for the same seed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

from flashbias_convert.errors import UsageError
from flashbias_convert.inputs import Batch, Inputs, as_inputs, read_inputs
from flashbias_convert.models.pangu import PanguModel
from tests.checkpoint.models import tiny_model


class Taking(nn.Module):
    """A model that says of itself what a library would."""

    def __init__(self, kind: str | None = None, **config: Any) -> None:
        super().__init__()
        self.config = SimpleNamespace(**config)
        if kind is not None:
            self.main_input_name = kind

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x


def batches(inputs: Inputs) -> list[Batch]:
    return list(inputs.batches)


def only(batch: Batch) -> Tensor:
    """The one tensor of a batch."""
    (tensor,) = [*batch.args, *batch.kwargs.values()]
    return tensor


# -- random --------------------------------------------------------------------------------


def test_images_have_the_size_that_the_model_was_built_for() -> None:
    found = batches(read_inputs(tiny_model(), samples=5, batch=2))
    assert [only(b).shape for b in found] == [(2, 3, 32, 32), (2, 3, 32, 32), (1, 3, 32, 32)]
    assert [b.size for b in found] == [2, 2, 1] and all(b.args for b in found)


@pytest.mark.parametrize(
    ("model", "name", "shape"),
    [
        (Taking("pixel_values", image_size=8, num_channels=1), "pixel_values", (2, 1, 8, 8)),
        (
            Taking("pixel_values", vision_config=SimpleNamespace(image_size=(4, 6))),
            "pixel_values",
            (2, 3, 4, 6),
        ),
        (Taking("input_ids", vocab_size=11), "input_ids", (2, 128)),
        (
            Taking("input_ids", vocab_size=11, max_position_embeddings=34),
            "input_ids",
            (2, 32),
        ),
        (Taking("input_values"), "input_values", (2, 16_000)),
        (Taking(None, vocab_size=300), None, (2, 128)),
    ],
)
def test_random_inputs_are_what_the_model_says(
    model: nn.Module, name: str | None, shape: tuple[int, ...]
) -> None:
    (batch,) = batches(read_inputs(model, samples=2))
    assert only(batch).shape == shape
    assert list(batch.kwargs) == ([] if name is None else [name])
    again = only(batches(read_inputs(model, samples=2))[0])
    other = only(batches(read_inputs(model, samples=2, seed=1))[0])
    assert torch.equal(again, only(batch)) and not torch.equal(other, again)


def test_random_tokens_are_never_padding_and_in_the_vocabulary() -> None:
    model = Taking("input_ids", vocab_size=3, pad_token_id=1)
    ids = only(batches(read_inputs(model, samples=8))[0])
    assert set(ids.flatten().tolist()) == {0, 2}


def test_an_encoder_and_decoder_gets_two() -> None:
    model = Taking("input_ids", vocab_size=9, is_encoder_decoder=True)
    (batch,) = batches(read_inputs(model, samples=2, tokens=5))
    assert {name: t.shape for name, t in batch.kwargs.items()} == {
        "input_ids": (2, 5),
        "decoder_input_ids": (2, 5),
    }


def test_transformers_models_run_on_their_random_inputs() -> None:
    from transformers import BloomConfig, BloomForCausalLM, Swinv2Config, Swinv2Model

    bloom = BloomForCausalLM(BloomConfig(vocab_size=40, hidden_size=8, n_layer=1, n_head=2))
    swin = Swinv2Model(
        Swinv2Config(image_size=32, embed_dim=8, depths=[1], num_heads=[1], window_size=4)
    )
    for model in (bloom, swin):
        (batch,) = batches(read_inputs(model.eval(), samples=2))
        with torch.no_grad():
            assert model(**batch.kwargs)[0].shape[0] == 2


@pytest.mark.parametrize("constants", [0, 1])
def test_weather_models_run_on_their_random_inputs(constants: int) -> None:
    sizes = {"dims": (8, 16, 16, 8), "heads": (1, 2, 2, 1), "depths": (1, 1, 1, 1)}
    model = PanguModel(
        grid=(12, 24), levels=3, constants=constants, surface_constants=2 * constants, **sizes
    ).eval()
    first, second = batches(read_inputs(model, samples=3, batch=2))
    assert (first.size, second.size) == (2, 1)
    with torch.no_grad():
        air, surface = model(*first.args)
    assert air.shape == first.args[0].shape and surface.shape == first.args[1].shape
    (again, _) = batches(read_inputs(model, samples=3, batch=2))
    assert torch.equal(again.args[0], first.args[0])
    assert not torch.equal(second.args[0], first.args[0][:1])


def test_a_model_that_says_nothing_needs_real_inputs() -> None:
    with pytest.raises(UsageError, match=r"does not say what inputs it takes.*package\.module"):
        read_inputs(nn.Linear(2, 2))


def test_more_tokens_than_the_model_takes_are_refused() -> None:
    model = Taking("input_ids", vocab_size=9, n_positions=16)
    with pytest.raises(UsageError, match="takes 16 tokens at most, got 17"):
        read_inputs(model, tokens=17)


# -- images --------------------------------------------------------------------------------


def write_images(folder: Path, names: list[str]) -> Path:
    for number, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 50), (10 * number, 0, 0)).save(path)
    return folder


def test_folders_are_classes(tmp_path: Path) -> None:
    names = [f"{c}/{i}.png" for c in "edcba" for i in range(2)]  # the tiny model has five classes
    found = read_inputs(tiny_model(), write_images(tmp_path, names), samples=9, batch=4)
    taken = batches(found)
    assert found.task == "classes" and "alphabetical order" in found.notes[0]
    assert [b.size for b in taken] == [4, 4, 1]
    assert only(taken[0]).shape == (4, 3, 32, 32)
    for batch in taken:
        assert batch.labels is not None
        for image, label in zip(only(batch), batch.labels, strict=True):
            # the colour says which image this is, through timm's own normalisation
            raw = image[0, 0, 0] * 0.229 + 0.485
            assert "edcba"[int(raw * 255 / 10 + 0.5) // 2] == "abcde"[int(label)]


def test_the_models_own_names_decide_over_the_order(tmp_path: Path) -> None:
    model = tiny_model()
    model.pretrained_cfg["label_names"] = ["z", "y", "x", "w", "v"]
    folder = write_images(tmp_path, ["x/1.png"])
    (batch,) = batches(read_inputs(model, folder))
    assert batch.labels is not None and batch.labels.tolist() == [2]


@pytest.mark.parametrize(
    ("names", "note"), [(["1.png", "2.png"], ""), (["a/1.png", "b/2.png"], "no labels: 2 folders")]
)
def test_folders_that_are_no_classes_give_no_labels(
    tmp_path: Path, names: list[str], note: str
) -> None:
    found = read_inputs(tiny_model(), write_images(tmp_path, names))
    assert found.task is None and batches(found)[0].labels is None
    assert note in " ".join(found.notes)


def test_images_of_transformers_models(tmp_path: Path) -> None:
    model = Taking("pixel_values", image_size=8, num_labels=1)
    folder = write_images(tmp_path / "images", ["a/1.png"])
    plain = read_inputs(model, folder)
    assert "preprocessor_config.json" in plain.notes[0]
    (batch,) = batches(plain)
    assert batch.kwargs["pixel_values"].shape == (1, 3, 8, 8)
    assert float(batch.kwargs["pixel_values"][0, 0].max()) == -1.0
    from transformers import ViTImageProcessor

    ViTImageProcessor(size={"height": 8, "width": 8}, image_mean=[0.0] * 3).save_pretrained(
        tmp_path
    )
    read = read_inputs(model, folder, assets=tmp_path)
    assert not any("preprocessor" in note for note in read.notes)
    assert float(batches(read)[0].kwargs["pixel_values"].abs().max()) == 0.0


def test_images_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no images"):
        read_inputs(tiny_model(), tmp_path)
    (tmp_path / "x.png").write_text("no image")
    with pytest.raises(UsageError, match=r"x\.png cannot be read as an image"):
        batches(read_inputs(tiny_model(), tmp_path))
    with pytest.raises(UsageError, match="does not say that it takes images"):
        read_inputs(nn.Linear(2, 2), tmp_path)


# -- text ----------------------------------------------------------------------------------


def test_bytes_are_tokens_without_a_tokenizer(tmp_path: Path) -> None:
    text = tmp_path / "x.txt"
    text.write_bytes(bytes(range(100)))
    found = read_inputs(Taking(None, vocab_size=256), text, tokens=10, samples=4, batch=3)
    taken = batches(found)
    assert found.task == "next token" and "bytes" in found.notes[0]
    assert [b.size for b in taken] == [3, 1]
    rows = torch.cat([only(b) for b in taken])
    assert torch.equal(rows, torch.cat([b.labels for b in taken]))  # type: ignore[misc]
    assert all((row.diff() == 1).all() and row[0] % 10 == 0 for row in rows)
    assert len({int(row[0]) for row in rows}) == 4  # no piece twice


def test_a_tokenizer_of_a_folder_is_used(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"[UNK]": 0, "to": 1, "be": 2, "or": 3}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path)
    (tmp_path / "x.txt").write_text("to be or not")
    found = read_inputs(
        Taking("input_ids", vocab_size=4), tmp_path / "x.txt", tokens=4, assets=tmp_path
    )
    assert batches(found)[0].kwargs["input_ids"].tolist() == [[1, 2, 3, 0]] and not found.notes
    with pytest.raises(UsageError, match="knows more tokens than the model"):
        read_inputs(
            Taking("input_ids", vocab_size=3), tmp_path / "x.txt", tokens=4, assets=tmp_path
        )


def test_texts_that_do_not_fit_the_model(tmp_path: Path) -> None:
    text = tmp_path / "x.txt"
    text.write_text("short")
    with pytest.raises(UsageError, match="holds 5 tokens, one piece needs 128"):
        read_inputs(Taking(None, vocab_size=256), text)
    with pytest.raises(UsageError, match=r"knows 5 tokens.*--tokenizer"):
        read_inputs(Taking(None, vocab_size=5), text)
    with pytest.raises(UsageError, match="does not say that it takes tokens"):
        read_inputs(tiny_model(), text)


# -- files of tensors, functions -----------------------------------------------------------


def test_arrays_are_arguments_by_name(tmp_path: Path) -> None:
    x, mask = np.random.rand(5, 3).astype(np.float32), np.ones((5, 2), dtype=np.int64)
    np.savez(tmp_path / "x.npz", x=x, mask=mask, labels=np.arange(5))
    save_file({"x": torch.from_numpy(x)}, tmp_path / "x.safetensors")
    np.savez(tmp_path / "positional.npz", x, mask)
    found = read_inputs(Taking(), tmp_path / "x.npz", samples=3, batch=2)
    taken = batches(found)
    assert [sorted(b.kwargs) for b in taken] == [["mask", "x"]] * 2 and found.task == "classes"
    assert [b.labels.tolist() for b in taken if b.labels is not None] == [[0, 1], [2]]
    assert np.array_equal(taken[0].kwargs["x"].numpy(), x[:2])
    (one,) = batches(read_inputs(Taking(), tmp_path / "x.safetensors"))
    assert one.kwargs["x"].shape == (5, 3)
    (one,) = batches(read_inputs(Taking(), tmp_path / "positional.npz"))
    assert [a.shape for a in one.args] == [(5, 3), (5, 2)]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"image": np.ones((2, 2))}, "holds 'image', which the model does not take"),
        ({"x": np.ones((2, 2)), "mask": np.ones((3, 2))}, "x has 2, mask has 3"),
        ({"x": np.float32(1)}, "must hold the same number of samples"),
        ({"labels": np.arange(3)}, "holds no inputs"),
        ({"x": np.array(["a", "b"])}, "cannot be read"),
    ],
)
def test_arrays_that_make_no_sense(tmp_path: Path, arrays: Any, message: str) -> None:
    np.savez(tmp_path / "x.npz", **arrays)
    with pytest.raises(UsageError, match=message):
        read_inputs(Taking(), tmp_path / "x.npz")


def test_pickles_are_not_opened(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=np.array([print], dtype=object))
    with pytest.raises(UsageError, match="cannot be read"):
        read_inputs(Taking(), tmp_path / "x.npz")
    (tmp_path / "y.npz").write_text("nothing")
    with pytest.raises(UsageError, match="cannot be read"):
        read_inputs(Taking(), tmp_path / "y.npz")


def three_batches(model: nn.Module) -> Any:
    assert isinstance(model, nn.Module)
    return ({"x": torch.ones(2, 3)} for _ in range(3))


def test_a_function_gets_the_model_and_is_not_asked_for_more_than_needed() -> None:
    for function in (three_batches, f"{__name__}:three_batches"):
        assert [b.size for b in batches(read_inputs(Taking(), function, samples=4))] == [2, 2]
    (one,) = batches(read_inputs(Taking(), lambda model: torch.zeros(3)))
    assert one.args[0].shape == (3,)


def takes_nothing() -> torch.Tensor:
    return torch.zeros(3)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere.txt", "there are no inputs nowhere.txt"),
        ("nowhere_at_all:function", "cannot import nowhere_at_all"),
        ("nowhere_at_all.py:function", "cannot import nowhere_at_all.py"),
        (f"{__name__}:takes_nothing", "takes_nothing raised TypeError: .* 0 positional"),
        ("math:nothing", "module math has no 'nothing'"),
        ("math:pi", "is not a function"),
        (lambda model: 3, r"what .*lambda.* returns: inputs must be tensors, got int"),
        (lambda model: ["text"], "must be a tensor, a tuple or a mapping, got str"),
        (lambda model: {"a": 3}, "holds no tensor"),
        (lambda model: torch.zeros(6, 2).split(2), "this one holds 3 pieces of one tensor"),
        (lambda model: {"y": torch.zeros(2)}, "Taking does not take these inputs: .*'x'"),
    ],
)
def test_sources_that_make_no_sense(source: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        batches(read_inputs(Taking(), source))


@pytest.mark.parametrize("name", ["samples", "batch", "tokens"])
def test_counts_must_be_positive(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name} must be at least 1, got 0"):
        read_inputs(tiny_model(), **{name: 0})  # type: ignore[arg-type]


# -- what a caller passes ------------------------------------------------------------------


def test_pieces_of_one_tensor_are_no_arguments() -> None:
    x = torch.arange(24.0).reshape(12, 2)
    for pieces in (x.split(5), x.chunk(2), x.T.contiguous().T.split(6)):
        with pytest.raises(UsageError, match=rf"holds {len(pieces)} pieces of one.*list\(pieces\)"):
            as_inputs(pieces, model=Taking())
        assert [len(only(b)) for b in batches(as_inputs(list(pieces), model=Taking()))] == [
            len(piece) for piece in pieces
        ]
    (one,) = batches(as_inputs([x.chunk(2)], model=Taking()))  # said to be one call
    assert [a.shape for a in one.args] == [(6, 2), (6, 2)]


@pytest.mark.parametrize(
    "arguments",
    [
        (torch.zeros(2, 3), torch.ones(2, 3)),
        torch.zeros(2, 2, 3).unbind(1),
        (torch.zeros(2, 3),) * 2,
        torch.zeros(2, 3).split(2),
        (torch.zeros(2, 3), None),
        (torch.zeros(2, 3).to_sparse(), torch.zeros(2, 3).to_sparse()),
    ],
)
def test_a_tuple_of_arguments_is_one_call(arguments: tuple[Any, ...]) -> None:
    (one,) = batches(as_inputs(arguments, model=Taking()))
    assert one.args == arguments and one.size == 2


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((torch.zeros(2),) * 3, r"Taking does not take these inputs: too many positional"),
        ({"y": torch.zeros(2)}, r"missing a required argument: 'x'; it takes x, mask"),
        ([{"x": torch.zeros(2), "y": None}], "unexpected keyword argument 'y'"),
        ([[torch.zeros(2), torch.zeros(2)]], r"got list.*\[x for x, _ in loader\]"),
    ],
)
def test_calls_that_the_model_does_not_take(inputs: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        batches(as_inputs(inputs, model=Taking()))
