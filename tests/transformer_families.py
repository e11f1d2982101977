"""Tiny random models of transformers whose attentions differ, and what tests do with all of them."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from helpers import normal
from torch import Tensor

import kittens_torch
from kittens_torch import FallbackWarning

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: `make test` installs it")
importlib.import_module("transformers.modeling_utils")  # which registers us: kittens_torch was imported before
masking_utils = importlib.import_module("transformers.masking_utils")
IS_5 = int(transformers.__version__.split(".")[0]) >= 5

TOKENS = torch.randint(3, 61, (2, 20), generator=torch.Generator().manual_seed(1))
DECODER = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
MIXED = {"head_dim": 16, "sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}
ENCODER = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}


@dataclass(frozen=True)
class Family:
    """A tiny model and its inputs."""

    model: str
    config: str
    settings: dict[str, Any] = field(default_factory=dict)
    inputs: Callable[[], dict[str, Tensor]] = lambda: {"input_ids": TOKENS}

    def takes_other_attention(self) -> bool:
        """Older versions of some models have attention classes of their own, which no name of the table reaches."""
        module = importlib.import_module(getattr(transformers, self.model).__module__)
        return hasattr(module, "ALL_ATTENTION_FUNCTIONS")

    def build(self) -> Any:
        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**self.settings)
        model = getattr(transformers, self.model)(config).eval()
        with torch.no_grad():  # Initial weights are so small that attention hardly matters.
            for name, parameter in model.named_parameters():
                if parameter.dim() == 2 and any(
                    part in name for part in ("q_proj", "k_proj", "query", "key", "qkv", "Wqkv")
                ):
                    parameter.mul_(6.0)
                if name.endswith("sinks"):
                    parameter.normal_()
        return model


def _images(size: int) -> dict[str, Tensor]:
    return {"pixel_values": normal(2, 3, size, size)}


FAMILIES = {
    "Llama": Family("LlamaForCausalLM", "LlamaConfig", DECODER),
    "Qwen3": Family("Qwen3ForCausalLM", "Qwen3Config", {**DECODER, "head_dim": 32}),
    "Mistral": Family("MistralForCausalLM", "MistralConfig", {**DECODER, "sliding_window": 7}),
    "Gemma-3": Family("Gemma3ForCausalLM", "Gemma3TextConfig", {**DECODER, **MIXED}),
    "Phi-3": Family(
        "Phi3ForCausalLM",
        "Phi3Config",
        {**DECODER, "hidden_size": 192, "num_attention_heads": 2, "num_key_value_heads": 2, "sliding_window": 7},
    ),
    "Gemma-2": Family("Gemma2ForCausalLM", "Gemma2Config", {**DECODER, **MIXED}),
    "gpt-oss": Family(
        "GptOssForCausalLM",
        "GptOssConfig",
        {**DECODER, **MIXED, "num_local_experts": 1, "num_experts_per_tok": 1, "rope_scaling": None},
    ),
    "T5": Family(
        "T5ForConditionalGeneration",
        "T5Config",
        {"vocab_size": 61, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
        | {"pad_token_id": 0, "decoder_start_token_id": 0},
        lambda: {"input_ids": TOKENS, "decoder_input_ids": TOKENS[:, :9]},
    ),
    "Whisper": Family(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {"vocab_size": 61, "d_model": 64, "num_mel_bins": 8, "max_source_positions": 30, "max_target_positions": 40}
        | {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in
           {"layers": 2, "attention_heads": 4, "ffn_dim": 96}.items()}
        | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3},
        lambda: {"input_features": normal(2, 8, 60), "decoder_input_ids": TOKENS[:, :9]},
    ),
    "ViT": Family(
        "ViTModel", "ViTConfig", {**ENCODER, "image_size": 24, "patch_size": 8}, lambda: _images(24)
    ),
    "SigLIP": Family(
        "SiglipVisionModel",
        "SiglipVisionConfig",
        {**ENCODER, "hidden_size": 144, "image_size": 24, "patch_size": 8},  # head dim 72
        lambda: _images(24),
    ),
    "BERT": Family("BertModel", "BertConfig", {**ENCODER, "vocab_size": 61}),
    "ModernBERT": Family(
        "ModernBertModel",
        "ModernBertConfig",
        {**ENCODER, "vocab_size": 61, "local_attention": 8, "global_attn_every_n_layers": 2}
        | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2},
    ),
}  # fmt: skip


def family_names(**fields: Any) -> list[Any]:
    """Names for parametrize, of the families with these values; None: of all families."""
    return [
        pytest.param(
            name,
            marks=pytest.mark.skipif(
                not family.takes_other_attention(), reason="this version of the model has only its own attention"
            ),
        )
        for name, family in FAMILIES.items()
        if all(getattr(family, key) == value for key, value in fields.items())
    ]


DECODERS = [name for name, family in FAMILIES.items() if family.settings.get("num_key_value_heads")]
every_family = pytest.mark.parametrize("name", family_names())
every_decoder = pytest.mark.parametrize("name", DECODERS)


class Fallbacks:
    """The reasons of the fallbacks inside the context, where there must be one with `expected`, or none at all."""

    def __init__(self, expected: str) -> None:
        self.expected = expected

    def __enter__(self) -> None:
        self.before = kittens_torch.set_fallback("warn" if self.expected else "error")
        self.catcher = warnings.catch_warnings(record=True)
        self.caught = self.catcher.__enter__()
        warnings.simplefilter("always")

    def __exit__(self, kind: Any, *rest: Any) -> None:
        self.catcher.__exit__(kind, *rest)
        kittens_torch.set_fallback(self.before)
        if kind is None:
            reasons = {str(entry.message) for entry in self.caught if entry.category is FallbackWarning}
            if self.expected:
                assert any(self.expected in reason for reason in reasons), reasons
            else:
                assert not reasons


def main_output(outputs: Any) -> Tensor:
    return outputs.logits if hasattr(outputs, "logits") else outputs.last_hidden_state


def run(model: Any, implementation: str, inputs: dict[str, Any], rows: Tensor | None = None) -> dict[str, Tensor]:
    """The main output and all gradients of one implementation. rows: bool (B, L), the rows that count."""
    model.set_attn_implementation(implementation)
    model.zero_grad()
    output = main_output(model(**inputs))
    if rows is not None:
        output = output * rows[..., None]
    # Not the mean square, which a last LayerNorm makes constant.
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(5)).to(output)
    (output * weights).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert gradients
    return {"output": output.detach(), **gradients}


def assert_close_to_exact(mine: dict[str, Tensor], eager: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
    """Of two runs in a 16-bit type, ours is at most three times as far from the float32 run as eager's, and 2 %.

    The gradient of a key's bias is zero but for rounding, which in ours holds that of the output: it is measured
    against a twentieth of the model's largest entry.
    """
    assert mine.keys() == eager.keys() == exact.keys()
    largest = max(value.abs().max() for value in exact.values())
    for name, value in exact.items():
        error, its = (mine[name].float() - value).abs().max(), (eager[name].float() - value).abs().max()
        size = torch.maximum(value.abs().max(), largest / 20)
        assert error <= 3 * its + 0.02 * size, f"{name}: error {error:.2e}, eager's {its:.2e}, largest entry {size:.2e}"


def assert_same(mine: dict[str, Tensor], eager: dict[str, Tensor], share: float) -> None:
    """Every tensor within `share` of the largest entry of eager's; some gradients are zero but for rounding."""
    assert mine.keys() == eager.keys()
    largest = max(exact.abs().max() for exact in eager.values())
    for name, exact in eager.items():
        error, size = (mine[name] - exact).abs().max(), torch.maximum(exact.abs().max(), largest / 100)
        assert error <= share * size + 1e-7, f"{name}: error {error:.2e}, largest entry {size:.2e}"
