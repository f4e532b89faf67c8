"""Training all weights: gradients and steps as plain transformers and AdamW make them, served, resumed and exported."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_policy import CPU, make_group, tiny_model_dir
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from dockyard.backends.launch import Ignored, Supported
from dockyard.backends.prime_rl import setting_support as prime_rl
from dockyard.backends.slime import setting_support as slime
from dockyard.cli import main
from dockyard.config import EngineConfig, GRPOConfig, ModelConfig, RunConfig, TasksConfig, TrainerConfig
from dockyard.engine.embedded.engine import TransformersEngine
from dockyard.engine.protocol import GenerateRequest, Generation
from dockyard.engine.weights import load_model, load_weights
from dockyard.errors import DockyardError, EngineError, UsageError
from dockyard.rl import trees
from dockyard.rl.pack import examples_of
from dockyard.run_dir.run import RunDir
from dockyard.settings.load import load_run_config
from dockyard.trainer import memory
from dockyard.trainer.memory import beside_training, bytes_to_train, refuse_too_large
from dockyard.trainer.modes import check_method
from dockyard.trainer.optimizer import Optimizer
from dockyard.trainer.policy import Policy
from dockyard.types import Group

GROUPS = [make_group([0.0, 1.0, 0.5] * 4)]
IDS = torch.arange(3, 40)[None]


def model_of(*, tied: bool, dtype: torch.dtype = torch.float32) -> Any:
    """Of a family with biases, far from uniform."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        initializer_range=0.2,
    )
    model: Any = Qwen2ForCausalLM(config)
    return model.to(dtype).eval()


def full_policy(model: Any, *, kl_coef: float = 0.0, lr: float = 1e-3, **trainer: Any) -> Policy:
    settings = TrainerConfig(method="full", lr=lr, **trainer)
    return Policy(model, settings, GRPOConfig(kl_coef=kl_coef), temperature=1.0, seed=0)


def flat(model: Any) -> Tensor:
    return torch.cat([parameter.detach().double().flatten() for parameter in model.parameters()])


def plain_loss(model: Any, groups: list[Group]) -> Tensor:
    """The policy gradient without recorded logprobs: the ratio is 1 and nothing is clipped."""
    total = torch.zeros(())
    for example in examples_of(groups, GRPOConfig(), with_idle=False):
        ids_T = torch.from_numpy(example.token_ids).long()
        logprobs_TV = torch.log_softmax(model(input_ids=ids_T[None], use_cache=False).logits[0], -1)
        targets = torch.from_numpy(example.targets).long()
        logprobs_N = logprobs_TV[targets - 1, ids_T[targets]]
        ratio_N = torch.exp(logprobs_N - logprobs_N.detach())
        total = total - example.weight * example.advantage * ratio_N.sum()
    return total


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("micro_batch_tokens", "worth_a_pass"), [(4096, 512), (64, 512), (64, 4)])
def test_two_updates_are_those_of_a_plain_model_and_adamw(
    monkeypatch: pytest.MonkeyPatch, tied: bool, micro_batch_tokens: int, worth_a_pass: int
):
    """In one row, in several, and in several over one prefix."""
    monkeypatch.setattr(trees, "_WORTH_A_PASS", worth_a_pass)
    plain = model_of(tied=tied, dtype=torch.float64)  # AdamW makes a step of the smallest difference
    adam = torch.optim.AdamW(plain.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    policy = full_policy(
        model_of(tied=tied, dtype=torch.float64), weight_decay=0.1, micro_batch_tokens=micro_batch_tokens
    )
    for _ in range(2):
        adam.zero_grad()
        loss = plain_loss(plain, GROUPS)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        metrics = policy.update(GROUPS, 10)
        assert metrics["train/loss"] == pytest.approx(loss.item(), abs=1e-6)
        assert metrics["train/grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
        for (name, theirs), ours in zip(plain.named_parameters(), policy.model.parameters(), strict=True):
            assert theirs.grad is not None, name
            assert theirs.grad.norm() > 1e-4, name
            assert (ours.grad - theirs.grad).norm() < 1e-5 * theirs.grad.norm(), name
        adam.step()
    begun, theirs, ours = (flat(model) for model in (model_of(tied=tied), plain, policy.model))
    assert (ours - theirs).norm() < 1e-3 * (theirs - begun).norm()


def narrow_weight(value: float) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.full((4,), value, dtype=torch.bfloat16))


def test_steps_too_small_for_a_bfloat16_number_add_up():
    weight = narrow_weight(1.0)
    optimizer = Optimizer([weight], TrainerConfig(lr=1e-4, max_grad_norm=10.0))
    for step in range(1, 101):  # AdamW steps by about `lr`; the next number below 1 is 0.00390625 away
        optimizer.zero_grad()
        optimizer.add([torch.ones(4, dtype=torch.bfloat16)])
        optimizer.step(1e-4)
        if step == 10:
            assert (weight == 1.0).all()
    torch.testing.assert_close(weight.float(), torch.full((4,), 0.99), rtol=0, atol=0.002)


def test_gradients_too_small_for_a_bfloat16_sum_add_up():
    optimizer = Optimizer([narrow_weight(1.0)], TrainerConfig(max_grad_norm=1e9))
    optimizer.zero_grad()
    optimizer.add([torch.full((4,), 256.0, dtype=torch.bfloat16)])
    for _ in range(64):
        optimizer.add([torch.full((4,), 0.5, dtype=torch.bfloat16)])
    assert optimizer.step(0.0) == pytest.approx(2 * (256 + 32))  # the norm of four such


def test_a_gradient_that_is_not_finite_changes_nothing():
    weight = narrow_weight(1.0)
    optimizer = Optimizer([weight], TrainerConfig(lr=0.1))
    optimizer.zero_grad()
    optimizer.add([torch.tensor([1.0, float("nan"), 0.0, 0.0], dtype=torch.bfloat16)])
    assert np.isnan(optimizer.step(0.1))
    assert (weight == 1.0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_restored_policy_goes_on_to_the_same_bits(tmp_path: Path, dtype: torch.dtype):
    policy = full_policy(model_of(tied=True, dtype=dtype))
    policy.update(GROUPS, 10)
    (tmp_path / "c").mkdir()
    policy.save(tmp_path / "c")
    other = full_policy(model_of(tied=True, dtype=dtype))
    other.restore(tmp_path / "c")
    assert other.version == 1
    for each in (policy, other):
        each.update(GROUPS, 10)
    for (name, one), two in zip(policy.model.named_parameters(), other.model.parameters(), strict=True):
        assert torch.equal(one, two), name


def test_a_saved_policy_is_a_model_that_transformers_loads(tmp_path: Path):
    policy = full_policy(load_model(tiny_model_dir(), CPU))
    policy.update(GROUPS, 10)
    policy.save_weights(tmp_path / "m")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=IDS).logits, policy.model.eval()(input_ids=IDS, attention_mask=None).logits)


def test_the_reference_is_the_model_before_training():
    policy = full_policy(model_of(tied=False), kl_coef=0.1, lr=1e-2)
    assert policy.update(GROUPS, 10)["train/kl"] == pytest.approx(0, abs=1e-6)
    assert policy.update(GROUPS, 10)["train/kl"] > 1e-4


def test_without_a_penalty_there_is_no_second_model():
    assert full_policy(model_of(tied=False))._network._frozen is None


async def sampled(engine: TransformersEngine) -> Generation:
    request = GenerateRequest(
        prompt_ids=np.arange(3, 20, dtype=np.int32), max_new_tokens=12, temperature=0, stop_ids=frozenset(), seed=0
    )
    found = await engine.generate(request)
    assert isinstance(found, Generation)
    return found


async def test_the_engine_has_weights_of_its_own_until_others_are_published(tmp_path: Path):
    policy = full_policy(load_model(tiny_model_dir(), CPU), lr=0.05)
    served = policy.serving_model()
    engine = TransformersEngine(served, EngineConfig())
    before = await sampled(engine)
    policy.update(GROUPS, 10)
    assert (await sampled(engine)).token_ids.tolist() == before.token_ids.tolist()
    policy.save_weights(tmp_path / "v1")
    await engine.publish(tmp_path / "v1", 1)
    after = await sampled(engine)
    await engine.close()
    assert torch.equal(flat(served), flat(policy.model))  # new weights, in the place of the old
    assert set(after.versions.tolist()) == {1}
    assert after.token_ids.tolist() != before.token_ids.tolist()
    plain: Any = LlamaForCausalLM.from_pretrained(tmp_path / "v1")
    greedy = plain.generate(torch.arange(3, 20)[None], max_new_tokens=12, do_sample=False, eos_token_id=None)
    assert after.token_ids.tolist() == greedy[0, 17:].tolist()


def test_weights_of_another_shape_are_refused_and_the_old_stay(tmp_path: Path):
    model_of(tied=True).save_pretrained(tmp_path / "other")
    model = model_of(tied=False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(EngineError, match="has other weights"):
        load_weights(model, tmp_path / "other")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def write_run(path: Path, base: Path | None = None, lr: float = 1e-2, **model: Any) -> tuple[Path, Policy]:
    settings = ModelConfig(name=str(base or tiny_model_dir()), device="cpu", **model)
    trainer = TrainerConfig(method="full", lr=lr)
    with RunDir.create(path, RunConfig(model=settings, trainer=trainer, tasks=TasksConfig(source="demo"))) as run:
        policy = Policy(load_model(base or tiny_model_dir(), settings), trainer, GRPOConfig(), temperature=1.0, seed=0)
        policy.update(GROUPS, 10)
        with run.checkpoints.new(1) as folder:
            policy.save(folder)
    return path, policy


def test_an_export_is_the_trained_model_with_its_bases_tokenizer(tmp_path: Path):
    run, policy = write_run(tmp_path / "run")
    assert main(["export", str(run), "--output", str(tmp_path / "out")]) == 0
    for file in tiny_model_dir().iterdir():
        assert (tmp_path / "out" / file.name).exists(), file.name
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for (name, ours), theirs in zip(policy.model.named_parameters(), exported.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    assert json.loads((tmp_path / "out/dockyard.json").read_text())["method"] == "full"
    assert "All weights were trained." in (tmp_path / "out/README.md").read_text()
    assert not (tmp_path / "out/optimizer.pt").exists()


@pytest.mark.parametrize(
    ("stored", "trained"),
    [(torch.bfloat16, "float32"), (torch.float32, "bfloat16")],
)
def test_an_export_has_the_weights_to_the_bit_whatever_format_the_base_is_stored_in(
    tmp_path: Path, stored: torch.dtype, trained: str
):
    base = shutil.copytree(tiny_model_dir(), tmp_path / "base")
    AutoModelForCausalLM.from_pretrained(base, dtype=stored).save_pretrained(base)
    run, policy = write_run(tmp_path / "run", base, lr=1e-5, dtype=trained)  # steps smaller than bfloat16's spacing
    assert main(["export", str(run), "--output", str(tmp_path / "out")]) == 0
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == trained
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for (name, ours), theirs in zip(policy.model.named_parameters(), exported.parameters(), strict=True):
        assert ours.dtype == theirs.dtype == getattr(torch, trained), name
        assert torch.equal(ours, theirs), name


def test_a_run_that_trained_all_weights_has_no_adapter_to_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run, _ = write_run(tmp_path / "run")
    assert main(["export", str(run), "--adapter-only", "--output", str(tmp_path / "out")]) == 2
    assert "trained all weights" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_evaluation_of_its_weights_as_an_adapter_is_told_the_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run, _ = write_run(tmp_path / "run")
    assert main(["eval", "--tasks.source=demo", f"--adapter={run / 'checkpoints/step-00001'}"]) == 2
    assert "`dockyard export RUN_DIR --output DIR`" in capsys.readouterr().err


def test_settings_of_adapters_mean_nothing_to_it():
    with pytest.raises(UsageError, match="`trainer.lora_r` has no effect when `trainer.method` is `full`"):
        load_run_config(None, ["--tasks.source=demo", "--trainer.method=full", "--trainer.lora_r=8"])


@pytest.mark.parametrize("setting", ["--trainer.offload=true", "--trainer.compile=false"])
def test_settings_of_gpus_mean_nothing_to_a_model_on_a_cpu(setting: str):
    load_run_config(None, ["--tasks.source=demo", setting])
    with pytest.raises(UsageError, match="has no effect when `model.device` is `cpu`"):
        load_run_config(None, ["--tasks.source=demo", "--model.device=cpu", setting])


FULL = RunConfig(trainer=TrainerConfig(method="full"))
ON_VLLM = FULL.model_copy(update={"engine": EngineConfig(type="vllm", url="http://localhost:8000")})


@pytest.mark.parametrize(
    ("config", "remote", "message"),
    [
        (ON_VLLM, False, "`engine.type` `vllm` takes adapters only"),
        (FULL, True, "a policy on another machine"),
    ],
)
def test_what_takes_adapters_only_is_refused_before_anything_is_loaded(config: RunConfig, remote: bool, message: str):
    with pytest.raises(UsageError, match=message):
        check_method(config, remote=remote)
    check_method(FULL, remote=False)
    recorded = ON_VLLM.tasks.model_copy(update={"source": "recorded"})
    check_method(ON_VLLM.model_copy(update={"tasks": recorded}), remote=False)  # they need no engine


@pytest.mark.parametrize(
    ("support", "settings", "kind"),
    [
        (slime.support, ["--trainer.method=full"], Supported),
        (slime.support, ["--trainer.method=lora"], Ignored),
        (slime.support, ["--trainer.method=lora", "--slime.flavour=miles"], Supported),
        (slime.support, ["--trainer.method=full", "--slime.flavour=miles"], Ignored),
        (slime.support, ["--trainer.method=qlora", "--slime.flavour=miles"], Ignored),
        (prime_rl.support, ["--trainer.method=lora"], Supported),
        (prime_rl.support, ["--trainer.method=full"], Ignored),
    ],
)
def test_other_engines_support_only_the_methods_they_train(
    support: Any, settings: list[str], kind: type[Supported | Ignored]
):
    config = load_run_config(None, ["--tasks.source=demo", *settings])
    assert isinstance(support("trainer.method", config), kind)


@pytest.mark.parametrize(("dtype", "per_weight"), [(torch.bfloat16, 20 + 2 * 2), (torch.float32, 16 + 2 * 4)])
def test_what_it_takes_is_counted_before_it_is_needed(dtype: torch.dtype, per_weight: int):
    model = model_of(tied=True, dtype=dtype)
    num_weights = sum(parameter.numel() for parameter in model.parameters())
    assert bytes_to_train(model, num_copies=1) == num_weights * per_weight


def test_what_does_not_fit_is_refused_with_both_sizes(monkeypatch: pytest.MonkeyPatch):
    model = model_of(tied=True)
    needed = bytes_to_train(model, num_copies=1)
    monkeypatch.setattr(memory, "free_bytes", lambda device: needed)
    refuse_too_large(model, num_copies=1)
    monkeypatch.setattr(memory, "free_bytes", lambda device: needed - 1)
    with pytest.raises(DockyardError, match="training all weights of `qwen2` takes .* GiB .* this machine has .* left"):
        refuse_too_large(model, num_copies=1)


def test_an_engine_leaves_room_for_the_gradients_of_all_weights(monkeypatch: pytest.MonkeyPatch):
    class OnGpu:
        device = torch.device("cuda")
        parameters = model_of(tied=True, dtype=torch.bfloat16).parameters

    num_weights = sum(parameter.numel() for parameter in OnGpu.parameters())
    monkeypatch.setattr(memory, "free_bytes", lambda device: 10 * num_weights + 2**31)
    assert beside_training(EngineConfig(), OnGpu).kv_cache_gb == 1.0
    assert beside_training(EngineConfig(kv_cache_gb=3), OnGpu).kv_cache_gb == 3
    assert beside_training(EngineConfig(), model_of(tied=True)).kv_cache_gb is None
