"""Run the real SGLang server on a CPU without AMX: `python launch.py --model-path DIR …` (SGLang's own flags).

Three things stand between the published wheel and such a machine: torchvision's compiled operators are
not there, the CPU engine must be chosen by an environment variable before the first import, and the
`intel_amx` attention backend (the only one that speculates on a CPU) is refused without AMX although the
stand-in kernels need none. SGLang's child processes import this file again, so all of it stands outside
the main guard except the start.
"""

import os

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")

import torch

for name in ("nms", "qnms"):
    torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


class _PlatformWithAMX:
    """SGLang's platform object, claiming AMX while the arguments are checked."""

    has_amx = True

    def __init__(self, platform):
        self._platform = platform

    def __getattr__(self, name):
        return getattr(self._platform, name)


if __name__ == "__main__":
    import runpy
    import sys

    from sglang.srt.arg_groups import overrides

    real_platform = overrides.get_platform
    overrides.get_platform = lambda: _PlatformWithAMX(real_platform())
    sys.argv[0] = "sglang.launch_server"
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=False)
