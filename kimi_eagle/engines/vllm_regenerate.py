"""Answer questions with vLLM: a program (see `engines.launch`)."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kimi_eagle.engines.launch import main
from kimi_eagle.engines.vllm_options import common_options, start_engine
from kimi_eagle.job import EventWriter, StageFailed
from kimi_eagle.rows.answers import LENGTH, STOP, Answer, Answers, AnswerWriter, Prompt, seed_of
from kimi_eagle.rows.dialogue import Asking, Dialogue, ask_all
from kimi_eagle.rows.questions import Questions
from kimi_eagle.rows.render import Renderer
from kimi_eagle.rows.tokenizer import load_tokenizer


def regenerate(job: Mapping[str, Any]) -> dict[str, Any]:
    asking = Asking(Renderer(load_tokenizer(Path(job["model"]))), **job["asking"])
    documents = json.loads(Path(job["questions"]).read_text("utf-8"))
    dialogues = [Dialogue(Questions.read(document), asking, record=False) for document in documents]
    answers = Answers()
    answers.load(Path(job["known"]))
    events = EventWriter(Path(job["events"]))
    staged, new = Path(job["answers"]), Path(job["new"])

    def announce(name: str) -> None:
        # The coordinator takes the staged file away; the stage reads its own.
        os.link(new / name, staged / name)
        events.emit("answers", name=name, set=job["set"])

    def progress(done: int, total: int) -> None:
        if job["tells"]:
            events.progress(done, total, "turns")

    writer = AnswerWriter(new, job["save_every"], announce)
    llm = start_engine(common_options(job))
    try:
        asked = ask_all(
            dialogues,
            answers,
            lambda prompts: _ask(llm, prompts, job["sampling"]),
            writer,
            job["chunk"],
            progress,
        )
    finally:
        writer.flush()
    return {"asked": asked}


def _ask(
    llm: Any, prompts: Sequence[Prompt], sampling: Mapping[str, Any]
) -> Iterator[tuple[int, Answer]]:
    """(position, answer) as answers come; all prompts are in the queue before the first is taken
    from it (see `vllm_extract._generate`)."""
    queue = [{"prompt_token_ids": list(prompt.token_ids)} for prompt in prompts]
    parameters = [_parameters(prompt, sampling) for prompt in prompts]
    if not hasattr(llm, "enqueue"):  # an older vLLM
        for position, output in enumerate(llm.generate(queue, parameters, use_tqdm=False)):
            yield position, _answer(output)
        return
    llm.sleep(level=0, mode="keep")
    names = llm.enqueue(queue, parameters, use_tqdm=False)
    # It may say the engine's own names, `7-1f3a…`, and gives outputs the plain ones, `7`.
    positions = {name.partition("-")[0]: position for position, name in enumerate(names)}
    llm.wake_up(tags=["scheduling"])
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            if output.finished:
                yield positions[output.request_id], _answer(output)


def _parameters(prompt: Prompt, sampling: Mapping[str, Any]) -> Any:
    from vllm import SamplingParams

    drawn = sampling["temperature"] > 0
    return SamplingParams(
        temperature=sampling["temperature"],
        top_p=sampling["top_p"] if drawn else 1.0,
        top_k=sampling["top_k"] if drawn else 0,
        seed=seed_of(sampling["seed"], prompt) if drawn else None,
        max_tokens=prompt.limit,
        detokenize=False,
    )


def _answer(output: Any) -> Answer:
    """What was emitted.

    Raises:
        StageFailed: the engine gave up on it.
    """
    (said,) = output.outputs
    if said.finish_reason not in (STOP, LENGTH):
        raise StageFailed(f"vLLM ended an answer with {said.finish_reason!r}; see the log")
    return Answer(np.asarray(said.token_ids, np.int32), said.finish_reason)


if __name__ == "__main__":
    sys.exit(main(regenerate))
