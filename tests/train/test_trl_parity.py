"""The loss and gradients of TRL's own GRPO trainer, for the settings that both have, on one model and one batch."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from gateway_fakes import tiny
from tiny_policy import make_group, tiny_model_dir
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from dockyard.config import GRPOConfig
from dockyard.rl.loss import Batch, batch_loss
from dockyard.rl.pack import Example, PackedRow, examples_of, pack
from dockyard.types import Group, Rollout

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("default"),  # what TRL warns of is its own affair
]

PROMPT, LONGEST = 12, 11
CAP = 1.2

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"kl_coef": 0.0}, {"loss_type": "grpo"}),
    "grpo with a KL penalty": ({"kl_coef": 0.3, "kl_type": "k3"}, {"loss_type": "grpo", "beta": 0.3}),
    "token mean": ({"aggregation": "token", "kl_coef": 0.0}, {"loss_type": "bnpo"}),
    "dapo": ({"algorithm": "dapo"}, {"loss_type": "dapo"}),
    "dapo with a KL penalty": (
        {"algorithm": "dapo", "kl_coef": 0.3, "kl_type": "k3"},
        {"loss_type": "dapo", "beta": 0.3},
    ),
    "dr_grpo": (
        {"algorithm": "dr_grpo", "constant_length": 20},
        {"loss_type": "dr_grpo", "max_completion_length": 20},
    ),
    "gspo": (
        {"algorithm": "gspo", "kl_coef": 0.0},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4},
    ),
    "gspo with wide clips": (
        {"algorithm": "gspo", "kl_coef": 0.3, "kl_type": "k3", "clip_low": 0.05, "clip_high": 0.05},
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon_low": 0.05,
            "epsilon_high": 0.05,
            "beta": 0.3,
        },
    ),
    "corrected by token": (
        {"correction": "token", "correction_cap": CAP, "kl_coef": 0.3, "kl_type": "k3"},
        {"loss_type": "grpo", "use_vllm": True, "beta": 0.3},
    ),
    "corrected by sequence": (
        {"correction": "sequence", "correction_cap": CAP, "aggregation": "token", "kl_coef": 0.0},
        {"loss_type": "bnpo", "use_vllm": True, "vllm_importance_sampling_mode": "sequence_truncate"},
    ),
}


@pytest.fixture(scope="module")
def trl_trainer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from datasets import Dataset
    from trl.trainer.grpo_config import GRPOConfig as TRLConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    arguments = TRLConfig(
        output_dir=str(tmp_path_factory.mktemp("trl")),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        per_device_train_batch_size=4,
        num_generations=4,
        use_bias_correction_kl=False,  # it would weigh the KL penalty by the ratio, as we do not
    )
    trainer = GRPOTrainer(
        model=LlamaForCausalLM.from_pretrained(tiny_model_dir()),
        args=arguments,
        processing_class=PreTrainedTokenizerFast(tokenizer_object=tiny(), pad_token="<pad>", eos_token="<eos>"),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=Dataset.from_dict({"prompt": ["hello"] * 4}),
    )
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def logprobs(model: Any, example: Example) -> torch.Tensor:
    ids = torch.from_numpy(example.token_ids).long()
    targets = torch.from_numpy(example.targets).long()
    return torch.log_softmax(model(input_ids=ids[None], use_cache=False).logits[0], -1)[targets - 1, ids[targets]]


def make_batch(model: Any) -> Group:
    """Four rollouts whose recorded logprobs are near the model's; one token of each is a tool's."""
    rng = np.random.default_rng(3)
    rollouts: list[Rollout] = []
    for rollout in make_group([0.0, 1.0, 0.5, 0.0]).rollouts:
        [segment] = rollout.segments
        sampled = segment.sampled.copy()
        sampled[PROMPT + 2] = False
        marked = replace(rollout, segments=(replace(segment, sampled=sampled),), reward=1.0)
        [example, _] = examples_of([Group(task="t", rollouts=(marked, marked))], with_idle=True)
        recorded = np.zeros(len(segment.token_ids), np.float32)
        noise = rng.normal(rng.normal(0, 0.05), 0.25, len(example.targets))
        recorded[sampled] = logprobs(model, example).detach().numpy() + noise
        told = replace(segment, sampled=sampled, logprobs=recorded)
        rollouts.append(replace(rollout, segments=(told,)))
    return Group(task="t", rollouts=tuple(rollouts))


def reference(example: Example) -> torch.Tensor:
    """Of no model: any numbers will do."""
    return torch.from_numpy(np.random.default_rng(len(example.targets)).normal(-5, 1, len(example.targets))).float()


def our_loss(model: Any, group: Group, config: GRPOConfig) -> torch.Tensor:
    total = torch.zeros(())
    for example in examples_of([group], config, with_idle=True):
        [row] = pack([example], 1)
        total = total + batch_loss(our_batch(model, example, row, config), config).total
    return total


def our_batch(model: Any, example: Example, row: PackedRow, config: GRPOConfig) -> Batch:
    logprobs_N = logprobs(model, example)
    recorded_N = torch.from_numpy(row.old_logprobs)
    return Batch(
        logprobs_N=logprobs_N,
        old_N=recorded_N if config.correction == "none" else logprobs_N.detach(),
        recorded_N=recorded_N,
        reference_N=reference(example),
        advantages_N=torch.from_numpy(row.advantages),
        weights_N=torch.from_numpy(row.weights),
        segments_N=torch.from_numpy(row.segments).long(),
    )


def trl_inputs(model: Any, group: Group, config: GRPOConfig) -> dict[str, torch.Tensor]:
    """The same rollouts as TRL pads them, with what its generation would have computed."""
    examples = examples_of([group], config, with_idle=True)
    ids, present = torch.zeros((2, len(examples), LONGEST), dtype=torch.long)
    sampled, old, recorded, base = torch.zeros((4, len(examples), LONGEST))
    for index, example in enumerate(examples):
        places = torch.from_numpy(example.targets).long() - PROMPT
        length = len(example.token_ids) - PROMPT
        ids[index, :length] = torch.from_numpy(example.token_ids[PROMPT:]).long()
        present[index, :length] = 1
        sampled[index, places] = 1
        assert example.old_logprobs is not None
        recorded[index, places] = torch.from_numpy(example.old_logprobs)
        now = logprobs(model, example).detach()
        old[index, places] = now if config.correction != "none" else recorded[index, places]
        base[index, places] = reference(example)
    difference = (old - recorded) * sampled
    if config.correction == "sequence":
        difference = difference.sum(-1, keepdim=True)
    prompt = torch.from_numpy(examples[0].token_ids[:PROMPT]).long().repeat(len(examples), 1)
    return {
        "prompt_ids": prompt,
        "prompt_mask": torch.ones_like(prompt),
        "completion_ids": ids,
        "completion_mask": present,
        "tool_mask": sampled,
        "advantages": torch.tensor([example.advantage for example in examples]),
        "old_per_token_logps": old,
        "ref_per_token_logps": base,
        "importance_sampling_ratio": torch.exp(difference).clamp(max=CAP),
        "num_items_in_batch": sampled.sum(),
    }


def gradient(model: Any, loss: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    loss.backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_equal_those_of_trl(name: str, trl_trainer: Any, monkeypatch: pytest.MonkeyPatch):
    ours, theirs = CASES[name]
    config = GRPOConfig(**ours)
    defaults = {
        "beta": 0.0,
        "epsilon_low": 0.2,
        "epsilon_high": 0.28,
        "importance_sampling_level": "token",
        "use_vllm": False,
        "vllm_importance_sampling_correction": True,
    }
    for key, value in (defaults | theirs).items():
        monkeypatch.setattr(trl_trainer, key, value)
    model = trl_trainer.model
    group = make_batch(model)
    expected = trl_trainer.compute_loss(model, trl_inputs(model, group, config))
    loss = our_loss(model, group, config)
    wanted, found = gradient(model, expected), gradient(model, loss)
    assert wanted.norm() > 1e-3
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-6)
    assert (found - wanted).norm() < 1e-5 * wanted.norm()
