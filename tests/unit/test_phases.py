import asyncio
from collections.abc import Mapping

import pytest

from dockyard.config import RolloutConfig
from dockyard.rollout.plan import Phase
from dockyard.rollout.trial import Phases


async def test_no_more_rollouts_are_in_a_phase_than_its_limit():
    most: dict[Phase, int] = {}

    def note(counts: Mapping[Phase, int]) -> None:
        for phase, count in counts.items():
            most[phase] = max(most.get(phase, 0), count)

    phases = Phases(RolloutConfig(concurrency=6, max_building=2, max_verifying=1), note)

    async def rollout() -> None:
        with phases.slot() as slot:
            for phase in Phase:
                await slot.enter(phase)
                await asyncio.sleep(0.005)

    await asyncio.gather(*(rollout() for _ in range(6)))
    assert most[Phase.BUILDING] == 2
    assert most[Phase.VERIFYING] == 1
    assert most[Phase.RUNNING] > 1


async def test_a_rollout_holds_one_slot_at_a_time_and_none_after_it_failed():
    counts: list[dict[Phase, int]] = []
    phases = Phases(RolloutConfig(concurrency=1), lambda now: counts.append(dict(now)))

    async def break_down() -> None:
        with phases.slot() as slot:
            await slot.enter(Phase.BUILDING)
            await slot.enter(Phase.RUNNING)
            raise RuntimeError("broken")

    for _ in range(2):  # the second would hang if the first had kept its slot
        with pytest.raises(RuntimeError):
            await break_down()
    assert all(sum(now.values()) <= 1 for now in counts)
    assert sum(counts[-1].values()) == 0


async def test_waiting_for_a_slot_is_counted():
    phases = Phases(RolloutConfig(max_running=1))
    with phases.slot() as first, phases.slot() as second:
        await first.enter(Phase.RUNNING)
        entering = asyncio.create_task(second.enter(Phase.RUNNING))
        await asyncio.sleep(0)  # so that it begins to wait before the time is taken
        await asyncio.sleep(0.05)
        assert not entering.done()
        first.leave()
        assert await entering >= 0.05
        assert second.waited_s >= 0.05


async def test_a_rollout_that_is_cancelled_while_it_waits_takes_no_slot():
    phases = Phases(RolloutConfig(max_running=1))
    with phases.slot() as first, phases.slot() as second:
        await first.enter(Phase.RUNNING)
        waiting = asyncio.create_task(second.enter(Phase.RUNNING))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    with phases.slot() as third:
        assert await asyncio.wait_for(third.enter(Phase.RUNNING), 60) < 60
