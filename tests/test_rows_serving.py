"""The prompts of rows beside what vLLM's server makes of the same messages, token for token.

The server is vLLM's own for rendering: it takes chat requests, runs no model, and answers with the
token ids that it would prefill.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cases import demo_verifier
from servers import vllm

from kimi_eagle.rows.render import Renderer
from kimi_eagle.rows.tokenizer import load_tokenizer

pytestmark = pytest.mark.slow

# Everything that a server hands over: names, ids, values of arguments, reasoning, tools, options.
TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>{% endif %}"
    "{% for m in messages %}<|im_{{ m.role if m.role in ('user', 'assistant') else 'system' }}|>"
    "{{ m.name or m.role }}<|im_middle|>{{ m.tool_call_id }}"
    "<think>{{ m.get('reasoning', m.get('reasoning_content', '')) }}</think>"
    "{% if m.content is string %}{{ m.content }}"
    "{% elif m.content %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}"
    "{% for c in m.tool_calls or [] %}{{ c.id }}{{ c.function.name }}"
    "{{ c.function.arguments | tojson }}{% endfor %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|><think>"
    "{% if thinking is defined and not thinking %}</think>{% endif %}{% endif %}"
)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 1,
    "num_hidden_layers": 1,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}
PARAMETERS = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "null"}}}
CALL = {
    "id": "functions.get:0",
    "type": "function",
    "function": {"name": "get", "arguments": '{"city":  "Zürich",\n"n": 1.50}'},
}
SYSTEM = {"role": "system", "content": "Be\n brief. "}
USER = {"role": "user", "content": " What's the weather in 東京?\n", "name": "Ann"}
RETURN = {"role": "tool", "tool_call_id": "functions.get:0", "content": '{"t": 31}'}
PARTS = {"role": "user", "content": [{"type": "text", "text": "hel"}]}
CASES: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]], bool | None]] = {
    "plain": ([USER], [], None),
    "system": ([SYSTEM, USER], [], None),
    "no thinking": ([SYSTEM, USER], [], False),
    "history": ([USER, {"role": "assistant", "content": "31 C"}, USER], [], None),
    "reasoning": (
        [USER, {"role": "assistant", "content": "a", "reasoning_content": "why\n"}, USER],
        [],
        None,
    ),
    "call": ([USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, RETURN], [], None),
    "reasoning call": (
        [
            USER,
            {
                "role": "assistant",
                "content": "I look.",
                "reasoning_content": "why",
                "tool_calls": [CALL],
            },
            RETURN,
        ],
        [{"type": "function", "function": {"name": "get", "parameters": PARAMETERS}}],
        None,
    ),
    "tools in another order": (
        [USER],
        [
            {
                "function": {
                    "parameters": PARAMETERS,
                    "strict": True,
                    "description": "Gets.",
                    "name": "get",
                },
                "type": "function",
            },
            {"type": "function", "function": {"name": "put"}},
        ],
        False,
    ),
    "parts": ([PARTS], [], None),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's tokenizer, that template, and the smallest model that vLLM renders for."""
    folder = tmp_path_factory.mktemp("serving") / "model"
    tokenizer = load_tokenizer(demo_verifier())
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": len(tokenizer)}))
    return folder


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    log = tmp_path_factory.mktemp("rendering") / "log"
    with vllm(log, "launch", "render", str(model)) as address:
        yield address


@pytest.mark.parametrize("case", CASES)
def test_prompts_are_what_vllm_renders(server: str, model: Path, case: str) -> None:
    messages, tools, thinking = CASES[case]
    body: dict[str, Any] = {"messages": messages, "add_generation_prompt": True}
    if tools:
        body |= {"tools": tools, "tool_choice": "none"}
    if thinking is not None:
        body["chat_template_kwargs"] = {"thinking": thinking}
    request = urllib.request.Request(
        f"{server}/v1/chat/completions/render",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        served = json.load(answer)["token_ids"]
    renderer = Renderer(load_tokenizer(model))
    plain = [{**message, "content": "hel"} if message is PARTS else message for message in messages]
    sent = renderer.prompt_ids(plain, tools, thinking=thinking)
    assert renderer.decode(sent) == renderer.decode(served)
    assert sent == served
