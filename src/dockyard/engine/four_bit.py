"""Weights of 4 bits: bitsandbytes' NF4 with its scales quantised too, some 0.52 bytes a weight."""

from importlib import import_module
from typing import Any

import torch
from transformers import BitsAndBytesConfig

from dockyard.errors import DockyardError


def four_bit_config(dtype: torch.dtype) -> BitsAndBytesConfig:
    """How transformers is to load a model's linear layers. They are multiplied with in this number format."""
    check_installed()
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


def check_installed() -> None:
    """Before the weights are read."""
    try:
        import_module("bitsandbytes")
    except ModuleNotFoundError as error:
        raise DockyardError(
            "`trainer.method` is `qlora`, which needs `bitsandbytes`, and that is not installed",
            hint="`pip install 'dockyard[qlora]'`, or `--trainer.method lora`",
        ) from error


def keep_layout(model: Any) -> None:
    """Have no layer change its weights' layout when it is asked without gradients.

    On some CPUs bitsandbytes would do that, in place, to weights that the trainer shares and needs as they are.
    """
    for layer in _layers(model):
        layer.support_avx512bf16_for_cpu = False


def quant_states(model: Any) -> list[Any]:
    """The scales of its weights, which are no parameters."""
    return [layer.weight.quant_state for layer in _layers(model)]


def quantised_share(model: Any) -> float:
    """Of its weights. The experts of a mixture are no linear layers, and keep all bits."""
    return _num_quantised(model) / num_weights(model)


def num_weights(model: Any) -> int:
    """Of all bits and of 4, two of which lie in each byte."""
    packed = {id(layer.weight) for layer in _layers(model)}
    return _num_quantised(model) + sum(p.numel() for p in model.parameters() if id(p) not in packed)


def _num_quantised(model: Any) -> int:
    return sum(layer.in_features * layer.out_features for layer in _layers(model))


def _layers(model: Any) -> list[Any]:
    if not is_four_bit(model):
        return []
    from bitsandbytes.nn.modules import Linear4bit

    return [module for module in model.modules() if isinstance(module, Linear4bit)]


def is_four_bit(model: Any) -> bool:
    """Whether it was loaded so."""
    return isinstance(getattr(model.config, "quantization_config", None), BitsAndBytesConfig)
