"""A vLLM server that runs already, over its HTTP interface. Imports no engine."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from kimi_eagle.job import StageFailed
from kimi_eagle.rows.answers import LENGTH, STOP, Answer, Prompt, seed_of

TOKEN = "KIMI_EAGLE_ENDPOINT_TOKEN"  # noqa: S105 - the name of a variable


class EndpointError(StageFailed):
    """A server that cannot be asked, or answers what cannot be used; the message says which."""


class RequestRefused(EndpointError):
    """A request that the server does not take as it is; others it may."""


class Endpoint:
    """One server and the model that is asked."""

    def __init__(self, url: str, model: str | None = None, timeout: float = 600.0):
        """Args: `model`: the name it is served under; None where there is one alone.

        Raises:
            EndpointError: the server does not answer, or does not serve the model.
        """
        self.url = url.rstrip("/").removesuffix("/v1")
        self._timeout = timeout
        served = [item.get("id") for item in self._call("/v1/models").get("data", ())]
        if model is None and len(served) != 1:
            raise EndpointError(
                f"{self.url} serves {len(served)} models ({', '.join(map(str, served))}): "
                "say which is the verifier"
            )
        if model is not None and model not in served:
            raise EndpointError(
                f"{self.url} does not serve {model!r}, but {', '.join(map(str, served))}"
            )
        self.model = str(model or served[0])

    def tokenize(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] = (),
        options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The ids of the prompt that the server makes of messages.

        Args:
            options: passed to the chat template.

        Raises:
            EndpointError: it makes none.
        """
        found = self._call(
            "/tokenize",
            {
                "model": self.model,
                "messages": list(map(_sent, messages)),
                "add_generation_prompt": True,
                "tools": list(tools) or None,
                "chat_template_kwargs": dict(options or {}),
            },
        )
        tokens = found.get("tokens")
        if not isinstance(tokens, list):
            raise EndpointError(f"{self.url}/tokenize gave no tokens: is it a vLLM server?")
        return [int(token) for token in tokens]

    def ask(
        self, prompts: Sequence[Prompt], sampling: Mapping[str, Any], concurrency: int
    ) -> Iterator[tuple[int, Answer]]:
        """(position, answer) as answers come.

        Raises:
            EndpointError: the server fails, or does not say which tokens it emitted.
        """
        with ThreadPoolExecutor(concurrency) as pool:
            waiting = {
                pool.submit(self._one, prompt, sampling): position
                for position, prompt in enumerate(prompts)
            }
            try:
                for done in as_completed(waiting):
                    yield waiting[done], done.result()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def _one(self, prompt: Prompt, sampling: Mapping[str, Any]) -> Answer:
        drawn = sampling["temperature"] > 0
        found = self._call(
            "/v1/completions",
            {
                "model": self.model,
                "prompt": list(prompt.token_ids),
                "max_tokens": prompt.limit,
                "temperature": sampling["temperature"],
                # Said each time: a server takes what is not said from generation_config.json.
                "top_p": sampling["top_p"] if drawn else 1.0,
                "top_k": sampling["top_k"] if drawn else 0,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "presence_penalty": 0.0,
                "frequency_penalty": 0.0,
                "seed": seed_of(sampling["seed"], prompt) if drawn else None,
                "return_token_ids": True,
            },
        )
        (choice,) = found["choices"]
        ids, finish = choice.get("token_ids"), choice.get("finish_reason")
        if not isinstance(ids, list):
            raise EndpointError(
                f"{self.url} does not say which tokens it emitted (return_token_ids, vLLM 0.10.2 "
                "and later); text that is encoded again is not what the verifier said"
            )
        if finish not in (STOP, LENGTH):
            raise EndpointError(f"{self.url} ended an answer with {finish!r}")
        return Answer([int(token) for token in ids], finish)

    def _call(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """What the server answers as JSON."""
        headers = {"Content-Type": "application/json"}
        token = os.environ.get(TOKEN)
        if token:
            headers["Authorization"] = f"Bearer {token}"
        data = None if body is None else json.dumps(body).encode("utf-8")
        request = urllib.request.Request(self.url + path, data, headers)  # noqa: S310 - http(s) only
        try:
            with urllib.request.urlopen(request, timeout=self._timeout) as answer:  # noqa: S310
                value = json.loads(answer.read())
        except urllib.error.HTTPError as error:
            said = error.read(2000).decode("utf-8", errors="replace")
            kind = RequestRefused if error.code in (400, 422) else EndpointError
            raise kind(f"{self.url}{path}: {error.code} {error.reason}: {said}") from None
        except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
            reason = getattr(error, "reason", error)
            raise EndpointError(
                f"{self.url} does not answer ({reason}): start the server, or mend the address"
            ) from None
        except ValueError as error:
            raise EndpointError(f"{self.url}{path}: no JSON: {error}") from None
        if not isinstance(value, dict):
            raise EndpointError(f"{self.url}{path}: not what a vLLM server answers")
        return value


def _sent(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as a client of the chat interface sends it."""
    sent = dict(message)
    reasoning = sent.pop("reasoning_content", None)
    if reasoning:
        sent["reasoning"] = reasoning
    if sent.get("tool_calls"):
        sent["tool_calls"] = [_call(call) for call in sent["tool_calls"]]
    return sent


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    if not isinstance(function["arguments"], str):
        function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return {"type": "function", **call, "function": function}
