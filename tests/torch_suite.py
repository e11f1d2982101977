"""PyTorch's own tests of its attention, with our kernels in the place of torch's.

    python tests/torch_suite.py PATH/TO/pytorch/test/test_transformers.py [options of pytest, -k for example]

runs the file twice, each time in a process of its own: as it is, and under `kittens_torch.enable()`. Take the file from
the sources of the installed torch's version; it needs `pip install expecttest`. The calls that torch runs faster come
to our kernels too, and warnings about fallbacks are off, because some tests count warnings.
Prints every test that passes without us and fails with us, and exits with 1 where there is one. On a GPU two are
expected, test_fused_backwards_throws_determinism_warning with warn_only for flash and for cuDNN: they ask for the
warning that the backward differs from run to run, and ours, in torch's deterministic mode, does not.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import outside_suite


def put_us_in(recorder: outside_suite.Recorder) -> None:
    import kittens_torch
    from kittens_torch import dispatch

    def count(outcome: Any) -> None:
        recorder.calls += outcome.reason == ""

    importlib.import_module("kittens_torch.enable").watchers.append(count)
    dispatch.cpu_prefers_torch = dispatch.gpu_prefers_torch = lambda *operands: False
    kittens_torch.set_fallback("silent")
    kittens_torch.enable()


if __name__ == "__main__":
    what = "test_transformers.py of the installed torch's version"
    raise SystemExit(outside_suite.main(__file__, __doc__ or "", what, put_us_in, sys.argv[1:]))
