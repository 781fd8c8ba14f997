"""A model that marks its reasoning with tags: the packaged model under a template with a switch."""

import json
from pathlib import Path

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{{ '' if not tools else tools | tojson }}{# <tool_call> #}<|im_start|>assistant\n"
    "{% if enable_thinking is defined %}"
    "{{ '<think>\n' if enable_thinking else '<think>\n\n</think>\n\n' }}{% endif %}"
)
"""Qwen3's switch: open, closed, or left to the model."""
START, STOP = 7, 8
"""Tokens of the packaged model that get the names of tags; it never writes them by itself."""


def write_thinking(smollm2_path: Path, folder: Path) -> Path:
    """Write the packaged model into ``folder``, with names of tags for two tokens; return it."""
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (folder / name).symlink_to(smollm2_path / name)
    (folder / "tokenizer_config.json").write_text(
        (smollm2_path / "tokenizer_config.json").read_text()
    )
    tokenizer = json.loads((smollm2_path / "tokenizer.json").read_text())
    for token, tag in ((START, "<think>"), (STOP, "</think>")):
        [added] = [entry for entry in tokenizer["added_tokens"] if entry["id"] == token]
        vocabulary = tokenizer["model"]["vocab"]
        vocabulary[tag] = vocabulary.pop(added["content"])
        added |= {"content": tag, "special": False}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder
