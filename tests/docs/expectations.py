"""What each command and each Python block of the documents must show, by page and heading."""

import json
import re
from collections.abc import Callable
from typing import Any

import httpx
import jsonschema

from tests.docs.reader import Reader

Check = str | Callable[[str, Reader], bool]
"""A text that must be printed, or a function of the printed text and the reader."""

TAKEN_ON_TRUST = {
    "make test": "it runs this test",
    "make run": "it installs Kvell, and whoever runs this has done so",
    "source .venv/bin/activate": "it changes the reader's shell",
}
"""Commands that are not run, with the reason."""

CONTRACT = "memory contract for smollm2"


def body(printed: str) -> Any:
    return json.loads(printed)


def completes_with(text: str) -> Check:
    return lambda printed, reader: text in body(printed)["choices"][0]["text"]


def answers(printed: str, reader: Reader) -> bool:
    return len(body(printed)["choices"][0]["message"]["content"]) > 10


def scores_pages_above_boats(printed: str, reader: Reader) -> bool:
    pages, boat = [entry["score"] for entry in body(printed)["data"]]
    return bool(1 >= pages > boat >= -1)


def is_named_and_allowed(printed: str, reader: Reader) -> bool:
    allowed = "access-control-allow-origin: https://chat.example"
    return allowed in printed and '"id":"gpt-4"' in printed


def has_three_beams(printed: str, reader: Reader) -> bool:
    texts = {choice["text"] for choice in body(printed)["choices"]}
    return len(texts) == 3 and any("Paris" in text for text in texts)


def lists_two_logprobs(printed: str, reader: Reader) -> bool:
    [top] = body(printed)["choices"][0]["logprobs"]["top_logprobs"]
    return " Paris" in top and len(top) == 2


def writes_four_tokens(printed: str, reader: Reader) -> bool:
    return bool(body(printed)["usage"]["completion_tokens"] == 4)


def answers_as_anthropic(printed: str, reader: Reader) -> bool:
    message = body(printed)
    return bool(message["type"] == "message" and len(message["content"][0]["text"]) > 10)


def answers_as_ollama(printed: str, reader: Reader) -> bool:
    answer = body(printed)
    return bool(answer["done"]) and len(answer["message"]["content"]) > 10


def leaves_the_tool_out(printed: str, reader: Reader) -> bool:
    answer = body(printed)
    return bool(answer["object"] == "response" and answer["tools"] == [])


def generates_from_a_file(printed: str, reader: Reader) -> bool:
    text = printed[printed.index('{"requests"') :].splitlines()[0]
    result = body(text)
    return len(result["requests"][0]["text"]) > 10 and "stats" in result


def names_both_capitals(printed: str, reader: Reader) -> bool:
    france, italy = printed.splitlines()
    return "Paris" in france and "Rome" in italy


def reasons_within_its_budget(printed: str, reader: Reader) -> bool:
    answer = body(printed)
    tokens = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
    return bool(answer["choices"][0]["message"]["reasoning_content"]) and tokens in range(1, 18)


def invents_a_person(printed: str, reader: Reader) -> bool:
    person = body(body(printed)["choices"][0]["message"]["content"])
    return person.keys() == {"name", "age"} and person["age"] in range(-120, 121)


def chooses(printed: str, reader: Reader) -> bool:
    return body(printed)["choices"][0]["message"]["content"] in ("yes", "no")


def calls_for_a_city(printed: str, reader: Reader) -> bool:
    [call] = body(printed)["choices"][0]["message"]["tool_calls"]
    return list(body(call["function"]["arguments"])) == ["city"]


def lends_beyond_one_instance(printed: str, reader: Reader) -> bool:
    [model] = body(printed)["data"]
    return bool(model["reach_tokens"] > model["max_model_len"])


def shows_the_pool(printed: str, reader: Reader) -> bool:
    return "mixed-0" in printed and "instances" in body(printed)


def sends_a_trace(printed: str, reader: Reader) -> bool:
    asked = {"prompt": "Once", "max_tokens": 1}
    httpx.post(f"{reader.url}/v1/completions", json=asked, timeout=60).raise_for_status()
    reader.stop()
    return "/v1/traces" in reader.collected


def replays_one_request(printed: str, reader: Reader) -> bool:
    return '"completed": 1,' in printed


def draws(printed: str, reader: Reader) -> bool:
    return (reader.home / "chat.png").read_bytes().startswith(b"\x89PNG")


def answers_both_prompts(printed: str, reader: Reader) -> bool:
    lines = printed.splitlines()
    return "Paris" in lines[0] and "Rome" in lines[1] and len(printed.split("\n", 2)[2]) > 4


def streams(printed: str, reader: Reader) -> bool:
    return len(printed) > 20


def obeys_the_schema(printed: str, reader: Reader) -> bool:
    jsonschema.validate(json.loads(printed), reader.names["schema"])
    return True


def calls_the_tool(printed: str, reader: Reader) -> bool:
    name, arguments = printed.split(" ", 1)
    jsonschema.validate(json.loads(arguments), reader.names["weather"]["parameters"])
    return name == "weather"


def hits_the_second_time(printed: str, reader: Reader) -> bool:
    first, second = [[int(n) for n in re.findall(r"\d+", line)] for line in printed.splitlines()]
    return first[1] < first[0] / 10 and second[1] > second[0] / 2


EXPECTED: dict[str, dict[str, tuple[Check, ...]]] = {
    "README.md": {
        "Three commands": (
            "Requests, while decoding",
            CONTRACT,
            "all processes",
            answers,
            "\n Paris.",
        ),
    },
    "docs/quickstart.md": {
        "On the command line": (CONTRACT, "Requests, while decoding"),
        "In Python": (answers_both_prompts,),
        "Over HTTP": ("all processes", '"object":"chat.completion"'),
        "A stream": (streams,),
        "Answers in a form": (obeys_the_schema,),
        "A tool call": (calls_the_tool,),
        "Cached tokens": (hits_the_second_time,),
        "An image": ("messages[0].content=image_url: is not accepted by this model",),
        "Look inside": (
            "mixed-0",
            "routing least-load",
            "# TYPE kvell:num_requests_running gauge",
        ),
    },
    "docs/http.md": {
        "Start a server": (CONTRACT, '"id":"smollm2"'),
        "Endpoints": ("data: [DONE]",),
        "Sampling and log probabilities": (lists_two_logprobs,),
        "Beam search": (has_three_beams,),
        "Embeddings and scores": (scores_pages_above_boats,),
        "Hints for the cache": (writes_four_tokens,),
        "Anthropic's messages": (answers_as_anthropic,),
        "Ollama's endpoints": (answers_as_ollama,),
        "Responses and Codex": (leaves_the_tool_out,),
        "Names, browsers and proxies": (
            CONTRACT,
            is_named_and_allowed,
        ),
        "Keys, tenants and limits": ("0eab086966bb2f6f", CONTRACT, '"id":"smollm2"'),
    },
    "docs/chat.md": {
        "In a terminal": (lambda printed, reader: len(printed) > 10,),
        "A file of prompts": ("", generates_from_a_file),
        "From Python": (names_both_capitals,),
        "Chat templates": ("", CONTRACT, answers),
        "Reasoning": ("memory contract", reasons_within_its_budget),
    },
    "docs/schemas-and-tools.md": {
        "A schema": (CONTRACT, invents_a_person),
        "Choices, patterns and grammars": (chooses,),
        "Tools": (calls_for_a_city,),
    },
    "docs/instances.md": {
        "Several instances": ("mixed-1", "routing session", "mixed-2", "mixed-0"),
        "Memory that instances lend": ("mixed-2", lends_beyond_one_instance),
        "Prefill and decode apart": ("decode-1", completes_with("Paris")),
        "Several models and draft models": ("longest to small", completes_with("Paris")),
        "From Python": ("Paris",),
    },
    "docs/replay.md": {
        "Plan": (
            "Requests, while decoding",
            "Qwen3Next",
            "jamba-mini",
            "longest request: 131,072 tokens",
        ),
        "Replay": ("stranded",),
        "Timelines": ("", draws),
        "Replay several instances": ("decode",),
        "Traces that are published": ("", replays_one_request),
        "Load on a server": (CONTRACT, "goodput"),
    },
    "docs/metrics.md": {
        "Metrics": (CONTRACT, "# TYPE kvell:kv_cache_usage_perc gauge"),
        "The ladder": ("mixed-0",),
        "Traces": (sends_a_trace,),
        "KV events": ("kv_events_published",),
    },
    "docs/memory-map.md": {
        "The memory map": (CONTRACT, "<!doctype html>"),
        "The same as JSON, and in a terminal": (shows_the_pool, "mixed-0"),
    },
    "docs/cluster.md": {
        "Try it on one machine": ("mixed-1", "mixed-1"),
    },
    "docs/operations.md": {
        "Sizing": ("sizing rule lcm",),
    },
}
