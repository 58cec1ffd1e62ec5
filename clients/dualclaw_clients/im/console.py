"""The console connector: each line of standard input is a message, answers go to standard output.

- Works with a pipe, a file and a terminal. The next line is read when the one before has been answered, so
  input of any length waits in its pipe and not in memory; end of input ends the connector.
- Input is read in a daemon thread: a blocked read cannot be cancelled, and must not keep the process alive.
- On a terminal, control characters of an answer are shown and not obeyed: an answer could otherwise retitle the
  window, hide text, or type for the reader. A pipe gets the answer as it is.
- Bytes go straight to the file descriptor: nothing is left in a buffer for the interpreter to flush at its end,
  when the reader of the pipe may be gone.
"""

import asyncio
import codecs
import contextlib
import os
import re
import threading
import uuid
from collections.abc import AsyncGenerator

from dualclaw_clients.im.connector import (
    EVERYBODY,
    Accept,
    ChatKey,
    IncomingMessage,
    Limit,
    Media,
    SendError,
    Sending,
    Unit,
)

MAX_LINE = 256 * 1024
"""Longest message in characters; the engine takes no longer one, and a file without line ends is no message."""
_READ_SIZE = 64 * 1024
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class LineTooLong(Exception):
    """The input holds a line longer than MAX_LINE."""


class ConsoleConnector:
    """A chat with one person over two file descriptors.

    Args:
        user_id: who is talking.
        chat_id: names the chat; the same name goes on with the same conversation if the state file is kept.
        prompt: written when the next line is waited for; for a terminal.
    """

    name = "console"
    claw = "im_console"
    tenant = ""
    gated = False
    approvers = frozenset({EVERYBODY})  # whoever sits at the machine
    limit = Limit(1_000_000, Unit.CHARACTERS)

    def __init__(
        self, input_fd: int, output_fd: int, *, user_id: str = "console", chat_id: str = "console", prompt: str = ""
    ) -> None:
        self._input = input_fd
        self._output = output_fd
        self._user_id = user_id
        self._chat_id = chat_id
        self._prompt = prompt
        self._on_terminal = os.isatty(output_fd)
        self._broken: SendError | None = None
        self.unanswered = 0
        """Messages that got a notice instead of an answer."""

    async def listen(self, accept: Accept) -> None:
        """Hand in every line that is not blank, each when the one before has been answered.

        Raises:
            LineTooLong: what came before it has been answered.
            SendError: nobody reads the answers any more.
            OSError: the input cannot be read.
        """
        await self._write(self._prompt)
        async with contextlib.aclosing(read_lines(self._input)) as lines:
            async for line in lines:
                if line.strip():
                    message = IncomingMessage("console", self._chat_id, self._user_id, uuid.uuid4().hex, line)
                    receipt = await accept(message)
                    if not await receipt.answered():
                        self.unanswered += 1
                    if self._broken is not None:
                        raise self._broken
                await self._write(self._prompt)

    async def send_text(self, chat: ChatKey, text: str, sending: Sending) -> None:
        """Print a part on lines of its own."""
        await self._write(text if text.endswith("\n") else text + "\n")

    async def send_media(self, chat: ChatKey, media: Media, sending: Sending) -> None:
        """Print the address of an image or a video."""
        await self._write(f"[{media.media_type}] {media.url}\n")

    async def _write(self, text: str) -> None:
        if self._on_terminal:
            text = visible(text)
        data = text.encode("utf-8", "replace")
        try:
            await asyncio.to_thread(_write_all, self._output, data)
        except OSError as error:
            self._broken = SendError(f"standard output cannot be written: {error.strerror}")
            raise self._broken from error


def visible(text: str) -> str:
    """Return a text whose control characters are shown as pictures; line feed and tab keep their meaning."""
    return _CONTROL.sub(_picture, text.replace("\r\n", "\n"))


def _picture(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x20:
        return chr(0x2400 + code)
    return "\u2421" if code == 0x7F else "\ufffd"


async def read_lines(fd: int) -> AsyncGenerator[str, None]:
    """Yield the lines of a file descriptor without their ends; bytes that are no UTF-8 become U+FFFD.

    Raises:
        LineTooLong: a line is longer than MAX_LINE.
        OSError: it cannot be read.
    """
    loop = asyncio.get_running_loop()
    chunks: asyncio.Queue[bytes | OSError] = asyncio.Queue()
    wanted = threading.Semaphore(0)
    ended = threading.Event()

    def read() -> None:
        while True:
            wanted.acquire()  # so that no more is taken from the pipe than is worked on
            if ended.is_set():
                return
            try:
                chunk: bytes | OSError = os.read(fd, _READ_SIZE)
            except OSError as error:
                chunk = error
            try:
                loop.call_soon_threadsafe(chunks.put_nowait, chunk)
            except RuntimeError:  # the loop has ended while this thread was reading
                return
            if not chunk or isinstance(chunk, OSError):
                return

    threading.Thread(target=read, name="console-input", daemon=True).start()
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    pending = ""
    chunk: bytes | OSError = b"first"
    try:
        while chunk:
            wanted.release()
            chunk = await chunks.get()
            if isinstance(chunk, OSError):
                raise chunk
            *lines, pending = (pending + decoder.decode(chunk, final=not chunk)).split("\n")
            for line in [*lines, pending]:
                if len(line) > MAX_LINE:
                    raise LineTooLong(f"a line is longer than {MAX_LINE} characters")
            for line in lines:
                yield line.removesuffix("\r")
        if pending:
            yield pending.removesuffix("\r")
    finally:
        ended.set()
        wanted.release()


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]
