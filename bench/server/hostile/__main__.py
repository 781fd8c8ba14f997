"""Twenty hostile clients for two minutes beside a well-behaved tenant, and what the tenant notices.

``python -m bench.server.hostile``

The tenant's time per token, its longest wait for a token and the slowest ``/livez`` are taken
before, during and after.  The bench fails if an instance restarts, if the tenant's answers fail or
are awaited for too long, if the audit finds a contradiction, or if processes take more memory than
their contract says.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import httpx

from bench import result_file
from bench.server.hostile.attacks import KEY as HOSTILE
from bench.server.hostile.attacks import PICTURE_KINDS, POISONED, TEXT_KINDS
from bench.server.hostile.models import picture_model, poisoned_model
from bench.server.hostile.tenant import KEY as TENANT
from bench.server.hostile.tenant import behave
from bench.side_by_side.processes import SystemProcess
from bench.side_by_side.systems import free_port

START_SECONDS = 180.0
MOST_WAIT_SECONDS = 2.0
"""The longest time in which the tenant may get no token."""
MOST_LIVE_SECONDS = 0.25
"""The longest time that ``/livez`` may take."""
OPERATOR = "operator"
KEYS = f"""
[[keys]]
name = "tenant"
key = "{TENANT}"
[[keys]]
name = "hostile"
key = "{HOSTILE}"
[[keys]]
name = "operator"
key = "{OPERATOR}"
operator = true
"""


class Watch:
    """Looks at the server's memory every second; the worst of what it saw."""

    def __init__(self, url: str) -> None:
        self._url, self._over = url, threading.Event()
        self.contract_bytes, self.most_bytes, self.beyond = 0, 0, list[str]()
        self.front_bytes = list[int]()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        headers = {"Authorization": f"Bearer {OPERATOR}"}
        with httpx.Client(timeout=60, headers=headers) as http:
            while not self._over.wait(1.0):
                try:
                    told = http.get(f"{self._url}/debug/memory").json()
                except (httpx.HTTPError, ValueError) as error:
                    self.beyond.append(f"no answer: {error}")
                    continue
                self._note(told)

    def _note(self, told: dict[str, Any]) -> None:
        self.contract_bytes = told.get("contract_bytes", 0)
        used = sum(told.get("now_bytes", {}).values())
        self.front_bytes.append(told.get("now_bytes", {}).get("front", 0))
        self.most_bytes = max(self.most_bytes, used)
        if used > self.contract_bytes:
            self.beyond.append(f"{used} bytes over a contract of {self.contract_bytes}")


def run(url: str, kinds: Sequence[str], clients: int, seconds: float) -> dict[str, Any]:
    """The tenant alone, beside hostile clients, and alone again."""
    each = [kinds[index % len(kinds)] for index in range(clients)]
    quiet = seconds / 4
    with Watch(url) as watch:
        before = asyncio.run(behave(url, quiet))
        command = [sys.executable, "-m", "bench.server.hostile.attacks", url, *each]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as hostile:
            during = asyncio.run(behave(url, seconds))
            answers, _ = hostile.communicate("")
        after = asyncio.run(behave(url, quiet))
    alone = mean(before.token_seconds + after.token_seconds)
    front = watch.front_bytes or [0]
    wait = max(before.longest_wait_seconds, after.longest_wait_seconds)
    live = max(before.slowest_live_seconds, after.slowest_live_seconds)
    return {
        "quiet": before.figures(),
        "attacked": during.figures(),
        "quiet_again": after.figures(),
        "tpot_ratio": mean(during.token_seconds) / alone if during.token_seconds else None,
        "wait_ratio": during.longest_wait_seconds / wait,
        "live_ratio": during.slowest_live_seconds / live,
        "waits": {
            "wait_seconds": [during.longest_wait_seconds, MOST_WAIT_SECONDS],
            "live_seconds": [during.slowest_live_seconds, MOST_LIVE_SECONDS],
        },
        "front_bytes": {"first": front[0], "most": max(front), "last": front[-1]},
        "hostile_answers": json.loads(answers),
        "contract_bytes": watch.contract_bytes,
        "most_bytes": watch.most_bytes,
        "problems": [*before.problems, *during.problems, *after.problems, *watch.beyond][:40],
    }


def settled(url: str) -> dict[str, Any]:
    """Restarts, refusals by bound and the audit, once the hostile clients have gone."""
    headers = {"Authorization": f"Bearer {OPERATOR}"}
    lines = httpx.get(f"{url}/metrics", timeout=60, headers=headers).text.splitlines()
    named = [line.rpartition(" ") for line in lines if not line.startswith("#")]
    refused = {
        name.partition('reason="')[2].rstrip('"}'): float(value)
        for name, _, value in named
        if name.startswith("kvell:admission_rejections_total") and float(value)
    }
    restarts = sum(
        float(value) for name, _, value in named if name.startswith("kvell:instance_restarts_total")
    )
    audit = httpx.get(f"{url}/debug/audit", timeout=60, headers=headers).json()
    return {"restarts": restarts, "refused": refused, "audit": audit}


def main(given: Sequence[str] | None = None) -> None:
    """Print the figures, write them to the bench's result file, and fail on any problem."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--kv-mib", type=int, default=256)
    parser.add_argument("--pictures", action="store_true", help="attack a model of images")
    parser.add_argument("--kinds", nargs="+", choices=TEXT_KINDS, help="only these attacks")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(given)
    name = "hostile_pictures" if args.pictures else "hostile"
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as folder:
        keys, log = Path(folder, "keys.toml"), Path(folder, "server.log")
        keys.write_text(KEYS)
        keys.chmod(0o600)
        command = [sys.executable, "-m", "kvell.cli.main", "serve", "--port", str(port)]
        command += [f"--kv-memory={args.kv_mib}MiB", f"--api-key-file={keys}"]
        command += _models(Path(folder), is_pictured=args.pictures)
        process = SystemProcess(command, log, {})
        try:
            process.wait_for(f"{url}/health", START_SECONDS)
            kinds = args.kinds or (PICTURE_KINDS if args.pictures else TEXT_KINDS)
            figures = run(url, kinds, args.clients, args.seconds) | settled(url)
            figures["log_bytes"] = log.stat().st_size
        finally:
            process.end()
    figures |= {"clients": args.clients, "seconds": args.seconds}
    result_file.write(args.out or result_file.path_of(name), figures)
    print(json.dumps(figures, indent=1))
    is_late = any(most > bound for most, bound in figures["waits"].values())
    if is_late or figures["problems"] or figures["restarts"] or not figures["audit"]["clean"]:
        sys.exit(1)


def _models(folder: Path, *, is_pictured: bool) -> list[str]:
    """What is served: SmolLM2 and a model of NaNs, or a model of images."""
    if is_pictured:
        return [f"--model=pictures={picture_model(folder / 'pictures')}"]
    from kvell.models.sources.packaged import packaged_model
    from kvell.models.sources.progress import quiet

    smollm2 = packaged_model(Path.home() / ".cache" / "kvell", quiet)
    bad = poisoned_model(smollm2, folder / POISONED)
    return ["--model=smollm2", f"--model={POISONED}={bad}"]


if __name__ == "__main__":
    main()
