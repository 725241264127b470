"""Glaive's tool traces (glaive-function-calling-v2): a `system` text that declares functions, and
one `chat` text of `USER:`, `ASSISTANT:` and `FUNCTION RESPONSE:`. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from kimi_eagle.rows.buckets import Rejected
from kimi_eagle.rows.tool_calls import parse

_SPEAKER = re.compile(r"(?:^|\n)\s*(USER|ASSISTANT|FUNCTION RESPONSE): ?")
_CALL, _END = "<functioncall>", "<|endoftext|>"
# Glaive's writer put the arguments, which are JSON, between single quotes.
_QUOTED = re.compile(r'("arguments"\s*:\s*)\'(.*)\'(\s*}\s*)$', re.DOTALL)
_ROLES = {"USER": "user", "ASSISTANT": "assistant", "FUNCTION RESPONSE": "function"}


def glaive_turns(value: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[Any], str | None]:
    """Turns as OpenAI's older form has them, the tools, and the system text without them.

    Raises:
        Rejected: the texts are not Glaive's.
    """
    chat, system = value.get("chat"), value.get("system")
    if not isinstance(chat, str) or not isinstance(system, str | None):
        raise Rejected("no_messages", "chat and system must be text")
    found = list(_SPEAKER.finditer(chat))
    if not found or chat[: found[0].start()].strip():
        raise Rejected("no_messages", "the chat does not begin with USER: or ASSISTANT:")
    turns: list[dict[str, Any]] = []
    for index, match in enumerate(found):
        end = found[index + 1].start() if index + 1 < len(found) else len(chat)
        said = chat[match.end() : end].replace(_END, "").strip()
        turns.append(_turn(_ROLES[match[1]], said))
    return (turns, *_declared(system or ""))


def _turn(role: str, said: str) -> dict[str, Any]:
    before, call, after = said.partition(_CALL)
    if not call:
        return {"role": role, "content": said}
    if role != "assistant" or _CALL in after:
        raise Rejected("bad_tools", f"{_CALL} where no single call stands")
    written = _QUOTED.sub(lambda found: found[1] + json.dumps(found[2]) + found[3], after.strip())
    called = parse(written, "functioncall")
    return {"role": role, "content": before.strip() or None, "function_call": called}


def _declared(system: str) -> tuple[list[Any], str | None]:
    """The functions that a system text declares, one JSON object after another at its end."""
    text = system.strip().removeprefix("SYSTEM:").strip()
    start = text.find("{")
    if start < 0:
        return [], text or None
    tools, at, decoder = [], start, json.JSONDecoder()
    while at < len(text):
        try:
            _, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            raise Rejected("bad_tools_json", "the functions of the system text") from None
        tools.append(parse(text[at:end], "the functions of the system text"))
        at = end + len(text[end:]) - len(text[end:].lstrip())
    # The sentence that leads to the functions says nothing without them; the template declares
    # tools in its own words.
    said = re.split(r"\s*(?:with access to|Use them if required)", text[:start])[0].strip(" -\n")
    return tools, f"{said.rstrip('.')}." if said else None
