"""`from_pretrained` of transformers gives a patched model, by its own hook for quantisation.

    AutoModelForCausalLM.from_pretrained(folder, quantization_config=FlashBiasConfig())

Nothing is quantised: what transformers calls a quantizer is its way of letting a library change a
model while it is loaded.
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from .checkpoint.attach import attach_terms
from .checkpoint.config_entry import config_entry
from .checkpoint.file_names import names_of
from .checkpoint.kept_terms import split_terms
from .checkpoint.read import metadata_of, read_file_tensors
from .checkpoint.transformers_names import by_sites, require_known
from .checkpoint.unused_tensors import split_unused
from .patching import patch_model
from .plan import Plan

logger = logging.getLogger(__name__)

METHOD = "flashbias"


@register_quantization_config(METHOD)
class FlashBiasConfig(QuantizationConfigMixin):
    """What `from_pretrained` should do with the attention biases of a model.

    A folder that a patched model was saved to, or that `flashbias-convert` wrote, keeps its
    conversion. Any other is converted after loading, as `patch_model` does it.

    Args:
        backend: "auto", "triton", "sdpa" or "eager", see `flashbias_attention`.
        **options: keyword arguments of `inspect_model`, for a folder that holds no terms.
    """

    def __init__(self, *, backend: str = "auto", **options: Any) -> None:
        self.quant_method = METHOD
        self.backend = backend
        self.options = options

    def to_dict(self) -> dict[str, Any]:
        """What may be printed; options that are no plain values are left out."""
        plain = (str, int, float, bool, list, tuple, type(None))
        kept = {k: v for k, v in self.options.items() if isinstance(v, plain)}
        return {"quant_method": METHOD, "backend": self.backend, **kept}


@register_quantizer(METHOD)
class FlashBiasQuantizer(HfQuantizer):
    """Patches a model once transformers has loaded its weights."""

    quantization_config: FlashBiasConfig

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        self._files = [Path(file) for file in kwargs.get("checkpoint_files") or ()]
        self._metadata = metadata_of(self._files)
        if names_of(self._metadata):
            require_known(names_of(self._metadata), self._tensors(), model, self._files[0].parent)
        # they are loaded below, in their own dtypes; transformers need not report them
        ignored = model._keys_to_ignore_on_load_unexpected or ()
        model._keys_to_ignore_on_load_unexpected = {*ignored, r"(^|\.)score_bias\."}

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> None:
        _declare_unquantised(model)
        options = dict(self.quantization_config.options)
        backend = self.quantization_config.backend
        terms = _of_its_parts(_fitted(by_sites(self._terms(), model), model), model)
        if not terms:
            plan = patch_model(model, backend=backend, **options)
        else:
            folder = self._files[0].parent
            plan = attach_terms(model, terms, folder, options.pop("recipes", ()), backend)
            if options:
                unused = ", ".join(sorted(options))
                logger.warning("%s was converted already; not used: %s", folder, unused)
        _tell_what_is_not_patched(plan)
        model.config.flashbias = config_entry(plan)

    def _terms(self) -> dict[str, Tensor]:
        return split_terms(self._tensors())[1]

    def _tensors(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for file in self._files:  # the terms of one site can lie in several shards
            tensors |= read_file_tensors(file)
        return split_unused(tensors, self._metadata)[0]

    def is_serializable(self) -> bool:
        """`save_pretrained` works."""
        return True

    @property
    def is_trainable(self) -> bool:
        """In training mode the original code runs."""
        return True


def _of_its_parts(terms: dict[str, Tensor], model: Any) -> dict[str, Tensor]:
    """Terms of the parts that a model has: that of an encoder alone has no decoder."""
    parts = {name for name, _ in model.named_children()}
    own = {key: tensor for key, tensor in terms.items() if key.partition(".")[0] in parts}
    if own and len(own) < len(terms):
        missing = sorted({key.partition(".")[0] for key in terms.keys() - own.keys()})
        logger.warning(
            "%s has no %s, whose terms are not used", type(model).__name__, ", ".join(missing)
        )
        return own
    return terms


def _tell_what_is_not_patched(plan: Plan) -> None:
    """Warn of a model that stays as it was, and of sites that could not be converted."""
    patched = len(plan.patched)
    silent = {"patched", "left alone"} if patched else set()
    told = [site for site in plan.sites if site.status not in silent]
    if not told:
        return
    reasons = Counter(f"{site.status}: {site.reason}" for site in told)
    listed = "; ".join(f"{count} x {reason}" for reason, count in reasons.items())
    warnings.warn(
        f"{patched} of {len(plan.sites)} attention sites were converted by FlashBiasConfig; "
        f"the others: {listed}",
        stacklevel=2,
    )


def _declare_unquantised(model: Any) -> None:
    """The model can be trained, cast and saved like any other."""
    del model.hf_quantizer, model.quantization_method, model.config.quantization_config
    model.is_quantized = False
    for module in model.modules():
        getattr(module, "config", model.config)._is_quantized = False


def _fitted(terms: dict[str, Tensor], model: Any) -> dict[str, Tensor]:
    """Names as this model has them: with a head the base model lies one level deeper."""
    prefix = f"{model.base_model_prefix}."
    names = {name for name, _ in model.named_modules()}
    found = {}
    for key, tensor in terms.items():
        site = key.partition("score_bias.")[0].rstrip(".")
        if site in names:
            found[key] = tensor
        elif site.removeprefix(prefix) in names:
            found[key.removeprefix(prefix)] = tensor
        else:
            found[prefix + key if prefix + site in names else key] = tensor
    return found
