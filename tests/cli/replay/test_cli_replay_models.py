"""The models of ``kvell replay``: overridden configs, and draft models with shorter contexts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvell.engine.requests.limits import draft_tokens_end

Kvell = Callable[..., Any]


@pytest.fixture
def replay(kvell: Kvell, tiny_config: Path, tmp_path: Path) -> Callable[..., Any]:
    """Replay one request on a model with a context of 4,096 tokens."""

    def call(prompt_tokens: int, *flags: str | Path) -> Any:
        trace = tmp_path / "trace"
        row = {"arrival_s": 0, "prompt_tokens": prompt_tokens, "output_tokens": 20}
        trace.write_text(json.dumps(row))
        args = ("--trace", trace, "--model", tiny_config, "--kv-memory", "64MiB", *flags)
        return kvell("replay", "--json", *args)

    return call


@pytest.fixture
def short_draft(tiny_config: Path) -> Path:
    """The same model with a context of 300 tokens."""
    raw = json.loads(tiny_config.read_text()) | {"max_position_embeddings": 300}
    path = tiny_config.with_name("draft.json")
    path.write_text(json.dumps(raw))
    return path


def figures(ended: Any) -> Any:
    assert ended.code == 0, ended.stderr
    return json.loads(ended.stdout)


def test_overrides_of_the_config_raise_the_context(replay: Any) -> None:
    assert figures(replay(9_000))["requests_refused"] == 1
    longer = figures(replay(9_000, "--hf-overrides", '{"max_position_embeddings": 16384}'))
    assert (longer["requests_finished"], longer["requests_refused"]) == (1, 0)


def test_overrides_that_are_no_object_are_refused(replay: Any) -> None:
    ended = replay(9, "--hf-overrides", "[1]")
    assert ended.code == 2 and "--hf-overrides" in ended.stderr


def test_a_draft_model_keeps_its_own_config(replay: Any, short_draft: Path) -> None:
    flags = ("--num-speculative-tokens", "3", "--speculative-model", short_draft)
    override = ("--hf-overrides", '{"max_position_embeddings": 16384}')
    assert figures(replay(400, *flags, *override))["spec_decode_draft_tokens"] == 0


def test_draft_tokens_end_with_the_draft_models_context_and_requests_do_not(
    replay: Any, short_draft: Path
) -> None:
    flags = ("--num-speculative-tokens", "3", "--acceptance", "1", "--speculative-model")
    beyond = figures(replay(400, *flags, short_draft))
    assert (beyond["requests_finished"], beyond["requests_refused"]) == (1, 0)
    assert beyond["spec_decode_draft_tokens"] == 0
    across, within = (figures(replay(tokens, *flags, short_draft)) for tokens in (290, 200))
    drafted = [one["spec_decode_draft_tokens"] for one in (across, within)]
    assert 0 < drafted[0] < drafted[1]
    assert across["requests_finished"] == within["requests_finished"] == 1


@pytest.mark.parametrize(
    ("own", "draft", "end"), [(100, None, 0), (100, 100, 0), (100, 200, 0), (100, 60, 60)]
)
def test_where_draft_tokens_end(own: int, draft: int | None, end: int) -> None:
    assert draft_tokens_end(own, draft) == end
