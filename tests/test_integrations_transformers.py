"""attn_implementation="kittens" against eager attention, on tiny random models of the families that differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformer_families import (
    DECODERS,
    FAMILIES,
    IS_5,
    TOKENS,
    Fallbacks,
    Family,
    assert_close_to_exact,
    assert_same,
    every_decoder,
    every_family,
    family_names,
    main_output,
    masking_utils,
    run,
    transformers,
)

import kittens_torch
from kittens_torch.integrations import transformers as ours

pytestmark = pytest.mark.usefixtures("only_ours")


@every_family
def test_outputs_and_gradients(name: str) -> None:
    family = FAMILIES[name]
    model, inputs = family.build(), family.inputs()
    eager = run(model, "eager", inputs)
    with Fallbacks(""):
        mine = run(model, "kittens", inputs)
    assert_same(mine, eager, 1e-4)
    model.set_attn_implementation("kittens")
    assert model.config._attn_implementation == "kittens"


@pytest.mark.gpu
@every_family
def test_outputs_and_gradients_on_the_gpu(name: str) -> None:
    family = FAMILIES[name]
    model = family.build().to("cuda")
    inputs = {key: word.to("cuda") for key, word in family.inputs().items()}
    exact = run(model, "eager", inputs)
    model = model.bfloat16()
    inputs = {key: word.bfloat16() if word.is_floating_point() else word for key, word in inputs.items()}
    eager = run(model, "eager", inputs)
    with Fallbacks(""):
        mine = run(model, "kittens", inputs)
    assert_close_to_exact(mine, eager, exact)


@every_family
def test_attention_matters(name: str) -> None:
    """The comparison above would see an attention that is off: without the window, the mask, the cap or the sinks."""
    family = FAMILIES[name]
    model = family.build()
    inputs = family.inputs()
    eager = run(model, "eager", inputs)["output"]

    def wrong(module: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **more: Any) -> Any:
        return ours.attention_forward(module, query, key, value, None, is_causal=False)

    ours._interfaces()[0].register("wrong", wrong)
    ours._interfaces()[1].register("wrong", masking_utils.sdpa_mask)
    try:
        mine = run(model, "wrong", inputs)["output"]
    finally:
        del ours._interfaces()[0]._global_mapping["wrong"], ours._interfaces()[1]._global_mapping["wrong"]
    if name not in ("ViT", "SigLIP", "BERT"):  # full attention is right for these
        assert (mine - eager).abs().max() > 1e-3 * eager.abs().max()


def generate(model: Any, implementation: str, **settings: Any) -> Tensor:
    model.set_attn_implementation(implementation)
    return model.generate(max_new_tokens=8, do_sample=False, pad_token_id=0, **settings)


@every_decoder
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_greedy_generation(name: str, cache: str) -> None:
    model = FAMILIES[name].build()
    settings = {} if cache == "dynamic" else {"cache_implementation": "static"}
    eager = generate(model, "eager", input_ids=TOKENS)
    # A static cache is longer than what it holds: every step has a dense mask.
    with Fallbacks(""):
        mine = generate(model, "kittens", input_ids=TOKENS, **settings)
    assert torch.equal(mine, eager) and mine.shape == (2, 28)


@every_decoder
def test_generation_with_left_padding(name: str) -> None:
    model = FAMILIES[name].build()
    present = torch.ones_like(TOKENS)
    present[0, :6] = 0
    with Fallbacks(""):
        mine = generate(model, "kittens", input_ids=TOKENS, attention_mask=present)
    assert torch.equal(mine, generate(model, "eager", input_ids=TOKENS, attention_mask=present))
    alone = generate(model, "eager", input_ids=TOKENS[:1, 6:])
    assert torch.equal(mine[0, 20:], alone[0, 14:]), "the padding must not matter"


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", [*DECODERS, *family_names(model="BertModel"), *family_names(model="ModernBertModel")])
def test_padding(name: str, side: str) -> None:
    model = FAMILIES[name].build()
    present = torch.ones_like(TOKENS, dtype=torch.bool)
    present[0, slice(6) if side == "left" else slice(14, None)] = False
    inputs = {"input_ids": TOKENS, "attention_mask": present.long()}
    eager = run(model, "eager", inputs, present)
    with Fallbacks(""):
        mine = run(model, "kittens", inputs, present)
    assert_same(mine, eager, 1e-4)
    with Fallbacks(""):  # a mask without padding is none
        run(model, "kittens", {**inputs, "attention_mask": torch.ones_like(TOKENS)})


@every_decoder
@pytest.mark.parametrize("first", [1, 5, 12, 19])
def test_prefill_in_two_parts(name: str, first: int) -> None:
    """Queries that are the last of the sequence: the lower-right corner, and the window on it."""
    model = FAMILIES[name].build()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(TOKENS).logits
        model.set_attn_implementation("kittens")
        head = model(TOKENS[:, :first], use_cache=True)
        tail = model(TOKENS[:, first:], past_key_values=head.past_key_values)
    logits = torch.cat([head.logits, tail.logits], dim=1)
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()


@every_decoder
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing(name: str, use_reentrant: bool) -> None:
    model = FAMILIES[name].build().train()
    expected = run(model, "eager", {"input_ids": TOKENS})
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    with Fallbacks(""):
        mine = run(model, "kittens", {"input_ids": TOKENS})
    assert_same(mine, expected, 1e-4)


@pytest.mark.parametrize("name", ["Mistral", "Llama", "gpt-oss"])
def test_dropout_in_training(name: str) -> None:
    family = FAMILIES[name]
    model = Family(family.model, family.config, {**family.settings, "attention_dropout": 0.5}).build()
    with Fallbacks(""):
        run(model, "kittens", {"input_ids": TOKENS})
        model.train()
        torch.manual_seed(4)
        first = run(model, "kittens", {"input_ids": TOKENS})
        torch.manual_seed(4)
        again = run(model, "kittens", {"input_ids": TOKENS})
        assert all(torch.equal(again[part], first[part]) for part in first)
        assert not torch.equal(run(model, "kittens", {"input_ids": TOKENS})["output"], first["output"])


def test_packed_sequences_stay_apart() -> None:
    model = FAMILIES["Llama"].build()
    positions = torch.cat([torch.arange(8), torch.arange(12)])[None]
    packed = {"input_ids": TOKENS[:1], "position_ids": positions, "use_cache": False}
    with Fallbacks(""):
        mine = run(model, "kittens", packed)["output"]
    apart = [run(model, "eager", {"input_ids": part})["output"] for part in (TOKENS[:1, :8], TOKENS[:1, 8:])]
    torch.testing.assert_close(mine, torch.cat(apart, dim=1), atol=1e-5, rtol=1e-4)
    model.set_attn_implementation("kittens")
    with pytest.raises(NotImplementedError, match="cu_seq_lens_q"), torch.no_grad():
        model(TOKENS[:1], cu_seq_lens_q=torch.tensor([0, 8, 20]), cu_seq_lens_k=torch.tensor([0, 8, 20]))


def test_mask_of_the_user() -> None:
    """A 4-D mask goes through as it is."""
    model = FAMILIES["Llama"].build()
    mask = torch.zeros(2, 1, 20, 20).masked_fill(torch.rand(2, 1, 20, 20) < 0.5, -1e4)
    inputs = {"input_ids": TOKENS, "attention_mask": mask}
    with Fallbacks(""):
        mine = run(model, "kittens", inputs)
    assert_same(mine, run(model, "eager", inputs), 1e-4)


@pytest.mark.skipif(not IS_5, reason="transformers 4.57 lets every layer decide")
@every_family
def test_weights_of_the_attention(name: str) -> None:
    """Computed where they are asked for, as eager attention has them. SigLIP does not pass the wish on to its layers,
    and has none, as with "sdpa"."""
    model, inputs = FAMILIES[name].build(), FAMILIES[name].inputs()
    model.set_attn_implementation("eager")
    eager = model(**inputs, output_attentions=True)
    model.set_attn_implementation("kittens")
    with Fallbacks("output_attentions" if name != "SigLIP" else ""):
        mine = model(**inputs, output_attentions=True)
    fields = [
        field
        for field in ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions")
        if field in eager
    ]
    assert fields
    if name == "SigLIP":
        assert mine["attentions"] == ()
        fields = []
    for field in fields:
        for layer, expected in zip(mine[field], eager[field], strict=True):
            torch.testing.assert_close(layer, expected, atol=1e-5, rtol=1e-3)
    torch.testing.assert_close(main_output(mine), main_output(eager), atol=1e-4, rtol=1e-3)


def test_a_replaced_attention_of_torch_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's context parallelism replaces it, and would compute with a part of the keys without that."""
    model = FAMILIES["Llama"].build()
    expected = run(model, "kittens", {"input_ids": TOKENS})
    seen: list[Any] = []

    def replacement(*arguments: Any, **keywords: Any) -> Tensor:
        seen.append((keywords["attn_mask"], keywords["is_causal"]))
        return by_torch(*arguments, **keywords)

    by_torch = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", replacement)
    with Fallbacks("replaced"):
        mine = run(model, "kittens", {"input_ids": TOKENS})
    assert seen == [(None, True)] * 2
    assert_same(mine, expected, 1e-4)
    for name in ("Gemma-2", "gpt-oss"):  # whose softcap and sinks it does not know
        with pytest.raises(NotImplementedError, match="replaced"):
            run(FAMILIES[name].build(), "kittens", {"input_ids": TOKENS})


def test_chosen_when_loading(tmp_path: Path) -> None:
    FAMILIES["Llama"].build().save_pretrained(tmp_path)
    models = [
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=implementation)
        for implementation in ("eager", "kittens")
    ]
    assert [model.config._attn_implementation for model in models] == ["eager", "kittens"]
    with torch.no_grad(), Fallbacks(""):
        expected, mine = (model(TOKENS).logits for model in models)
    torch.testing.assert_close(mine, expected, atol=1e-5, rtol=1e-4)


def test_enable_serves_the_models_that_use_torchs() -> None:
    model = FAMILIES["Llama"].build()
    expected = run(model, "eager", {"input_ids": TOKENS})
    with kittens_torch.enabled(), kittens_torch.report() as report:
        mine = run(model, "sdpa", {"input_ids": TOKENS})
    assert [call.plan.machine for call in report.calls] == ["cpu"] * 2
    assert_same(mine, expected, 1e-4)


def test_grouped_heads_are_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Size] = []

    def spy(query: Tensor, key: Tensor, *rest: Any, **more: Any) -> Tensor:
        seen.append(key.shape)
        return attention(query, key, *rest, **more)

    attention = kittens_torch.functional.attention
    monkeypatch.setattr(kittens_torch.functional, "attention", spy)
    run(FAMILIES["Mistral"].build(), "kittens", {"input_ids": TOKENS})
    assert seen == [(2, 2, 20, 16)] * 2
