"""``kvell serve`` over a watched instance: the front in this process, the instance in its own."""

import json
import sys
from pathlib import Path

from kvell.cli.terminal.environment import prepare_process, process_cache_dir
from kvell.engine.setup.engine_settings import EngineSettings
from kvell.fleet.instance.command import instance_command
from kvell.models.sources.progress import quiet
from kvell.server.run import ServeOptions, serve
from kvell.server.text.named_texts import texts_of
from kvell.vocabulary import MIB

INSTANCE = "bench.engine.seams.watched_instance"


def watched_command(settings: EngineSettings, record: Path) -> list[str]:
    """The instance's command line, with the watched program in the place of Kvell's."""
    python, _module, _kvell, *words = instance_command(settings)
    return [python, "-m", INSTANCE, str(record), *words]


def main() -> None:
    """Serve; arguments are ``MODEL QUANTIZATION KV_MIB RECORD [ahead]``; prints the address."""
    prepare_process()
    model, quantization, kv_mib, record, *ahead = sys.argv[1:]
    settings = EngineSettings(
        model,
        kv_memory_bytes=int(kv_mib) * MIB,
        dtype="bfloat16",
        quantization=quantization,
        async_scheduling=ahead == ["ahead"],
    )
    texts = texts_of((model,), process_cache_dir(), quiet)
    command = watched_command(settings, Path(record).absolute())
    serve(command, texts, ServeOptions(port=0), announce)


def announce(url: str) -> None:
    """Print the address as ``kvell serve --json`` does."""
    print(json.dumps({"url": url}), flush=True)


if __name__ == "__main__":
    main()
