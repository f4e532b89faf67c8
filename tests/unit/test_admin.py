"""The admin listener, as an external trainer meets it."""

import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from gateway_fakes import FakeEngine, Said, tiny_renderer

from dockyard.errors import EngineError
from dockyard.gateway.admin import Admin, Publish
from dockyard.gateway.server import Gateway, Timeouts
from dockyard.gateway.sessions import TokenSessions

TOKEN = "the-admin-token"
BODY = {"messages": [{"role": "user", "content": "count the lines"}]}

type Answer = tuple[int, Any]


@dataclass
class Trainer:
    """Talks to both listeners."""

    gateway: Gateway
    admin_url: str
    http: aiohttp.ClientSession

    async def admin(self, method: str, path: str, body: Any = None, token: str | None = TOKEN) -> Answer:
        return await self._ask(method, f"{self.admin_url}{path}", body, token)

    async def open(self, **settings: Any) -> dict[str, Any]:
        status, opened = await self.admin("POST", "/sessions", settings)
        assert status == 200, opened
        return opened

    async def agent(self, key: str, method: str = "POST", path: str = "/chat/completions", **fields: Any) -> Answer:
        return await self._ask(method, f"{self.gateway.url}{path}", BODY | fields, key)

    async def _ask(self, method: str, url: str, body: Any, key: str | None) -> Answer:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        async with self.http.request(method, url, json=body, headers=headers) as response:
            return response.status, await response.json()


@asynccontextmanager
async def training(engine: FakeEngine, publish: Publish | None = None) -> AsyncIterator[Trainer]:
    gateway = Gateway(TokenSessions(engine, tiny_renderer()), "policy", timeouts=Timeouts(retry_grace_s=0.01))
    admin = Admin(gateway, TOKEN, publish=publish or engine.publish, describe=lambda: {"serve": {"calls": 0}})
    await gateway.start()
    url = await admin.start_port(0)
    async with aiohttp.ClientSession() as http:
        yield Trainer(gateway, url, http)
    await admin.close()
    await gateway.close()


async def test_a_session_is_opened_used_and_closed_into_its_recording():
    async with training(engine := FakeEngine([Said("list", pieces=1)])) as trainer:
        opened = await trainer.open(label="task-1", seed=5, temperature=0.5, max_new_tokens=20)
        assert opened["openai_base_url"] == trainer.gateway.url
        assert opened["anthropic_base_url"] == trainer.gateway.root_url
        assert (await trainer.agent(opened["key"]))[0] == 200
        status, recording = await trainer.admin("POST", f"/sessions/{opened['id']}/close")
        assert (await trainer.agent(opened["key"]))[0] == 401
    [segment] = recording["segments"]
    prompt, sampled = engine.requests[0].prompt_ids.tolist(), engine.generations[0].token_ids.tolist()
    assert (status, recording["calls"]) == (200, 1)
    assert segment["token_ids"] == prompt + sampled
    assert segment["sampled"] == [False] * len(prompt) + [True] * len(sampled)
    assert segment["logprobs"][len(prompt) :] == [-1, -2, -3, -4, -5]
    assert segment["versions"][-1] == 0
    assert (engine.requests[0].temperature, engine.requests[0].max_new_tokens) == (0.5, 20)


async def test_sampling_of_an_opened_session_is_the_trainers():
    async with training(engine := FakeEngine()) as trainer:
        key = (await trainer.open(temperature=0.5))["key"]
        await trainer.agent(key, temperature=0, seed=3)
        await trainer.agent(key, temperature=9)
    assert [request.temperature for request in engine.requests] == [0.5, 0.5]


async def test_limits_of_an_opened_session_hold():
    async with training(FakeEngine()) as trainer:
        key = (await trainer.open(limits={"max_calls": 1}))["key"]
        statuses = [(await trainer.agent(key))[0] for _ in range(2)]
    assert statuses == [200, 403]


ROUTES = [("POST", "/sessions"), ("POST", "/sessions/x/close"), ("POST", "/adapter"), ("GET", "/stats"), ("GET", "/no")]


async def test_an_agents_key_opens_nothing_here_and_looks_like_any_wrong_one():
    async with training(FakeEngine()) as trainer:
        key = (await trainer.open())["key"]
        wrong = (None, key, "nonsense", TOKEN[:-1], "é")
        answers = [await trainer.admin(*route, token=token) for route in ROUTES for token in wrong]
    assert all(answer == answers[0] for answer in answers)
    assert answers[0][0] == 401


async def test_the_admin_token_opens_nothing_on_the_agents_port_and_looks_like_any_wrong_one():
    async with training(engine := FakeEngine()) as trainer:
        answers = [
            await trainer.agent(key, method, path)
            for key in (TOKEN, "nonsense")
            for method, path in (("POST", "/chat/completions"), ("GET", "/models"))
        ]
        assert (await trainer.agent(TOKEN, "POST", "/sessions"))[0] == 404
    assert all(answer == answers[0] for answer in answers)
    assert (answers[0][0], engine.requests) == (401, [])


@pytest.mark.parametrize("route", [("GET", "/sessions"), ("GET", "/sessions/x"), ("DELETE", "/sessions"), ("GET", "/")])
async def test_nothing_lists_sessions(route: tuple[str, str]):
    async with training(FakeEngine()) as trainer:
        opened = await trainer.open()
        status, answer = await trainer.admin(*route)
        _, stats = await trainer.admin("GET", "/stats")
    assert (status, answer["error"]["code"]) == (404, "not_found")
    assert opened["key"] not in str(stats)
    assert opened["id"] not in str(stats)


async def test_a_session_can_be_closed_once():
    async with training(FakeEngine()) as trainer:
        handle = (await trainer.open())["id"]
        statuses = [(await trainer.admin("POST", f"/sessions/{handle}/close"))[0] for _ in range(2)]
    assert statuses == [200, 404]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"temperature": 3}, "temperature"),
        ({"label": "a/b"}, "label"),
        ({"limits": {"max_calls": 0}}, "limits.max_calls"),
        ({"sampling": {}}, "sampling"),
    ],
)
async def test_a_wrong_setting_is_named(body: dict[str, Any], field: str):
    async with training(FakeEngine()) as trainer:
        status, answer = await trainer.admin("POST", "/sessions", body)
    assert status == 400
    assert answer["error"]["message"].startswith(f"`{field}`")


@dataclass
class Publisher:
    """Remembers what was published, or refuses."""

    error: Exception | None = None
    published: list[tuple[Path, int]] = field(default_factory=list)

    async def __call__(self, adapter_dir: Path, version: int) -> None:
        if self.error:
            raise self.error
        self.published.append((adapter_dir, version))


async def test_an_adapter_is_published_under_its_version(tmp_path: Path):
    (tmp_path / "adapter_config.json").write_text("{}")
    async with training(FakeEngine(), publisher := Publisher()) as trainer:
        answer = await trainer.admin("POST", "/adapter", {"path": str(tmp_path), "version": 3})
        _, stats = await trainer.admin("GET", "/stats")
    assert answer == (200, {"version": 3})
    assert publisher.published == [(tmp_path, 3)]
    assert stats["version"] == 3


async def test_a_folder_without_an_adapter_is_not_published(tmp_path: Path):
    async with training(FakeEngine(), publisher := Publisher()) as trainer:
        status, answer = await trainer.admin("POST", "/adapter", {"path": str(tmp_path), "version": 3})
    assert (status, answer["error"]["code"], publisher.published) == (400, "no_adapter", [])


async def test_an_engine_that_refuses_an_adapter_is_quoted_and_the_version_stays(tmp_path: Path):
    (tmp_path / "adapter_config.json").write_text("{}")
    error = EngineError("cannot load it", hint="start it with `--enable-lora`")
    async with training(FakeEngine(), Publisher(error)) as trainer:
        status, answer = await trainer.admin("POST", "/adapter", {"path": str(tmp_path), "version": 3})
        _, stats = await trainer.admin("GET", "/stats")
    assert (status, answer["error"]["message"]) == (502, "cannot load it (start it with `--enable-lora`)")
    assert stats["version"] == 0


async def test_statistics_add_up_over_closed_sessions():
    async with training(FakeEngine()) as trainer:
        for _ in range(2):
            opened = await trainer.open()
            await trainer.agent(opened["key"])
            await trainer.admin("POST", f"/sessions/{opened['id']}/close")
        await trainer.open()
        _, stats = await trainer.admin("GET", "/stats")
    assert stats["sessions"] == {"open": 1, "closed": 2}
    assert stats["totals"]["calls"] == 2
    assert stats["serve"] == {"calls": 0}


async def test_a_unix_socket_is_the_users_alone_and_gone_afterwards(tmp_path: Path):
    gateway = Gateway(TokenSessions(FakeEngine(), tiny_renderer()), "policy")
    admin = Admin(gateway, TOKEN, publish=None)
    path = tmp_path / "admin.sock"
    assert await admin.start_socket(path) == f"unix:{path}"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path))) as http:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with http.get("http://admin/stats", headers=headers) as response:
            assert response.status == 200
        async with http.post("http://admin/adapter", headers=headers, json={"path": "/", "version": 1}) as response:
            assert (await response.json())["error"]["code"] == "cannot_publish"
    await admin.close()
    assert not path.exists()
