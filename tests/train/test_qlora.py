"""Adapters over weights of 4 bits: what is quantised, what is trained, what the engine shares, what is exported."""

import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn.modules import Linear4bit
from packed_rows import random_row
from peft import PeftModel
from tiny_policy import make_group, tiny_model_dir
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from dockyard.cli import main
from dockyard.config import EngineConfig, GRPOConfig, ModelConfig, RunConfig, TasksConfig, TrainerConfig
from dockyard.engine.embedded.engine import TransformersEngine
from dockyard.engine.protocol import GenerateRequest, Generation
from dockyard.engine.weights import load_model, num_weights, quantised_share
from dockyard.errors import DockyardError
from dockyard.run_dir.run import RunDir
from dockyard.trainer.modes import check_method
from dockyard.trainer.network import Network
from dockyard.trainer.policy import Policy

TRAINER = TrainerConfig(method="qlora", lr=1e-2, lora_r=4)
GROUPS = [make_group([0.0, 1.0, 0.5])]


def four_bit(folder: Path) -> Any:
    return load_model(folder, ModelConfig(name=str(folder), device="cpu", dtype="float32"), four_bit=True)


def policy_of(folder: Path) -> Policy:
    return Policy(four_bit(folder), TRAINER, GRPOConfig(kl_coef=0.0), temperature=1.0, seed=0)


def dequantised(model: Any) -> Any:
    """The same model with ordinary weights of the same values."""
    for name, layer in list(model.named_modules()):
        if isinstance(layer, Linear4bit):
            plain = nn.Linear(layer.in_features, layer.out_features, bias=False)
            weight: Any = layer.weight
            plain.weight = nn.Parameter(dequantize_4bit(weight.data, weight.quant_state).float())
            model.set_submodule(name, plain)
    return model


def shaken(network: Network) -> Network:
    """Adapters begin as nothing; give them something to say."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in network.trained:
            parameter.normal_(std=0.2)
    return network


def logprobs(network: Network) -> Tensor:
    return network.scores(random_row(), 1.0).logprobs_N


def test_linear_layers_have_4_bits_and_the_head_all():
    model = four_bit(tiny_model_dir())
    kinds = {
        name.rpartition(".")[2]: type(layer) for name, layer in model.named_modules() if isinstance(layer, nn.Linear)
    }
    assert kinds.pop("lm_head") is nn.Linear
    assert set(kinds.values()) == {Linear4bit}
    layer: Any = model.model.layers[0].mlp.up_proj
    state = layer.weight.quant_state
    assert (state.quant_type, state.nested, layer.weight.dtype) == ("nf4", True, torch.uint8)
    assert layer.weight.numel() * 2 == layer.in_features * layer.out_features
    assert 0.3 < quantised_share(model) < 0.7  # half of so small a model is embeddings


def test_weights_of_4_bits_count_as_any_other():
    model = four_bit(tiny_model_dir())
    plain = LlamaForCausalLM.from_pretrained(tiny_model_dir())
    assert num_weights(model) == num_weights(plain) == plain.num_parameters()
    assert sum(parameter.numel() for parameter in model.parameters()) < plain.num_parameters()


def test_gradients_of_adapters_are_those_over_the_same_weights_in_full():
    networks = [
        shaken(Network(base, TRAINER)) for base in (four_bit(tiny_model_dir()), dequantised(four_bit(tiny_model_dir())))
    ]
    ours, plain = (logprobs(network) for network in networks)
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)
    pairs = zip(*(torch.autograd.grad(logprobs(n).sum(), n.trained) for n in networks), strict=True)
    for one, two in pairs:
        assert one.dtype == torch.float32
        assert two.norm() > 0
        assert (one - two).norm() < 1e-3 * two.norm()


async def sampled(engine: TransformersEngine) -> Generation:
    request = GenerateRequest(
        prompt_ids=np.arange(3, 20, dtype=np.int32), max_new_tokens=8, temperature=1.0, stop_ids=frozenset(), seed=0
    )
    found = await engine.generate(request)
    assert isinstance(found, Generation)
    return found


@pytest.fixture(scope="module")
def wide_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sizes whose layout bitsandbytes changes on CPUs with special instructions."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,
    )
    folder = tmp_path_factory.mktemp("wide")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


async def test_the_engine_samples_from_the_trainers_own_base_and_leaves_it_as_it_is(
    wide_model_dir: Path, tmp_path: Path
):
    policy = policy_of(wide_model_dir)
    before = policy.logprobs(random_row()).detach()
    served = policy.serving_model()
    frozen = [name for name, parameter in policy.model.named_parameters() if not parameter.requires_grad]
    ours, theirs = dict(policy.model.named_parameters()), dict(served.named_parameters())
    assert all(ours[name] is theirs[name] for name in frozen)
    engine = TransformersEngine(served, EngineConfig())
    await sampled(engine)
    assert torch.equal(policy.logprobs(random_row()), before)
    policy.update(GROUPS, 10)
    policy.save_weights(tmp_path / "v1")
    await engine.publish(tmp_path / "v1", 1)
    drawn = await sampled(engine)
    await engine.close()
    ids = torch.from_numpy(np.concatenate([np.arange(3, 20), drawn.token_ids]))[None]
    with torch.no_grad():
        logits = policy.model.eval()(input_ids=ids, attention_mask=None).logits
    expected = torch.log_softmax(logits[0, 16:-1], -1).gather(1, ids[0, 17:, None])[:, 0]
    np.testing.assert_allclose(drawn.logprobs, expected.numpy(), atol=1e-4)


def test_an_update_moves_adapters_alone_and_a_restored_policy_goes_on_to_the_same_bits(tmp_path: Path):
    policy, other = policy_of(tiny_model_dir()), policy_of(tiny_model_dir())
    policy.update(GROUPS, 10)
    (tmp_path / "c").mkdir()
    policy.save(tmp_path / "c")
    other.restore(tmp_path / "c")
    for each in (policy, other):
        assert each.update(GROUPS, 10)["train/grad_norm"] > 0
    fresh = dict(policy_of(tiny_model_dir()).model.named_parameters())
    for (name, one), two in zip(policy.model.named_parameters(), other.model.parameters(), strict=True):
        assert torch.equal(one, two), name
        assert torch.equal(one, fresh[name]) != one.requires_grad, name


def test_an_export_is_merged_into_the_base_with_all_its_bits_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    model = ModelConfig(name=str(tiny_model_dir()), device="cpu")
    config = RunConfig(model=model, trainer=TRAINER, tasks=TasksConfig(source="demo"))
    with RunDir.create(tmp_path / "run", config) as run, run.checkpoints.new(1) as folder:
        policy = policy_of(tiny_model_dir())
        policy.update(GROUPS, 10)
        policy.save(folder)
    with caplog.at_level(logging.WARNING):
        assert main(["export", str(tmp_path / "run"), "--adapter-only", "--output", str(tmp_path / "adapter")]) == 0
        assert "4 bits" not in caplog.text  # nothing was merged
        assert main(["export", str(tmp_path / "run"), "--output", str(tmp_path / "out")]) == 0
    assert caplog.text.count("the adapter was trained over weights of 4 bits; the merged model has all bits") == 1
    base = AutoModelForCausalLM.from_pretrained(tiny_model_dir())
    adapted = PeftModel.from_pretrained(base, str(tmp_path / "run/checkpoints/step-00001")).eval()
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        torch.testing.assert_close(exported(input_ids=ids).logits, adapted(input_ids=ids).logits, rtol=1e-4, atol=1e-4)
    assert "weights of 4 bits (NF4)" in (tmp_path / "out/README.md").read_text()


def test_without_bitsandbytes_the_extra_to_install_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(DockyardError, match="needs `bitsandbytes`") as caught:
        four_bit(tiny_model_dir())
    assert "dockyard[qlora]" in caught.value.hint
    with pytest.raises(DockyardError, match="needs `bitsandbytes`"):  # before an engine is started for it
        check_method(RunConfig(trainer=TRAINER), remote=False)
    check_method(RunConfig(trainer=TRAINER), remote=True)


def test_an_engine_with_other_base_weights_is_warned_of(caplog: pytest.LogCaptureFixture):
    trainer = TrainerConfig(method="qlora", lr=1e-4)
    server = EngineConfig(type="vllm", url="http://localhost:8000")
    with caplog.at_level(logging.WARNING):
        check_method(RunConfig(trainer=trainer), remote=False)
        assert not caplog.records
        check_method(RunConfig(trainer=trainer, engine=server), remote=False)
    assert "`train/mismatch_kl`" in caplog.text
