"""Damage to converted files: the plan, the architecture in it, the terms, the layout."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

from safetensors.torch import load, save
from torch import Tensor

from flashbias_convert.checkpoint.header import (
    NAMES_KEY,
    PLAN_KEY,
    TIED_KEY,
    UNUSED_KEY,
    VERSION_KEY,
)
from flashbias_convert.checkpoint.origin import SOURCE_KEY

from . import damage_json
from .damage_safetensors import split

Metadata = dict[str, str]
Tensors = dict[str, Tensor]
_NUMBERS = (0, -1, 2, 3, 5, 8, 17, 10**5, 10**7, 10**9, 10**12, 2**63, 10**30, 1.5)


def opened(data: bytes) -> tuple[Tensors, Metadata]:
    """Tensors and metadata of a converted file."""
    return load(data), split(data)[0]["__metadata__"]


def closed(tensors: Tensors, metadata: Metadata) -> bytes:
    return save(tensors, {k: v.encode("utf-8", "replace").decode() for k, v in metadata.items()})


def _with_plan(metadata: Metadata, plan: Any) -> Metadata:
    return {**metadata, PLAN_KEY: json.dumps(plan)}


def plan_values(rng: Random, tensors: Tensors, metadata: Metadata) -> bytes:
    plan = damage_json.damaged(rng, json.loads(metadata[PLAN_KEY]))
    return closed(tensors, _with_plan(metadata, plan))


def plan_text(rng: Random, tensors: Tensors, metadata: Metadata) -> bytes:
    text = metadata[PLAN_KEY]
    at = rng.randrange(len(text))
    new = rng.choice(
        ["", "{", "[" * 100_000, "null", "NaN", text[:at], text + text, "9" * 5000,
         text[:at] + rng.choice('{}[],:"0x') + text[at:], text.replace("low_rank", "dense"),
         text.replace(": 1", ": 2")]
    )  # fmt: skip
    return closed(tensors, {**metadata, PLAN_KEY: new})


def plan_sites(rng: Random, tensors: Tensors, metadata: Metadata) -> bytes:
    """Sites that are there twice, not at all, or under another name."""
    plan = json.loads(metadata[PLAN_KEY])
    sites = plan["sites"]
    site = rng.choice(sites)
    change = rng.choice(["twice", "gone", "name", "recipe", "status", "spec", "order"])
    if change == "twice":
        sites.append(site)
    elif change == "gone":
        sites.remove(site)
    elif change == "name":
        site["name"] = rng.choice(
            ["", "layers", "nowhere", ".", "layers.0.blocks.0", sites[0]["name"]]
        )
    elif change == "recipe":
        site["recipe"] = rng.choice(["", "nothing", "transformers_bloom", "../x", None])
    elif change == "status":
        site["status"] = rng.choice(["left alone", "failed", "magic", None, [], "unsupported"])
    elif change == "spec":
        site["spec"] = rng.choice([None, {}, [], sites[0]["spec"], {"num_heads": 1, "terms": []}])
    else:
        sites.reverse()
    return closed(tensors, _with_plan(metadata, plan))


def plan_arch(rng: Random, tensors: Tensors, metadata: Metadata) -> bytes:
    """Another architecture, or one of sizes that the weights do not have."""
    plan = json.loads(metadata[PLAN_KEY])
    arch = plan["arch"]
    if rng.random() < 0.3:
        wrong = ["resnet50", "swinv2_tiny_window16_256", "hf-hub:a/b", "", "os.system", "test_vit"]
        arch[rng.choice(["name", "library"])] = rng.choice(
            [*wrong, "transformers", "caller", "flashbias", "timm"]
        )
    else:
        args = arch["args"]
        more = ["in_chans", "mlp_ratio", "checkpoint_path", "pretrained", "drop_path_rate", "foo"]
        name = rng.choice([*args, *more])
        value: Any = rng.choice(_NUMBERS)
        if isinstance(args.get(name), list):
            value = rng.choice([[value] * len(args[name]), [1, value], [value], [1] * 10_000])
        args[name] = value
    return closed(tensors, _with_plan(metadata, plan))


def plan_missing(rng: Random, tensors: Tensors, metadata: Metadata) -> bytes:
    key = rng.choice([PLAN_KEY, VERSION_KEY, "format"])
    return closed(tensors, {k: v for k, v in metadata.items() if k != key})


def tied(rng: Random, tensors: Tensors, metadata: Metadata) -> bytes:
    a, b = rng.sample(sorted(tensors), 2)
    said = rng.choice([{a: b}, {a: a}, {"new": a}, {a: "nowhere"}, [a], a, {a: 3}, None, {a: [b]}])
    kept = {k: v for k, v in tensors.items() if k != a} if rng.random() < 0.5 else tensors
    text = rng.choice([json.dumps(said), "{", "[" * 100_000])
    return closed(kept, {**metadata, TIED_KEY: text})


def names(rng: Random, tensors: Tensors, metadata: Metadata) -> bytes:
    """What the model is said to call the tensors of the file."""
    a, b = rng.sample(sorted(tensors), 2)
    said = rng.choice(
        [{a: b}, {a: a}, {a: "new"}, {a: ""}, {a: "module." + b}, {"nowhere": a}, {b: "a" * 10_000},
         {b * 1000: a}, {a: "\x1b[2J"}, {a: "\ud800"}, {a: 3}, {a: [b]}, {a: {a: b}}, [a], [[a, b]],
         a, None]
    )  # fmt: skip
    twice = f"{{{json.dumps(a)}: {json.dumps(a)}, {json.dumps(a)}: {json.dumps(b)}}}"
    text = rng.choice([json.dumps(said)] * 4 + [twice, "{", "[" * 100_000, '{"a":' * 100_000])
    return closed(tensors, {**metadata, NAMES_KEY: text})


def unused(rng: Random, tensors: Tensors, metadata: Metadata) -> bytes:
    """What the file is said to hold beside weights and terms."""
    a, b = rng.sample(sorted(tensors), 2)
    said = rng.choice(
        [[a], [a, b], [a, a], sorted(tensors), ["nowhere"], ["a" * 10_000], ["\ud800"], [""], [3],
         [[a]], [None], {a: b}, a, 3, None]
    )  # fmt: skip
    text = rng.choice([json.dumps(said)] * 4 + ["{", "[" * 100_000])
    return closed(tensors, {**metadata, UNUSED_KEY: text})


def source(rng: Random, tensors: Tensors, metadata: Metadata) -> bytes:
    """What the file remembers of the names in its source."""
    said = damage_json.damaged(rng, json.loads(metadata[SOURCE_KEY]))
    text = rng.choice([json.dumps(said)] * 6 + ["{", "[1]", "[" * 100_000])
    return closed(tensors, {**metadata, SOURCE_KEY: text})


def _term_keys(tensors: Tensors) -> list[str]:
    apart = (".layout", ".made_from")
    return [key for key in tensors if ".score_bias." in key and not key.endswith(apart)]


def layout(rng: Random, tensors: Tensors, metadata: Metadata) -> bytes:
    key = rng.choice([key for key in tensors if key.endswith(".layout")])
    value = tensors[key].clone()
    value[rng.randrange(len(value))] ^= 1 << rng.randrange(8)
    tensors[key] = rng.choice([value, value[:-1], value[:0], value.repeat(2), value.double()])
    return closed({k: v.contiguous() for k, v in tensors.items()}, metadata)


def made_from(rng: Random, tensors: Tensors, metadata: Metadata) -> bytes:
    """Hashes of other weights, too few, too many, or none at all."""
    key = rng.choice([key for key in tensors if key.endswith(".made_from")])
    value = tensors[key].clone()
    value.view(-1)[rng.randrange(value.numel())] ^= 1 << rng.randrange(62)
    tensors[key] = rng.choice(
        [value, value[:-1], value[:, :1], value[None], value.flatten(), value.double(), value[:0]]
    )
    return closed({k: v.contiguous() for k, v in tensors.items()}, metadata)


def term_values(rng: Random, tensors: Tensors, metadata: Metadata) -> bytes:
    """No numbers in a term, or codes that point elsewhere."""
    key = rng.choice(_term_keys(tensors))
    value = tensors[key].clone()
    flat = value.view(-1)
    where = slice(None) if rng.random() < 0.3 else rng.randrange(len(flat))
    if value.is_floating_point():
        flat[where] = rng.choice([float("nan"), float("inf"), float("-inf"), 1e38])
    else:
        flat[where] = rng.choice([-1, 99, 2**31 - 1, -(2**31)])
    return closed({**tensors, key: value}, metadata)


def term_shapes(rng: Random, tensors: Tensors, metadata: Metadata) -> bytes:
    """Terms and plan agree with each other, but not with the model."""
    plan = json.loads(metadata[PLAN_KEY])
    key = rng.choice(_term_keys(tensors))
    site, _, rest = key.partition(".score_bias.")
    term, _, field = rest.partition(".")
    value = tensors[key]
    new = rng.choice(
        [value[..., :-1], value[..., :0], value[None], value.double(), value.flatten(), value[:0]]
    ).contiguous()
    spec = next(s["spec"] for s in plan["sites"] if s["name"] == site)
    entry = next(t for t in spec["terms"] if t["name"] == term)
    entry["tensors"][field] = {
        "shape": list(new.shape), "dtype": str(new.dtype).removeprefix("torch.")
    }  # fmt: skip
    return closed({**tensors, key: new.clone()}, _with_plan(metadata, plan))


DAMAGES: dict[str, Callable[[Random, Tensors, Metadata], bytes]] = {
    f.__name__: f
    for f in (
        plan_values, plan_text, plan_sites, plan_arch, plan_missing, tied, names, unused, source,
        layout, made_from, term_values, term_shapes,
    )
}  # fmt: skip
