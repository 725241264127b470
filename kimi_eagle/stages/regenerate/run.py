"""Read questions, take the answers that are kept, ask for the others, make rows."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kimi_eagle.artifacts.files import write_json
from kimi_eagle.engines.endpoint import Endpoint
from kimi_eagle.engines.launch import cpu_build, engine_environment, has_gpu, run_program, share_of
from kimi_eagle.identity import digest_bytes, digest_document
from kimi_eagle.job import EVENTS, StageFailed
from kimi_eagle.rows.answers import Answers, AnswerWriter, answers_folder, set_digest
from kimi_eagle.rows.conversations import Rejected
from kimi_eagle.rows.dialogue import Asking, Dialogue, Tally, ask_all, known_only
from kimi_eagle.rows.questions import Questions, read_questions
from kimi_eagle.rows.rejects import Rejects
from kimi_eagle.rows.render import Renderer
from kimi_eagle.rows.sources import BadRecord, read_records
from kimi_eagle.rows.split import validating
from kimi_eagle.rows.table import TRAIN, VALIDATE, save_rows
from kimi_eagle.rows.tokenizer import load_tokenizer
from kimi_eagle.stages.context import Context
from kimi_eagle.stages.regenerate.spec import LIST

_TRIES = 5
# Questions by which a server is known again: one that it renders alike will do.
_PROBED = 3
_PROGRAM = "kimi_eagle.engines.vllm_regenerate"


@dataclass(frozen=True)
class _Item:
    """One conversation to ask: source, number of the record, digest of what is asked."""

    source: int
    record: int
    digest: str
    questions: Questions


def run(context: Context) -> dict[str, Any]:
    params = context.params
    asking = Asking(
        Renderer(load_tokenizer(context.verifier.path)),
        False if params.thinking == "never" else None,
        min(params.max_length, context.verifier.facts.max_positions),
        params.sampling.max_tokens,
        params.on_length == "keep",
    )
    rejects = Rejects()
    items = list(_items(context, rejects))
    if not items:
        raise StageFailed(
            f"nothing is asked, {rejects.total} records were left out: "
            f"{rejects.summary() or 'the sources are empty'}"
        )
    if context.job.share is not None:
        return _answer_share(context, asking, items)
    started, known = time.monotonic(), None
    asked = sum(part["answers_generated"] for part in context.job.parts)
    for _ in range(_TRIES):
        answers = Answers()
        for path in answers.load(answers_folder(context.root, _set(context))):
            context.events.note(f"{path} is damaged: what it held is asked for again")
        known = len(answers) if known is None else known
        missing = known_only(
            [Dialogue(item.questions, asking, record=False) for item in items], answers
        )
        if missing:
            ask = _ask_endpoint if params.engine.endpoint is not None else _ask_vllm
            asked += ask(context, asking, missing, answers)
        seconds = time.monotonic() - started
        try:
            metrics = _save(context, items, _Replayed(asking, answers), rejects)
            break
        except _Unanswered:
            continue
    else:
        raise StageFailed("others answer the same questions otherwise all the time: submit again")
    for note in rejects.notes():
        context.events.note(note)
    return {
        **metrics,
        "answers_kept_before": known,
        "answers_generated": asked,
        "seconds_asking": round(seconds, 3),
    }


def _answer_share(context: Context, asking: Asking, items: Sequence[_Item]) -> dict[str, Any]:
    """Have this worker's share of the conversations answered; those at the same prompt are in one
    share, and asked once."""
    assert context.job.share is not None
    number, of = context.job.share
    answers = Answers()
    for path in answers.load(answers_folder(context.root, _set(context))):
        context.events.note(f"{path} is damaged: what it held is asked for again")
    begun = [Dialogue(item.questions, asking, record=False) for item in items]
    ours = [
        dialogue
        for dialogue in begun
        if (prompt := dialogue.prompt()) is not None and int(prompt.key[:8], 16) % of == number
    ]
    missing = known_only(ours, answers)
    ask = _ask_endpoint if context.params.engine.endpoint is not None else _ask_vllm
    return {"answers_generated": ask(context, asking, missing, answers) if missing else 0}


def _set(context: Context) -> str:
    sampling = context.params.sampling.model_dump(mode="json", exclude={"max_tokens"})
    if sampling["temperature"] == 0:
        sampling = {"temperature": 0.0}  # nothing is drawn
    verifier = context.input("verifier").digest
    return set_digest(verifier, context.params.engine.kind, sampling)


def _items(context: Context, rejects: Rejects) -> Iterator[_Item]:
    """What is asked, each once; what cannot be is counted, or fatal."""
    seen: set[str] = set()
    for index, source in enumerate(context.params.sources):
        taken = 0
        for number, where, value in _records(context, index, rejects):
            if source.limit is not None and taken >= source.limit:
                break
            try:
                questions = read_questions(value, source.format)
            except Rejected as error:
                rejects.add(error.reason, where, str(error))
                continue
            taken += 1
            digest = digest_document("questions/1", questions.document())
            if digest in seen:
                rejects.add("duplicate", where)
                continue
            seen.add(digest)
            yield _Item(index, number, digest, questions)


def _records(context: Context, index: int, rejects: Rejects) -> Iterator[tuple[int, str, Any]]:
    """(number, where, value) of the records of one source that can be read."""
    for given in context.job.inputs[f"sources.{index}"]:
        path = Path(given.path)
        try:
            for record in read_records(path):
                where = f"{path.name}:{record.number}"
                if record.error is None:
                    yield record.number, where, record.value
                elif context.params.on_bad_record == "fail":
                    raise StageFailed(
                        f"{path}:{record.number}: {record.error}; mend the record, or set "
                        "on_bad_record: skip to leave such records out, counted"
                    )
                else:
                    rejects.add("bad_record", where, record.error)
        except BadRecord as error:
            raise StageFailed(str(error)) from None


def _ask_vllm(
    context: Context, asking: Asking, missing: Sequence[Dialogue], answers: Answers
) -> int:
    """Ask vLLM, in processes of its own; returns how many answers it gave."""
    params, cpu = context.params, not has_gpu()
    if cpu != cpu_build():
        raise StageFailed("vLLM here is not the build for this machine (extras `cpu` and `gpu`)")
    shares = _dealt(missing, params.shards)
    environments = list(_environments(len(shares), params.engine, params.engines_per_gpu, cpu))
    new = context.scratch("new")
    job = {
        "model": str(context.verifier.path),
        "engine": params.engine.model_dump(mode="json"),
        "sharing": min(params.engines_per_gpu, len(shares)),
        "cpu": cpu,
        "multimodal": context.verifier.facts.model_type == "kimi_k25",
        "max_model_len": min(asking.max_length + 1, context.verifier.facts.max_positions),
        "asking": {
            "thinking": asking.thinking,
            "max_length": asking.max_length,
            "max_tokens": asking.max_tokens,
            "keep_cut": asking.keep_cut,
        },
        "sampling": params.sampling.model_dump(mode="json"),
        "known": str(answers_folder(context.root, _set(context))),
        "set": _set(context),
        "new": str(new),
        "answers": str(context.answers),
        "save_every": params.save_every,
        "chunk": params.chunk,
        "events": str(Path(context.job.folder) / EVENTS),
    }

    def one(share: int) -> int:
        folder = context.scratch(f"engine-{share}")
        write_json(folder / "questions.json", [item.questions.document() for item in shares[share]])
        given = {**job, "questions": str(folder / "questions.json"), "tells": share == 0}
        return int(run_program(_PROGRAM, given, folder, environments[share])["asked"])

    with ThreadPoolExecutor(len(shares)) as pool:
        asked = sum(pool.map(one, range(len(shares))))
    answers.load_new(new)
    return asked


def _dealt(dialogues: Sequence[Dialogue], shares: int) -> list[list[Dialogue]]:
    """Conversations in shares, those that are at the same prompt in one: it is asked once."""
    dealt: list[list[Dialogue]] = [[] for _ in range(shares)]
    for dialogue in dialogues:
        prompt = dialogue.prompt()
        assert prompt is not None, "it is not over"
        dealt[int(prompt.key[:8], 16) % shares].append(dialogue)
    return [share for share in dealt if share]


def _environments(shares: int, engine: Any, per_gpu: int, cpu: bool) -> Iterator[dict[str, str]]:
    """The environment of each of several engines at once: GPUs, or cores, of its own."""
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    needed = -(-shares // per_gpu) * engine.tensor_parallel
    listed = devices.split(",") if devices else [str(n) for n in range(needed)]
    cores = sorted(os.sched_getaffinity(0))
    for share in range(shares):
        own = share_of(cores, share, shares)
        env = engine_environment(engine, own)
        if not cpu and shares > 1:
            if len(listed) < needed:
                raise StageFailed(
                    f"{shares} shards of {engine.tensor_parallel} GPUs, {per_gpu} on the same, "
                    f"need {needed}; CUDA_VISIBLE_DEVICES names {len(listed)}"
                )
            first = share // per_gpu * engine.tensor_parallel
            env["CUDA_VISIBLE_DEVICES"] = ",".join(listed[first : first + engine.tensor_parallel])
        yield env


def _ask_endpoint(
    context: Context, asking: Asking, missing: Sequence[Dialogue], answers: Answers
) -> int:
    """Ask a server; returns how many answers it gave."""
    params = context.params
    endpoint = Endpoint(params.engine.endpoint, params.engine.model, params.engine.timeout)
    _require_the_verifier(endpoint, asking, missing)
    sampling = params.sampling.model_dump(mode="json")
    name = _set(context)
    writer = AnswerWriter(
        context.answers,
        params.save_every,
        lambda file: context.events.emit("answers", name=file, set=name),
    )
    try:
        return ask_all(
            missing,
            answers,
            lambda prompts: endpoint.ask(prompts, sampling, params.engine.concurrency),
            writer,
            params.chunk,
            lambda done, total: context.events.progress(done, total, "turns"),
        )
    finally:
        writer.flush()


def _require_the_verifier(
    endpoint: Endpoint, asking: Asking, dialogues: Sequence[Dialogue]
) -> None:
    """Raises: StageFailed: the server does not make the tokens of the verifier's folder of the
    first questions; so it serves something else."""
    options = {} if asking.thinking is None else {"thinking": asking.thinking}
    for dialogue in dialogues[:_PROBED]:
        prompt = dialogue.prompt()
        assert prompt is not None, "it is not over"
        if endpoint.tokenize(dialogue.messages, dialogue.questions.tools, options) == list(
            prompt.token_ids
        ):
            return
    raise StageFailed(
        f"{endpoint.url} ({endpoint.model}) makes other tokens of the first questions than the "
        "verifier's folder does: another model, or another chat template, is served there"
    )


class _Unanswered(Exception):
    """A question has no answer after all: that before it was also asked by another run, answered
    otherwise, and is taken from there."""


@dataclass(frozen=True)
class _Replayed:
    """Conversations as their answers, all of them known, make them."""

    asking: Asking
    answers: Answers

    def dialogue(self, item: _Item) -> Dialogue:
        """Raises: _Unanswered."""
        dialogue = Dialogue(item.questions, self.asking)
        if known_only([dialogue], self.answers):
            raise _Unanswered
        return dialogue


def _save(
    context: Context, items: Sequence[_Item], replayed: _Replayed, rejects: Rejects
) -> dict[str, Any]:
    """Write the artifact; returns its figures."""
    params, total = context.params, Tally()
    owners: list[_Item] = []
    ids: list[Any] = []
    masks: list[Any] = []
    out = context.out("rows")
    with (out / LIST).open("w", encoding="utf-8") as listed:
        for item in items:
            dialogue = replayed.dialogue(item)
            total.add(dialogue)
            listed.writelines(_lines(item, dialogue))
            for row in dialogue.rows:
                owners.append(item)
                ids.append(np.array(row.token_ids, np.int32))
                masks.append(np.array(row.loss_mask, np.uint8))
    if not owners:
        raise StageFailed(
            f"no row is left of {len(items)} conversations: {total.empty} answers were empty, "
            f"{total.dropped} cut off and dropped; not asked: {_words(total.unasked) or 'none'}"
        )
    try:
        apart = validating([item.digest for item in owners], params.val_ratio, params.seed)
    except ValueError as error:
        raise StageFailed(str(error)) from None
    split = [VALIDATE if item.digest in apart else TRAIN for item in owners]
    save_rows(
        out, ids, masks, split, [item.source for item in owners], [item.record for item in owners]
    )
    metrics = {
        "conversations": len({item.digest for item in owners}),
        "rows": len(owners),
        "rows_train": split.count(TRAIN),
        "rows_val": split.count(VALIDATE),
        "tokens": sum(map(len, ids)),
        "supervised_tokens": sum(int(mask.sum()) for mask in masks),
        "answers": total.asked,
        "answer_tokens": total.tokens,
        "finish_reasons": dict(sorted(total.finish.items())),
        "empty": total.empty,
        "dropped_length": total.dropped,
        "not_asked": dict(sorted(total.unasked.items())),
        "rejected": rejects.total,
        "repaired_surrogates": sum(item.questions.repaired for item in items),
        "rejects": rejects.by_reason(),
    }
    write_json(out / "report.json", metrics)
    return metrics


def _lines(item: _Item, dialogue: Dialogue) -> Iterator[str]:
    """A line for each answer: where it is from, how it ended, what it is the answer to."""
    for asked in dialogue.asked:
        ids = np.asarray(asked.answer.token_ids, "<i4")
        line = {
            "source": item.source,
            "record": item.record,
            "turn": asked.turn,
            "prompt_tokens": len(asked.prompt.token_ids),
            "tokens": len(ids),
            "finish": asked.answer.finish,
            "kept": asked.kept,
            "prompt": asked.prompt.key,
            "answer": digest_bytes(ids.tobytes()),
        }
        yield json.dumps(line) + "\n"


def _words(counts: Counter[str] | Mapping[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in sorted(counts.items()))
