"""The draft's two operations that keep less for the backward pass than torch does, against torch's own and plain expressions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from eyas.draft.model import _GatedDown, rms_norm

EPS = 1e-5
Inputs = tuple[torch.Tensor, ...]


def rows(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    """Rows of rms 0.1 to 50, as the target's states are."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-1, 1.7, shape[-2], dtype=torch.float64).unsqueeze(1)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * sizes).to(dtype).requires_grad_()


def weight(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def gated_down(gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return _GatedDown.apply(gate_up, down)


def plain_gated_down(gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return (gate / (1 + torch.exp(-gate)) * up) @ down.T


def plain_norm(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS) * scale


def norm(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return rms_norm(x, scale, EPS)


def torch_norm(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, scale.shape, scale, EPS)


def torch_gated_down(gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.linear(F.silu(gate) * up, down)


def derived(function: Callable[..., torch.Tensor], inputs: Inputs, grad: torch.Tensor) -> Inputs:
    """Value and gradients with `grad` coming from above."""
    value = function(*inputs)
    return value.detach(), *torch.autograd.grad(value, inputs, grad.to(value.dtype))


NORM, MLP = (norm, plain_norm, torch_norm), (gated_down, plain_gated_down, torch_gated_down)


@pytest.mark.parametrize(
    ("function", "inputs"),
    [(norm, (rows(5, 8), weight(8))), (norm, (rows(2, 5, 8), weight(8))), (gated_down, (weight(5, 12), weight(4, 6, seed=2)))],
    ids=["norm", "norm of steps", "gated down"],
)
def test_gradients_equal_finite_differences(function: Callable[..., torch.Tensor], inputs: Inputs) -> None:
    assert torch.autograd.gradcheck(function, inputs)


@pytest.mark.parametrize(
    ("functions", "inputs"), [(NORM, (rows(64, 48), weight(48))), (MLP, (rows(64, 96), weight(32, 48)))], ids=["norm", "mlp"]
)
def test_value_and_gradients_equal_the_plain_expression(functions: tuple[Callable[..., torch.Tensor], ...], inputs: Inputs) -> None:
    grad = weight(64, functions[0](*inputs).shape[1], seed=3).detach()
    for wanted in functions[1:]:
        torch.testing.assert_close(derived(functions[0], inputs, grad), derived(wanted, inputs, grad), rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("functions", [NORM, MLP], ids=["norm", "mlp"])
def test_in_bf16_errors_are_no_larger_than_torchs(functions: tuple[Callable[..., torch.Tensor], ...]) -> None:
    """Each against the same bf16 inputs in float64, relative to the largest gradient, row by row where there are rows."""
    ours, plain, torchs = functions
    is_norm = ours is norm
    inputs = (
        rows(64, 256 if is_norm else 512, dtype=torch.bfloat16),
        weight(*(() if is_norm else (128,)), 256, dtype=torch.bfloat16),
    )
    wide = tuple(item.detach().double().requires_grad_() for item in inputs)
    grad = weight(64, ours(*inputs).shape[1], dtype=torch.bfloat16, seed=3).detach()
    exact = derived(plain, wide, grad.double())
    for name, own, other, wanted in zip(
        ("value", "input", "weight"), derived(ours, inputs, grad), derived(torchs, inputs, grad), exact, strict=True
    ):
        assert own.dtype == torch.bfloat16
        scale = wanted.abs().amax(-1, keepdim=True)
        own_error, other_error = (((item.double() - wanted) / scale).square().mean().sqrt() for item in (own, other))
        assert own_error <= 1.1 * other_error + 1e-4, f"{name}: {own_error:.2e} against {other_error:.2e}"
        assert own_error < 2**-8, name


def test_no_gradient_goes_to_what_needs_none() -> None:
    """Embeddings are frozen: their rows get no gradient, the weight gets its own."""
    x, scale = rows(6, 8).detach(), weight(8)
    norm(x, scale).sum().backward()
    wanted = weight(8)
    torch_norm(x, wanted).sum().backward()
    torch.testing.assert_close(scale.grad, wanted.grad)
    assert x.grad is None


def test_only_the_inputs_are_kept_for_the_backward_pass() -> None:
    """What torch's own operations keep beside them is most of a step's memory."""

    def kept(function: Callable[..., torch.Tensor], inputs: Inputs) -> int:
        sizes: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            value = function(*inputs)
            total = sum(sizes.values())
            value.sum().backward()
        return total

    for ours, torchs, inputs in (
        (norm, torch_norm, (rows(64, 256, dtype=torch.bfloat16), weight(256, dtype=torch.bfloat16))),
        (gated_down, torch_gated_down, (rows(64, 512, dtype=torch.bfloat16), weight(128, 256, dtype=torch.bfloat16))),
    ):
        assert kept(ours, inputs) == sum(item.untyped_storage().nbytes() for item in inputs)
        assert kept(torchs, inputs) > kept(ours, inputs)
