"""State dicts say what weights their terms were made from; terms of others are refused."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from flashbias_convert import StaleTermsError, load_model, save_model
from flashbias_convert.checkpoint import convert_checkpoint
from flashbias_convert.errors import CheckpointError
from flashbias_convert.patching import apply_plan
from flashbias_convert.seals import COLUMNS, NO_ROW, rows_of, saved_rows, values_of, vouches
from tests.patching import patch, patched_model, run
from tests.toy import TOY, make_model

State = dict[str, Tensor]
OTHERS = "made from other weights"


def weights(seed: int) -> State:
    return make_model(seed=seed).state_dict()


def drop(state: State, name: str) -> State:
    return {key: tensor for key, tensor in state.items() if not key.endswith(name)}


# -- terms of other weights ----------------------------------------------------------------


def update(model: nn.Module, new: State, _: Path) -> None:
    state = model.state_dict()
    state.update(new)
    model.load_state_dict(state)


def distributed(model: nn.Module, new: State, _: Path) -> None:
    options = StateDictOptions(full_state_dict=True, strict=False)
    set_model_state_dict(model, new, options=options)


def accelerated(model: nn.Module, new: State, folder: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    torch.save(new, folder / "pytorch_model.bin")
    accelerate.load_checkpoint_in_model(model, str(folder / "pytorch_model.bin"))


WAYS = [update, distributed, accelerated]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("load", WAYS)
def test_new_weights_beside_the_models_own_terms_are_refused(load: Any, tmp_path: Path) -> None:
    model, fresh = patched_model(), patched_model()
    run(model)
    load(model, weights(9), tmp_path)
    with pytest.raises(StaleTermsError, match=OTHERS):
        run(model)
    with pytest.raises(StaleTermsError, match=OTHERS):
        run(copy.deepcopy(model))
    assert not model.state_dict()["blocks.0.attn.score_bias.layout"].any()
    model.load_state_dict(fresh.state_dict())
    assert torch.equal(run(model), run(fresh))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("load", WAYS)
def test_the_same_weights_beside_the_models_own_terms_are_fresh(load: Any, tmp_path: Path) -> None:
    model = patched_model()
    expected = run(model)
    load(model, weights(0), tmp_path)
    assert torch.equal(run(model), expected)


def test_one_number_in_its_last_bit_is_noticed() -> None:
    model = patched_model()
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    entry = state["blocks.1.attn.table"][0, 0]
    entry[0] = torch.nextafter(entry[0], entry[0] + 1)
    model.load_state_dict(state)
    with pytest.raises(StaleTermsError, match=OTHERS):
        run(model)


def test_weights_and_terms_load_in_either_order() -> None:
    source = patched_model(seed=9)
    parts: list[State] = [{}, {}]
    for key, tensor in source.state_dict().items():
        parts["score_bias" in key][key] = tensor
    for order in itertools.permutations(parts):
        model = patched_model()
        for part in order:
            model.load_state_dict(part, strict=False)
        assert torch.equal(run(model), run(source))


def test_placeholders_that_a_model_saves_itself_are_no_terms() -> None:
    source = make_model()
    plan = patch(source)
    model = make_model()
    apply_plan(model, plan, recipes=[TOY], empty=True)
    update(model, weights(0), Path())
    with pytest.raises(StaleTermsError):
        run(model)
    model.load_state_dict(source.state_dict())
    assert torch.equal(run(model), run(source))


# -- and those of the same weights ---------------------------------------------------------

NARROW = (torch.float16, torch.bfloat16)


@pytest.mark.parametrize("target", [torch.float32, torch.float64, *NARROW])
def test_casts_between_saving_and_loading_are_no_other_weights(target: torch.dtype) -> None:
    state = patched_model().state_dict()
    model = patched_model(seed=9).to(target)
    for chain in [(), (torch.float64,), *itertools.permutations(NARROW, 1),
                  *itertools.permutations(NARROW)]:  # fmt: skip
        cast = dict(state)
        for dtype, key in itertools.product(chain, state):
            if "score_bias" not in key:
                cast[key] = cast[key].to(dtype)
        model.load_state_dict(cast)
        run(model, torch.zeros(1, 36, 16, dtype=target))
        again = patched_model(seed=9)  # and what is saved then
        again.load_state_dict(model.state_dict())
        run(again)


def test_state_dicts_of_earlier_releases_load() -> None:
    source, model = patched_model(seed=9), patched_model()
    model.load_state_dict(drop(source.state_dict(), "made_from"))
    assert torch.equal(run(model), run(source))
    made = model.state_dict()["blocks.0.attn.score_bias.made_from"]
    assert torch.equal(made, source.state_dict()["blocks.0.attn.score_bias.made_from"])


def test_of_another_number_of_sources_nothing_is_told() -> None:
    source, model = patched_model(seed=9), patched_model()
    state = source.state_dict()
    key = "blocks.0.attn.score_bias.made_from"
    state[key] = torch.ones(3, COLUMNS, dtype=torch.int64)
    model.load_state_dict(state)
    assert torch.equal(run(model), run(source))


def test_terms_that_are_missing_are_still_missing() -> None:
    with pytest.raises(RuntimeError, match=r"score_bias\.made_from"):
        patched_model().load_state_dict(weights(0))


def test_loading_onto_the_meta_device() -> None:
    source = patched_model(seed=9)
    model = patched_model().to("meta")
    model.load_state_dict(source.state_dict(), assign=True)
    assert torch.equal(run(model), run(source))
    model = patched_model().to("meta")
    model.load_state_dict({**source.state_dict(), **weights(0)}, assign=True)
    with pytest.raises(StaleTermsError, match=OTHERS):
        run(model)


# -- files ---------------------------------------------------------------------------------


def rewrite(path: Path, change: Callable[[State], State]) -> None:
    """Change the tensors of a file, and leave its header."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        state = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    save_file(change(state), path, metadata=metadata)


def load(path: Path) -> nn.Module:
    return load_model(path, arch=make_model, recipes=[TOY])


@pytest.mark.parametrize("by", ["save_model", "torch.save"])
def test_files_with_and_without_it_and_of_other_weights(tmp_path: Path, by: str) -> None:
    model, path = patched_model(), tmp_path / "x.safetensors"
    if by == "save_model":
        save_model(model, path, arch=make_model, recipes=[TOY])
    else:
        save_file(model.state_dict(), path)
    rewrite(path, lambda state: drop(state, "made_from"))
    assert torch.equal(run(load(path)), run(model))
    save_model(model, path, arch=make_model, recipes=[TOY], force=True)
    rewrite(path, lambda state: {**state, **weights(9)})
    with pytest.raises(CheckpointError, match=OTHERS):
        load(path)


@pytest.mark.parametrize("wide", [False, True])
def test_a_conversion_in_a_narrower_dtype_says_nothing(tmp_path: Path, wide: bool) -> None:
    """Its terms were made from rounded weights, and the file holds them as they were."""
    path = tmp_path / "x.safetensors"
    save_file(weights(0), path)
    dtype = torch.float32 if wide else torch.bfloat16
    done = convert_checkpoint(path, arch=make_model, recipes=[TOY], dtype=dtype)
    assert done.output is not None
    with safe_open(done.output, framework="pt") as file:
        made = file.get_tensor("blocks.0.attn.score_bias.made_from")
    assert made.shape == (1, COLUMNS) and bool(made.any()) == wide
    run(load(done.output))


# -- the numbers that say it ---------------------------------------------------------------


def test_equal_numbers_have_equal_hashes_whatever_their_dtype() -> None:
    x = torch.randn(50, generator=torch.Generator().manual_seed(0)).bfloat16()
    same = [x, x.float(), x.double(), x.double().t(), torch.stack([x, x], 1)[:, 0]]
    assert len({values_of((tensor,)) for tensor in same}) == 1
    assert values_of((torch.zeros(3),)) == values_of((-torch.zeros(3),)) != (0,)
    whole = torch.arange(5)
    assert values_of((whole,)) == values_of((whole.to(torch.uint8),))


def test_other_numbers_have_other_hashes() -> None:
    x = torch.randn(50, generator=torch.Generator().manual_seed(0))
    changed = [x, x.flip(0), x[:-1], x.bfloat16(), -x, x.double() + 1e-12, torch.zeros(50),
               torch.zeros(49), *(x + row for row in torch.eye(50))]  # fmt: skip
    assert len({values_of((tensor,)) for tensor in changed}) == len(changed)


def test_rows_stay_while_a_cast_explains_the_numbers() -> None:
    x = torch.randn(9, generator=torch.Generator().manual_seed(0))
    rows = rows_of((x, 5), values_of((x,)))
    for cast in (x.half(), x.bfloat16(), x.double(), x.half().bfloat16()):
        assert rows_of((cast,), values_of((cast,)), rows) == rows
        assert vouches(rows, (cast,))
    assert rows_of((x + 1,), values_of((x + 1,)), rows) != rows
    assert not vouches(rows, (x + 1,))
    assert vouches(rows, (x.to("meta"),)) and vouches([NO_ROW], (x,))


def test_of_what_no_state_dict_holds_nothing_is_said() -> None:
    module = nn.Module()
    module.weight = nn.Parameter(torch.randn(3))
    module.register_buffer("kept", torch.randn(3))
    module.register_buffer("made", torch.randn(3), persistent=False)
    module.register_buffer("index", torch.arange(3), persistent=False)
    sources = (module.weight, module.kept, module.made, module.index, torch.ones(2), 7)
    rows = rows_of(sources, values_of(sources))
    found = saved_rows(module, sources, rows)
    assert [row is NO_ROW for row in found] == [False, False, True, False, True]
