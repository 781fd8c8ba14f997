"""``kvell chat``: turns, commands, interruption, pipes and terminals."""

import builtins
import io
import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest

from kvell.errors import ChangeSomething

Kvell = Callable[..., Any]


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def put(*lines: str) -> None:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(line + "\n" for line in lines)))

    return put


@pytest.fixture
def type_in(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    def put(*lines: str) -> None:
        typed: Iterator[str] = iter(lines)

        def read(_prompt: str) -> str:
            try:
                return next(typed)
            except StopIteration:
                raise EOFError from None

        monkeypatch.setattr("sys.stdin", Terminal())
        monkeypatch.setattr(builtins, "input", read)

    return put


class TestPipe:
    def test_an_answer_a_line(self, kvell: Kvell, say: Any) -> None:
        say("hi")
        ended = kvell("chat")
        assert ended.code == 0
        assert ended.stdout == "<USER>HI<ASSISTANT>\n"

    def test_is_with_one_model(self, kvell: Kvell, say: Any) -> None:
        say("hi")
        ended = kvell("chat", "--model", "a", "--model", "b")
        assert (ended.code, ended.stdout) == (2, "")
        assert "--model=b: is a second model" in ended.stderr

    def test_keeps_the_conversation(self, kvell: Kvell, model: Any, say: Any) -> None:
        say("a", "b")
        kvell("chat", "--max-tokens", "3")
        assert [prompt for prompt, _ in model.asked] == [
            "<user>a<assistant>",
            "<user>a<assistant><US<user>b<assistant>",
        ]

    def test_each_turn_begins_with_the_one_before(self, kvell: Kvell, model: Any, say: Any) -> None:
        """This is why the prefix cache hits."""
        say("a", "b", "c")
        kvell("chat", "--max-tokens", "3")
        prompts = [prompt for prompt, _ in model.asked]
        assert all(after.startswith(before) for before, after in pairwise(prompts))

    def test_quit_ends(self, kvell: Kvell, model: Any, say: Any) -> None:
        say("a", "/quit", "b")
        assert kvell("chat").code == 0
        assert len(model.asked) == 1

    def test_set_changes_the_sampling_of_further_turns(
        self, kvell: Kvell, model: Any, say: Any
    ) -> None:
        say("a", "/set temperature 0", "/set parameter top_k 5", "/set max-tokens 3", "b")
        assert kvell("chat").code == 0
        (_, first), (_, second) = model.asked
        assert (first.temperature, first.top_k, first.max_tokens) == (0.7, 0, 256)
        assert (second.temperature, second.top_k, second.max_tokens) == (0.0, 5, 3)

    def test_set_changes_the_system_prompt(self, kvell: Kvell, model: Any, say: Any) -> None:
        say('/set system "be brief"', "a")
        kvell("chat")
        assert model.asked[-1][0] == "<system>be brief<user>a<assistant>"

    @pytest.mark.parametrize(
        ("line", "answer"),
        [
            ("/set colour red", "/set=colour: is not a setting; use one of temperature, top_k"),
            ("/set top_k many", "/set top_k=many: is not a number; write one"),
            ("/set temperature -1", "--temperature=-1.0: must be between 0 and 100"),
        ],
    )
    def test_a_setting_that_cannot_be_used_is_named(
        self, kvell: Kvell, say: Any, line: str, answer: str
    ) -> None:
        say(line)
        ended = kvell("chat")
        assert (ended.code, ended.stdout) == (2, "")
        assert f"kvell: {answer}" in ended.stderr

    def test_quotation_marks_hold_several_lines(self, kvell: Kvell, model: Any, say: Any) -> None:
        say('"""a', "", 'b"""', "c", '"""d"""')
        kvell("chat", "--max-tokens", "1")
        assert [prompt.split("<user>")[-1] for prompt, _ in model.asked] == [
            "a\n\nb<assistant>",
            "c<assistant>",
            "d<assistant>",
        ]

    def test_a_path_in_a_pipe_is_a_turn(self, kvell: Kvell, model: Any, say: Any) -> None:
        say("/usr/bin/env is what?", "/frob")
        assert kvell("chat").code == 0
        assert len(model.asked) == 2

    @pytest.mark.parametrize("word", ["/bye", "/exit"])
    def test_other_words_for_the_end(self, kvell: Kvell, model: Any, say: Any, word: str) -> None:
        say(word, "a")
        assert kvell("chat").code == 0
        assert model.asked == []

    def test_reset_forgets(self, kvell: Kvell, model: Any, say: Any) -> None:
        say("a", "/reset", "b")
        kvell("chat", "--system", "be brief")
        assert model.asked[-1][0] == "<system>be brief<user>b<assistant>"

    def test_empty_lines_are_skipped(self, kvell: Kvell, model: Any, say: Any) -> None:
        say("", "  ", "a", "")
        kvell("chat")
        assert len(model.asked) == 1

    def test_system_message_comes_first(self, kvell: Kvell, model: Any, say: Any) -> None:
        say("a")
        kvell("chat", "--system", "be brief")
        assert model.asked[0][0] == "<system>be brief<user>a<assistant>"

    def test_json_lines(self, kvell: Kvell, say: Any) -> None:
        say("a", "b")
        lines = kvell("chat", "--json", "--max-tokens", "3").stdout.splitlines()
        assert [json.loads(line) for line in lines] == [
            {"role": "assistant", "content": "<US"},
            {"role": "assistant", "content": "<US"},
        ]

    def test_no_input_is_no_error(self, kvell: Kvell, say: Any) -> None:
        say()
        ended = kvell("chat")
        assert (ended.code, ended.stdout) == (0, "")

    def test_a_turn_that_cannot_be_answered_ends_it(
        self, kvell: Kvell, model: Any, say: Any
    ) -> None:
        model.fails = ChangeSomething("prompt", "9 tokens", "is over 8", "shorten it")
        say("a", "b")
        ended = kvell("chat")
        assert ended.code == 2
        assert ended.stderr.endswith("kvell: prompt=9 tokens: is over 8; shorten it\n")
        assert len(model.asked) == 1


class TestTerminal:
    def test_shows_the_contract_and_how_to_leave(self, kvell: Kvell, type_in: Any) -> None:
        type_in("a")
        ended = kvell("chat")
        assert ended.code == 0
        assert "KV pool 2 MiB" in ended.stderr
        assert "/help shows commands, /bye ends" in ended.stderr
        assert ended.stdout == "<USER>A<ASSISTANT>\n"

    def test_commands(self, kvell: Kvell, model: Any, type_in: Any) -> None:
        type_in("/help", "/set", "/frob", "a")
        ended = kvell("chat")
        assert ended.code == 0
        assert "/set NAME VALUE" in ended.stderr
        assert "\ntemperature 0.7\n" in ended.stderr
        assert "kvell: command=/frob: is not a command; type /help" in ended.stderr
        assert [prompt for prompt, _ in model.asked] == ["<user>a<assistant>"]
        assert all(len(line) < 80 for line in ended.stderr.splitlines())

    def test_goes_on_after_a_refusal_and_forgets_that_turn(
        self, kvell: Kvell, model: Any, type_in: Any
    ) -> None:
        model.fails = ChangeSomething("prompt", "9 tokens", "is over 8", "shorten it")
        type_in("a", "b")
        ended = kvell("chat")
        assert ended.code == 0
        assert "kvell: prompt=9 tokens: is over 8; shorten it (or /reset)" in ended.stderr
        assert [prompt for prompt, _ in model.asked] == ["<user>a<assistant>", "<user>b<assistant>"]

    def test_interrupt_keeps_what_was_said_and_goes_on(
        self, kvell: Kvell, model: Any, type_in: Any
    ) -> None:
        model.fails = KeyboardInterrupt()
        type_in("a", "b")
        assert kvell("chat").code == 0
        assert model.asked[1][0] == "<user>a<assistant><U<user>b<assistant>"
