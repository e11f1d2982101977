"""As test_known_failures: the rows on models of transformers and on graphs of torch.compile and torch.export."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import inputs, normal
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from transformer_families import DECODER, FAMILIES, IS_5, TOKENS, Fallbacks, Family, assert_same, run

from kittens_torch import attention, ops
from kittens_torch import scaled_dot_product_attention as drop_in
from kittens_torch.integrations import transformers as ours

pytestmark = pytest.mark.usefixtures("only_ours")


def _one_layer(name: str, **settings: Any) -> Any:
    family = FAMILIES[name]
    return replace(family, settings={**family.settings, "num_hidden_layers": 1, **settings}).build()


def test_row_07_window_of_a_model() -> None:
    """huggingface/transformers#39408: a window of 4 shows 4 tokens, the own among them, also in decoding."""
    model, tokens = _one_layer("Mistral", sliding_window=4), TOKENS[:1, :12]
    with Fallbacks(""):
        mine = run(model, "kittens", {"input_ids": tokens})
        other = run(model, "kittens", {"input_ids": torch.cat([tokens[:, :1] % 50 + 5, tokens[:, 1:]], 1)})
        with torch.no_grad():
            cache = model(tokens[:, :11], use_cache=True).past_key_values
            step = model(tokens[:, 11:], past_key_values=cache, use_cache=True).logits
    assert_same(mine, run(model, "eager", {"input_ids": tokens}), 1e-4)
    seen = (mine["output"] != other["output"]).any(-1)[0]
    assert seen.tolist() == [True] * 4 + [False] * 8, "the rows that see the first token"
    torch.testing.assert_close(step[:, 0], mine["output"][:, 11], atol=1e-4, rtol=1e-4)


def test_row_37_lengths_that_claim_more_tokens_than_there_are() -> None:
    """huggingface/transformers#44911: without a mask they are refused, or they say nothing that is used."""
    query, key, value = normal(1, 4, 256, 16), normal(1, 2, 256, 16), normal(1, 2, 256, 16)
    module = torch.nn.Module()
    expected = drop_in(query, key, value, is_causal=True, enable_gqa=True)

    def packed(starts: list[int]) -> Tensor:
        lengths = torch.tensor(starts, dtype=torch.int32)
        settings = {"cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths, "max_length_q": 64, "max_length_k": 64}
        return ours.attention_forward(module, query, key, value, None, **settings)[0]

    torch.testing.assert_close(packed([0, 300]).transpose(1, 2), expected)
    for starts in ([0, 256, 512, 768], [0, 128, 256], [0, 200, 100]):
        with pytest.raises(NotImplementedError, match="cu_seq_lens_q"):
            packed(starts)


MULTI_AXIS = {"mrope_section": [2, 3, 3], "rope_type": "default"}
QWEN2_VL = Family(
    "Qwen2VLTextModel",
    "Qwen2VLTextConfig",
    {**DECODER, "rope_parameters" if IS_5 else "rope_scaling": MULTI_AXIS, "use_sliding_window": False},
)


def _multi_axis_model() -> Any:
    import transformers
    from transformers.models.qwen2_vl import modeling_qwen2_vl

    for name in (QWEN2_VL.model, QWEN2_VL.config):
        if not hasattr(transformers, name):
            setattr(transformers, name, getattr(modeling_qwen2_vl, name))
    return QWEN2_VL.build()


def test_row_37_positions_of_three_axes_are_no_pack() -> None:
    """huggingface/transformers#44911: the axes of a multi-axis rotary embedding are not three sequences."""
    model, tokens = _multi_axis_model(), torch.randint(3, 61, (1, 256))
    places = torch.arange(256).expand(3, 1, 256)
    for positions in (places, places * torch.tensor([1, 2, 3]).view(3, 1, 1)):
        inputs = {"input_ids": tokens, "position_ids": positions, "use_cache": False}
        with Fallbacks(""):
            mine = run(model, "kittens", inputs)
        assert_same(mine, run(model, "eager", inputs), 1e-4)
        if positions is places:
            without = run(model, "kittens", {"input_ids": tokens, "use_cache": False})
            assert_same(mine, without, 1e-5)


@pytest.mark.parametrize("what", ["lengths", "packs"])
def test_row_43_a_compiled_model_is_compiled_for_all(what: str) -> None:
    """huggingface/transformers#41803: no graph break, and no compilation for each length or pack."""
    torch._dynamo.reset()
    model = _one_layer("Llama")
    counter = CompileCounterWithBackend("eager")

    def arguments(index: int) -> dict[str, Any]:
        if what == "lengths":
            return {"input_ids": TOKENS[:, : 9 + index], "use_cache": False}
        cut = 3 + 2 * index
        places = torch.cat([torch.arange(cut), torch.arange(20 - cut)])
        return {"input_ids": TOKENS[:1], "position_ids": places[None], "use_cache": False}

    with torch.inference_mode(), Fallbacks(""):
        model.set_attn_implementation("eager")
        expected = [model(**arguments(index)).logits for index in range(8)]
        model.set_attn_implementation("kittens")
        eager = [model(**arguments(index)).logits for index in range(8)]
        compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
        outputs = [compiled(**arguments(index)).logits for index in range(8)]
    assert counter.frame_count <= 2
    for results in (eager, outputs):
        for mine, exact in zip(results, expected, strict=True):
            torch.testing.assert_close(mine, exact, atol=1e-4, rtol=1e-3)


def test_row_43_one_node_of_an_exported_program() -> None:
    class Module(torch.nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
            return drop_in(query, key, value, is_causal=True), drop_in(query, key, value, mask)

    operands = (*inputs("cpu", torch.float32, length_q=70), torch.rand(70, 70) > 0.3)
    program = torch.export.export(Module(), operands)
    called = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert [name for name in called if "attention" in name or "kittens" in name] == [
        str(ops.forward),
        str(ops.forward_modified),
    ]
    for mine, exact in zip(program.module()(*operands), Module()(*operands), strict=True):
        assert torch.equal(mine, exact)


@pytest.mark.gpu
def test_row_43_no_call_waits_for_the_gpu() -> None:
    tensors = inputs("cuda", torch.bfloat16, batch=2, heads=4, heads_k=2, length_q=300)
    query, key, value = (tensor.requires_grad_() for tensor in tensors)
    options: list[dict[str, Any]] = [
        {},
        {"causal": "lower_right", "window": (100, None), "softcap": 20.0},
        {"mask": torch.rand(2, 1, 300, 300, device="cuda") > 0.2},
        {"key_lengths": torch.tensor([300, 17], device="cuda"), "alibi_slopes": torch.rand(4, device="cuda")},
        {"bias": normal(4, 300, 300, device="cuda").requires_grad_(), "sinks": normal(4, device="cuda")},
        {"dropout_p": 0.1},
    ]

    def run_all() -> None:
        for keywords in options:
            output = attention(query, key, value, **keywords)
            assert isinstance(output, Tensor)
            output.backward(output.detach())
        drop_in(query, key, value, is_causal=True, enable_gqa=True).backward(output.detach())

    run_all()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run_all()
    finally:
        torch.cuda.set_sync_debug_mode("default")
