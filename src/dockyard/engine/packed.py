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


class PackedLinears:
    """Takes over how the linear layers of a model are called."""

    def __init__(self) -> None:
        self._frozen: dict[int, Tensor] = {}
        """Packed weights that no publish changes, by the address of the weights."""

    @torch.no_grad()
    def take_over(self, model: Any) -> None:
        """Pack the weights as they are now. To be called again whenever they have changed."""
        inside = {id(part) for module in model.modules() if isinstance(module, LoraLinear) for part in module.modules()}
        for module in model.modules():
            if isinstance(module, LoraLinear):
                self._pack_adapted(module)
            elif isinstance(module, nn.Linear) and id(module) not in inside:
                self._pack_frozen(module)

    def _pack_adapted(self, module: Any) -> None:
        if not _is_plain(module):
            return
        base = module.get_base_layer()
        weight = base.weight
        for name in module.active_adapters:
            weight = torch.addmm(
                weight, module.lora_B[name].weight, module.lora_A[name].weight, alpha=module.scaling[name]
            )
        module._compiled_call_impl = partial(_linear, _packed(weight), base.bias)

    def _pack_frozen(self, module: nn.Linear) -> None:
        address = module.weight.data_ptr()
        if address not in self._frozen:
            self._frozen[address] = _packed(module.weight)
        module._compiled_call_impl = partial(_linear, self._frozen[address], module.bias)


def _is_plain(module: Any) -> bool:
    """Whether the layer computes `W x + scaling * B A x` and nothing else."""
    return type(module.get_base_layer()) is nn.Linear and not module.lora_variant and not module.merged


def _packed(weight: Tensor) -> Tensor:
    return _mkldnn._reorder_linear_weight(weight)


def _linear(packed: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    return _mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
