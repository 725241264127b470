"""Ask an engine prompts, one at a time, and go on with conversations. Imports no engine.

An engine is anything that answers one prompt of token ids with the tokens it said and how many
each of its forward passes committed (`Answer`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from kimi_eagle.job import EventWriter, StageFailed
from kimi_eagle.rows.conversations import Rejected
from kimi_eagle.rows.prompts import went_on
from kimi_eagle.rows.render import Renderer
from kimi_eagle.rows.tokenizer import load_tokenizer


@dataclass(frozen=True)
class Answer:
    """What an engine said to one prompt."""

    token_ids: list[int]
    committed: list[int]
    """Tokens that each draft step committed. The first forward pass is prefill: its one token
    belongs to no draft step and is not here."""
    seconds: float
    finish_reason: str | None
    log_probability: float | None = None
    """Of the answer as the verifier has it, in nats; None where it was not asked for."""


@dataclass(frozen=True)
class Request:
    """One prompt as it is asked: of which set, conversation and turn (from 0), as token ids."""

    set: str
    conversation: int
    turn: int
    prompt: list[int]


class Ask(Protocol):
    def __call__(self, prompt: list[int], temperature: float, seed: int) -> Answer: ...


def converse(
    ask: Ask,
    conversations: Sequence[Mapping[str, Any]],
    tokenizer: Path,
    temperature: float,
    job: Mapping[str, Any],
    done: Callable[[int], None],
) -> list[dict[str, Any]]:
    """Have every conversation to its end, each turn asked after the engine's own answers.

    Args:
        conversations: `set`, `conversation`, `messages`, `later`, and `prompt`, the ids of the
            first turn.
        job: `thinking`, `seed`, `max_tokens`, `max_model_len`.
        done: told how many conversations are over.

    Returns: of each turn its request and answer in one. A later turn whose prompt leaves no room
        for an answer is not asked, nor is any after it.
    """
    loaded: Any = None
    found: list[dict[str, Any]] = []
    thinking = False if job["thinking"] == "never" else None
    for number, one in enumerate(conversations):
        ids, messages = list(one["prompt"]), list(one["messages"])
        for turn in range(len(one["later"]) + 1):
            said = ask(ids, temperature, job["seed"] + len(found))
            found.append(_both(Request(one["set"], one["conversation"], turn, ids), said))
            if turn == len(one["later"]):
                break
            if loaded is None:  # a set of single turns needs none
                loaded = load_tokenizer(tokenizer)
                renderer = Renderer(loaded)
            words = said.token_ids[:-1] if said.finish_reason == "stop" else said.token_ids
            answer = loaded.decode(words, skip_special_tokens=False)
            prompt = renderer.prompt(messages, thinking=thinking)
            messages = went_on(messages, prompt, answer, one["later"][turn])
            try:
                ids = renderer.encode(renderer.prompt(messages, thinking=thinking))
            except Rejected as error:
                where = f"turn {turn + 2} of prompt {one['conversation'] + 1} of {one['set']}"
                raise StageFailed(f"{where}: {error}") from None
            if len(ids) + job["max_tokens"] + job["draft_tokens"] + 1 > job["max_model_len"]:
                break
        done(number + 1)
    return found


def repeat(
    ask: Ask,
    requests: Sequence[Mapping[str, Any]],
    temperature: float,
    seed: int,
    done: Callable[[int], None],
) -> list[dict[str, Any]]:
    """Ask prompts again as they were asked before, one at a time."""
    found = []
    for number, one in enumerate(requests):
        request = Request(one["set"], one["conversation"], one["turn"], one["prompt"])
        found.append(_both(request, ask(request.prompt, temperature, seed + number)))
        done(number + 1)
    return found


def _both(request: Request, said: Answer) -> dict[str, Any]:
    return {**asdict(request), **asdict(said)}


def single_streams(
    ask: Ask, counters: Callable[[], dict[str, int]], job: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Every temperature in turn, one request at a time.

    Args (of `job`): `conversations` (see `converse`), or `runs`: what an earlier call returned,
        whose prompts are asked again.

    Returns: of each temperature `temperature`, `requests`, and `counters`, the engine's own.
    """
    events = EventWriter(Path(job["events"]))
    runs = []
    for number, temperature in enumerate(job["temperatures"]):
        total = len(job["runs"][number]["requests"] if job["runs"] else job["conversations"])
        label = f"prompts {job['label']}" + (f", temperature {temperature}" if number else "")

        def done(count: int, total: int = total, label: str = label) -> None:
            events.progress(count, total, label)

        before = counters()
        if job["runs"]:
            asked = job["runs"][number]["requests"]
            requests = repeat(ask, asked, temperature, job["seed"], done)
        else:
            requests = converse(
                ask, job["conversations"], Path(job["tokenizer"]), temperature, job, done
            )
        after = counters()
        spent = {name: after[name] - before.get(name, 0) for name in after}
        runs.append({"temperature": temperature, "requests": requests, "counters": spent})
    return runs
