"""One optimizer step of another project's EAGLE-3 trainer on a CPU, in that project's own environment (no import of Eyas).

`benchmarks.train --peers DIR` makes the environments and runs this file in them. The models, attention masks and losses
are the projects' own, at their packages' versions; the loop around them is the plain one: forward, backward, clip,
AdamW. What a CPU needs: for SpecForge a stand-in for triton while its loss module is imported (its plain loss is used);
for speculators, whose head is frozen, `sdpa` attention. Both compute head and loss at every position.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import resource
import sys
import time
import types
from collections.abc import Callable, Iterator

import torch

H, V, D, AUX = 576, 49_152, 8_192, 3
DECAY = 0.8
SHAPE = {
    "hidden_size": H,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100_000.0,
    "max_position_embeddings": 32_768,
    "vocab_size": V,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def specforge(count: int, length: int, unroll: int, dtype: torch.dtype) -> tuple[torch.nn.Module, Callable[[], torch.Tensor]]:
    """`OnlineEagle3Model` with sdpa attention, weights in `dtype`; the whole target vocabulary is projected once a step."""
    with _stand_in_for_triton():
        from specforge.core import loss as plain
    import specforge.algorithms.eagle3.model as eagle3
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
    from transformers import LlamaConfig

    def loss(logits: torch.Tensor, target: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return plain._compute_loss(logits, target, mask)

    eagle3.LogSoftmaxLoss = types.SimpleNamespace(apply=loss)
    config = LlamaConfig(**SHAPE, draft_vocab_size=D, target_hidden_size=H, pad_token_id=0)
    draft = LlamaForCausalLMEagle3(config, attention_backend="sdpa").to(dtype)
    draft.embed_tokens.weight.requires_grad_(False)
    draft.t2d.copy_(torch.arange(V) < D)
    model = eagle3.OnlineEagle3Model(draft, length=unroll, attention_backend="sdpa")
    head = (torch.randn(V, H) * 0.02).to(dtype)
    tokens, mask, aux, final = batch(count, length, dtype)

    def compute() -> torch.Tensor:
        losses = model(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            target=final @ head.T,
            loss_mask=mask.unsqueeze(-1),
            hidden_states=aux,
        )[0]
        return sum(DECAY**step * value for step, value in enumerate(losses))

    return model, compute


def speculators(count: int, length: int, unroll: int, dtype: torch.dtype) -> tuple[torch.nn.Module, Callable[[], torch.Tensor]]:
    """`Eagle3DraftModel` with sdpa attention, under autocast if `dtype` is bf16; the records are packed into one row."""
    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig

    layer = LlamaConfig(**SHAPE)
    layer._attn_implementation = "sdpa"
    verifier = VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"])
    proposal = GreedyTokenProposalConfig(speculative_tokens=unroll)
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=D,
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3", proposal_methods=[proposal], default_proposal_method="greedy", verifier=verifier
        ),
    )
    model, losses = Eagle3DraftModel(config), resolve_loss_config("kl_div", "eager")
    with torch.no_grad():
        for weight in (model.lm_head.weight, model.embed_tokens.weight, model.verifier_lm_head.weight):
            weight.copy_(torch.randn_like(weight) * 0.02)
    tokens, mask, aux, final = batch(count, length, dtype)
    rows = {
        "hidden_states": aux.reshape(1, -1, AUX * H),
        "input_ids": tokens.reshape(1, -1),
        "document_ids": torch.arange(count).repeat_interleave(length).unsqueeze(0),
        "loss_mask": mask.bool().reshape(1, -1),
        "position_ids": 1 + torch.arange(length).repeat(count).unsqueeze(0),
        "verifier_last_hidden_states": final.reshape(1, -1, H),
    }

    def compute() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            found = model(**rows, ttt_steps=unroll, ttt_step_loss_decay=DECAY, loss_config=losses)
        return next(item for item in found if torch.is_tensor(item) and item.dim() == 0)

    return model, compute


def batch(count: int, length: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Tokens, mask (a third is prompt), aux and final states of `count` random records of `length` tokens."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, D, (count, length), generator=generator)
    mask = (torch.arange(length) >= length // 3).long().repeat(count, 1)
    aux = torch.randn(count, length, AUX * H, generator=generator).to(dtype)
    return tokens, mask, aux, torch.randn(count, length, H, generator=generator).to(dtype)


@contextlib.contextmanager
def _stand_in_for_triton() -> Iterator[None]:

    importlib.import_module("torch._dynamo")  # asks for the real one, once
    triton, language = types.ModuleType("triton"), types.ModuleType("triton.language")
    triton.jit, triton.language, language.constexpr = (lambda function: function), language, int
    sys.modules |= {"triton": triton, "triton.language": language}
    yield
    del sys.modules["triton"], sys.modules["triton.language"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=["specforge", "speculators"])
    for name in ("unroll", "batch-tokens", "length", "steps"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], required=True)
    options = parser.parse_args()
    torch.manual_seed(0)
    count = max(1, options.batch_tokens // options.length)
    length = options.batch_tokens // count
    model, compute = globals()[options.peer](count, length, options.unroll, getattr(torch, options.dtype))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    masters = [parameter.detach().float().clone() for parameter in trained]
    optimizer = torch.optim.AdamW(masters, lr=1e-4, fused=True)
    seconds = []
    for _ in range(options.steps + 1):
        begun = time.perf_counter()
        loss = compute()
        loss.backward()
        for master, parameter in zip(masters, trained, strict=True):
            master.grad, parameter.grad = None if parameter.grad is None else parameter.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(trained, masters)
        seconds.append(time.perf_counter() - begun)
    assert torch.isfinite(loss), f"loss is {loss}"
    middle = sorted(seconds[1:])[options.steps // 2]
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    figures = {"positions_per_s": count * length / middle, "peak_rss_mb": peak_mb, "trained": sum(item.numel() for item in trained)}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
