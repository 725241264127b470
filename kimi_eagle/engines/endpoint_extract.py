"""Extract hidden states with a vLLM server that runs already: a program (see `engines.launch`).

The server was started with our connector (`engines.connector`) and writes into a folder that both
see. Prompts go to `/v1/completions` as token ids.
"""

from __future__ import annotations

import json
import secrets
import shutil
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from kimi_eagle.engines.gathering import Gathering, gather
from kimi_eagle.engines.launch import main
from kimi_eagle.job import EventWriter, StageFailed

_TIMEOUT_SECONDS = 600.0


def extract(job: Mapping[str, Any]) -> dict[str, Any]:
    engine = job["engine"]
    # A folder of our own there: what others left, or write now, is not ours.
    inside = secrets.token_hex(8)
    spool = Path(engine["spool"])
    if not spool.is_dir():
        raise StageFailed(f"engine.spool {spool} is no folder here: the server must write to it")
    gathering = gather(job, spool, inside)
    events = EventWriter(Path(job["events"]))

    def take(name: str) -> None:
        """Move a shard that is whole from the server's folder to the job's."""
        for path in (Path(name).with_suffix(".json"), Path(name)):
            shutil.move(spool / inside / path, Path(job["shards"]) / path)
        events.emit("shard", name=name)

    gathering.announce = take
    try:
        _feed(engine, _model(engine["endpoint"]), gathering)
        gathering.wait()
    finally:
        shutil.rmtree(spool / inside, ignore_errors=True)
    return gathering.document()


def _feed(engine: Mapping[str, Any], model: str, gathering: Gathering) -> None:
    todo = gathering.todo
    with ThreadPoolExecutor(engine["concurrency"]) as pool:
        waiting: dict[Future[dict[str, Any]], int] = {}
        row = 0
        try:
            while row < len(todo) or waiting:
                while row < len(todo) and len(waiting) < engine["concurrency"]:
                    body = _body(model, gathering, row)
                    asked = pool.submit(_ask, engine["endpoint"], "/v1/completions", body)
                    waiting[asked] = row
                    row += 1
                done, _ = wait(waiting, timeout=0.2, return_when=FIRST_COMPLETED)
                for answer in done:
                    number = waiting.pop(answer)
                    choice = answer.result()["choices"][0]
                    if number < gathering.probing:
                        gathering.ranked(number, _first_ranked(choice))
                gathering.look()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _body(model: str, gathering: Gathering, row: int) -> dict[str, Any]:
    body = {
        "model": model,
        "prompt": gathering.todo.ids(row).tolist(),
        "max_tokens": 1,
        "temperature": 0.0,
        "kv_transfer_params": gathering.asks(row),
        "return_token_ids": True,
        "add_special_tokens": False,
    }
    return {**body, "prompt_logprobs": 1} if row < gathering.probing else body


def _first_ranked(choice: Mapping[str, Any]) -> list[int]:
    """The token the server ranks first after each position of a prompt, the last included."""
    after = [
        next(int(token) for token, entry in ranked.items() if entry["rank"] == 1)
        for ranked in choice["prompt_logprobs"][1:]
    ]
    return [*after, int(choice["token_ids"][0])]


def _model(endpoint: str) -> str:
    """The name under which the server serves its one model."""
    served = [item["id"] for item in _ask(endpoint, "/v1/models", None)["data"]]
    return str(served[0])


def _ask(endpoint: str, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
    """Raises: StageFailed, with what the server said."""
    address = endpoint.rstrip("/") + path
    data = None if body is None else json.dumps(body).encode("utf-8")
    request = urllib.request.Request(  # noqa: S310 - http and https alone: the manifest's pattern
        address, data=data, headers={"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as answer:  # noqa: S310
            found: dict[str, Any] = json.load(answer)
            return found
    except urllib.error.HTTPError as error:
        said = error.read().decode("utf-8", "replace")[:500]
        raise StageFailed(f"{address} answered {error.code}: {said}") from None
    except (OSError, ValueError) as error:
        raise StageFailed(f"{address} does not answer: {error}") from None


if __name__ == "__main__":
    sys.exit(main(extract))
