"""Fields of vLLM's formats are taken, or refused with a remedy."""

from typing import Any

import pytest

from kvell.errors import ChangeSomething
from kvell.server.api.bodies.completions import Heading
from kvell.server.api.routes.chat import chat_body
from kvell.server.api.schemas.chat import ChatRequest
from kvell.server.text.text_stream import Usage

MESSAGES = [{"role": "user", "content": "hi"}]


def constraint(**fields: Any) -> Any:
    return ChatRequest.model_validate({"messages": MESSAGES, **fields}).constraint()


@pytest.mark.parametrize(
    "also",
    [
        *("disable_any_whitespace", "disable_fallback", "disable_additional_properties"),
        *("whitespace_pattern", "structural_tag"),
    ],
)
def test_what_kvell_does_anyway_is_accepted(also: str) -> None:
    value = None if also in ("whitespace_pattern", "structural_tag") else True
    made = constraint(structured_outputs={"choice": ["a"], also: value})
    assert made == constraint(structured_outputs={"choice": ["a"]})


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        (
            {"structured_outputs": {"structural_tag": "{}"}},
            "structured_outputs.structural_tag='{}': structured_outputs does not support it; write",
        ),
        (
            {"structured_outputs": {"json": {}, "whitespace_pattern": " "}},
            "structured_outputs.whitespace_pattern=' ': structured_outputs does not support it; ",
        ),
        (
            {"structured_outputs": {"choise": ["a"]}},
            "structured_outputs.choise=['a']: is not an argument of structured_outputs; did you "
            "mean structured_outputs.choice?",
        ),
        (
            {"response_format": {"type": "structural_tag", "structures": [], "triggers": []}},
            "response_format.type=structural_tag: is not served; write a grammar with the tags",
        ),
        ({"return_tokens_as_token_ids": True}, "is not served; use return_token_ids"),
        ({"structural_tag": "{}"}, "structural_tag={}: is not served; use structured_outputs.gram"),
    ],
)
def test_other_fields_are_refused_with_a_remedy(fields: dict[str, Any], line: str) -> None:
    with pytest.raises(ChangeSomething) as caught:
        constraint(**fields)
    assert line in str(caught.value)


@pytest.mark.parametrize("field", ["structured_outputs", "guided_grammar"])
def test_ebnf_is_a_grammar(field: str) -> None:
    grammar = 'root ::= "a"'
    given = {"grammar": grammar} if field == "structured_outputs" else grammar
    assert constraint(**{field: given}).grammar == grammar


def test_scores_of_a_prompt_are_in_both_places() -> None:
    heading = Heading("id", "model", 0)
    scores = [None, {"5": {"logprob": -1.0}}]
    body = chat_body(heading, [{"index": 0, "prompt_logprobs": scores}], Usage(), 0)
    assert body["prompt_logprobs"] == body["choices"][0]["prompt_logprobs"] == scores
    assert "prompt_logprobs" not in chat_body(heading, [{"index": 0}], Usage(), 0)
