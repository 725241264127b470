"""The demo verifier's shape, its tokenizer, and its checkpoint folder in the form of the hub's."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.models.kimi_k25 import Kimi_K25Config, Kimi_K25ForConditionalGeneration

VOCAB_SIZE = 1024
MAX_POSITIONS = 2048
HIDDEN_SIZE = 128
LAYERS = 8
SHARDS = 2
TEMPLATE = Path(__file__).with_name("chat_template.jinja")

BOS, UNK, PAD = "[BOS]", "[UNK]", "[PAD]"
END_OF_TURN = "<|im_end|>"
IMAGE, VIDEO = "<|media_pad|>", "<|kimi_k25_video_placeholder|>"
CONTROL_TOKENS = (
    BOS, "[EOS]", END_OF_TURN,
    "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>",
    "<|media_begin|>", "<|media_content|>", "<|media_end|>", IMAGE, VIDEO, UNK, PAD,
)  # fmt: skip
# As in Kimi's tokenizer these are added tokens but not special ones: decoded text keeps them.
THINKING_TOKENS = ("<think>", "</think>")

# Text is all that is served here; what reads the folder wants a vision tower all the same.
VISION = {
    "patch_size": 14,
    "pos_emb_height": 8,
    "pos_emb_width": 8,
    "pos_emb_time": 4,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
}

# transformers 5.19 saves this architecture under names that it reads back itself, so that a round
# trip hides it, but that neither the hub nor vLLM knows.
_HUB_NAMES = (
    (re.compile(r"^language_model\.model\.blocks\."), "language_model.model.layers."),
    (re.compile(r"^model\.mm_projector\."), "mm_projector."),
    (re.compile(r"^vision_tower\.encoder\.patch_embed\."), "vision_tower.patch_embed."),
)


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE of ``VOCAB_SIZE`` tokens, added ones included.

    Each digit is a token of its own, so that the verifier sees the tens and the ones of a number.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(CONTROL_TOKENS) - len(THINKING_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(list(CONTROL_TOKENS))
    tokenizer.add_tokens(
        [AddedToken(text, special=False, normalized=False) for text in THINKING_TOKENS]
    )
    # The dialogues run out of pairs to merge before the vocabulary is full: reserve the rest.
    tokenizer.add_special_tokens(
        [f"<|reserved_token_{i}|>" for i in range(tokenizer.get_vocab_size(), VOCAB_SIZE)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=END_OF_TURN,
        unk_token=UNK,
        pad_token=PAD,
        chat_template=TEMPLATE.read_text(),
        model_max_length=MAX_POSITIONS,
    )


def verifier_config(tokenizer: PreTrainedTokenizerFast) -> Kimi_K25Config:
    """Kimi-K2.5's architecture with small sizes.

    The latent and rope parts of attention keep the real sizes (512 and 64): vLLM's MLA on CPU has
    no others.
    """
    token_id = tokenizer.convert_tokens_to_ids
    shared_ids = {
        "bos_token_id": token_id(BOS),
        "eos_token_id": token_id(END_OF_TURN),
        "pad_token_id": token_id(PAD),
    }
    text = {
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "vocab_size": len(tokenizer),
        "hidden_size": HIDDEN_SIZE,
        "num_hidden_layers": LAYERS,
        "first_k_dense_replace": 1,
        "intermediate_size": 256,
        "moe_intermediate_size": 48,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.827,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 64,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 64,
        "v_head_dim": 32,
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "initializer_range": 0.05,
        "tie_word_embeddings": False,
        "rope_theta": 50000.0,
        "rope_scaling": {
            "type": "yarn",
            "rope_type": "yarn",
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 512,
        },
        **shared_ids,
    }
    return Kimi_K25Config(
        text_config=text,
        vision_config=VISION,
        projection_hidden_size=VISION["hidden_size"],
        image_token_id=token_id(IMAGE),
        video_token_id=token_id(VIDEO),
        vision_start_token_id=token_id("<|media_begin|>"),
        vision_end_token_id=token_id("<|media_end|>"),
        tie_word_embeddings=False,
        **shared_ids,
    )


def save_verifier(
    model: Kimi_K25ForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, folder: Path
) -> None:
    """Write the folder: bf16 shards under the hub's tensor names, configs, tokenizer, template."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    _write_weights(model, folder)
    write_json(folder / "config.json", _hub_config(model.config))
    write_json(
        folder / "generation_config.json",
        {"do_sample": False, "eos_token_id": tokenizer.eos_token_id},
    )
    write_json(folder / "preprocessor_config.json", preprocessor_config())


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


def _write_weights(model: Kimi_K25ForConditionalGeneration, folder: Path) -> None:
    """Two shards, layers first, and their index."""
    with TemporaryDirectory() as scratch:
        model.save_pretrained(scratch)
        saved = load_file(Path(scratch) / "model.safetensors")
    tensors = {
        _hub_name(name): tensor.to(torch.bfloat16).contiguous() for name, tensor in saved.items()
    }
    weight_map: dict[str, str] = {}
    for number in range(1, SHARDS + 1):
        shard = f"model-{number:05d}-of-{SHARDS:05d}.safetensors"
        part = {name: tensors[name] for name in sorted(tensors) if _is_layer(name) == (number == 1)}
        save_file(part, folder / shard, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, shard))
    total_size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    write_json(folder / "model.safetensors.index.json", index)


def _is_layer(name: str) -> bool:
    return name.startswith("language_model.model.layers.")


def _hub_name(name: str) -> str:
    for pattern, replacement in _HUB_NAMES:
        name = pattern.sub(replacement, name)
    return name


def _hub_config(config: Kimi_K25Config) -> dict[str, Any]:
    """The config as the hub has it: its class name, ``kimi_k2`` inside, flat rope fields."""
    hub: dict[str, Any] = config.to_dict()
    hub["architectures"] = ["KimiK25ForConditionalGeneration"]
    hub["dtype"] = "bfloat16"
    # vLLM's EAGLE proposer reads the image token under this name.
    hub["media_placeholder_token_id"] = hub["image_token_id"]
    text = hub["text_config"]
    text.update(model_type="kimi_k2", num_nextn_predict_layers=0, dtype="bfloat16")
    scaling = text.pop("rope_parameters")
    text["rope_theta"] = scaling.pop("rope_theta")
    scaling.pop("rope_type")
    text["rope_scaling"] = scaling
    return hub


def preprocessor_config() -> dict[str, Any]:
    """Image settings; vLLM asks for them even where only text is served."""
    return {
        "image_processor_type": "KimiK25VisionProcessor",
        "media_proc_cfg": {
            "in_patch_limit": 64,
            "in_patch_limit_each_frame": 64,
            "in_patch_limit_video": None,
            "patch_size": 14,
            "patch_limit_on_one_side": 8,
            "merge_kernel_size": 2,
            "temporal_merge_kernel_size": 4,
            "fixed_output_tokens": None,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "sample_fps": 2.0,
            "max_num_frames_each_video": None,
            "timestamp_mode": "hh:mm:ss.fff",
        },
    }
