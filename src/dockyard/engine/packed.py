"""Linear layers in the layout that a CPU multiplies a few rows by fastest, with adapters merged into the weights.

A decoding step multiplies each matrix by one row a request. MKL reads a matrix row by row for that; oneDNN, given the
matrix in blocks, is two to four times as fast. It takes a copy of the weights, so large models keep the usual layout.
"""

from functools import partial
from typing import Any

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn

from dockyard.engine.four_bit import num_weights

_MOST_WEIGHTS = 10**9
"""Of a model that is packed: 4 GB more."""
_mkldnn: Any = torch.ops.mkldnn


def worth_packing(model: Any) -> bool:
    """Whether it is a small float32 model on a CPU for which torch has oneDNN."""
    on_cpu = model.device.type == "cpu" and model.dtype == torch.float32
    return on_cpu and torch.backends.mkldnn.is_available() and num_weights(model) < _MOST_WEIGHTS


@torch.no_grad()
def pack_linears(model: Any) -> None:
    """Take over how the linear layers of a model are called, with the weights they have now.

    To be done again whenever these have changed.
    """
    inside = {id(part) for module in model.modules() if isinstance(module, LoraLinear) for part in module.modules()}
    for module in model.modules():
        if isinstance(module, LoraLinear) and _is_plain(module):
            base: Any = module.get_base_layer()
            _pack(module, _merged(module), base.bias)
        elif isinstance(module, nn.Linear) and id(module) not in inside:
            _pack(module, module.weight, module.bias)


def _merged(module: Any) -> Tensor:
    weight = module.get_base_layer().weight
    for name in module.active_adapters:
        up, down = module.lora_B[name].weight, module.lora_A[name].weight
        weight = torch.addmm(weight, up, down, alpha=module.scaling[name])
    return weight


def _pack(module: Any, weight: Tensor, bias: Any) -> None:
    packed = _mkldnn._reorder_linear_weight(weight)
    module._compiled_call_impl = partial(_linear, packed, bias)


def _is_plain(module: Any) -> bool:
    """Whether the layer computes `W x + scaling * B A x` and nothing else."""
    return type(module.get_base_layer()) is nn.Linear and not module.lora_variant and not module.merged


def _linear(packed: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    return _mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
