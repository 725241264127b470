"""Decode prompts on vLLM servers that run already: a program (see `engines.launch`).

Tokens are streamed with their ids; every piece of the stream is what one forward pass committed.
A server joins pieces when they are read too slowly, so the pieces are held against the server's
own count of draft steps, and where the two differ nothing is reported.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any

from kimi_eagle.engines.asking import Answer, single_streams
from kimi_eagle.engines.launch import main
from kimi_eagle.job import StageFailed

_SECONDS = 600
_DRAFTS = "vllm:spec_decode_num_drafts"


def generate(job: Mapping[str, Any]) -> dict[str, Any]:
    """As `vllm_generate.generate`, one request at a time, at the manifest's endpoint.

    Raises: StageFailed: no answer, another use of the server meanwhile, or pieces that were joined.
    """
    if job["batch"] != 1:
        raise StageFailed("an endpoint is asked one request at a time: set batch to 1")
    drafted = job["draft"] is not None
    server = Server(job["engine"]["url" if drafted else "plain_url"])
    if drafted == (_DRAFTS not in server.counters()):
        wants = "with a draft" if drafted else "without one"
        raise StageFailed(f"{server.url} is not a server {wants}: see its --speculative-config")

    def ask(prompt: list[int], temperature: float, seed: int) -> Answer:
        return server.complete(prompt, job["max_tokens"], temperature, seed)

    # The first answer sets kernels up; it is thrown away.
    server.complete(job["conversations"][0]["prompt"], 4, 0.0, 0)
    runs = single_streams(ask, server.counters, job)
    for run in runs if drafted else ():
        _whole(run, job["draft_tokens"], server.url)
    return {"runs": runs, "batched": None}


def _whole(run: Mapping[str, Any], draft_tokens: int, url: str) -> None:
    """Raises: StageFailed unless every piece is one draft step."""
    pieces = [count for one in run["requests"] for count in one["committed"]]
    steps = run["counters"][_DRAFTS]
    longest = max(pieces, default=1)
    if longest > draft_tokens + 1:
        raise StageFailed(
            f"{url} commits {longest} tokens at once; with draft_tokens {draft_tokens} it can be "
            f"{draft_tokens + 1}: it serves with more, or joins what is read too slowly"
        )
    if len(pieces) != steps:
        raise StageFailed(
            f"{url} counts {steps} draft steps, {len(pieces)} were seen: others use it, or it "
            "joins steps (--stream-interval must be 1)"
        )


def read_counters(metrics: str) -> dict[str, int]:
    """The counters of speculative decoding in a server's metrics (Prometheus' text form), named
    as in-process ones are, summed over its engines."""
    found: dict[str, int] = {}
    for line in metrics.splitlines():
        name, _, value = line.rpartition(" ")
        name, _, labels = name.partition("{")
        if not name.startswith("vllm:spec_decode") or not name.endswith("_total"):
            continue
        name = name.removesuffix("_total")
        place = labels.partition('position="')[2].partition('"')[0]
        key = f"{name}.{place}" if place else name
        found[key] = found.get(key, 0) + int(float(value))
    return found


class Server:
    """One vLLM server."""

    def __init__(self, url: str):
        """Raises: StageFailed when it does not answer."""
        self.url = url.rstrip("/").removesuffix("/v1")
        models = json.loads(self._read("/v1/models"))
        self._model = models["data"][0]["id"]

    def complete(self, prompt: list[int], tokens: int, temperature: float, seed: int) -> Answer:
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": temperature,
            "seed": seed,
            "stream": True,
            "return_token_ids": True,
            "skip_special_tokens": False,
            **({"logprobs": 1} if temperature else {}),
        }
        started = time.perf_counter()
        said: list[int] = []
        committed: list[int] = []
        reason, likely = None, 0.0 if temperature else None
        for piece in self._stream("/v1/completions", body):
            for choice in piece.get("choices") or ():
                ids = choice.get("token_ids")
                if ids is None and choice.get("text"):
                    raise StageFailed(f"{self.url} gives no token ids: it is no vLLM, or too old")
                if ids:
                    said += ids
                    committed.append(len(ids))
                if likely is not None:
                    likely += sum((choice.get("logprobs") or {}).get("token_logprobs") or ())
                reason = choice.get("finish_reason") or reason
        return Answer(said, committed[1:], time.perf_counter() - started, reason, likely)

    def counters(self) -> dict[str, int]:
        return read_counters(self._read("/metrics"))

    def _stream(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        with self._open(path, json.dumps(body).encode()) as answer:
            for raw in answer:
                line = raw.decode("utf-8").strip()
                if line.startswith("data:") and line != "data: [DONE]":
                    yield json.loads(line.removeprefix("data:"))

    def _read(self, path: str) -> str:
        with self._open(path, None) as answer:
            return str(answer.read().decode("utf-8"))

    def _open(self, path: str, body: bytes | None) -> Any:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, body, headers)  # noqa: S310
        try:
            return urllib.request.urlopen(request, timeout=_SECONDS)  # noqa: S310
        except urllib.error.HTTPError as error:
            said = error.read().decode("utf-8", "replace")[:300]
            raise StageFailed(f"{self.url}{path} answers {error.code}: {said}") from None
        except OSError as error:
            raise StageFailed(f"{self.url}{path} does not answer: {error}") from None


if __name__ == "__main__":
    sys.exit(main(generate))
