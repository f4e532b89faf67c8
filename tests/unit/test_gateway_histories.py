"""Whatever an agent does to its history, every sampled token is trained once, in the context it was sampled in."""

import asyncio
import os
from functools import cache

import exactness
import pytest
from gateway_fakes import HERMES, IM_END, hermes_model
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_jinja import plain_jinja
from random_agent import Agent, Habits, Policy, Step, echoes, habits, steps
from tokenizers import Tokenizer
from wire_agents import WIRES, Wire

from dockyard.gateway.render.renderer import Renderer

NUM_HISTORIES = int(os.environ.get("DOCKYARD_HISTORIES") or 5000)
"""Of `make soak`."""


@cache
def hermes() -> Policy:
    folder = hermes_model()
    return Policy(
        renderer=Renderer.load(folder),
        tokenizer=Tokenizer.from_file(str(folder / "tokenizer.json")),
        call=lambda name, arguments: f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>',
        stop_id=IM_END,
        plain=plain_jinja(HERMES),
    )


def any_history(num_examples: int) -> None:
    """Judge as many random agents."""
    with asyncio.Runner() as runner:

        @settings(max_examples=num_examples, deadline=None, database=None)
        @given(st.lists(steps, min_size=4, max_size=14), habits)
        def judged(steps: list[Step], habits: Habits) -> None:
            exactness.judge(runner, Agent(hermes(), habits), steps)

        judged()


def only_echoes(num_examples: int) -> None:
    with asyncio.Runner() as runner:

        @settings(max_examples=num_examples, deadline=None, database=None)
        @given(st.lists(echoes, min_size=1, max_size=8), st.sampled_from(WIRES))
        def judged(steps: list[Step], wire: Wire) -> None:
            recording = exactness.judge(runner, Agent(hermes(), Habits(wire)), steps)
            assert len(recording.segments) == (1 if recording.stats["sampled_tokens"] else 0)
            assert recording.stats["splices"] == len(steps) - 1
            assert recording.stats["reencoded_tokens"] == 0

        judged()


def test_whatever_an_agent_does_every_sampled_token_is_trained_once_in_the_context_it_was_sampled_in():
    any_history(200)


@pytest.mark.soak
def test_thousands_of_agents_do_not_get_a_token_wrong():
    any_history(NUM_HISTORIES)


def test_an_agent_that_only_echoes_in_whatever_words_gives_one_segment():
    only_echoes(100)


@pytest.mark.soak
def test_so_do_many_more_that_only_echo():
    only_echoes(NUM_HISTORIES // 10)
