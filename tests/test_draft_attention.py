"""A draft beside a verifier with MLA on a CPU without AMX: when something is done, and that vLLM's
kernel computes right what it is then given."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from conftest import DEMO

from kimi_eagle.engines.launch import cpu_build
from kimi_eagle.engines.vllm_options import attention_options, draft_options
from kimi_eagle.verifiers.facts import read_facts

JOB = {"draft": "folder", "draft_tokens": 3, "cpu": True, "mla": True}
EXTENSION = "kimi_eagle.engines.draft_attention.InBlocksOf16"


def options(amx: bool, machine: str = "x86_64", **job: Any) -> dict[str, Any]:
    found = draft_options({**JOB, **job}, machine=machine, amx=amx)
    assert found.pop("speculative_config") == {
        "method": "eagle3",
        "model": "folder",
        "num_speculative_tokens": 3,
    }
    return found


def test_without_amx_a_draft_of_a_verifier_with_mla_has_its_attention_in_small_blocks() -> None:
    assert options(amx=False) == {"worker_extension_cls": EXTENSION}


@pytest.mark.parametrize(
    ("amx", "job"),
    [
        (True, {}),
        (False, {"mla": False}),
        (False, {"cpu": False}),
        (False, {"machine": "aarch64"}),
    ],
)
def test_everywhere_else_vllm_is_left_as_it_is(amx: bool, job: dict[str, Any]) -> None:
    assert options(amx, **job) == {}


@pytest.mark.parametrize(
    ("job", "backend"),
    [
        ({"cpu": False, "mla": False, "heads": 9, "draft_heads": 18}, "TRITON_ATTN"),
        ({"cpu": False, "mla": False, "heads": 9, "draft_heads": 9}, None),
        ({"cpu": False, "mla": True, "heads": 9, "draft_heads": 18}, None),
        ({"cpu": True, "mla": False, "heads": 9, "draft_heads": 18}, None),
    ],
)
def test_on_a_gpu_query_heads_of_another_number_need_another_kernel(
    job: dict[str, Any], backend: str | None
) -> None:
    assert attention_options(job).get("attention_backend") == backend


def test_a_verifier_has_mla_whose_config_has_a_rank_of_latents() -> None:
    config = json.loads((DEMO / "verifier" / "config.json").read_text("utf-8"))
    assert read_facts(config).mla
    text = {key: value for key, value in config["text_config"].items() if key != "kv_lora_rank"}
    assert not read_facts({**config, "text_config": text}).mla


# A process of its own, since a backend is registered for good. Requests of several lengths, some of
# which run more than one token, in blocks that lie anyhow, against torch in float32.
KERNEL = """
import torch
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, _get_attn_isa
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.worker.utils import select_common_block_size

def common():
    backends = [CPUMLABackend, AttentionBackendEnum.CPU_ATTN.get_class()]
    return select_common_block_size(16, backends)

try:
    print("vLLM itself takes", common())
except ValueError as error:
    print(error)
from kimi_eagle.engines import draft_attention
assert AttentionBackendEnum.CPU_ATTN.get_class() is draft_attention.CPUAttentionInBlocksOf16
assert common() == 16

torch.manual_seed(0)
block, kv_heads, heads, dim, blocks = 16, 2, 4, {dim}, 64
new, lengths = [1, 4, 37, 4, 16], [1, 40, 37, 131, 64]
isa = _get_attn_isa(torch.bfloat16, block, dim)
assert isa == "vec16", isa
cache = torch.full((blocks, kv_heads, block, 2 * dim), float("nan"), dtype=torch.bfloat16)
keys_at, values_at = cache.view(blocks, kv_heads, 2 * block, dim).chunk(2, dim=2)
# Of a block that is used in part the kernel reads the rest, and weighs it with 0.
values_at.zero_()
widest = max(-(-length // block) for length in lengths)
table = torch.randperm(blocks)[: len(lengths) * widest].view(len(lengths), -1).int()
keys = [torch.randn(length, kv_heads, dim).bfloat16() for length in lengths]
values = [torch.randn(length, kv_heads, dim).bfloat16() for length in lengths]
queries = [torch.randn(count, heads, dim).bfloat16() for count in new]
slots = [
    table[at, torch.arange(length) // block].long() * block + torch.arange(length) % block
    for at, length in enumerate(lengths)
]
ops.cpu_attn_reshape_and_cache(
    torch.cat(keys), torch.cat(values), keys_at, values_at, torch.cat(slots), isa
)
starts = torch.tensor([0, *new]).cumsum(0).int()
held = torch.tensor(lengths).int()
plan = ops.cpu_attn_get_scheduler_metadata(
    num_reqs=len(new), num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, seq_lens=held,
    dtype=torch.bfloat16, query_start_loc=starts, causal=True, sliding_window_size=-1, isa=isa,
    enable_kv_split=True,
)
found = torch.empty(sum(new), heads, dim, dtype=torch.bfloat16)
ops.cpu_attention_with_kv_cache(
    query=torch.cat(queries), key_cache=keys_at, value_cache=values_at, output=found,
    query_start_loc=starts, seq_lens=held, scale=dim**-0.5, causal=True, alibi_slopes=None,
    sliding_window=-1, block_table=table, softcap=0.0, scheduler_metadata=plan, s_aux=None,
)
for at, (count, length) in enumerate(zip(new, lengths)):
    k, v = (
        tensors[at].float().repeat_interleave(heads // kv_heads, dim=1).transpose(0, 1)
        for tensors in (keys, values)
    )
    seen = torch.ones(count, length, dtype=torch.bool).tril(length - count)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        queries[at].float().transpose(0, 1), k, v, attn_mask=seen
    ).transpose(0, 1)
    torch.testing.assert_close(
        found[starts[at] : starts[at + 1]].float(), wanted, atol=0.02, rtol=0.02
    )
print("right")
"""


@pytest.mark.slow
@pytest.mark.skipif(not cpu_build(), reason="vLLM here is not the CPU build")
@pytest.mark.parametrize("dim", [64, 128])
def test_vllms_kernel_computes_right_in_blocks_of_sixteen(dim: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KERNEL.replace("{dim}", str(dim))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    refused, right = done.stdout.splitlines()[-2:]
    # Else vLLM has come to do it by itself, and ours can go.
    assert refused == "No common block size for 16 (CPU_MLA: [16]; CPU_ATTN: [MultipleOf(32)])."
    assert right == "right"
