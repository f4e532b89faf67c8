"""SLiME's side of the hooks, as small as it can be: its classes, and what it does with what hooks return.

`SLIME_REPO=DIR` takes the classes of a real checkout instead.
"""

import os
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from importlib import import_module
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

from dockyard.run_dir.paths import RunPaths
from dockyard.settings.load import load_run_config

SLIME_REPO = os.environ.get("SLIME_REPO")


class _Status(Enum):
    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass
class _Sample:
    """The fields that its code reads of ours. Unknown ones become attributes, as there."""

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: Any = ""
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: Any = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    remove_sample: bool = False
    status: _Status = _Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    Status = _Status

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"status": self.status.value}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> "_Sample":
        known = {one.name for one in fields(_Sample)}
        sample = _Sample(**{key: value for key, value in data.items() if key in known})
        sample.status = _Status(data["status"])
        for key in data.keys() - known:
            setattr(sample, key, data[key])
        return sample


@dataclass
class _TrainOutput:
    samples: list[Any]
    metrics: dict[str, Any] | None = None


@dataclass
class _EvalOutput:
    data: dict[str, Any]
    metrics: dict[str, Any] | None = None


@dataclass
class _FilterOutput:
    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False


def _install() -> None:
    """Make `import slime...` find the checkout, or what stands in for it."""
    if SLIME_REPO:
        sys.path.insert(0, SLIME_REPO)
        return
    modules: dict[str, dict[str, Any]] = {
        "slime": {},
        "slime.utils": {},
        "slime.utils.types": {"Sample": _Sample},
        "slime.rollout": {},
        "slime.rollout.base_types": {"RolloutFnTrainOutput": _TrainOutput, "RolloutFnEvalOutput": _EvalOutput},
        "slime.rollout.filter_hub": {},
        "slime.rollout.filter_hub.base_types": {"DynamicFilterOutput": _FilterOutput},
    }
    for name, content in modules.items():
        module = sys.modules.setdefault(name, ModuleType(name))
        vars(module).update(content)


_install()
Sample: Any = import_module("slime.utils.types").Sample
RolloutFnTrainOutput: Any = import_module("slime.rollout.base_types").RolloutFnTrainOutput
RolloutFnEvalOutput: Any = import_module("slime.rollout.base_types").RolloutFnEvalOutput
DynamicFilterOutput: Any = import_module("slime.rollout.filter_hub.base_types").DynamicFilterOutput


def slime_args(run: Path, router_url: str, model: Path, **more: Any) -> Namespace:
    """What the hooks read of SLiME's arguments."""
    config = load_run_config(RunPaths(run).config, [])
    host, _, port = router_url.removeprefix("http://").partition(":")
    return Namespace(
        **{
            "dockyard_run": str(run),
            "sglang_router_ip": host,
            "sglang_router_port": int(port),
            "hf_checkpoint": str(model),
            "rollout_max_context_len": 4096,
            "num_rollout": 8,
            "rollout_batch_size": config.grpo.tasks_per_step,
            "n_samples_per_prompt": config.grpo.group_size,
            "rollout_temperature": config.sampling.temperature,
            "dynamic_sampling_filter_path": None,
            "rollout_sample_filter_path": None,
            "save": str(run / "checkpoints" / "slime"),
            "load": str(run / "checkpoints" / "slime"),
            **more,
        }
    )


def unpacked(samples: list[Any]) -> list[Any]:
    """A batch as SLiME takes it apart: it looks at the first entry alone. Siblings must share their rollout."""
    for group in samples:
        for rollout in group:
            if isinstance(rollout, list):
                assert len({sample.rollout_id for sample in rollout}) == 1
                assert rollout[0].rollout_id is not None
    while isinstance(samples[0], list):
        samples = list(chain.from_iterable(samples))
    assert all(isinstance(sample, Sample) for sample in samples)
    return samples


def train_data(args: Any, samples: list[Any], post_process: Callable[[Any, list[Any]], Any]) -> dict[str, Any]:
    """What the trainer gets: advantages as `rewards`, masks of removed samples empty, each rollout's trained tokens."""
    raw_rewards, rewards = post_process(args, samples)
    masks = [[0] * sample.response_length if sample.remove_sample else sample.loss_mask for sample in samples]
    for sample, mask in zip(samples, masks, strict=True):
        assert len(mask) == len(sample.rollout_log_probs) == sample.response_length < len(sample.tokens)
    sums: dict[int, int] = {}
    for sample, mask in zip(samples, masks, strict=True):
        sums[sample.rollout_id] = sums.get(sample.rollout_id, 0) + sum(mask)
    return {
        "tokens": [sample.tokens for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "rewards": rewards,
        "raw_reward": raw_rewards,
        "loss_masks": masks,
        "rollout_log_probs": [sample.rollout_log_probs for sample in samples],
        "rollout_ids": [sample.rollout_id for sample in samples],
        "rollout_mask_sums": [sums[sample.rollout_id] for sample in samples],
    }
