"""What the embedded engine says must not depend on where in its pool a sequence lies, nor on who else is there."""

from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_policy import CPU, tiny_model_dir, tiny_policy

from dockyard.engine.embedded.decode import Next, Steps, Unrecorded, Work, few_lengths, few_sizes, sample
from dockyard.engine.embedded.kv import SCRATCH, KVPool, KVShape, PoolSize, Region, Regions
from dockyard.engine.embedded.model import Piece, PooledModel, attend, pack, pack_linears, worth_packing
from dockyard.engine.embedded.scheduler import DecodeRequest, Scheduler
from dockyard.engine.protocol import GenerateRequest
from dockyard.engine.torch_internals import replace_call
from dockyard.engine.weights import load_model
from dockyard.errors import EngineError
from dockyard.types import IntArray

DEVICE = torch.device("cpu")
SHAPE = KVShape(2, 2, 8, DEVICE, torch.float32)
pytestmark = pytest.mark.usefixtures("one_thread")


@cache
def plain_model() -> Any:
    return load_model(tiny_model_dir(), CPU).eval().requires_grad_(False)


def pooled(*, most: int, first: int = 64, finished: int = 0) -> PooledModel:
    model = load_model(tiny_model_dir(), CPU).eval().requires_grad_(False)
    return PooledModel(model, KVPool(SHAPE, PoolSize(first=first, most=most, finished=finished)))


def batch_of(*, most: int, max_batch: int = 4, finished: int = 0) -> Scheduler:
    model = pooled(most=most, finished=finished)
    steps = Steps(model, DEVICE, Unrecorded, sizes=range(1, max_batch + 1), lengths=[512])
    return Scheduler(model, steps, max_batch, 0, shares=finished > 0)


def expected(prompt: IntArray, sampled: IntArray) -> np.ndarray:
    ids = torch.from_numpy(np.concatenate([prompt, sampled])).long()[None]
    logprobs = plain_model()(ids).logits[0].log_softmax(-1)
    return logprobs[len(prompt) - 1 : -1].gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()


def random_ids(seed: int, length: int) -> IntArray:
    return np.random.default_rng(seed).integers(3, 300, length).astype(np.int32)


def new_row(prompt: IntArray, new: int, seed: int = 0) -> DecodeRequest:
    asked = GenerateRequest(prompt_ids=prompt, max_new_tokens=new, temperature=1.0, stop_ids=frozenset(), seed=seed)
    return DecodeRequest(asked, new)


def run_out(batch: Scheduler) -> None:
    for _ in range(5000):
        if batch.idle:
            return
        batch.advance()
    raise AssertionError("the batch never ends")


def assert_answered(row: DecodeRequest, new: int) -> None:
    generation = row.future.result(timeout=0)
    assert len(generation.token_ids) == new
    np.testing.assert_allclose(generation.logprobs, expected(row.request.prompt_ids, generation.token_ids), atol=1e-4)


@torch.no_grad()
def test_a_pass_over_pieces_with_and_without_known_beginnings_gives_the_plain_models_logits():
    model = pooled(most=512)
    sequences = [random_ids(seed, length) for seed, length in enumerate((1, 40, 17, 90))]
    regions = [model.pool.take(len(ids)) for ids in sequences]
    known = [0, 23, 16, 0]
    for stops in (known, [len(ids) for ids in sequences]):
        begins = [0] * 4 if stops is known else known
        pieces = [
            Piece(ids[begin:stop], begin, region.start)
            for ids, region, begin, stop in zip(sequences, regions, begins, stops, strict=True)
            if region and stop > begin
        ]
        logits = model.logits(pack(pieces, DEVICE))
    plain = [plain_model()(torch.from_numpy(ids).long()[None]).logits[0] for ids in sequences]
    wanted = torch.cat([rows[begin:] for rows, begin in zip(plain, known, strict=True)])
    torch.testing.assert_close(logits.log_softmax(-1), wanted.log_softmax(-1), atol=1e-4, rtol=0)


def test_adapters_are_served_in_the_models_own_number_format():
    policy = tiny_policy()
    model = policy.serving_model()
    model.get_base_model().to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    PooledModel(model, KVPool(SHAPE, PoolSize(first=64, most=64, finished=0)))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert {parameter.dtype for parameter in policy.model.parameters() if parameter.requires_grad} == {torch.float32}


class Recorded:
    """Keeps what it was given, as a graph would."""

    made: list[Work]

    def __init__(self) -> None:
        Recorded.made = []

    def __call__(self, work: Work) -> Work:
        self.made.append(work)
        work()
        return work


@torch.no_grad()
def test_steps_of_a_few_sizes_give_the_tokens_of_those_who_asked_and_spoil_nobody_elses_keys():
    model = pooled(most=512)
    steps = Steps(model, DEVICE, Recorded, sizes=[4, 8], lengths=few_lengths(512, first=64, factor=4))
    sequences = [random_ids(seed, length) for seed, length in enumerate((5, 40, 17, 29, 8))]
    starts: list[int] = []
    for ids in sequences:
        region = model.pool.take(len(ids) + 20)
        assert region
        starts.append(region.start)
        model.logits(pack([Piece(ids[:-1], 0, region.start)], DEVICE))
    drawn: list[list[float]] = [[] for _ in sequences]
    grown = [ids.tolist() for ids in sequences]
    for turn in range(9):
        asked = range(5) if turn % 2 else range(3)
        rows = [Next(grown[index][-1], starts[index], len(grown[index]), 1.0, 0.1 * turn) for index in asked]
        token_ids, logprobs = steps.run(rows)
        for index, token_id, logprob in zip(asked, token_ids, logprobs, strict=True):
            grown[index].append(token_id)
            drawn[index].append(logprob)
    assert len(Recorded.made) == 2  # for batches of 4 and 8
    for ids, whole, logprobs in zip(sequences, grown, drawn, strict=True):
        np.testing.assert_allclose(logprobs, expected(ids, np.array(whole[len(ids) :], np.int32)), atol=1e-4)


@pytest.mark.parametrize("num_shared", [1, 40, 200])
def test_a_common_prefix_is_read_once_for_all_and_changes_no_output(num_shared: int):
    torch.manual_seed(0)
    starts, lengths = [0, 256, 512], [num_shared + 1, num_shared + 9, num_shared + 20]
    pool_2SGD = torch.randn(2, 768, 2, 8)
    for start in starts[1:]:
        pool_2SGD[:, start : start + num_shared] = pool_2SGD[:, :num_shared]
    slots_R = torch.tensor(starts) + torch.tensor(lengths) - 1
    rows_3R = torch.tensor([[0, 1, 2, 3], [*starts, 0], [*lengths, 0]], dtype=torch.int32)
    q_RHD, k_RGD, v_RGD = torch.randn(3, 4, 8), torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    plain, shared = (
        attend(q_RHD, k_RGD, v_RGD, pool_2SGD.clone(), slots_R, rows_3R, torch.tensor([1, 512, prefix]), 0.3)
        for prefix in (0, num_shared)
    )
    torch.testing.assert_close(shared, plain, rtol=1e-5, atol=1e-6)


def test_packed_layers_give_what_weights_and_adapters_give_and_follow_them():
    model = tiny_policy().serving_model()
    ids = torch.from_numpy(random_ids(0, 12)).long()[None]
    assert worth_packing(model)
    for scale in (0.0, 0.1):
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.data.normal_(std=scale)
        forget(model)
        expected_logits = model(ids).logits
        pack_linears(model)
        torch.testing.assert_close(model(ids).logits, expected_logits, rtol=1e-4, atol=1e-4)


def forget(model: Any) -> None:
    """Call all layers as ever."""
    for module in model.modules():
        replace_call(module, None)


def test_every_batch_up_to_the_largest_has_a_size_that_is_recorded():
    for most in (1, 2, 3, 64, 100, 128, 300):
        assert few_sizes(most)[-1] == max(2, most)
        assert few_sizes(most) == sorted(set(few_sizes(most)))
    assert few_lengths(5000, first=1024, factor=4) == [1024, 4096, 16384]


ARRIVALS = st.lists(
    st.tuples(
        st.integers(0, 12),  # advances before it comes
        st.integers(1, 70),  # tokens of its prompt
        st.integers(1, 40),  # new tokens
        st.integers(0, 60),  # tokens of a beginning that others share
        st.none() | st.integers(1, 20),  # advances after which it is cancelled
    ),
    min_size=1,
    max_size=9,
)


@settings(max_examples=40, deadline=None)
@given(arrivals=ARRIVALS, finished=st.sampled_from([0, 96, 1000]), max_batch=st.integers(1, 5))
@torch.no_grad()
def test_whoever_comes_and_goes_in_a_pool_too_small_for_all_gets_what_they_would_get_alone(
    arrivals: list[tuple[int, int, int, int, int | None]], finished: int, max_batch: int
):
    batch = batch_of(most=SCRATCH.size + 176, max_batch=max_batch, finished=finished)
    head = random_ids(99, 60)
    rows: list[DecodeRequest] = []
    cancels: dict[int, list[DecodeRequest]] = {}
    now = 0
    for index, (delay, length, new, shared, cancelled) in enumerate(arrivals):
        for _ in range(delay):
            batch.advance()
            now += 1
            for row in cancels.pop(now, []):
                row.future.cancel()
        rows.append(new_row(np.concatenate([head[:shared], random_ids(index, length)]), new, seed=index))
        batch.add(rows[-1])
        if cancelled:
            cancels.setdefault(now + cancelled, []).append(rows[-1])
    run_out(batch)
    for row, (_, _, new, _, _) in zip(rows, arrivals, strict=True):
        if not row.future.cancelled():
            assert_answered(row, new)
    pool = batch.pool
    kept = sum(known.region.size for known in pool.finished)
    assert kept <= finished
    assert pool.num_free + kept + SCRATCH.size == pool.num_tokens  # nothing leaked


@torch.no_grad()
def test_requests_that_outgrow_the_pool_together_take_turns():
    batch = batch_of(most=SCRATCH.size + 320, max_batch=3)
    rows = [new_row(random_ids(seed, 20), 290, seed) for seed in range(3)]
    for row in rows:
        batch.add(row)
    run_out(batch)
    for row in rows:
        assert_answered(row, 290)


@torch.no_grad()
def test_the_next_turn_of_a_rollout_runs_its_new_tokens_only():
    batch = batch_of(most=2048, finished=1024)
    first = new_row(random_ids(0, 100), 10)
    batch.add(first)
    run_out(batch)
    before = batch.counts.pass_tokens
    longer = np.concatenate([first.request.prompt_ids, first.future.result().token_ids, random_ids(1, 30)])
    second = new_row(longer, 10)
    batch.add(second)
    run_out(batch)
    assert batch.counts.pass_tokens - before == 31  # the last sampled token had not been run
    assert_answered(second, 10)


@torch.no_grad()
def test_prompts_that_begin_alike_and_come_together_run_their_beginning_once():
    batch = batch_of(most=2048, finished=1024)
    head = random_ids(0, 100)
    rows = [new_row(np.concatenate([head, random_ids(seed, 20)]), 5, seed) for seed in (1, 2, 3)]
    for row in rows:
        batch.add(row)
    run_out(batch)
    assert batch.counts.pass_tokens == 120 + 20 + 20
    for row in rows:
        assert_answered(row, 5)


@torch.no_grad()
def test_a_cancelled_request_gives_its_region_back():
    batch = batch_of(most=1024)
    row = new_row(random_ids(0, 100), 50)
    batch.add(row)
    batch.advance()
    taken = batch.pool.num_free
    row.future.cancel()
    batch.advance()
    assert batch.idle
    assert batch.pool.num_free == taken + row_size(150)


def row_size(num_tokens: int) -> int:
    return -(-num_tokens // 16) * 16


@torch.no_grad()
def test_a_request_that_the_pool_can_never_hold_fails_and_the_others_go_on():
    batch = batch_of(most=SCRATCH.size + 64)
    large, small = new_row(random_ids(0, 100), 5), new_row(random_ids(1, 10), 5)
    batch.add(large)
    batch.add(small)
    run_out(batch)
    with pytest.raises(EngineError, match="no memory for the keys and values of a request of 100 tokens"):
        large.future.result(timeout=0)
    assert_answered(small, 5)


def test_room_is_made_by_forgetting_finished_sequences_but_not_the_one_that_is_about_to_be_copied():
    pool = KVPool(SHAPE, PoolSize(first=64, most=SCRATCH.size + 160, finished=1000))
    for seed in range(2):
        region = pool.take(64)
        assert region
        pool.keep(random_ids(seed, 64), region)
    older, newer = pool.finished
    assert pool.take(64, besides=older)
    assert list(pool.finished) == [older]
    assert newer.region.size == 64
    assert pool.take(64, besides=older) is None
    assert pool.take(64) == older.region


@settings(max_examples=200, deadline=None)
@given(sizes=st.lists(st.tuples(st.integers(1, 60), st.booleans()), max_size=40), more=st.integers(0, 20))
def test_regions_never_overlap_and_come_back_whole(sizes: list[tuple[int, bool]], more: int):
    regions = Regions()
    regions.grow(256)
    owned: list[Region] = []
    for number, (size, back) in enumerate(sizes):
        if back and owned:
            regions.give_back(owned.pop(number % len(owned)))
        elif (region := regions.take(size)) is not None:
            owned.append(region)
        if owned and (longer := regions.extend(owned[-1], size + more)) is not None:
            owned[-1] = longer
        ordered = sorted(owned)
        assert all(left.stop <= right.start for left, right in pairwise(ordered))
        assert regions.num_free == 256 - sum(region.size for region in owned)
    for region in owned:
        regions.give_back(region)
    assert regions.take(256) == Region(0, 256)


def test_a_draw_from_a_large_vocabulary_falls_where_the_cumulative_distribution_says():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(50, 5000, generator=generator) * 3
    logits[:, :700] = -torch.inf  # a whole block that must never be drawn
    draws = torch.rand(50, generator=generator, dtype=torch.float64)
    draws[0], draws[1] = 0.0, 1 - 2.0**-53
    ids, logprobs = sample(logits, [0.8] * 50, draws.tolist())
    plain = torch.log_softmax(logits / 0.8, -1)
    cumulative = plain.exp().cumsum(-1, dtype=torch.float64)
    for row, token_id in enumerate(ids):
        target = float(draws[row] * cumulative[row, -1])
        assert float(cumulative[row, token_id]) >= target - 1e-12
        assert float(cumulative[row, token_id - 1]) <= target + 1e-12
        assert logprobs[row] == pytest.approx(float(plain[row, token_id]), abs=1e-6)
        assert token_id >= 700
