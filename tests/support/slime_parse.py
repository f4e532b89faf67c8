"""Run the parsers of SLiME and Megatron on our arguments: `python tests/support/slime_parse.py SLIME MEGATRON`.

Both parse and validate what the launcher writes for each model, without a GPU. SGLang's two parsers are stand-ins that
know the options we write. Needs the development install.
"""

import argparse
import json
import os
import re
import shlex
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType, SimpleNamespace

import torch

from dockyard.backends.slime.launch import BACKEND
from dockyard.backends.slime.layout import MODELS
from dockyard.settings.load import load_run_config

_CLASSES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
_VARIANTS = ((), ("--rollout.max_staleness=1", "--slime.num_gpus=16", "--trainer.warmup_steps=2", "--grpo.kl_coef=0"))


class ServerArgs:
    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        for name in ("context-length", "mem-fraction-static", "tp-size"):
            parser.add_argument(f"--{name}", type=float)
        for name in ("dp-size", "pp-size", "ep-size"):
            parser.add_argument(f"--{name}", type=int, default=1)


class RouterArgs:
    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser, **_: bool) -> None:
        for name in ("policy", "log-level", "balance-abs-threshold", "balance-rel-threshold"):
            parser.add_argument(f"--router-{name}")


def stand_in(slime: Path, megatron: Path) -> None:
    """For what is not on this machine: SGLang, and a GPU to ask for its properties."""
    sys.path[:0] = [str(slime), str(megatron)]
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    gpu = SimpleNamespace(major=9, minor=0, total_memory=80 << 30)
    torch.cuda.get_device_properties = lambda *_: gpu
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    for name in ("sglang", "sglang.srt", "sglang.srt.server_args", "sglang_router", "sglang_router.launch_router"):
        sys.modules[name] = ModuleType(name)
    vars(sys.modules["sglang.srt.server_args"])["ServerArgs"] = ServerArgs
    vars(sys.modules["sglang_router.launch_router"])["RouterArgs"] = RouterArgs


def parse(model: str, words: tuple[str, ...], folder: Path) -> SimpleNamespace:
    """What SLiME makes of a run's arguments."""
    from slime.utils.arguments import parse_args  # pyright: ignore[reportMissingImports]

    shape = MODELS[model] | {"architectures": [_CLASSES[MODELS[model]["model_type"]]]}
    (folder / "config.json").write_text(json.dumps(shape))
    given = [f"--model.name={model}", "--tasks.source=demo", "--slime.checkout=/slime", *words]
    launch = BACKEND.plan(load_run_config(None, given), folder)
    (folder / "backend").mkdir(exist_ok=True)
    (folder / "backend" / "dockyard.yaml").write_text(launch.files["dockyard.yaml"])
    arrays = re.findall(r"^(?:SHAPE|ARGUMENTS)=\(\n(.*?)^\)", launch.files["train.sh"], re.M | re.S)
    places = {"$MODEL": str(folder), "$REFERENCE": str(folder)}
    sys.argv = ["train.py", *(places.get(word, word) for array in arrays for word in shlex.split(array))]
    return parse_args()


if __name__ == "__main__":
    stand_in(Path(sys.argv[1]), Path(sys.argv[2]))
    for name in MODELS:
        for variant in _VARIANTS:
            with TemporaryDirectory() as place:
                args = parse(name, variant, Path(place))
            assert (args.dockyard_run, args.use_rollout_logprobs, args.bf16) == (place, True, True)
            sys.stderr.write(f"accepted: {name} {' '.join(variant)}, {args.data_parallel_size} replicas\n")
