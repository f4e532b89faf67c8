"""A hosted chat endpoint with scripted replies: text and tool calls, no token ids."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

type Json = dict[str, Any]
type Script = Callable[[list[Json]], Json]
"""From the messages so far to the assistant's next."""


def says(text: str, *calls: tuple[str, Json]) -> Json:
    """An assistant message."""
    wire = [
        {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for number, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": text, **({"tool_calls": wire} if wire else {})}


@dataclass
class ScriptedChat:
    """Serves one model, `scripted`, on a thread."""

    script: Script
    bodies: list[Json] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)

    @contextmanager
    def at(self, host: str = "127.0.0.1", port: int = 0) -> Iterator[str]:
        """Its base URL while the block lasts."""
        server = ThreadingHTTPServer((host, port), self._handler())
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://{host}:{server.server_port}/v1"
        finally:
            server.shutdown()
            server.server_close()
            thread.join()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        chat = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                known = self.path == "/v1/models"
                self._answer(200 if known else 404, {"object": "list", "data": [{"id": "scripted"}]} if known else {})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path != "/v1/chat/completions":
                    self._answer(404, {"error": {"message": "chat only"}})
                    return
                chat.bodies.append(body)
                chat.keys.add(self.headers.get("Authorization", ""))
                message = chat.script(body["messages"])
                reason = "tool_calls" if message.get("tool_calls") else "stop"
                usage = {"prompt_tokens": 10, "completion_tokens": 5}
                self._answer(200, {"choices": [{"message": message, "finish_reason": reason}], "usage": usage})

            def _answer(self, status: int, body: Json) -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
                """Quiet."""

        return Handler
