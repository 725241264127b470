"""Ask the demo verifier its evaluation prompts through vLLM.

    python -m kimi_eagle.demo.check VERIFIER

decodes ``prompts.jsonl`` greedily with thinking and prints every answer that differs from the
generator's, then the number of those that agree.
"""

import argparse
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from kimi_eagle.demo.build import evaluation_dialogues

MAX_TOKENS = 160
MAX_LENGTH = 512


def greedy_texts(verifier: Path, dialogues: list[dict[str, Any]]) -> list[str]:
    """The verifier's last turn of each dialogue, decoded: ``reasoning</think>answer``."""
    # Here, so that everything else in this package works without vLLM.
    from vllm import LLM, SamplingParams

    tokenizer = AutoTokenizer.from_pretrained(verifier)
    prompts = [
        tokenizer.apply_chat_template(
            dialogue["messages"][:-1], tokenize=False, add_generation_prompt=True
        )
        for dialogue in dialogues
    ]
    encoded = [
        {"prompt_token_ids": tokenizer.encode(prompt, add_special_tokens=False)}
        for prompt in prompts
    ]
    llm = LLM(
        str(verifier),
        dtype="bfloat16",
        max_model_len=MAX_LENGTH,
        enforce_eager=True,
        limit_mm_per_prompt={"vision_chunk": 0},
    )
    outputs = llm.generate(encoded, SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS))
    return [output.outputs[0].text for output in outputs]


def main() -> None:
    """Print the differing answers and the share of right ones."""
    parser = argparse.ArgumentParser(
        description="Ask the demo verifier its evaluation prompts through vLLM."
    )
    parser.add_argument("verifier", type=Path)
    dialogues = evaluation_dialogues()
    texts = greedy_texts(parser.parse_args().verifier, dialogues)
    answers_right = whole_right = 0
    for dialogue, text in zip(dialogues, texts, strict=True):
        question, expected = dialogue["messages"][-2]["content"], dialogue["messages"][-1]
        reasoning, _, answer = text.partition("</think>")
        whole_right += answer == expected["content"] and reasoning == expected["reasoning_content"]
        if answer == expected["content"]:
            answers_right += 1
        else:
            print(f"{question}\n  expected: {expected['content']}\n  decoded:  {text}")
    print(f"answers right: {answers_right} of {len(texts)}; reasoning right too: {whole_right}")


if __name__ == "__main__":
    main()
