"""``kvell serve`` with a real model and a file of keys: tenants take turns in the instance."""

import httpx
import openai
import pytest

from tests.llm.conftest import Configured

pytestmark = pytest.mark.xdist_group("configured_server")
PROMPT = "Pages of memory are handed out one by one. " * 12


@pytest.fixture(scope="module")
def url(configured_server: Configured) -> str:
    return configured_server.url


def cached_tokens(url: str, key: str, salt: str = "") -> int:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        reply = client.completions.create(
            model="smollm2",
            prompt=PROMPT,
            max_tokens=1,
            temperature=0,
            extra_body={"cache_salt": salt},
        )
    assert reply.usage is not None
    assert reply.usage.prompt_tokens_details is not None
    return reply.usage.prompt_tokens_details.cached_tokens or 0


def num_ended(url: str) -> int:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    named = [line for line in lines if line.startswith("kvell:request_success_total")]
    return int(sum(float(line.split()[-1]) for line in named))


def test_a_tenant_waits_for_no_backlog_that_the_instance_has(url: str) -> None:
    """The instance has all of it at once, since it is within the front's credits."""
    many = {"model": "smollm2", "prompt": [f"{n} is" for n in range(32)], "n": 8}
    many |= {"stream": True, "ignore_eos": True}
    path, red = f"{url}/v1/completions", {"Authorization": "Bearer red-key"}
    with httpx.stream("POST", path, json=many | {"max_tokens": 16}, headers=red) as reply:
        assert reply.status_code == 200, reply.read()
        lines = reply.iter_lines()  # kept: without it the connection would be closed
        next(lines)
        before = num_ended(url)
        assert before < 100, "the backlog was worked off before"
        cached_tokens(url, "blue-key")
        assert num_ended(url) - before - 1 <= 64, "a quarter of the others went first"
