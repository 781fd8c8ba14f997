"""Prompts: a row's own tokens from a seed, after the previous turns of its session.

A token depends on the seed and on its position: in a block of the trace, which several prompts may
share, or in the text of one request.  So a prefix that rows share gives the same tokens, and the
same seed gives the same prompts.  Answers come from the server; the next turn of a session
contains them verbatim.

Short, frequent words for text prompts: with a leading space, each is one token in most English
vocabularies.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from kvell.simulator.traces.rows import TraceRow, predecessors

_TEXT = """
a able about above across after again air all almost alone along also always an and animal
answer any are area around art as ask at away back bad ball bank base be bed before began begin
behind best better between big bird black blood blue boat body book both box boy bring brother
brown build built but buy by call came can car care carry case cat catch cause center change
child children church city class clear close cold color come common cook cool corner country
course cover cross cry cut dark day dead deal deep did do doctor does dog done door down draw
dream drive drop dry each early earth east easy eat edge eight else end enough even evening ever
every eye face fact fall family far farm fast father feel feet fell few field fight fill find
fine fire first fish five floor fly follow food foot for form forward found four free friend
from front full game garden gave get girl give glass go god gold gone good got great green
ground group grow had hair half hand happy hard has hat have he head hear heart heat held help
her here high hill him his hold home hope horse hot hour house how hundred ice if in into iron
is island it its job join just keep kept key kind king knew know lady land large last late laugh
law lay lead learn leave left less let letter level life light like line list little live long
look lost lot love low made main make man many map mark may me mean meet men might mile milk
mind minute money month moon more morning most mother mountain mouth move much music must my
name near need never new next night nine no north not note now number of off often oil old on
once one only open or order other our out over own page paper part party pass past people person
picture piece place plan plant play point poor power press pull push put question quick quiet
rain ran reach read ready real red rest rich ride right river road rock room round rule run said
same sand saw say school sea second see seem sent set seven shape she ship shop short should
show side sign silver since sing sister sit six size sky sleep slow small snow so some son song
soon sound south space speak spring stand star start state stay step still stone stood stop
store story street strong such summer sun sure table take talk tall tell ten test than that the
their them then there these they thing think this those thought three through time to today
together told too took top town trade train travel tree trip true try turn two type under until
up us use very visit voice wait walk wall want war warm was watch water way we week well went
were west what wheel when where which while white who whole why wide wife wild will wind window
winter wish with woman wood word work world would write wrong year yes yet you young your
"""
WORDS = tuple(_TEXT.split())


Said = TypeVar("Said", list[int], str, list[dict[str, str]])
"""The type of a session's content so far: token ids, text, or messages."""
Ids = npt.NDArray[np.int64]
FIRST_ORDINARY_ID = 256
"""Smaller ids are special tokens or single bytes in many vocabularies."""
_SHARED, _OWN, _ANSWER = 1, 2, 3
_ODD = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class AnswerTokens:
    """An answer of the server.

    :param token_ids: empty if the server does not report them.
    """

    text: str
    token_ids: list[int]


@dataclass(frozen=True)
class TokenSource:
    """A function from seed and position to tokens, uniform over ``low`` … ``high`` - 1."""

    seed: int
    low: int
    high: int

    @classmethod
    def of_vocabulary(cls, seed: int, size: int) -> "TokenSource":
        """Return a source of ids below ``size`` that are ordinary tokens in most vocabularies."""
        return cls(seed, min(FIRST_ORDINARY_ID, size // 2), size)

    def make_prompt(self, row: TraceRow, index: int, count: int) -> Ids:
        """Return a request's shared blocks and own tokens, int64 ``[count]``."""
        size = row.block_tokens
        named = min(len(row.block_ids) * size, count)
        places = (row.block_ids[:, None] * size + np.arange(size)).reshape(-1)[:named]
        shared = self._tokens(_SHARED, 0, places)
        own = self._tokens(_OWN, index, np.arange(count - named))
        return np.concatenate([shared, own])

    def answer(self, index: int, count: int) -> Ids:
        """Return a made-up answer to request ``index``, int64 ``[count]``."""
        return self._tokens(_ANSWER, index, np.arange(count))

    def _tokens(self, kind: int, index: int, places: Ids) -> Ids:
        seeds = np.array([self.seed, kind, index], np.uint64)
        state = np.uint64(0)
        with np.errstate(over="ignore"):
            for part in seeds:
                state = _mixed(state + part + _ODD)
            drawn = _mixed(places.astype(np.uint64) * _ODD + state)
        ids: Ids = self.low + (drawn % np.uint64(self.high - self.low)).astype(np.int64)
        return ids


class Prompts(Generic[Said]):
    """The prompts of a run; the content of a session is kept until its next turn is sent.

    :param to_prompt: converts new tokens to a prompt's form.
    :param answered: converts an answer to a prompt's form.
    """

    def __init__(
        self,
        rows: Sequence[TraceRow],
        source: TokenSource,
        field: str,
        to_prompt: Callable[[Ids], Said],
        answered: Callable[[AnswerTokens], Said],
    ) -> None:
        self._rows, self._source, self._field = rows, source, field
        self._asked: Callable[[Ids], Said] = to_prompt
        self._answered: Callable[[AnswerTokens], Said] = answered
        self._before = [
            before if row.continues else None
            for row, before in zip(rows, predecessors(rows), strict=True)
        ]
        self._goes_on = {before for before in self._before if before is not None}
        self._prompts: dict[int, Said] = {}
        self._said: dict[int, Said] = {}

    def can_ask(self, index: int) -> bool:
        before = self._before[index]
        return before is None or before in self._said

    def ask(self, index: int) -> dict[str, Any]:
        """Return the field and the prompt of a request; called at most once per request.

        :raises KeyError: if :meth:`can_ask` is False.
        """
        row, before = self._rows[index], self._before[index]
        said_tokens = 0 if before is None else self._rows[before].num_tokens
        count = row.prompt_tokens - said_tokens
        prompt = self._asked(self._source.make_prompt(row, index, count))
        if before is not None:
            prompt = self._said.pop(before) + prompt
        if index in self._goes_on:
            self._prompts[index] = prompt
        return {self._field: prompt}

    def on_answer(self, index: int, answer: AnswerTokens) -> None:
        if index in self._prompts:
            self._said[index] = self._prompts.pop(index) + self._answered(answer)


Encode = Callable[[str], list[int]]


def id_prompts(
    rows: Sequence[TraceRow], seed: int, vocab_size: int, encode: Encode
) -> Prompts[list[int]]:
    """Return prompts as token ids.

    :param encode: converts an answer's text to ids if the server does not report them.
    """
    source = TokenSource.of_vocabulary(seed, vocab_size)

    def answered(answer: AnswerTokens) -> list[int]:
        return answer.token_ids or encode(answer.text)

    return Prompts(rows, source, "prompt", Ids.tolist, answered)


def whole_prompts(rows: Sequence[TraceRow], seed: int, vocab_size: int) -> list[list[int]]:
    """Return all prompts as token ids; sessions have made-up answers with the rows' lengths."""
    made_up = TokenSource.of_vocabulary(seed, vocab_size)
    prompts = id_prompts(rows, seed, vocab_size, lambda _text: [])
    all_ids: list[list[int]] = []
    for index, row in enumerate(rows):
        all_ids.append(prompts.ask(index)["prompt"])
        answer = made_up.answer(index, row.output_tokens).tolist()
        prompts.on_answer(index, AnswerTokens("", answer))
    return all_ids


def text_prompts(rows: Sequence[TraceRow], seed: int) -> Prompts[str]:
    """Return prompts of words that are one token each in most vocabularies."""
    return Prompts(rows, _words(seed), "prompt", _as_text, lambda answer: answer.text)


def chat_prompts(rows: Sequence[TraceRow], seed: int) -> Prompts[list[dict[str, str]]]:
    """Return conversations of such words; the chat template adds further tokens."""

    def said(role: str, text: str) -> list[dict[str, str]]:
        return [{"role": role, "content": text}]

    return Prompts(
        rows,
        _words(seed),
        "messages",
        lambda ids: said("user", _as_text(ids).strip()),
        lambda answer: said("assistant", answer.text),
    )


def _words(seed: int) -> TokenSource:
    return TokenSource(seed, 0, len(WORDS))


def _as_text(ids: Ids) -> str:
    return "".join(f" {WORDS[word]}" for word in ids.tolist())


def _mixed(values: Any) -> Any:
    """Mix the bits of uint64 values (the last steps of splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
