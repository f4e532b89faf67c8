"""What the model says of a row's tokens: in chunks as in one piece; and how much of a pass is kept."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from packed_rows import random_row, row_of
from tiny_policy import tiny_model_dir
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    Qwen2Config,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SeedOssConfig,
    SeedOssForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
)

from dockyard.config import TrainerConfig
from dockyard.errors import DockyardError
from dockyard.rl.trees import Tree
from dockyard.trainer import layers, network
from dockyard.trainer.layers import Keep, plan
from dockyard.trainer.network import Network

TRAINER = TrainerConfig(lora_r=4)
SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}


def scored(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return network._Head.apply(hidden_ND, weight_VD, targets_N, 0.7, False)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-4)])
def test_logprobs_in_chunks_and_their_gradients_are_those_of_all_logits_at_once(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, tolerance: float
):
    monkeypatch.setattr(network, "_CHUNK", 7)  # of 30 tokens: the last chunk is short
    torch.manual_seed(0)
    inputs = [torch.randn(size, 16, dtype=dtype, requires_grad=True) for size in (30, 50)]
    targets_N = torch.randint(0, 50, (30,))
    hidden_ND, weight_VD = inputs
    logprobs_N, entropy_N, likeliest_N = scored(hidden_ND, weight_VD, targets_N)
    all_NV = torch.log_softmax(hidden_ND @ weight_VD.T / 0.7, -1)
    slope_N = torch.randn(30, dtype=dtype)
    expected_N = all_NV.gather(1, targets_N[:, None])[:, 0]
    grads = torch.autograd.grad(logprobs_N, inputs, slope_N)
    expected_grads = torch.autograd.grad(expected_N, inputs, slope_N, retain_graph=True)
    pairs = [
        (logprobs_N, expected_N),
        (entropy_N, -(all_NV.exp() * all_NV).sum(-1)),
        *zip(grads, expected_grads, strict=True),
    ]
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    assert torch.equal(likeliest_N, all_NV.argmax(-1) == targets_N)


@pytest.mark.parametrize(("trained", "times"), [(False, 1), (True, 2)])
def test_no_tensor_of_all_tokens_by_the_whole_vocabulary_is_made(
    monkeypatch: pytest.MonkeyPatch, trained: bool, times: int
):
    monkeypatch.setattr(network, "_CHUNK", 4)
    sizes: list[int] = []
    plain = network.linear

    def watched(x: Tensor, weight: Tensor) -> Tensor:
        out = plain(x, weight)
        sizes.append(len(out))
        return out

    monkeypatch.setattr(network, "linear", watched)
    hidden = torch.randn(30, 16, requires_grad=True)
    weight = torch.randn(50, 16, requires_grad=trained)
    scored(hidden, weight, torch.zeros(30, dtype=torch.int64))[0].sum().backward()
    assert max(sizes) == 4
    assert sum(sizes) == times * 30  # forward, and once more backward where the head is trained


def test_a_frozen_head_gives_the_gradients_that_a_trained_one_gives(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(network, "_CHUNK", 7)
    torch.manual_seed(0)
    hidden = torch.randn(30, 16, dtype=torch.float64, requires_grad=True)
    weight, slope = torch.randn(50, 16, dtype=torch.float64), torch.randn(30, dtype=torch.float64)
    targets = torch.randint(0, 50, (30,))
    grads = [
        torch.autograd.grad(scored(hidden, weight.clone().requires_grad_(trained), targets)[0], hidden, slope)[0]
        for trained in (False, True)
    ]
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-12, atol=1e-12)


def moe(dense_layers: Sequence[int] = ()) -> Qwen3MoeForCausalLM:
    shape: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
    experts: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = Qwen3MoeConfig(
        vocab_size=64,
        num_key_value_heads=2,
        intermediate_size=48,
        mlp_only_layers=list(dense_layers),
        **shape,
        **experts,
    )
    return Qwen3MoeForCausalLM(config)


@pytest.mark.parametrize("dense_layers", [(), (0,)])
def test_a_mixture_of_experts_is_trained_in_its_attention_alone(dense_layers: Sequence[int]):
    torch.manual_seed(0)
    base = moe(dense_layers)
    weights = base.state_dict()
    net = Network(base, TRAINER)
    assert {name.replace(".base_layer", "") for name in base.state_dict() if "lora_" not in name} == set(weights)
    trained = {name.rsplit(".", 3)[0].rpartition(".")[2] for name, p in net.model.named_parameters() if p.requires_grad}
    assert trained == {"q_proj", "k_proj", "v_proj", "o_proj"}
    grads = torch.autograd.grad(net.scores(random_row(), 1.0).logprobs_N.sum(), net.trained)
    assert any(grad.abs().sum() > 0 for grad in grads)


def test_in_a_mixture_with_dense_layers_only_those_are_cut_into_parts(monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    net = Network(moe([0]), TRAINER)
    with torch.no_grad():
        for parameter in net.trained:
            parameter.normal_(std=0.2)
    widths: list[set[int]] = []
    for layer in net._decoder.layers:
        seen: set[int] = set()
        layer.mlp.register_forward_hook(lambda _, __, out, seen=seen: seen.add(out.shape[1]))
        widths.append(seen)

    def grads(free: float) -> Tensor:
        for seen in widths:
            seen.clear()
        monkeypatch.setattr(layers, "free_bytes", lambda _: free)
        found = torch.autograd.grad(net.scores(random_row(), 1.0).logprobs_N.sum(), net.trained)
        return torch.cat([grad.flatten() for grad in found])

    monkeypatch.setattr(layers, "_PART_TOKENS", 5)
    grads(0.0)  # measures
    expected = grads(math.inf)
    assert (grads(-math.inf) - expected).norm() < 1e-5 * expected.norm()
    assert max(widths[0]) == 5
    assert widths[1] == {len(random_row().token_ids)}


def test_a_model_that_does_more_to_its_logits_is_refused():
    config = Gemma2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        final_logit_softcapping=0.1,
    )
    with pytest.raises(DockyardError, match="`gemma2` does more to its logits"):
        Network(Gemma2ForCausalLM(config), TRAINER)


def test_a_family_whose_layers_do_not_pass_on_what_a_row_is_is_refused():
    model = StableLmForCausalLM(StableLmConfig(**SHAPE, max_position_embeddings=128))
    with pytest.raises(DockyardError, match="`stablelm` attends in a way that is not trained"):
        Network(model, TRAINER)
    with pytest.raises(DockyardError, match="`stablelm` attends in a way that is not trained"):
        Network(AutoModelForCausalLM.from_config(model.config, dtype=torch.bfloat16), TRAINER)


def test_a_family_that_is_built_otherwise_is_named():
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4))
    with pytest.raises(DockyardError, match="`gpt2` cannot be trained here"):
        Network(model, TRAINER)


def test_dropout_is_off_since_the_engine_has_none():
    torch.manual_seed(0)
    model: Any = SeedOssForCausalLM(SeedOssConfig(**SHAPE, head_dim=8, residual_dropout=0.5, attention_dropout=0.5))
    net = Network(model.train(), TRAINER)
    first, second = (net.scores(random_row(), 1.0).logprobs_N for _ in range(2))
    torch.testing.assert_close(first, second)


def test_a_family_may_scale_its_scores_otherwise():
    torch.manual_seed(0)
    base: Any = LlamaForCausalLM(LlamaConfig(**SHAPE, initializer_range=0.3)).eval()
    for layer in base.model.layers:
        layer.self_attn.scaling = 2.0
    ids = torch.arange(3, 30)
    with torch.no_grad():
        expected = torch.log_softmax(base(input_ids=ids[None]).logits[0, :-1], -1).gather(1, ids[1:, None])[:, 0]
    found = Network(base, TRAINER).scores(row_of(ids.tolist()), 1.0).logprobs_N
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "window"),
    [
        (MistralConfig, {"sliding_window": 8}),  # of all layers
        (Qwen2Config, {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),  # of the second
    ],
)
def test_a_model_whose_tokens_see_only_the_latest_is_refused(family: Any, window: dict[str, Any]):
    full = {**SHAPE, "sliding_window": None}
    Network(AutoModelForCausalLM.from_config(family(**full)), TRAINER)
    with pytest.raises(DockyardError, match="sliding_attention"):
        Network(AutoModelForCausalLM.from_config(family(**full | window)), TRAINER)


def test_the_reference_is_the_base_model():
    base = LlamaForCausalLM.from_pretrained(tiny_model_dir())
    row = random_row()
    before = Network(base, TRAINER)
    untrained = before.scores(row, 1.0).logprobs_N.detach()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in before.trained:
            parameter.normal_(std=0.2)
    assert (before.scores(row, 1.0).logprobs_N - untrained).abs().max() > 0.1
    [reference] = before.reference(Tree(prefix=np.zeros(0, np.int32), rows=(row,)), 1.0)
    torch.testing.assert_close(reference, untrained)


SIZES = {Keep.EVERYTHING: 100.0, Keep.PRODUCTS: 60.0, Keep.ATTENTION: 20.0, Keep.NOTHING: 5.0}


@pytest.mark.parametrize(
    ("room", "expected"),
    [
        (400, [Keep.EVERYTHING] * 4),
        (350, [Keep.PRODUCTS, Keep.PRODUCTS, Keep.EVERYTHING, Keep.EVERYTHING]),
        (240, [Keep.PRODUCTS] * 4),
        (130, [Keep.ATTENTION, Keep.ATTENTION, Keep.ATTENTION, Keep.PRODUCTS]),
        (70, [Keep.NOTHING, Keep.ATTENTION, Keep.ATTENTION, Keep.ATTENTION]),
        (0, [Keep.NOTHING] * 4),
    ],
)
def test_layers_keep_as_much_as_fits_and_the_last_most(room: float, expected: list[Keep]):
    assert plan(SIZES, 4, room) == expected
