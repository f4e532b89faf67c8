"""Assign GPUs to training and sampling, and split a model across them.

Megatron gets a model's shape by arguments, which SLiME compares with the model's `config.json`. They are derived from
that file if it is on this machine, otherwise from a table of known models.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from dockyard.config import RunConfig
from dockyard.engine.model_dir import known_as
from dockyard.errors import UsageError

type MegatronArguments = dict[str, str | tuple[str, ...] | None]
"""Option -> its value or values; None for an option without a value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSplit:
    """Default parallel sizes for a model."""

    tensor: int
    expert: int
    engine: int
    num_params_b: float
    """Number of parameters in billions."""


def _dense(kind: str, layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, vocab: int) -> dict[str, Any]:
    return {
        "model_type": kind,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
    }


_CODER_MOE = _dense("qwen3_moe", 48, 2048, 5472, 32, 4, 151936) | {
    "head_dim": 128,
    "rope_theta": 10000000,
    "max_position_embeddings": 262144,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-8B": _dense("qwen3", 36, 4096, 12288, 32, 8, 151936)
    | {"head_dim": 128, "max_position_embeddings": 40960},
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": _CODER_MOE,
    "Qwen/Qwen2.5-Coder-7B-Instruct": _dense("qwen2", 28, 3584, 18944, 28, 4, 152064),
    "Qwen/Qwen2.5-Coder-32B-Instruct": _dense("qwen2", 64, 5120, 27648, 40, 8, 152064),
}
"""The contents of each model's `config.json` on the Hub."""
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_DENSE = tuple(key for key in MODELS["Qwen/Qwen2.5-Coder-7B-Instruct"] if key != "tie_word_embeddings")
_NEEDED = {
    "qwen2": _DENSE,
    "qwen3": (*_DENSE, "head_dim"),
    "qwen3_moe": tuple(key for key in _CODER_MOE if key != "tie_word_embeddings"),
}
"""Model type -> keys of `config.json` from which the arguments are made."""
_USUAL: dict[str, tuple[object, ...]] = {
    "rope_type": ("default",),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "use_sliding_window": (False,),
    "norm_topk_prob": (True,),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([],),
}
"""Values that the arguments assume."""


def read_shape(name: str) -> dict[str, Any]:
    """Return a model's `config.json`, or its entry in the table of known models."""
    file = Path(name).expanduser() / "config.json"
    cached = try_to_load_from_cache(known_as(name), "config.json") if _HUB_NAME.fullmatch(name) else None
    if file.is_file() or isinstance(cached, str):
        return _checked(file if file.is_file() else Path(str(cached)))
    known = MODELS.get(known_as(name))
    if known is None:
        hint = f"use a local model folder, or one of {', '.join(f'`{model}`' for model in MODELS)}"
        raise UsageError(f"`model.name` is `{name}`, whose shape is not known here", hint=hint)
    return known


def _checked(file: Path) -> dict[str, Any]:
    """Refuse what the arguments cannot express: Megatron would silently train a different architecture."""
    try:
        shape: dict[str, Any] = json.loads(file.read_bytes())
    except ValueError as error:
        raise UsageError(f"`{file}` is not JSON: {error}", hint="download the model again") from None
    kind = shape.get("model_type")
    if kind not in _NEEDED:
        hint = "supported types are qwen2, qwen3 and qwen3_moe"
        raise UsageError(f"`model.name` has the type `{kind}`, which is not supported with SLiME", hint=hint)
    rope: dict[str, Any] = shape.get("rope_parameters") or shape.get("rope_scaling") or {}
    shape["rope_theta"] = rope.get("rope_theta") or shape.get("rope_theta")
    shape["rope_type"] = rope.get("rope_type") or rope.get("type")
    for key in _NEEDED[kind]:
        if shape.get(key) is None:
            raise UsageError(f"`{file}` has no `{key}`", hint="the model folder is incomplete; download it again")
    for key, usual in _USUAL.items():
        if shape.get(key) not in (None, *usual):
            hint = f"supported are models whose `{key}` is {usual[0]!r}"
            raise UsageError(f"`{file}` has `{key}` {shape[key]!r}, which is not supported with SLiME", hint=hint)
    return shape


def shape_arguments(shape: dict[str, Any]) -> MegatronArguments:
    """Return the model's shape as arguments of Megatron."""
    kind = shape["model_type"]
    return {
        "--num-layers": str(shape["num_hidden_layers"]),
        "--hidden-size": str(shape["hidden_size"]),
        "--ffn-hidden-size": str(shape["intermediate_size"]),
        "--num-attention-heads": str(shape["num_attention_heads"]),
        "--group-query-attention": None,
        "--num-query-groups": str(shape["num_key_value_heads"]),
        **({"--kv-channels": str(shape["head_dim"])} if shape.get("head_dim") else {}),
        "--swiglu": None,
        "--normalization": "RMSNorm",
        "--norm-epsilon": str(shape["rms_norm_eps"]),
        "--use-rotary-position-embeddings": None,
        "--rotary-base": f"{shape['rope_theta']:.0f}",
        "--vocab-size": str(shape["vocab_size"]),
        "--disable-bias-linear": None,
        **({"--add-qkv-bias": None} if kind == "qwen2" else {"--qk-layernorm": None}),
        **({} if shape.get("tie_word_embeddings") else {"--untie-embeddings-and-output-weights": None}),
        **(_expert_arguments(shape) if kind == "qwen3_moe" else {}),
    }


def _expert_arguments(shape: dict[str, Any]) -> MegatronArguments:
    return {
        "--num-experts": str(shape["num_experts"]),
        "--moe-router-topk": str(shape["num_experts_per_tok"]),
        "--moe-ffn-hidden-size": str(shape["moe_intermediate_size"]),
        "--moe-layer-freq": f"[{','.join(['1'] * shape['num_hidden_layers'])}]",
        "--moe-router-score-function": "softmax",
        "--moe-router-dtype": "fp32",
        "--moe-token-dispatcher-type": "alltoall",
        "--moe-token-drop-policy": "probs",
        "--moe-aux-loss-coeff": "0",
        "--moe-grouped-gemm": None,
        "--moe-permute-fusion": None,
    }


def usual_split(shape: dict[str, Any]) -> ParallelSplit:
    """Return the parallel sizes of SLiME's own recipes for GPUs of 80 GB."""
    num_params_b = count_params(shape) / 1e9
    if shape.get("num_experts"):
        return ParallelSplit(tensor=4, expert=8, engine=8, num_params_b=num_params_b)
    if num_params_b > 16:
        return ParallelSplit(tensor=8, expert=1, engine=8, num_params_b=num_params_b)
    return ParallelSplit(tensor=2, expert=1, engine=1, num_params_b=num_params_b)


def count_params(shape: dict[str, Any]) -> int:
    """Count the weights of the matrices, which are nearly all of them."""
    hidden = int(shape["hidden_size"])
    head = int(shape.get("head_dim") or hidden // shape["num_attention_heads"])
    attention = 2 * hidden * head * (int(shape["num_attention_heads"]) + int(shape["num_key_value_heads"]))
    experts = int(shape.get("num_experts") or 0)
    ffn = 3 * hidden * (experts * int(shape["moe_intermediate_size"]) if experts else int(shape["intermediate_size"]))
    embeddings = int(shape["vocab_size"]) * hidden * (1 if shape.get("tie_word_embeddings") else 2)
    return int(shape["num_hidden_layers"]) * (attention + ffn) + embeddings


_OPTIMIZER_BYTES = 16
"""Per weight: gradient, master copy and both moments in float32. Megatron shards them across all training GPUs."""
_MOST_OPTIMIZER_GB = 40.0
"""Per GPU of 80 GB. A larger optimizer state is offloaded to host memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How many GPUs each part uses."""

    train: int
    engines: int
    colocated: bool
    """Whether engines and trainer share the same GPUs in turn."""
    per_node: int
    per_engine: int
    tensor: int
    context: int
    pipeline: int
    expert: int
    offload: bool
    """Whether the optimizer state is offloaded to host memory."""

    @property
    def data(self) -> int:
        """Data-parallel size."""
        return self.train // (self.tensor * self.context * self.pipeline)

    @property
    def train_nodes(self) -> int:
        """Number of machines that train."""
        return max(1, self.train // self.per_node)

    @property
    def nodes(self) -> int:
        """Number of machines in total."""
        return -(-(self.train + (0 if self.colocated else self.engines)) // self.per_node)

    def __str__(self) -> str:
        place = "engines and trainer share the GPUs" if self.colocated else f"{self.train} train, {self.engines} sample"
        return (
            f"{place}; trainer: tensor {self.tensor} × context {self.context} × pipeline {self.pipeline} × "
            f"data {self.data}, expert {self.expert}; "
            f"{self.engines // self.per_engine} engines of {self.per_engine}"
        )


def lay_out(config: RunConfig, split: ParallelSplit) -> Layout:
    """Return the layout that the run sets, with defaults for the model. Raise if the GPUs cannot be split that way."""
    slime = config.slime
    apart = slime.rollout_gpus or (max(slime.num_gpus // 2, 1) if config.rollout.max_staleness else 0)
    train = slime.num_gpus - apart
    layout = Layout(
        train=train,
        engines=apart or train,
        colocated=not apart,
        per_node=slime.gpus_per_node,
        per_engine=slime.gpus_per_engine or min(split.engine, apart or train),
        tensor=slime.tensor_parallel or min(split.tensor, max(train, 1)),
        context=slime.context_parallel or _for_context(config),
        pipeline=slime.pipeline_parallel,
        expert=slime.expert_parallel or min(split.expert, max(train, 1)),
        offload=slime.flavour == "slime" and split.num_params_b * _OPTIMIZER_BYTES > _MOST_OPTIMIZER_GB * max(train, 1),
    )
    _check(config, layout)
    return layout


def _for_context(config: RunConfig) -> int:
    """Return the smallest power of 2 with which the longest sequence fits."""
    context = 1
    while context * config.trainer.micro_batch_tokens < (config.engine.context_length or 0):
        context *= 2
    return context


def _check(config: RunConfig, layout: Layout) -> None:
    slime, batch = config.slime, config.grpo.tasks_per_step * config.grpo.group_size
    model_gpus = layout.tensor * layout.context * layout.pipeline
    rules = (
        (layout.train >= 1, f"separate engines leave none of {slime.num_gpus} GPUs for training", "slime.num_gpus"),
        (
            layout.train > 0 and layout.train % model_gpus == 0,
            f"{layout.train} training GPUs are not a multiple of tensor {layout.tensor} × context {layout.context} × "
            f"pipeline {layout.pipeline}",
            "slime.num_gpus",
        ),
        (
            layout.train < layout.per_node or layout.train % layout.per_node == 0,
            f"{layout.train} training GPUs do not fill whole machines of {layout.per_node}",
            "slime.rollout_gpus",
        ),
        (
            layout.engines % layout.per_engine == 0,
            f"{layout.engines} GPUs for engines are not a multiple of {layout.per_engine}, the GPUs of one engine",
            "slime.gpus_per_engine",
        ),
        (
            layout.train % (layout.expert * layout.pipeline) == 0,
            f"{layout.train} training GPUs are not a multiple of expert {layout.expert} × pipeline {layout.pipeline}",
            "slime.expert_parallel",
        ),
        (
            batch % max(layout.data, 1) == 0,
            f"a step's {config.grpo.tasks_per_step} × {config.grpo.group_size} rollouts cannot be split evenly "
            f"across {layout.data} replicas",
            "grpo.tasks_per_step",
        ),
    )
    for holds, problem, what in rules:
        if not holds:
            raise UsageError(problem, hint=f"change `--{what} N`")
