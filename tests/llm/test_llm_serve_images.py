"""Images over HTTP: data URLs go through the model's processor to the same answer as in Python."""

import base64
import io
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import transformers
from PIL import Image
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from kvell import LLM
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.errors import ChangeSomething
from kvell.models.images.processor import PictureProcessor
from kvell.vocabulary import MIB
from tests.models.pictures import CROSS, picture_module

PATIENCE_SECONDS = 120.0
IMAGE_TOKEN = "<|image|>"
TENSORS = ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask")
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}{{ message.role }}: "
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}"
    "<|image|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}\n{% endfor %}assistant: "
)


def picture(shade: int, side: int = 32) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (side, side), (shade, 255 - shade, 40)).save(file, "PNG")
    return file.getvalue()


def data_url(file: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(file).decode()


def messages(*urls: str) -> Any:
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [{"type": "text", "text": "ab"}, *images]}]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Path:
    """A tiny Llama 3.2 Vision with random weights, as a directory with a processor of its own."""
    found = tmp_path_factory.mktemp("pictures") / "pictures"
    module = picture_module(CROSS)
    module.save_pretrained(found)
    save_processor(found, module.config)
    return found


def save_processor(found: Path, config: Any) -> None:
    """A processor whose tokens are characters, and one that stands for an image."""
    shown = {10, *range(32, 127)}
    vocabulary = {
        chr(number) if number in shown else f"w{number}": number
        for number in range(config.image_token_id)
    }
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="w0", bos_token="w1", eos_token="w2"
    )
    tokenizer.add_tokens([AddedToken(IMAGE_TOKEN, special=True, normalized=False)])
    side = config.vision_config.image_size
    processor = transformers.MllamaProcessor(
        transformers.MllamaImageProcessorPil(
            size={"height": side, "width": side},
            max_image_tiles=config.vision_config.max_num_tiles,
        ),
        tokenizer,
        chat_template=TEMPLATE,
    )
    processor.save_pretrained(found)
    assert tokenizer.convert_tokens_to_ids(IMAGE_TOKEN) == config.image_token_id


@pytest.fixture(scope="module")
def front(path: Path) -> Iterator[tuple[str, int]]:
    """The URL of a server, and the pid of its front."""
    command = [sys.executable, "-m", "kvell.cli.main", "serve", "--model", f"pictures={path}"]
    command += ["--port", "0", "--json", "--kv-memory", "8MiB", "--dtype", "float32"]
    command += ["--max-model-len", "256"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["url"], process.pid
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_SECONDS) == 0


@pytest.fixture
def url(front: tuple[str, int]) -> str:
    return front[0]


def answer(url: str, content: Any, **fields: Any) -> Any:
    body = {"messages": content, "temperature": 0, "max_tokens": 8, "ignore_eos": True}
    return httpx.post(
        f"{url}/v1/chat/completions",
        json=body | {"return_token_ids": True} | fields,
        timeout=PATIENCE_SECONDS,
    )


def test_answers_about_images_are_those_of_python(url: str, path: Path) -> None:
    processor = transformers.AutoProcessor.from_pretrained(path)
    llm = LLM(str(path), kv_memory_bytes=8 * MIB, dtype="float32", max_model_len=256)
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


def cached(url: str, shade: int) -> int:
    usage = answer(url, messages(data_url(picture(shade)))).json()["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def test_only_the_same_image_is_found_in_the_cache(url: str) -> None:
    first, again, other = cached(url, 77), cached(url, 77), cached(url, 78)
    assert first < again and other < again


@pytest.mark.parametrize(
    ("image", "problem"),
    [
        ("https://example.com/a.png", "is no data URL"),
        ("http://169.254.169.254/latest", "is no data URL"),
        ("file:///etc/passwd", "is no data URL"),
        ("data:image/svg+xml;base64,AAAA", "is no data URL"),
        ("data:image/png;base64,!!!!", "is not base64"),
        ("data:image/png;base64,AAAA", "is no picture"),
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


def test_tools_stand_beside_images(url: str, path: Path) -> None:
    """The prompt is the processor's, with the tools in it."""
    file = picture(9)
    reply = answer(url, messages(data_url(file)), tools=[TOOL]).json()
    parts = [{"type": "text", "text": "ab"}, {"type": "image"}]
    processor = PictureProcessor.of(path)
    assert processor is not None
    said = [{"role": "user", "content": parts}]
    ids, made = processor.encode(said, [file], [TOOL], {}, opens_answer=True)
    assert '"look"' in transformers.AutoTokenizer.from_pretrained(path).decode(ids)
    prompt = {"prompt_token_ids": ids, "images": {name: made[name] for name in TENSORS}}
    llm = LLM(str(path), kv_memory_bytes=8 * MIB, dtype="float32", max_model_len=256)
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
    path: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(path, other)
    for file in other.glob("*template*"):
        file.write_text(file.read_text().replace("tools", "nothing"))
    processor = PictureProcessor.of(other)
    assert processor is not None
    parts = [{"type": "text", "text": "ab"}, {"type": "image"}]
    said = [{"role": "user", "content": parts}]
    with pytest.raises(ChangeSomething, match="tools=1 functions"):
        processor.encode(said, [picture(9)], [TOOL], {}, opens_answer=True)
