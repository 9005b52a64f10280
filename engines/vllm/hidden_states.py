"""vLLM's hidden-states connector on a CPU: its own code, without the pinned memory that a CPU build does not have.

Used as `kv_connector` with `kv_connector_module_path` naming this module, in the place of `ExampleHiddenStatesConnector`.
"""

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as original


class _Torch:
    """torch, as that module sees it, but for `pin_memory`."""

    def __getattr__(self, name):
        return getattr(torch, name)

    @staticmethod
    def empty_like(tensor, *, pin_memory, **settings):
        return torch.empty_like(tensor, **settings)


original.torch = _Torch()


class CpuHiddenStatesConnector(original.ExampleHiddenStatesConnector):
    """See the module."""
