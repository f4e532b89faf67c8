"""The gateway's HTTP surface under invalid requests of every kind: it does not fail, and other sessions continue."""

import asyncio
import gzip
import json
import logging
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from dialect_data import json_values, spoiled
from gateway_fakes import FakeEngine, hermes_model, until
from hypothesis import given, settings
from hypothesis import strategies as st
from random_agent import SYSTEM, TOOLS
from raw_http import RawAnswer, RawRequest, exchange
from wire_agents import WIRES, Style

from dockyard.engine.protocol import ContextOverflow, GenerateRequest, Generation
from dockyard.gateway.admin import Admin
from dockyard.gateway.render.renderer import Renderer
from dockyard.gateway.server import BODY_LIMIT, Gateway, Timeouts
from dockyard.gateway.sessions import TokenSession, TokenSessions
from dockyard.types import ASSISTANT, Message, ToolCall

NUM_MORE = int(os.environ.get("DOCKYARD_FUZZ") or 400)
"""Examples of each test of `make soak`."""

HISTORY = (
    SYSTEM,
    Message("user", "count the lines"),
    Message(ASSISTANT, "so be it", "hm", (ToolCall("call_1", "bash", {"command": "wc é", "timeout": 1.5}),)),
    Message("tool", "3 out.txt", call_id="call_1"),
    Message("user", "again"),
)
CHAT, MESSAGES, RESPONSES = (wire.body(HISTORY, TOOLS, Style(in_parts=True)) for wire in WIRES)
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT | {"stream_options": {"include_usage": True}, "logprobs": True, "max_tokens": 9},
    "/v1/messages": MESSAGES | {"output_config": {"effort": "high"}, "return_token_ids": True},
    "/v1/messages/count_tokens": MESSAGES,
    "/v1/responses": RESPONSES | {"text": {"format": {"type": "text"}}, "max_output_tokens": 9},
}


class Busy(FakeEngine):
    """Knows how many calls it is working on."""

    num_running = 0
    failure: Exception | None = None

    def fail_next(self, failure: Exception) -> None:
        self.failure = failure

    async def generate(self, request: GenerateRequest) -> Generation | ContextOverflow:
        self.num_running += 1
        failure, self.failure = self.failure, None
        try:
            if failure:
                raise failure
            return await super().generate(request)
        finally:
            self.num_running -= 1


@cache
def renderer() -> Renderer:
    return Renderer.load(hermes_model())


class Attack:
    """A gateway with one session that must not be affected, and one for the attacker."""

    def __init__(self, gateway: Gateway, engine: Busy) -> None:
        self.gateway, self.engine = gateway, engine
        self.bystander = self.open("bystander")
        self.session = self.open("attacked")

    def open(self, label: str) -> TokenSession:
        session = self.gateway.open_session(label, seed=1, temperature=1.0, max_new_tokens=50)
        assert isinstance(session, TokenSession)
        return session

    @property
    def port(self) -> int:
        return int(self.gateway.root_url.rsplit(":", 1)[1])

    async def send(self, request: RawRequest) -> RawAnswer | None:
        return await exchange(self.port, request)

    async def ask(self, session: TokenSession, path: str = "/v1/chat/completions") -> RawAnswer:
        answer = await self.send(with_key(session, RawRequest(path=path, body=dumped(BODIES[path]))))
        assert answer is not None
        return answer

    async def check_alive(self) -> None:
        """Nothing goes on for requests that are over, and the attacked session still answers."""
        self.engine.hold = None
        await until(lambda: self.engine.num_running == 0)
        assert (await self.ask(self.session)).status == 200


def key_of(session: TokenSession) -> tuple[tuple[str, str], ...]:
    return (("Authorization", f"Bearer {session.key}"),)


def with_key(session: TokenSession, request: RawRequest) -> RawRequest:
    return replace(request, headers=(*key_of(session), *request.headers))


def dumped(body: Any) -> bytes:
    return json.dumps(body).encode()


@asynccontextmanager
async def attacked(engine: Busy) -> AsyncIterator[Attack]:
    timeouts = Timeouts(retry_grace_s=0.01, keep_alive_s=0.005, transfer_s=5)
    gateway = Gateway(TokenSessions(engine, renderer()), "policy", timeouts=timeouts)
    await gateway.start()
    try:
        yield Attack(gateway, engine)
    finally:
        await gateway.close()


@contextmanager
def unmoved(caplog: pytest.LogCaptureFixture, runner: asyncio.Runner) -> Iterator[Attack]:
    """Around any number of attacks: the log shows no error, the bystander's record is what it was."""
    caplog.set_level(logging.INFO)
    opened = attacked(Busy())
    attack = runner.run(opened.__aenter__())
    runner.run(attack.ask(attack.bystander))
    [before] = attack.engine.requests
    [sampled] = attack.engine.generations
    try:
        yield attack
    finally:
        recording = attack.gateway.close_session(attack.bystander)
        runner.run(opened.__aexit__(None, None, None))
    [segment] = recording.segments
    assert segment.token_ids.tolist() == [*before.prompt_ids.tolist(), *sampled.token_ids.tolist()]
    assert (recording.calls, recording.engine_failure) == (1, None)


def check_log(caplog: pytest.LogCaptureFixture) -> None:
    loud = [record for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR]
    assert not [f"{record.getMessage()}: {(record.exc_info or ' ')[1]!r}" for record in loud]


def attack_with(requests: st.SearchStrategy[RawRequest], num_examples: int, caplog: pytest.LogCaptureFixture) -> None:
    """Send every request, and see that the gateway is none the worse."""
    with asyncio.Runner() as runner, unmoved(caplog, runner) as attack:

        @settings(max_examples=num_examples, deadline=None, database=None)
        @given(requests)
        def harmless(request: RawRequest) -> None:
            caplog.clear()
            answer = runner.run(attack.send(with_key(attack.session, request)))
            assert answer is None or answer.status < 500
            runner.run(attack.check_alive())
            check_log(caplog)

        harmless()


PATHS = st.builds(lambda prefix, path: prefix + path, st.sampled_from(["", "/s/attacked"]), st.sampled_from([*BODIES]))


def nest(depth: int) -> str:
    return "[" * depth + "]" * depth


DEPTHS = (50, 300, 700, 900, 940, 960, 980, 990, 5000)
ODD = (
    *map(nest, DEPTHS),
    *(json.dumps(f'{{"a": {nest(depth)}}}') for depth in DEPTHS),
    *('{"a":' * depth + "1" + "}" * depth for depth in DEPTHS),
    *map(json.dumps, ["\ud800", "a\udcff", "\ud83d\ude00", '{"a": "\\ud800"}', "\\udfff", "\x00", "\ufdd0\ue000", ""]),
    *("NaN", "-Infinity", "1e999", "-1", "0", "1.5", "9" * 30, "9" * 5000, '"' + "9" * 5000 + '"', "{}", "[]", "null"),
)
"""JSON that is rarely seen, as text."""
odd_values = st.one_of(st.integers(0, len(ODD) - 1).map(lambda number: ODD[number]), json_values.map(json.dumps))


@st.composite
def spoiled_bodies(draw: st.DrawFn) -> RawRequest:
    path = draw(PATHS)
    body = draw(spoiled(BODIES[path.removeprefix("/s/attacked")]))
    return RawRequest(path=path, body=json.dumps(streamed(draw, body)).encode())


@st.composite
def odd_bodies(draw: st.DrawFn) -> RawRequest:
    """A value of any kind in a place where another is expected."""
    path = draw(PATHS)
    body = json.loads(json.dumps(BODIES[path.removeprefix("/s/attacked")]))
    holder, key = draw(st.sampled_from(places(body)))
    holder[key] = "@@"
    text = json.dumps(streamed(draw, body)).replace('"@@"', draw(odd_values))
    return RawRequest(path=path, body=text.encode())


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every place inside a value, as its holder and its key."""
    keys: list[Any] = list(value) if isinstance(value, dict) else list(range(len(value)))
    inner = [place for key in keys if isinstance(value[key], dict | list) for place in places(value[key])]
    return [(value, key) for key in keys] + inner


def streamed(draw: st.DrawFn, body: Any) -> Any:
    return {**body, "stream": True} if isinstance(body, dict) and draw(st.booleans()) else body


bodies = st.one_of(
    spoiled_bodies(),
    odd_bodies(),
    st.builds(RawRequest, path=PATHS, body=odd_values.map(str.encode)),
    st.builds(RawRequest, path=PATHS, body=st.binary(max_size=40)),
)


def test_no_body_makes_the_gateway_fail(caplog: pytest.LogCaptureFixture):
    attack_with(bodies, 150, caplog)


@pytest.mark.soak
def test_nor_does_any_of_many_more(caplog: pytest.LogCaptureFixture):
    attack_with(bodies, NUM_MORE, caplog)


def spelled(arguments: str) -> bytes:
    """A history whose tool call has these arguments."""
    made = {"id": "call_1", "type": "function", "function": {"name": "bash", "arguments": arguments}}
    return dumped({"messages": [HEARD, {"role": ASSISTANT, "tool_calls": [made]}, HEARD]})


HEARD = {"role": "user", "content": "count the lines"}
TROUBLE = {
    "half a character inside the arguments of a call": RawRequest(body=spelled('{"command": "\\ud800"}')),
    "arguments nested as deep as they can be": RawRequest(body=spelled('{"a":' + nest(960) + "}")),
    "an expectation that is no text": RawRequest(headers=(("Expect", "\x80"),), body=dumped({"messages": [HEARD]})),
    "an expectation that is no text for a target that is no path": RawRequest(path="*", headers=(("Expect", "\x80"),)),
    "a body that is not compressed as it says": RawRequest(headers=(("Content-Encoding", "gzip"),), body=b"{}"),
    "a target that is no path": RawRequest(path="*"),
}


@pytest.mark.parametrize("request_", [*TROUBLE.values()], ids=[*TROUBLE])
def test_known_trouble_is_answered_and_leaves_no_traceback(request_: RawRequest, caplog: pytest.LogCaptureFixture):
    attack_with(st.just(request_), 1, caplog)


header_names = st.sampled_from(
    "Content-Type Content-Encoding Transfer-Encoding Content-Length Expect Accept-Encoding Range Upgrade Cookie Host "
    "x-stainless-retry-count Idempotency-Key x-api-key anthropic-version X-Ü".split()
)
header_values = st.one_of(
    st.sampled_from(["", *"gzip deflate br zstd chunked identity 100-continue websocket 1 -1".split()]),
    st.text(st.characters(min_codepoint=32, max_codepoint=255, exclude_characters="\x7f"), max_size=12),
)
paths = st.one_of(
    PATHS,
    st.sampled_from("/ /v1/models /s/attacked/ /s/attacked/api/hello /s/%ff/v1/models /s//v1/models *".split()),
    st.text(st.sampled_from("/svatcked1%20.?#é"), max_size=16).map(lambda path: f"/{path}"),
)
whole = dumped(BODIES["/v1/chat/completions"])
odd_requests = st.builds(
    RawRequest,
    method=st.sampled_from(["POST", "GET", "HEAD", "PUT", "DELETE", "OPTIONS", "TRACE", "PROPFIND", "post"]),
    path=paths,
    headers=st.lists(st.tuples(header_names, header_values), max_size=3).map(tuple),
    body=st.sampled_from([whole, b"", gzip.compress(whole), gzip.compress(whole)[:40], b"5\r\nhello\r\n0\r\n\r\n"]),
)


def test_no_method_path_or_header_makes_the_gateway_fail(caplog: pytest.LogCaptureFixture):
    attack_with(odd_requests, 150, caplog)


@pytest.mark.soak
def test_nor_does_any_of_many_more_methods_paths_and_headers(caplog: pytest.LogCaptureFixture):
    attack_with(odd_requests, NUM_MORE, caplog)


@st.composite
def cut_requests(draw: st.DrawFn) -> RawRequest:
    """Requests that end before they are whole, or whose client is gone when the answer comes."""
    path = draw(PATHS)
    body = dumped({**BODIES[path.removeprefix("/s/attacked")], "stream": draw(st.booleans())})
    gone = RawRequest(path=path, body=body, hangs_up_after_s=draw(st.sampled_from([0.0, 0.001, 0.02])))
    return draw(
        st.one_of(
            st.just(gone),
            st.integers(0, len(body) + 300).map(lambda num_sent: replace(gone, num_sent=num_sent)),
            st.integers(-200, 200).map(lambda more: replace(gone, announced=len(body) + more)),
        )
    )


def hang_up_with(num_examples: int, caplog: pytest.LogCaptureFixture) -> None:
    with asyncio.Runner() as runner, unmoved(caplog, runner) as attack:

        @settings(max_examples=num_examples, deadline=None, database=None)
        @given(cut_requests(), st.booleans())
        def harmless(request: RawRequest, held: bool) -> None:
            caplog.clear()
            runner.run(hang_up(attack, request, held))
            check_log(caplog)

        harmless()


async def hang_up(attack: Attack, request: RawRequest, held: bool) -> None:
    """`held`: while the engine works, else at any time."""
    attack.engine.hold = asyncio.Event() if held else None
    await attack.send(with_key(attack.session, request))
    if held:  # nobody waits for these any more
        await asyncio.sleep(0.01)
        await until(lambda: attack.engine.num_running == 0)
    await attack.check_alive()


def test_clients_that_hang_up_at_any_time_leave_nothing_behind(caplog: pytest.LogCaptureFixture):
    hang_up_with(60, caplog)


@pytest.mark.soak
def test_nor_do_many_more_that_hang_up(caplog: pytest.LogCaptureFixture):
    hang_up_with(NUM_MORE, caplog)


ADMIN_BODIES = {
    "/sessions": {"label": "a", "seed": 1, "temperature": 1.0, "max_new_tokens": 9, "limits": {"max_seconds": 9.5}},
    "/adapter": {"path": "nowhere", "version": 1},
    "/sessions/a/close": {},
}
admin_requests = st.one_of(
    st.sampled_from([*ADMIN_BODIES]).flatmap(
        lambda path: st.builds(RawRequest, path=st.just(path), body=spoiled(ADMIN_BODIES[path] | {"a": 1}).map(dumped))
    ),
    st.builds(RawRequest, path=st.sampled_from([*ADMIN_BODIES]), body=odd_values.map(str.encode)),
    st.just(RawRequest(path="/adapter", body=dumped({"path": "a" * 5000, "version": 1}))),
    st.just(RawRequest(path="/sessions", headers=(("Content-Encoding", "gzip"),), body=b"{}")),
    st.just(RawRequest(path="/adapter", headers=(("Expect", "\x80"),), body=b"{}")),
    st.just(RawRequest(path="*", headers=(("Expect", "\x80"),))),
)


def test_no_body_makes_the_admin_listener_fail(caplog: pytest.LogCaptureFixture):
    with asyncio.Runner() as runner, unmoved(caplog, runner) as attack:
        admin = Admin(attack.gateway, "token", publish=attack.engine.publish)
        port = int(runner.run(admin.start_port(0)).rsplit(":", 1)[1])

        @settings(max_examples=100, deadline=None, database=None)
        @given(admin_requests)
        def harmless(request: RawRequest) -> None:
            keyed = replace(request, headers=(("Authorization", "Bearer token"), *request.headers))
            answer = runner.run(exchange(port, keyed))
            assert answer is None or answer.status < 500

        harmless()
        runner.run(admin.close())


any_route = st.sampled_from([*(("POST", path) for path in BODIES), ("GET", "/v1/models")])


def keys_with(num_examples: int, caplog: pytest.LogCaptureFixture) -> None:
    with asyncio.Runner() as runner, unmoved(caplog, runner) as attack:
        closed = attack.open("closed")
        attack.gateway.close_session(closed)
        made_up = [(), (("Authorization", "Bearer nonsense"),), (("x-api-key", "é"),)]
        wrong = [*made_up, key_of(closed), key_of(attack.session)]

        @settings(max_examples=num_examples, deadline=None, database=None)
        @given(any_route, st.sampled_from(["bystander", "closed", "nobody", "%ff"]), odd_values)
        def told_nothing(route: tuple[str, str], label: str, body: str) -> None:
            method, path = route
            asked = RawRequest(method=method, path=f"/s/{label}{path}", body=body.encode())
            answers = [runner.run(attack.send(replace(asked, headers=key))) for key in wrong]
            assert {answer and answer.status for answer in answers} == {401}
            assert len(set(answers)) == 1
            check_log(caplog)

        told_nothing()


def test_a_key_that_does_not_fit_its_label_is_answered_as_one_that_never_was(caplog: pytest.LogCaptureFixture):
    keys_with(40, caplog)


@pytest.mark.soak
def test_and_so_it_is_with_any_body(caplog: pytest.LogCaptureFixture):
    keys_with(NUM_MORE, caplog)


@pytest.mark.parametrize("path", [path for path in BODIES if "count" not in path])
def test_only_an_engine_that_fails_is_a_502(path: str, caplog: pytest.LogCaptureFixture):
    with asyncio.Runner() as runner, unmoved(caplog, runner) as attack:
        attack.engine.fail_next(RuntimeError("gone"))
        statuses = [runner.run(attack.ask(attack.session, path)).status for _ in range(2)]
        check_log(caplog)
    assert statuses == [502, 200]


def test_a_small_body_that_unpacks_to_a_large_one_is_refused(caplog: pytest.LogCaptureFixture):
    bomb = gzip.compress(b" " * (BODY_LIMIT + 1))
    request = RawRequest(headers=(("Content-Encoding", "gzip"),), body=bomb)
    with asyncio.Runner() as runner, unmoved(caplog, runner) as attack:
        answer = runner.run(attack.send(with_key(attack.session, request)))
        runner.run(attack.check_alive())
        check_log(caplog)
    assert answer is not None
    assert answer.status == 413
