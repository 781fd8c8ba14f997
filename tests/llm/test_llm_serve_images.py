"""Images over HTTP: data URLs go through the model's processor to the same answer as in Python."""

import io
import shutil
from pathlib import Path
from typing import Any

import ollama
import openai
import pytest
import transformers
from PIL import Image

from kvell import LLM
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.errors import ChangeSomething
from kvell.models.images.processor import PictureProcessor
from kvell.vocabulary import MIB
from tests.llm.pictures import answer, data_url, messages, picture
from tests.llm.servers import Served

pytestmark = pytest.mark.xdist_group("picture_server")
TENSORS = ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask")


@pytest.fixture
def url(picture_server: Served) -> str:
    return picture_server.url


def test_answers_about_images_are_those_of_python(url: str, picture_path: Path) -> None:
    processor = transformers.AutoProcessor.from_pretrained(picture_path)
    llm = LLM(str(picture_path), kv_memory_bytes=8 * MIB, dtype="float32", max_model_len=256)
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    told = []
    for shades in ((10,), (200,), (10, 200)):
        files = [picture(shade) for shade in shades]
        content = messages(*map(data_url, files))
        reply = answer(url, content).json()
        parts = [{"type": "text", "text": "ab"}, *({"type": "image"} for _ in files)]
        text = processor.apply_chat_template(
            [{"role": "user", "content": parts}], add_generation_prompt=True, tokenize=False
        )
        pictures = [Image.open(io.BytesIO(file)).convert("RGB") for file in files]
        made = dict(processor(text=[text], images=pictures, return_tensors="pt"))
        ids = made.pop("input_ids")[0].tolist()
        made.pop("attention_mask")
        images = {name: made[name] for name in TENSORS}
        [expected] = llm.generate({"prompt_token_ids": ids, "images": images}, sampling)
        assert reply["choices"][0]["token_ids"] == expected.token_ids
        assert reply["usage"]["prompt_tokens"] == len(ids)
        told.append(expected.token_ids)
    assert len({tuple(one) for one in told}) > 1, "the images must matter"


def test_the_official_client_sends_images_and_streams(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    content = messages(data_url(picture(10)))
    asked: Any = {"model": "pictures", "messages": content, "max_tokens": 8, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    pieces = list(client.chat.completions.create(**asked, stream=True))
    streamed = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert streamed == whole.choices[0].message.content


def test_images_of_ollamas_clients_are_the_same(url: str) -> None:
    file = picture(10)
    options = ollama.Options(num_predict=8, temperature=0)
    asked = ollama.Message(role="user", content="ab", images=[ollama.Image(value=file)])
    reply = ollama.Client(url).chat("pictures", [asked], options=options)
    expected = answer(url, messages(data_url(file)), ignore_eos=False).json()
    assert reply.message.content == expected["choices"][0]["message"]["content"]
    assert reply.prompt_eval_count == expected["usage"]["prompt_tokens"]


def cached(url: str, shade: int) -> int:
    usage = answer(url, messages(data_url(picture(shade)))).json()["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def test_only_the_same_image_is_found_in_the_cache(url: str) -> None:
    first, again, other = cached(url, 77), cached(url, 77), cached(url, 78)
    assert first < again and other < again


@pytest.mark.parametrize(
    ("image", "problem"),
    [
        ("https://example.com/a.png", "is not a data URL"),
        ("http://169.254.169.254/latest", "is not a data URL"),
        ("file:///etc/passwd", "is not a data URL"),
        ("data:image/svg+xml;base64,AAAA", "is not a data URL"),
        ("data:image/png;base64,!!!!", "is not base64"),
        ("data:image/png;base64,AAAA", "is not a picture"),
    ],
)
def test_images_that_are_not_served_are_refused(url: str, image: str, problem: str) -> None:
    reply = answer(url, messages(image))
    assert reply.status_code == 400 and problem in reply.json()["error"]["message"]


def test_a_gigantic_image_is_refused_from_its_head(url: str) -> None:
    file = io.BytesIO()
    Image.new("1", (20_000, 20_000)).save(file, "PNG")
    reply = answer(url, messages(data_url(file.getvalue())))
    assert reply.status_code == 400 and "is too large" in reply.json()["error"]["message"]


TOOL: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def test_tools_stand_beside_images(url: str, picture_path: Path) -> None:
    """The prompt is the processor's, with the tools in it."""
    file = picture(9)
    reply = answer(url, messages(data_url(file)), tools=[TOOL]).json()
    parts = [{"type": "text", "text": "ab"}, {"type": "image"}]
    processor = PictureProcessor.of(picture_path)
    assert processor is not None
    said = [{"role": "user", "content": parts}]
    ids, made = processor.encode(said, [file], [TOOL], {}, opens_answer=True)
    assert '"look"' in transformers.AutoTokenizer.from_pretrained(picture_path).decode(ids)
    prompt = {"prompt_token_ids": ids, "images": {name: made[name] for name in TENSORS}}
    llm = LLM(str(picture_path), kv_memory_bytes=8 * MIB, dtype="float32", max_model_len=256)
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    [expected] = llm.generate(prompt, sampling)
    assert reply["choices"][0]["token_ids"] == expected.token_ids
    assert reply["usage"]["prompt_tokens"] == len(ids)


@pytest.mark.parametrize("stream", [False, True])
def test_a_function_that_must_be_called_is_called_beside_images(url: str, stream: bool) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    forced: Any = {"type": "function", "function": {"name": "look"}}
    asked: Any = {"model": "pictures", "messages": messages(data_url(picture(9)))}
    asked |= {"tools": [TOOL], "tool_choice": forced, "max_tokens": 8, "temperature": 0}
    if not stream:
        [choice] = client.chat.completions.create(**asked).choices
        calls: Any = choice.message.tool_calls or []
    else:
        pieces = [
            one.choices[0].delta for one in client.chat.completions.create(**asked, stream=True)
        ]
        calls = [call for piece in pieces for call in piece.tool_calls or []]
    assert calls[0].function.name == "look"
    arguments = "".join(call.function.arguments or "" for call in calls)
    assert arguments.startswith("{")


def test_a_template_without_a_place_for_tools_refuses_them_by_name(
    picture_path: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(picture_path, other)
    for file in other.glob("*template*"):
        file.write_text(file.read_text().replace("tools", "nothing"))
    processor = PictureProcessor.of(other)
    assert processor is not None
    parts = [{"type": "text", "text": "ab"}, {"type": "image"}]
    said = [{"role": "user", "content": parts}]
    with pytest.raises(ChangeSomething, match="tools=1 functions"):
        processor.encode(said, [picture(9)], [TOOL], {}, opens_answer=True)
