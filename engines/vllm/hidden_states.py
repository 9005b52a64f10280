"""vLLM's hidden-states connector on a CPU: its own code, without pinned memory and with events that can be asked.

Used as `kv_connector` with `kv_connector_module_path` naming this module, in the place of `ExampleHiddenStatesConnector`.
"""

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as original


class _Event:
    """A copy on a CPU is done when it returns; the stand-in of vLLM's CPU build cannot say so (it has no `query`)."""

    def record(self, stream=None):
        pass

    def synchronize(self):
        pass

    def query(self):
        return True


class _Cuda:
    """torch.cuda, but for its events."""

    Event = _Event

    def __getattr__(self, name):
        return getattr(torch.cuda, name)


class _Torch:
    """torch, as that module sees it, but for `pin_memory` and events."""

    cuda = _Cuda()

    def __getattr__(self, name):
        return getattr(torch, name)

    @staticmethod
    def empty_like(tensor, *, pin_memory, **settings):
        return torch.empty_like(tensor, **settings)


original.torch = _Torch()


class CpuHiddenStatesConnector(original.ExampleHiddenStatesConnector):
    """See the module."""
