"""How much of a pass is kept for the backward pass on a CPU, and that the gradients are the same."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from packed_rows import random_row
from tiny_policy import tiny_model_dir
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from transformers import LlamaForCausalLM

from dockyard.config import TrainerConfig
from dockyard.trainer import layers
from dockyard.trainer.memory import available, left_to_group
from dockyard.trainer.network import Network

ROW = random_row()


def trained(method: str = "lora", dtype: torch.dtype = torch.float32) -> Network:
    trainer = TrainerConfig(method="full") if method == "full" else TrainerConfig(lora_r=4)
    base = LlamaForCausalLM.from_pretrained(tiny_model_dir(), dtype=dtype)
    torch.manual_seed(0)
    network = Network(base, trainer, with_reference=False)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in network.trained:
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return network


def kept_and_grads(network: Network) -> tuple[int, tuple[Tensor, ...]]:
    """How many tensors a pass leaves for its backward pass, and what that comes to."""
    kept = 0

    def note(x: Tensor) -> Tensor:
        nonlocal kept
        kept += 1
        return x

    with saved_tensors_hooks(note, lambda x: x):
        total = network.scores(ROW, 1.0).logprobs_N.sum()
    return kept, torch.autograd.grad(total, network.trained)


@pytest.mark.parametrize("method", ["lora", "full"])
def test_with_little_memory_layers_run_twice_and_gradients_are_the_same(monkeypatch: pytest.MonkeyPatch, method: str):
    monkeypatch.setattr(layers, "free_bytes", lambda _: math.inf)
    much, expected = kept_and_grads(trained(method))
    monkeypatch.setattr(layers, "free_bytes", lambda _: 0.0)
    little, grads = kept_and_grads(trained(method))
    assert little < much / 2
    assert any(grad.abs().sum() > 0 for grad in expected)
    torch.testing.assert_close(grads, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", ["lora", "full"])
def test_with_less_still_feed_forward_parts_see_some_tokens_at_a_time(monkeypatch: pytest.MonkeyPatch, method: str):
    monkeypatch.setattr(layers, "_PART_TOKENS", 5)
    network = trained(method, torch.float64)
    checkpointed: list[Any] = []
    monkeypatch.setattr(layers, "checkpoint", lambda run, *x, **y: checkpointed.append(run) or checkpoint(run, *x, **y))
    widths: list[int] = []
    for layer in network._decoder.layers:
        layer.mlp.down_proj.register_forward_hook(lambda _, __, out: widths.append(out.shape[1]))

    def grads(free: float) -> tuple[Tensor, ...]:
        widths.clear()
        monkeypatch.setattr(layers, "free_bytes", lambda _: free)
        return kept_and_grads(network)[1]

    grads(0.0)  # measures
    expected = grads(math.inf)
    assert set(widths) == {len(ROW.token_ids)}
    found = grads(-math.inf)
    assert max(widths) == 5
    made_again = {layer.mlp._call_impl for layer in network._decoder.layers}
    assert sum(run in made_again for run in checkpointed) >= math.ceil(len(ROW.token_ids) / 5) * len(made_again)
    torch.testing.assert_close(found, expected)
    grads(math.inf)
    assert set(widths) == {len(ROW.token_ids)}


def test_margins_and_later_passes_make_layers_keep_less_but_do_not_cut_them_into_parts(monkeypatch: pytest.MonkeyPatch):
    network = trained()
    runs = network._layers

    def chosen(free: float) -> tuple[set[layers.Keep], bool]:
        monkeypatch.setattr(layers, "free_bytes", lambda _: free)
        network.scores(ROW, 1.0)
        return set(runs._plan), runs._in_parts

    assert chosen(0.0) == ({layers.Keep.NOTHING}, True)  # measures
    runs._gradient_bytes, runs._lost_bytes = 10**9, 2 * 10**9
    everything, nothing = (
        runs._per_token[keep] * len(ROW.token_ids) for keep in (layers.Keep.EVERYTHING, layers.Keep.NOTHING)
    )
    always = 3 * 10**9 + layers._BACKWARD * everything
    margin = runs._head_bytes + layers._SPARE_BYTES
    num = len(network._decoder.layers)
    assert chosen(always + margin + num * everything + 1) == ({layers.Keep.EVERYTHING}, False)
    assert layers.Keep.NOTHING in chosen(always + margin + num * everything - 1)[0]
    runs.reserved_tokens = 10**9
    assert chosen(always + margin + num * everything + 1) == ({layers.Keep.NOTHING}, False)
    assert chosen(always + num * nothing + 1) == ({layers.Keep.NOTHING}, False)
    assert chosen(always + num * nothing - 1) == ({layers.Keep.NOTHING}, True)


def test_a_layer_that_runs_twice_keeps_only_what_it_was_called_with(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(layers, "free_bytes", lambda _: 0.0)
    network = trained()
    network.scores(ROW, 1.0)
    sizes = network._layers._per_token
    assert sizes[layers.Keep.NOTHING] == 32 * 4  # a hidden state in float32
    assert sizes[layers.Keep.EVERYTHING] > 10 * sizes[layers.Keep.NOTHING]


def test_linux_says_how_much_is_available(tmp_path: Path):
    meminfo = tmp_path / "meminfo"
    assert available(meminfo) == math.inf  # another system
    meminfo.write_text("MemTotal:       1000 kB\nMemFree:         100 kB\nMemAvailable:    300 kB\n")
    assert available(meminfo) == 300 * 1024


def test_a_container_has_what_its_limit_leaves(tmp_path: Path):
    assert left_to_group(tmp_path) == math.inf  # no such limits here
    (tmp_path / "memory.max").write_text("max\n")
    assert left_to_group(tmp_path) == math.inf
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("900\n")
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 300\n")
    assert left_to_group(tmp_path) == 400
