"""Terms that are trained on two processes: the losses and the terms are those of one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("torch was built without gloo", allow_module_level=True)
pytest.importorskip("transformers")

from tests.training.models import terms

from .processes import run
from .training import STEPS, data, model, steps, train

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(train, 2, tmp_path_factory.mktemp("train"))


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_two_processes_train_as_one(trained: list[dict[str, Any]], wrapper: str) -> None:
    alone = model()
    losses = steps(alone, *data())
    before = terms(model())
    for step in range(STEPS):
        mean = torch.stack([found[wrapper][0][step] for found in trained]).mean()
        # sums over two halves of a batch come in another order
        assert torch.allclose(mean, losses[step], rtol=1e-5, atol=0)
    for found in trained:
        for key, value in terms(alone).items():
            assert torch.allclose(found[wrapper][1][key], value, rtol=1e-4, atol=1e-5), key
            assert not torch.allclose(value, before[key], rtol=1e-4, atol=1e-5), key


def test_fsdp_shards_terms_and_serves_them(trained: list[dict[str, Any]]) -> None:
    alone = model()
    steps(alone, *data())
    with torch.no_grad():
        expected = alone.eval()(data()[0])
    for found in trained:
        assert found["parts"] and all(shape[0] == 1 for shape in found["parts"])  # of two heads
        assert torch.allclose(found["served"], expected, rtol=1e-4, atol=1e-4)
