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
    """The quantisation of linear layers. Products are computed in this number format."""
    check_installed()
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


def check_installed() -> None:
    """Raise an error if bitsandbytes is missing, before weights are read."""
    try:
        import_module("bitsandbytes")
    except ModuleNotFoundError as error:
        raise DockyardError(
            "`trainer.method` is `qlora`, which needs `bitsandbytes`, and that is not installed",
            hint="`pip install 'dockyard[qlora]'`, or `--trainer.method lora`",
        ) from error


def keep_layout(model: Any) -> None:
    """Keep the layout of quantised weights when layers run without gradients.

    On some CPUs bitsandbytes would change it in place, although the trainer shares these weights.
    """
    for layer in _layers(model):
        layer.support_avx512bf16_for_cpu = False


def quant_states(model: Any) -> list[Any]:
    """The scales of its weights, which are not parameters."""
    return [layer.weight.quant_state for layer in _layers(model)]


def quantised_share(model: Any) -> float:
    """The share of weights with 4 bits. The experts of a mixture are not linear layers and are not quantised."""
    return _num_quantised(model) / num_weights(model)


def num_weights(model: Any) -> int:
    """The number of weights, including 4-bit ones, of which a byte holds two."""
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
    """Whether the model was loaded with 4-bit weights."""
    return isinstance(getattr(model.config, "quantization_config", None), BitsAndBytesConfig)


_WORTH_COMPILING = 10**9
"""The number of weights from which on compiling is worthwhile."""


def resolve_device(config: ModelConfig) -> torch.device:
    """The device to use, with `auto` resolved."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise DockyardError("`model.device` is `cuda`, but torch sees no GPU", hint="`--model.device cpu`")
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(config.device)


def resolve_dtype(config: ModelConfig, device: torch.device) -> torch.dtype:
    """The number format to use, with `auto` resolved."""
    if config.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.dtype]


def load_model(folder: Path, config: ModelConfig, *, as_stored: bool = False, four_bit: bool = False) -> Any:
    """Load the causal language model in this folder to its device.

    `as_stored` keeps the number format of its files; `four_bit` quantises its linear layers except the head.
    """
    device = resolve_device(config)
    dtype = resolve_dtype(config, device)
    transformers_logging.disable_progress_bar()
    quantised = {"quantization_config": four_bit_config(dtype), "device_map": {"": device}} if four_bit else {}
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto" if as_stored else dtype, **quantised)
    except Exception as error:  # transformers raises many types of errors; the folder is what the user can change
        raise DockyardError(
            f"the model in `{folder}` cannot be loaded: {type(error).__name__}: {str(error).splitlines()[0]}",
            hint="a model folder is what `save_pretrained` writes: config.json, safetensors, tokenizer.json",
        ) from error
    # PEFT writes this to adapters as the name of their base model: the name on the Hub, not a local folder.
    model.config.name_or_path = model.name_or_path = hub_name(config.name) or str(folder.absolute())
    keep_layout(model)
    return model if four_bit else cast(Any, model).to(device)


def worth_compiling(model: Any) -> bool:
    """Whether the model is on a GPU and large enough that compiling for a minute pays off."""
    return model.device.type == "cuda" and num_weights(model) >= _WORTH_COMPILING


def other_attention(text_config: Any) -> list[str]:
    """The kinds of attention that a model has besides full attention, the only kind that is supported."""
    kinds = set(getattr(text_config, "layer_types", None) or ["full_attention"])
    if getattr(text_config, "layer_types", None) is None and getattr(text_config, "sliding_window", None):
        kinds = {"sliding_attention"}
    return sorted(kinds) if kinds != {"full_attention"} else []


def share_weights(model: Any) -> Any:
    """A second model that shares the frozen weights. Only trained weights are copied, which may be all."""
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    shared = [*frozen, *model.buffers(), *quant_states(model)]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in shared}).requires_grad_(False)


def load_weights(model: Any, folder: Path) -> Any:
    """Replace the model's weights by those in this folder: of a LoRA adapter, or all."""
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
    """Replace the weights of the model's LoRA adapter, or add one."""
    if not (adapter_dir / "adapter_config.json").is_file():  # PEFT would look up the folder's name on the Hub
        raise EngineError(f"`{adapter_dir}` holds no adapter", hint="an adapter folder is what PEFT's save writes")
    if isinstance(model, PeftModel):
        weights = load_peft_weights(str(adapter_dir), device=str(model.device))
        set_peft_model_state_dict(model, weights)
        return model
    return PeftModel.from_pretrained(model, str(adapter_dir)).eval()


def _copy_weights(folder: Path, model: Any) -> None:
    """Copy all weights into the model's own tensors. transformers reads them, because names in files may differ."""
    transformers_logging.disable_progress_bar()
    with torch.inference_mode(False), torch.no_grad():
        saved = dict(AutoModelForCausalLM.from_pretrained(folder, dtype="auto").named_parameters())
        own = dict(model.named_parameters())
        if {name: tensor.shape for name, tensor in saved.items()} != {name: t.shape for name, t in own.items()}:
            raise EngineError(
                f"the weights in `{folder}` do not have the names and shapes of this `{model.config.model_type}` model",
                hint="choose a folder of the same model",
            )
        for name, tensor in saved.items():
            own[name].copy_(tensor)


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Convert a GGUF file to a model folder in bfloat16. transformers shows the progress."""
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    config: Any = copy.deepcopy(model.config)
    del config.quantization_config  # `save_pretrained` rejects a model with this setting
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    settings = folder / "tokenizer_config.json"
    content = json.loads(settings.read_text())
    content.pop("is_local", None)
    settings.write_text(json.dumps(content, indent=2))
