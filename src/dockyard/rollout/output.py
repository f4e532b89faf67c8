"""Where the output of a command goes."""

from dataclasses import dataclass, field
from typing import Protocol


class Sink(Protocol):
    """Takes a command's output as it comes. True: it has enough, and the command may as well end."""

    def write(self, data: bytes, /) -> bool | None: ...


@dataclass(slots=True)
class Output:
    """A command's output as text: the first and the last megabyte of it."""

    keep_bytes: int = 1 << 20
    head: bytearray = field(default_factory=bytearray)
    tail: bytearray = field(default_factory=bytearray)
    num_dropped: int = 0

    def write(self, data: bytes, /) -> None:
        room = max(0, self.keep_bytes - len(self.head))
        self.head += data[:room]
        self.tail += data[room:]
        excess = len(self.tail) - self.keep_bytes
        if excess > 0:
            del self.tail[:excess]
            self.num_dropped += excess

    def text(self) -> str:
        note = f"\n[{self.num_dropped} bytes left out]\n".encode() if self.num_dropped else b""
        return (bytes(self.head) + note + bytes(self.tail)).decode(errors="replace")
