"""Attention put together from blocks against one softmax over everything that a token sees."""

import threading

import pytest
import torch
from packed_rows import random_row, row_of
from torch import Tensor

from dockyard.rl.pack import PackedRow
from dockyard.trainer import kernels
from dockyard.trainer.attention import PrefixKV, RowLayout, blocks_of, open_prefix, row_attention, watched
from dockyard.trainer.kernels import rounded_up

HEADS, GROUPS, DIM = 6, 2, 8


def visible(row: PackedRow) -> Tensor:
    index_T, ends_T = torch.arange(len(row.token_ids)), torch.from_numpy(row.ends)
    return (index_T <= index_T[:, None]) & (index_T[:, None] < ends_T)


def plain(q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, row: PackedRow) -> tuple[Tensor, Tensor]:
    k_THD, v_THD = (x.repeat_interleave(HEADS // GROUPS, 1) for x in (k_TGD, v_TGD))
    scores_HTT = torch.einsum("qhd,khd->hqk", q_THD, k_THD) / DIM**0.5
    scores_HTT = scores_HTT.masked_fill(~visible(row), -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores_HTT.softmax(-1), v_THD), scores_HTT.logsumexp(-1)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("row", [random_row(), row_of([1, 2, 3, 4, 5])], ids=["trie", "one sequence"])
def test_blocks_give_what_one_softmax_gives_and_its_gradients(row: PackedRow, dtype: torch.dtype, tolerance: float):
    torch.manual_seed(0)
    num = len(row.token_ids)
    inputs = [torch.randn(num, heads, DIM, dtype=dtype, requires_grad=True) for heads in (HEADS, GROUPS, GROUPS)]
    layout = RowLayout.of(blocks_of(row.positions, row.ends))
    q_THD, k_TGD, v_TGD = inputs
    out, lse = row_attention(q_THD, k_TGD, v_TGD, layout.row_blocks, layout.row_call)
    expected, expected_lse = plain(q_THD, k_TGD, v_TGD, row)
    slope = torch.randn_like(out)
    grads = torch.autograd.grad(out, inputs, slope)
    expected_grads = torch.autograd.grad(expected, inputs, slope)
    for ours, theirs in zip((out, lse, *grads), (expected, expected_lse, *expected_grads), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("causal", [True, False])
def test_the_plain_kernel_is_the_fused_one(causal: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernels, "_PLAIN_QUERIES", 4)
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(num, heads, DIM, dtype=torch.float64) for num, heads in ((9, HEADS), (9, GROUPS), (9, GROUPS))
    )
    slope = torch.randn_like(q)
    found: list[tuple[Tensor, ...]] = []
    for kernel in (kernels.Plain(), kernels.Cpu()):
        part = kernel.forward(q, k, v, causal)
        found.append((part.out_QHD, part.lse_HQ, *kernel.backward(slope, q, k, v, part, causal)))
    for plain_one, fused_one in zip(*found, strict=True):
        torch.testing.assert_close(plain_one, fused_one, rtol=1e-12, atol=1e-12)


def test_every_pair_of_tokens_that_see_each_other_lies_in_exactly_one_block():
    row = random_row()
    seen = torch.zeros(len(row.token_ids), len(row.token_ids), dtype=torch.int64)
    blocks = blocks_of(row.positions, row.ends).tolist()
    for start, stop, first, last in blocks:
        ones = torch.ones(stop - start, last - first, dtype=torch.int64)
        seen[start:stop, first:last] += ones.tril() if start == first else ones
    assert torch.equal(seen, visible(row).long())
    assert len(blocks) < 2 * 9  # two a run at most: nothing is cut finer than the trie branches


def test_torch_may_compile_it():
    row = random_row()
    inputs = [torch.randn(len(row.token_ids), heads, DIM, requires_grad=True) for heads in (HEADS, GROUPS, GROUPS)]
    layout = RowLayout.of(blocks_of(row.positions, row.ends))
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(
        torch.ops.dockyard.row_attention.default, (*inputs, layout.row_blocks, layout.row_call), test_utils=checks
    )


def test_lengths_are_rounded_up_to_few_and_by_little():
    lengths = range(2048, 70_000, 37)
    assert all(0 <= rounded_up(length) - length <= max(128, length / 16) for length in lengths)
    assert len({rounded_up(length) for length in lengths}) <= 6 * 33


def test_what_rows_ask_of_a_prefix_is_summed_in_float32():
    prefix = PrefixKV(1, 1)
    for value in [256.0, *[1.0] * 100]:  # from 256 on bfloat16 knows even numbers only
        prefix.add_grads(0, *(torch.full((1, 1, 1), value, dtype=torch.bfloat16) for _ in "kv"))
    assert [total.item() for total in prefix.take_grads(0)] == [356.0, 356.0]


def test_one_thread_at_a_time_watches_what_is_attended_to():
    inside = threading.Event()

    def watch() -> None:
        with watched():
            inside.set()

    with watched():
        other = threading.Thread(target=watch)
        other.start()
        assert not inside.wait(0.2)
    assert inside.wait(10)
    other.join()


def test_prefixes_of_several_threads_have_numbers_of_their_own():
    numbers: list[int] = []

    def open_many() -> None:
        for _ in range(2000):
            with open_prefix(1) as prefix:
                numbers.append(prefix.number)

    threads = [threading.Thread(target=open_many) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(numbers) == len(set(numbers)) == 8000
