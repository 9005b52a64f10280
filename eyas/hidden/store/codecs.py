"""How states are coded on disk: exact in bf16, or block-scaled in 8 or 4 bits, all rows of a shard at once.

The channels of a hidden state differ by a factor of hundreds, so a plain block scale spends its bits on one
of them. Each channel is first divided by its size in the shard, a power of two (exact to undo, stored once);
then 32 neighbours share a bf16 scale. On SmolLM2-135M that takes the relative error of the small channels
from 0.34 to 0.10 in 4 bits. What a draft reads survives 4 bits; the argmax of lm_head does not (7 % of
positions flip), so the final state takes 8, or gives way to top-k probabilities (`eyas.hidden.store.top`).
"""

from __future__ import annotations

import torch

from eyas.hidden.codec import BLOCK, CODECS, TOP, CodecName, Number
from eyas.hidden.store.top import TopTargets

_LARGEST = {"fp8": 448.0, "int4": 7.0}
_ROWS = 2048
_SMALLEST_SCALE = 1e-30

Layout = dict[str, tuple[torch.dtype, int]]


def layout(name: CodecName, hidden_size: int, num_top: int = TOP) -> tuple[Layout, Layout]:
    """(tensors with a row for each token, tensors of one row a shard): dtype and width by name."""
    codec = CODECS[name]
    rows, shared = _layout_of("aux", codec.aux, 3 * hidden_size)
    if codec.final is None:
        rows |= {"top_ids": (torch.int32, num_top), "top_logs": (torch.float16, num_top), "argmax": (torch.int32, 1)}
    else:
        final_rows, final_shared = _layout_of("final", codec.final, hidden_size)
        rows, shared = rows | final_rows, shared | final_shared
    return rows, shared


def encode_states(
    aux: torch.Tensor, final: torch.Tensor, loss_mask: torch.Tensor, name: CodecName, top_targets: TopTargets | None
) -> dict[str, torch.Tensor]:
    """All tensors that `layout` names, of states aux [N, 3H] and final [N, H] bf16 and the mask [N] of generated ids."""
    codec = CODECS[name]
    coded = encode("aux", aux, codec.aux)
    if codec.final is not None:
        return coded | encode("final", final, codec.final)
    assert top_targets is not None, f"codec {name} needs the target's head"
    return coded | top_targets.encode(final, loss_mask)


def encode(name: str, states: torch.Tensor, number: Number) -> dict[str, torch.Tensor]:
    """Code bf16 states [N, C] as the tensors that `name` has in a shard."""
    if number == "bf16":
        return {name: states}
    channels = _channel_sizes(states)
    parts = [_encode_rows(part.float() / channels, number) for part in torch.split(states, _ROWS)]
    return {
        name: torch.cat([codes for codes, _ in parts]),
        f"{name}_scales": torch.cat([scales for _, scales in parts]),
        f"{name}_channels": channels,
    }


def decode(name: str, tensors: dict[str, torch.Tensor], rows: slice, number: Number) -> torch.Tensor:
    """The states [T, C] bf16 of some rows of a shard; a view of it where they are stored in bf16."""
    codes = tensors[name][rows]
    if number == "bf16":
        return codes
    scales = tensors[f"{name}_scales"][rows].float().unsqueeze(-1)  # [T, C / 32, 1]
    values = codes.float() if number == "fp8" else _unpack(codes)
    scaled = values.view(len(values), values.shape[1] // BLOCK, BLOCK).mul_(scales).view_as(values)
    return scaled.mul_(tensors[f"{name}_channels"]).to(torch.bfloat16)


def _layout_of(name: str, number: Number, width: int) -> tuple[Layout, Layout]:
    if number == "bf16":
        return {name: (torch.bfloat16, width)}, {}
    codes = (torch.float8_e4m3fn, width) if number == "fp8" else (torch.uint8, width // 2)
    return (
        {name: codes, f"{name}_scales": (torch.bfloat16, width // BLOCK)},
        {f"{name}_channels": (torch.float32, width)},
    )


def _channel_sizes(states: torch.Tensor) -> torch.Tensor:
    """[C] fp32: the power of two nearest to each channel's root mean square; 1 where it is always zero."""
    total = torch.zeros(states.shape[1], dtype=torch.float64)
    for part in torch.split(states, _ROWS):
        total += part.double().square().sum(0)
    rms = (total / max(1, len(states))).sqrt()
    return torch.where(rms > 0, rms.log2().round().exp2(), torch.ones_like(rms)).float()


def _encode_rows(values: torch.Tensor, number: Number) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scales [n, C / 32] bf16) of fp32 values [n, C]."""
    blocks = values.view(len(values), values.shape[1] // BLOCK, BLOCK)
    largest = _LARGEST[number]
    scales = (blocks.abs().amax(-1) / largest).clamp(min=_SMALLEST_SCALE).to(torch.bfloat16)
    units = (blocks / scales.float().unsqueeze(-1)).clamp(-largest, largest).flatten(1)
    if number == "fp8":
        return units.to(torch.float8_e4m3fn), scales
    codes = units.round().add_(8).to(torch.uint8)  # 1 to 15
    return codes[:, 0::2] | codes[:, 1::2] << 4, scales


def _unpack(codes: torch.Tensor) -> torch.Tensor:
    """[T, C] fp32, −7 to 7, of two codes a byte [T, C / 2]; the lower half stands first."""
    return torch.stack((codes & 15, codes >> 4), -1).flatten(1).float().sub_(8)
