"""Images for a tiny model over HTTP: what it is asked, and the processor that it has."""

import base64
import io
from pathlib import Path
from typing import Any

import httpx
import transformers
from PIL import Image
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from tests.llm.servers import PATIENCE_SECONDS
from tests.models.pictures import CROSS, picture_module

IMAGE_TOKEN = "<|image|>"
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


def write_picture_model(found: Path) -> Path:
    """A tiny Llama 3.2 Vision: what its text attends to must be where it goes on."""
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


def answer(url: str, content: Any, **fields: Any) -> Any:
    body = {"messages": content, "temperature": 0, "max_tokens": 8, "ignore_eos": True}
    return httpx.post(
        f"{url}/v1/chat/completions",
        json=body | {"return_token_ids": True} | fields,
        timeout=PATIENCE_SECONDS,
    )
