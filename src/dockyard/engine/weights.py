"""Load a model's weights, share them between trainer and engine, quantise them, and convert the demo's GGUF file.

4-bit weights are bitsandbytes' NF4 with quantised scales, about 0.52 bytes per weight.
"""

import copy
import json
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftModel, load_peft_weights, set_peft_model_state_dict
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from transformers.utils import logging as transformers_logging

from dockyard.config import ModelConfig
from dockyard.engine.model_dir import hub_name
from dockyard.errors import DockyardError, EngineError


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


_WORTH_COMPILING = 10**9
"""Weights."""


def resolve_device(config: ModelConfig) -> torch.device:
    """The device that `auto` stands for."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise DockyardError("`model.device` is `cuda`, but torch sees no GPU", hint="`--model.device cpu`")
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(config.device)


def resolve_dtype(config: ModelConfig, device: torch.device) -> torch.dtype:
    """The number format that `auto` stands for."""
    if config.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.dtype]


def load_model(folder: Path, config: ModelConfig, *, as_stored: bool = False, four_bit: bool = False) -> Any:
    """The causal language model in this folder, on its device.

    `as_stored` keeps the number format of its files; `four_bit` quantises its linear layers but the head.
    """
    device = resolve_device(config)
    dtype = resolve_dtype(config, device)
    transformers_logging.disable_progress_bar()
    quantised = {"quantization_config": four_bit_config(dtype), "device_map": {"": device}} if four_bit else {}
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto" if as_stored else dtype, **quantised)
    except Exception as error:  # transformers raises whatever its parts raise; the folder is what the user can change
        raise DockyardError(
            f"the model in `{folder}` cannot be loaded: {type(error).__name__}: {str(error).splitlines()[0]}",
            hint="a model folder is what `save_pretrained` writes: config.json, safetensors, tokenizer.json",
        ) from error
    # What PEFT writes into adapters as the name of their base: others find it by the Hub's, not by a folder here.
    model.config.name_or_path = model.name_or_path = hub_name(config.name) or str(folder.absolute())
    keep_layout(model)
    return model if four_bit else cast(Any, model).to(device)


def worth_compiling(model: Any) -> bool:
    """Whether it is on a GPU, and so large that a minute of compiling is soon won back."""
    return model.device.type == "cuda" and num_weights(model) >= _WORTH_COMPILING


def other_attention(text_config: Any) -> list[str]:
    """Which kinds of attention a model has besides full attention, the only one that is served or trained here."""
    kinds = set(getattr(text_config, "layer_types", None) or ["full_attention"])
    if getattr(text_config, "layer_types", None) is None and getattr(text_config, "sliding_window", None):
        kinds = {"sliding_attention"}
    return sorted(kinds) if kinds != {"full_attention"} else []


def share_weights(model: Any) -> Any:
    """A second model over the same frozen weights. Only what is trained is copied, be it everything."""
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    shared = [*frozen, *model.buffers(), *quant_states(model)]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in shared}).requires_grad_(False)


def load_weights(model: Any, folder: Path) -> Any:
    """The model with the weights in this folder in place of the ones it had: a LoRA adapter's, or all."""
    if (folder / "adapter_config.json").is_file():
        return load_adapter(model, folder)
    if (folder / "config.json").is_file():
        _copy_weights(folder, model)
        return model
    raise EngineError(
        f"`{folder}` holds no adapter and no model",
        hint="an adapter folder is what PEFT's save writes, a model folder what transformers' does",
    )


def load_adapter(model: Any, adapter_dir: Path) -> Any:
    """The model with this LoRA adapter's weights in place of the ones it had."""
    if not (adapter_dir / "adapter_config.json").is_file():  # PEFT would look for the folder's name on the Hub
        raise EngineError(f"`{adapter_dir}` holds no adapter", hint="an adapter folder is what PEFT's save writes")
    if isinstance(model, PeftModel):
        weights = load_peft_weights(str(adapter_dir), device=str(model.device))
        set_peft_model_state_dict(model, weights)
        return model
    return PeftModel.from_pretrained(model, str(adapter_dir)).eval()


def _copy_weights(folder: Path, model: Any) -> None:
    """Into the very tensors that the model has. transformers reads them: its files may have other names than they."""
    transformers_logging.disable_progress_bar()
    with torch.inference_mode(False), torch.no_grad():
        saved = dict(AutoModelForCausalLM.from_pretrained(folder, dtype="auto").named_parameters())
        own = dict(model.named_parameters())
        if {name: tensor.shape for name, tensor in saved.items()} != {name: t.shape for name, t in own.items()}:
            raise EngineError(
                f"the model in `{folder}` has other weights than `{model.config.model_type}` here",
                hint="choose a folder of the same model",
            )
        for name, tensor in saved.items():
            own[name].copy_(tensor)


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write the quantised model as an ordinary model folder in bfloat16. transformers shows how far it is."""
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    config: Any = copy.deepcopy(model.config)
    del config.quantization_config  # save_pretrained refuses a model that says it is quantised
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    settings = folder / "tokenizer_config.json"
    content = json.loads(settings.read_text())
    content.pop("is_local", None)
    settings.write_text(json.dumps(content, indent=2))
