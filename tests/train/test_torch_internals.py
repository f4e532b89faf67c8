"""What a torch release may break: each use of its internals is tried alone, and the failure names it."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dockyard.engine import torch_internals
from dockyard.engine.torch_internals import (
    activation_budget,
    block_weight,
    blocked_linear,
    cpu_flash_backward,
    cpu_flash_forward,
    mark_dynamic,
    original_call,
    replace_call,
)

SOURCE = Path(torch_internals.__file__).parents[1]

# What `torch_internals` passes by position and by name, and how many results it takes.
OPERATORS = {
    "aten._flash_attention_forward": (
        "query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal return_debug_mask",
        "scale seqused_k",
        2,
    ),
    "aten._flash_attention_backward": (
        "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p is_causal rng_state unused",
        "",
        3,
    ),
    "aten._scaled_dot_product_cudnn_attention": (
        "query key value attn_bias compute_log_sumexp dropout_p is_causal return_debug_mask",
        "",
        2,
    ),
    "aten._scaled_dot_product_cudnn_attention_backward": (
        "grad_out query key value out logsumexp philox_seed philox_offset attn_bias cum_seq_q cum_seq_k max_q max_k "
        "dropout_p is_causal",
        "",
        3,
    ),
    "aten._scaled_dot_product_flash_attention_for_cpu": (
        "query key value dropout_p is_causal",
        "attn_mask scale",
        2,
    ),
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": (
        "grad_out query key value out logsumexp dropout_p is_causal",
        "",
        3,
    ),
    "mkldnn._reorder_linear_weight": ("self", "", 1),
    "mkldnn._linear_pointwise": ("X W B attr scalars algorithm", "", 1),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_takes_what_it_is_called_with(name: str):
    namespace, operator = name.split(".")
    found: Any = getattr(getattr(torch.ops, namespace), operator, None)
    assert found is not None, f"torch {torch.__version__} has no operator `{name}`: see `engine/torch_internals.py`"
    positional, keywords, num_results = OPERATORS[name]
    schema = found.default._schema
    given = positional.split()
    names = [argument.name for argument in schema.arguments]
    others = [argument for argument in schema.arguments[len(given) :] if argument.name not in keywords.split()]
    changed = f"torch {torch.__version__} changed `{name}`: see `engine/torch_internals.py`. It is now {schema}"
    assert names[: len(given)] == given, changed
    assert set(keywords.split()) <= set(names), changed
    assert all(argument.has_default_value() for argument in others), changed
    assert len(schema.returns) >= num_results, changed


def test_every_operator_in_use_is_checked_here():
    used = re.findall(r"_(aten|mkldnn)\.(\w+)\(", Path(torch_internals.__file__).read_text())
    assert {f"{namespace}.{operator}" for namespace, operator in used} == set(OPERATORS)


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    scores = (q @ k.transpose(-1, -2) * scale).masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def test_attention_on_a_cpu_returns_the_log_sum_exp_and_its_gradients():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 6, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    seen = torch.ones(6, 6).tril().bool()
    expected, expected_lse = softmax_attention(q, k, v, seen, 8**-0.5)
    out, lse = cpu_flash_forward(q.detach(), k.detach(), v.detach(), causal=True)
    torch.testing.assert_close(out, expected.detach())
    torch.testing.assert_close(lse, expected_lse.detach())
    slope = torch.randn_like(out)
    grads = cpu_flash_backward(slope, q.detach(), k.detach(), v.detach(), out, lse, causal=True)
    torch.testing.assert_close(grads, torch.autograd.grad(expected, (q, k, v), slope))


def test_attention_on_a_cpu_takes_a_mask_and_a_scale():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 1, 4, 8) for _ in range(3))
    seen = torch.tensor([True, False, True, True]).expand(2, 1, 1, 4)
    added = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
    out, lse = cpu_flash_forward(q, k, v, causal=False, added_mask=added, scale=0.5)
    expected, expected_lse = softmax_attention(q, k, v, seen, 0.5)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this build of torch has no oneDNN")
def test_a_blocked_weight_multiplies_as_a_plain_one():
    torch.manual_seed(0)
    x, weight, bias = torch.randn(3, 16), torch.randn(8, 16), torch.randn(8)
    expected = nn.functional.linear(x, weight, bias)
    torch.testing.assert_close(blocked_linear(x, block_weight(weight), bias), expected, rtol=1e-5, atol=1e-5)


def test_a_modules_call_can_be_replaced_and_restored():
    module = nn.Linear(2, 2)
    x = torch.ones(1, 2)
    expected = module(x)
    replace_call(module, lambda x: original_call(module)(x) + 1)
    torch.testing.assert_close(module(x), expected + 1)
    replace_call(module, None)
    torch.testing.assert_close(module(x), expected)


def test_a_size_that_is_marked_is_compiled_for_once():
    compiled: list[int] = []

    def count(graph: Any, inputs: Any) -> Any:
        compiled.append(1)
        return graph.forward

    double = torch.compile(lambda x: x * 2, backend=count)
    for length in (8, 9, 10):
        x = torch.ones(2, length)
        mark_dynamic(x, 1)
        torch.testing.assert_close(double(x), x + x)
    assert len(compiled) == 1


def test_the_budget_of_activations_is_what_the_compiler_reads():
    from torch._functorch import config

    before = config.activation_memory_budget
    with activation_budget(0.25):
        assert config.activation_memory_budget == 0.25
    assert config.activation_memory_budget == before


def internals_in(source: str) -> list[str]:
    """Each use of torch's internals in a module: private names of torch or its operators, and a module's call slots."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            if re.match(r"torch\.(ops\.(aten|mkldnn)|_\w+)", name) or node.attr in (
                "_call_impl",
                "_compiled_call_impl",
            ):
                found.append(name)
        elif isinstance(node, ast.ImportFrom) and re.match(r"torch\.(.*\.)?_", node.module or ""):
            found.append(f"from {node.module}")
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if re.match(r"torch\.(.*\.)?_", alias.name)]
    return found


def test_no_other_file_uses_internals():
    files = {file for file in SOURCE.rglob("*.py") if file.name != "torch_internals.py"}
    assert {file.name: uses for file in files if (uses := internals_in(file.read_text()))} == {}


@pytest.mark.parametrize(
    "source",
    [
        "from torch._functorch import config",
        "import torch._dynamo",
        "torch._dynamo.maybe_mark_dynamic(x, 0)",
        "aten = torch.ops.aten",
        "torch._C._cuda_getDevice()",
        "layer._call_impl(x)",
        "layer._compiled_call_impl = None",
    ],
)
def test_the_check_sees_internals(source: str):
    assert internals_in(source)


@pytest.mark.parametrize(
    "source", ["import torch", "torch.ops.dockyard.row_attention(x)", "x._value", "torch.compile(f)"]
)
def test_the_check_allows_what_is_public(source: str):
    assert not internals_in(source)
