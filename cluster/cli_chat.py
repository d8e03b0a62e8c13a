"""`baton chat`: a conversation in the terminal.

1. A line is read; what begins with `/` is a command (`COMMANDS`), anything else a message.
2. The answer is shown while it comes, then where its time went. Ctrl-C stops the answer, not the program:
   what came stays part of the conversation.
3. An error is told and the message taken back, so that it can be asked again. Ctrl-D ends the chat.

What a model writes is shown as text: a terminal obeys none of it (`_CONTROLS`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import typer

from cluster.chat_answer import Answer
from cluster.client import ClientError, stream_chat
from cluster.clock import Clock, MonotonicClock

COMMANDS: Final = {
    "/new": "forget the conversation",
    "/system TEXT": "set the system message, or remove it without TEXT; begins anew",
    "/help": "show this",
    "/exit": "end the chat (as Ctrl-D does)",
}


# Characters that would move the cursor, change colours, or write to the clipboard; shown by their pictures.
_CONTROLS: Final = {
    **{code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"},
    **dict.fromkeys(range(0x7F, 0xA0), 0x2421),
}


@dataclass(slots=True)
class Conversation:
    """What is said so far. `body` holds the options of every request."""

    body: dict[str, Any]
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)

    def request(self) -> dict[str, Any]:
        head = [{"role": "system", "content": self.system}] if self.system else []
        return self.body | {"messages": [*head, *self.messages]}

    def begin_anew(self) -> None:
        self.messages.clear()


class TerminalChat:
    """`run` until the end of input."""

    def __init__(
        self,
        url: str,
        conversation: Conversation,
        *,
        api_key: str | None = None,
        show_timings: bool = True,
        read: Callable[[str], str] = input,
        clock: Clock | None = None,
    ) -> None:
        self._url = url
        self._conversation = conversation
        self._api_key = api_key
        self._show_timings = show_timings
        self._read = read
        self._clock = clock or MonotonicClock()

    def run(self) -> None:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 -- gives `input` editing and history
        while True:
            try:
                line = self._read("> ").strip()
            except EOFError:
                typer.echo()
                return
            except KeyboardInterrupt:
                typer.echo("\n(Ctrl-D ends the chat)")
                continue
            if line == "/exit":
                return
            if line.startswith("/"):
                self._obey(line)
            elif line:
                self._ask(line)

    def _obey(self, line: str) -> None:
        command, _, text = line.partition(" ")
        match command:
            case "/new":
                self._conversation.begin_anew()
                typer.echo("A new conversation.")
            case "/system":
                self._conversation.system = text.strip() or None
                self._conversation.begin_anew()
                typer.echo("System message set." if text.strip() else "No system message.")
            case "/help":
                for name, meaning in COMMANDS.items():
                    typer.echo(f"{name:<14} {meaning}")
            case _:
                typer.echo(f"There is no command {command}; /help lists them.")

    def _ask(self, question: str) -> None:
        messages = self._conversation.messages
        messages.append({"role": "user", "content": question})
        answer = Answer(self._clock.now())
        try:
            self._receive(answer)
        except ClientError as error:
            typer.secho(f"error: {error}".translate(_CONTROLS), fg="red", err=True)
        if not answer.text:
            messages.pop()
            return
        messages.append({"role": "assistant", "content": answer.text})
        if self._show_timings:
            for line in answer.timing_lines():
                typer.secho(line, dim=True)
        typer.echo()

    def _receive(self, answer: Answer) -> None:
        chunks = stream_chat(self._url, self._conversation.request(), self._api_key)
        with contextlib.closing(chunks):  # closes the connection, which ends the answer at the server
            try:
                for chunk in chunks:
                    typer.echo(answer.take(chunk, self._clock.now()).translate(_CONTROLS), nl=False)
            except KeyboardInterrupt:
                typer.echo(" (stopped)", nl=False)
            finally:
                typer.echo()
