"""A whole server over an instance that answers what its prompt says, as a process.

A prompt with ``SAY …`` is answered with the rest of that line, in which ``~`` is a new line; the
answer fails at ``BREAK``.  No prompt breaks the instance.  The answers' format is Hermes' with
reasoning, as Qwen3's template asks.  The script prints its URL and ends at SIGTERM; with
``--socket-fd`` it is the instance.
"""

import re
import socket
import sys
from dataclasses import replace

import msgspec
import numpy as np

from kvell.engine.protocol.logprobs import PromptLogprobs, TokenLogprobs
from kvell.engine.protocol.messages import Command, Event, Finished, Submit, Tokens
from kvell.server.run import ServeOptions, Texts, serve
from kvell.serving.lone import serve_instance
from kvell.testing.instance import CRASH_TOKEN, EOS_TOKEN, ByteText, FakeEngine
from kvell.vocabulary import FinishReason

TEMPLATE = "tools <tool_call> <think> </think> enable_thinking"
_SAID = re.compile(r".*SAY ([^\n]*)", re.DOTALL)


class ScriptedEngine(FakeEngine):
    """Says what it is told up to a stop token, a byte each step, and the more likely the later."""

    def __init__(self, incarnation: int) -> None:
        super().__init__(incarnation=incarnation, step_seconds=0.002)
        self._scripts: dict[str, bytes] = {}
        self._submits: dict[str, Submit] = {}

    def handle(self, command: Command) -> list[Event]:
        if isinstance(command, Submit):
            prompt = bytes(command.spec.prompt[::4]).decode(errors="replace")
            said = _SAID.match(prompt)
            script = (said[1] if said else "nothing").replace("~", "\n").encode()
            stops = map(bytes, zip(command.spec.sampling.stop_token_ids, strict=True))
            script = min((script.partition(stop)[0] for stop in stops), key=len, default=script)
            self._scripts[command.request_id] = script
            self._submits[command.request_id] = command
            most = min(
                command.spec.sampling.max_tokens or 1, len(script.partition(b"BREAK")[0]) + 1
            )
            ids = np.frombuffer(command.spec.prompt, "<i4")
            harmless = np.where(ids == CRASH_TOKEN, EOS_TOKEN, ids).tobytes()
            sampling = replace(command.spec.sampling, max_tokens=most)
            spec = msgspec.structs.replace(command.spec, prompt=harmless, sampling=sampling)
            command = replace(command, spec=spec)
            if sampling.prompt_logprobs is not None:
                told = tuple(TokenLogprobs(-1.0, 1, ((int(one), -1.0),)) for one in ids[1:])
                scores = PromptLogprobs(command.request_id, command.attempt, 1, told)
                return [scores, *super().handle(command)]
        return super().handle(command)

    def step(self) -> list[Event]:
        return [self._said(event) for event in super().step()]

    def _said(self, event: Event) -> Event:
        if isinstance(event, Tokens):
            index = event.first_index
            token = [*self._scripts[event.request_id], EOS_TOKEN][index]
            told: tuple[TokenLogprobs, ...] = ()
            if self._submits[event.request_id].spec.sampling.logprobs is not None:
                told = (TokenLogprobs(-1 / (index + 1), 1, ((token, -1 / (index + 1)),)),)
            return msgspec.structs.replace(event, token_ids=(token,), logprobs=told)
        if isinstance(event, Finished) and event.reason == "length":
            script = self._scripts[event.request_id]
            reason: FinishReason = "stop" if event.output_tokens > len(script) else "length"
            if b"BREAK" in script and event.output_tokens > script.index(b"BREAK"):
                reason = "cancelled"
            return replace(event, reason=reason)
        return event


def main() -> None:
    if len(sys.argv) > 1:
        with socket.socket(fileno=int(sys.argv[2])) as sock:
            serve_instance(ScriptedEngine(int(sys.argv[4])), sock)
        return
    command = [sys.executable, __file__, "--socket-fd", "{socket_fd}"]
    command += ["--incarnation", "{incarnation}"]
    announce = lambda url: print(url, flush=True)  # noqa: E731, T201
    serve(command, Texts.of(ByteText(chat_template=TEMPLATE)), ServeOptions(port=0), announce)


if __name__ == "__main__":
    main()
