"""Make everything in this folder again.

    python -m kimi_eagle.demo.build OUT [--steps N] [--threads T]

writes the verifier to ``OUT/verifier`` and the chat data beside it:

- ``verifier/``: a Kimi-K2.5-shaped checkpoint in the hub's form, trained on dialogues made on
  the fly;
- ``chats.jsonl``: training dialogues in OpenAI form, most with ``reasoning_content``;
- ``first10.jsonl``: its first ten lines;
- ``chats_sharegpt.jsonl``: other dialogues in ShareGPT form, without reasoning;
- ``prompts.jsonl``: evaluation prompts, the messages before the last assistant turn, of those
  dialogues that the verifier answers right and without a near tie. Where two tokens are all but
  equally likely, bf16 rounding decides, which depends on how many tokens a forward pass takes: an
  output with a draft would then differ from one without, whatever the draft.

No evaluation question is in the other files or in what the verifier was trained on.
``--data-only`` leaves the verifier as it is. The data is the same everywhere; the weights are the
same for one torch build, CPU and thread count.
"""

import argparse
import json
import logging
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast
from transformers.models.kimi_k25 import Kimi_K25ForConditionalGeneration

from kimi_eagle.demo import dialogues, training
from kimi_eagle.demo.checkpoint import save_verifier, train_tokenizer, verifier_config

logger = logging.getLogger(__name__)

TOKENIZER_SEED, WEIGHTS_SEED, TRAINING_SEED = 101, 102, 103
CHATS_SEED, SHAREGPT_SEED, EVALUATION_SEED, HELD_OUT_SEED = 1, 2, 3, 4
CHATS, FIRST_CHATS, SHAREGPT_CHATS, EVALUATION_PROMPTS, HELD_OUT_CHATS = 360, 10, 40, 24, 100
TOKENIZER_CHATS = 3000
STEPS = 2200
# Between the two likeliest tokens, in nats; bf16 rounds logits of this model to about 0.1.
MARGIN = 1.0

Dialogue = dict[str, Any]


def questions(dialogue: Dialogue) -> set[str]:
    """The user messages of a dialogue."""
    return {message["content"] for message in dialogue["messages"] if message["role"] == "user"}


def evaluation_dialogues() -> list[Dialogue]:
    """The dialogues behind ``prompts.jsonl``, answers included.

    All have reasoning, none shares a question with another, and none ends in thanks.
    """
    chosen: list[Dialogue] = []
    seen: set[str] = set()
    for dialogue in dialogues.stream(EVALUATION_SEED):
        asked = questions(dialogue)
        closing = dialogue["messages"][-2]["content"] in dialogues.THANKS
        if "reasoning_content" in dialogue["messages"][-1] and not closing and not seen & asked:
            seen |= asked
            chosen.append(dialogue)
        if len(chosen) == EVALUATION_PROMPTS:
            break
    return chosen


def evaluation_questions() -> frozenset[str]:
    """Every user message of the evaluation prompts: what training must not see."""
    return frozenset().union(*(questions(dialogue) for dialogue in evaluation_dialogues()))


def distinct_dialogues(seed: int, count: int) -> list[Dialogue]:
    """The first ``count`` dialogues of a seed that repeat no other of them.

    Dialogues that share a question with the evaluation are left out.
    """
    excluded = evaluation_questions()
    seen: set[frozenset[str]] = set()
    chosen: list[Dialogue] = []
    for dialogue in dialogues.stream(seed):
        asked = frozenset(questions(dialogue))
        if not asked & excluded and asked not in seen:
            seen.add(asked)
            chosen.append(dialogue)
        if len(chosen) == count:
            break
    return chosen


def _sharegpt(dialogue: Dialogue) -> Dialogue:
    speakers = {"system": "system", "user": "human", "assistant": "gpt"}
    turns = [
        {"from": speakers[message["role"]], "value": message["content"]}
        for message in dialogue["messages"]
    ]
    return {"id": dialogue["id"], "conversations": turns}


def _write_lines(path: Path, values: list[Dialogue]) -> None:
    path.write_text("".join(json.dumps(value, ensure_ascii=False) + "\n" for value in values))


def write_data(folder: Path) -> None:
    """Write the chat files that are trained on."""
    chats = distinct_dialogues(CHATS_SEED, CHATS)
    _write_lines(folder / "chats.jsonl", chats)
    _write_lines(folder / "first10.jsonl", chats[:FIRST_CHATS])
    sharegpt = [
        _sharegpt(dialogue) for dialogue in distinct_dialogues(SHAREGPT_SEED, SHAREGPT_CHATS)
    ]
    _write_lines(folder / "chats_sharegpt.jsonl", sharegpt)


def write_prompts(folder: Path) -> None:
    """Write the evaluation prompts that the verifier in ``folder/verifier`` is sure of."""
    verifier = folder / "verifier"
    tokenizer = PreTrainedTokenizerFast.from_pretrained(verifier)
    model = Kimi_K25ForConditionalGeneration.from_pretrained(verifier, dtype=torch.bfloat16).eval()
    prompts = []
    for dialogue in evaluation_dialogues():
        row = training.turn_rows(dialogue, tokenizer)[-1]
        with torch.inference_mode():
            output = model.generate(
                input_ids=torch.tensor([row.prompt]),
                max_new_tokens=len(row.completion),
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
        best = [logits.float().topk(2).values[0] for logits in output.logits]
        margin = min(float(top[0] - top[1]) for top in best)
        if output.sequences[0, len(row.prompt) :].tolist() == row.completion and margin >= MARGIN:
            prompts.append({"messages": dialogue["messages"][:-1]})
    logger.info("%d of %d evaluation prompts kept", len(prompts), EVALUATION_PROMPTS)
    _write_lines(folder / "prompts.jsonl", prompts)


def build_verifier(folder: Path, steps: int) -> None:
    """Train the verifier and write its checkpoint folder."""
    texts = [
        message[part]
        for dialogue in dialogues.generate(TOKENIZER_SEED, TOKENIZER_CHATS)
        for message in dialogue["messages"]
        for part in ("content", "reasoning_content")
        if part in message
    ]
    tokenizer = train_tokenizer(texts)
    pad_id = tokenizer.pad_token_id
    torch.manual_seed(WEIGHTS_SEED)
    model = Kimi_K25ForConditionalGeneration(verifier_config(tokenizer))
    rows = training.batches(dialogues.stream(TRAINING_SEED), tokenizer, evaluation_questions())
    training.train(model, rows, steps, pad_id)
    save_verifier(model, tokenizer, folder)
    # Score what was written; turning the live model to bfloat16 would round its rope frequencies.
    model = Kimi_K25ForConditionalGeneration.from_pretrained(folder, dtype=torch.bfloat16)
    held_out = [
        row
        for dialogue in dialogues.generate(HELD_OUT_SEED, HELD_OUT_CHATS)
        for row in training.turn_rows(dialogue, tokenizer)
    ]
    accuracy, entropy = training.next_token_scores(model, held_out, pad_id)
    logger.info("held-out completions: accuracy %.4f, entropy %.4f nats", accuracy, entropy)


def main() -> None:
    """Write the data and, unless told otherwise, the verifier."""
    parser = argparse.ArgumentParser(description="Make the demo verifier and its chat data again.")
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument(
        "--steps", type=int, default=STEPS, help="training steps (default: %(default)s)"
    )
    parser.add_argument(
        "--threads", type=int, default=1, help="torch threads (default: %(default)s)"
    )
    parser.add_argument("--data-only", action="store_true", help="write the chat files only")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(arguments.threads)
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_data(arguments.out)
    if not arguments.data_only:
        build_verifier(arguments.out / "verifier", arguments.steps)
    write_prompts(arguments.out)


if __name__ == "__main__":
    main()
