"""Tunnels are commands: here, small forwarders on loopback."""

import asyncio
import os
import sys
from pathlib import Path

import aiohttp
import pytest
from gateway_fakes import FakeEngine, tiny_renderer
from processes import descendants, wait_until_gone, words_of

from dockyard.errors import DockyardError
from dockyard.gateway.server import Gateway
from dockyard.gateway.sessions import TokenSessions
from dockyard.rollout.environments import open_tunnel

FORWARD = """
import asyncio, sys

async def pump(reader, writer):
    while data := await reader.read(65536):
        writer.write(data)
    writer.close()

async def forward(reader, writer):
    theirs, ours = await asyncio.open_connection("127.0.0.1", int(sys.argv[1]))
    await asyncio.gather(pump(reader, ours), pump(theirs, writer))

async def main():
    server = await asyncio.start_server(forward, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    print("read our terms at http://127.0.0.1:9/terms")
    print(f"forwarding http://127.0.0.1:{sys.argv[1]}")
    print(f"your tunnel: http://127.0.0.1:{port}", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.fixture
async def gateway():
    gateway = Gateway(TokenSessions(FakeEngine(), tiny_renderer()), "policy")
    await gateway.start()
    yield gateway
    await gateway.close()


async def test_the_url_behind_which_the_gateway_answers_is_the_tunnels_and_it_ends_with_the_block(
    gateway: Gateway, tmp_path: Path
):
    (tmp_path / "forward.py").write_text(FORWARD)
    command = f"true; {sys.executable} {tmp_path}/forward.py {{port}}"  # not the shell itself: its child
    async with open_tunnel(command, gateway.port) as url:
        assert url not in ("http://127.0.0.1:9", gateway.root_url)
        session = gateway.open_session("s", seed=0, temperature=1.0, max_new_tokens=5)
        headers = {"Authorization": f"Bearer {session.key}"}
        async with aiohttp.ClientSession(headers=headers) as client, client.get(f"{url}/v1/models") as response:
            assert response.status == 200
        script = f"{tmp_path}/forward.py"
        started = {one for one in descendants(os.getpid()) if any(script in word for word in words_of(one))}
    assert len(started) == 2  # the shell and its child
    wait_until_gone(started)
    async with aiohttp.ClientSession() as client:
        with pytest.raises(aiohttp.ClientConnectorError):
            await client.get(url)


@pytest.mark.parametrize("command", ["echo no network here; exit 1", "echo http://127.0.0.1:9; sleep 60", "no-such-x"])
async def test_a_command_that_opens_no_way_to_the_gateway_is_an_error_with_its_words(gateway: Gateway, command: str):
    with pytest.raises(DockyardError, match="opened no way to the gateway in 2 s"):
        async with open_tunnel(command, gateway.port, patience_s=2):
            pass


def ending(folder: Path) -> str:
    """A tunnel that ends with code 7 as soon as there is a file `end`."""
    (folder / "forward.py").write_text(FORWARD)
    wait = f"while [ ! -e {folder}/end ]; do sleep 0.05; done; kill $!; exit 7"
    return f"{sys.executable} {folder}/forward.py {{port}} & {wait}"


async def test_a_tunnel_that_ends_in_the_middle_ends_the_block_with_an_error(gateway: Gateway, tmp_path: Path):
    async def hold() -> None:
        async with asyncio.timeout(600), open_tunnel(command, gateway.port):  # only against hanging
            (tmp_path / "end").touch()
            await asyncio.sleep(600)

    command = ending(tmp_path)
    with pytest.raises(DockyardError) as caught:
        await hold()
    assert caught.value.message == "`gateway.tunnel` ended with code 7 in the middle of the run"
    assert command in caught.value.hint
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_who_cancels_a_block_whose_tunnel_has_ended_is_heard(gateway: Gateway, tmp_path: Path):
    async def hold() -> None:
        async with open_tunnel(ending(tmp_path), gateway.port):
            (tmp_path / "end").touch()
            try:
                await asyncio.sleep(600)
            finally:
                ended.set()
                await asyncio.sleep(600)

    ended = asyncio.Event()
    holding = asyncio.create_task(hold())
    async with asyncio.timeout(600):  # only against hanging
        await ended.wait()
        holding.cancel()
        with pytest.raises(asyncio.CancelledError):
            await holding
