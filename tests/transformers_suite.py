"""The tests that transformers has of a model, with our attention in the place of its "sdpa".

    python tests/transformers_suite.py PATH/TO/transformers/tests/models/llama/test_modeling_llama.py

runs the file twice, each time in a process of its own: as it is, and with the attention function and the mask function
of "kittens" under the name "sdpa", which models take where a test asks for nothing else, and our drop-in under the name
of torch's function, which models call that choose from tables of their own (BERT and T5 of transformers 4.57). Options
of pytest may follow. Take the file from a source tree of the installed transformers' version; it needs
`pip install parameterized datasets`. The calls that torch runs faster come to our kernels too, and warnings about
fallbacks are off. Prints every test that passes without us and fails with us, and exits with 1 where there is one.
"""

from __future__ import annotations

import sys
from typing import Any

import outside_suite


def put_us_in(recorder: outside_suite.Recorder) -> None:
    import torch

    import kittens_torch
    from kittens_torch import dispatch, ops
    from kittens_torch.integrations import transformers as integration

    integration.register()
    dispatch.cpu_prefers_torch = dispatch.gpu_prefers_torch = lambda *operands: False
    kittens_torch.set_fallback("silent")

    def counting(op: Any) -> Any:
        def counted(*arguments: Any) -> Any:
            if not torch.compiler.is_compiling():
                recorder.calls += 1
            return op(*arguments)

        return counted

    for name in ("forward", "forward_modified"):
        setattr(ops, name, counting(getattr(ops, name)))
    attentions, masks = integration._interfaces()
    attentions._global_mapping["sdpa"] = integration.attention_forward
    masks._global_mapping["sdpa"] = integration.make_mask
    ours = kittens_torch.scaled_dot_product_attention
    # The integration must know that torch's function is ours: another one, as context parallelism puts there, it calls.
    torch.nn.functional.scaled_dot_product_attention = integration._torch_attention = ours


if __name__ == "__main__":
    what = "a test file of a model in the sources of the installed transformers' version"
    raise SystemExit(outside_suite.main(__file__, __doc__ or "", what, put_us_in, sys.argv[1:]))
