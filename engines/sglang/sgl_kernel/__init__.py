"""A stand-in for SGLang's compiled kernels, in plain torch, so that the real server runs on any CPU.

It holds what a dense Llama with an EAGLE-3 chain or tree calls on `--attention-backend intel_amx` (where SGLang itself
verifies greedily at every temperature); everything else raises `NotImplementedError` by name. Slow and plain on purpose: it stands
in for arithmetic only, while server, scheduler, cache, draft worker and accounting remain SGLang's.
Signatures follow the call sites of SGLang 0.5.23.
"""

import ctypes

import torch
from torch.nn.functional import scaled_dot_product_attention

__version__ = "0.0.0+torch"


def __getattr__(name):
    """Any other kernel can be imported, and says its name when it is called."""
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} has no torch stand-in; run this on a GPU with the real package")

    return absent


# --- cache locations: req_to_token[request, position] = row of the KV cache ---


def assign_req_to_token_pool_cpu(req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len):
    """Write freshly allocated cache rows into each request's positions start..end."""
    taken = 0
    for request, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        req_to_token[request, start:end] = out_cache_loc[taken : taken + end - start].to(req_to_token.dtype)
        taken += end - start


def assign_extend_cache_locs_cpu(req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len):
    """The reverse: read each request's cache rows start..end into one flat list."""
    spans = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    rows = [req_to_token[request, start:end] for request, start, end in spans]
    if rows:
        flat = torch.cat(rows)
        out_cache_loc[: flat.numel()] = flat.to(out_cache_loc.dtype)


def assign_draft_cache_locs_contiguous_cpu(req_pool_indices, req_to_token, seq_lens, out_cache_loc, pool_len, topk, num_steps):
    """Read the topk * num_steps rows that follow each request's sequence."""
    per_request = topk * num_steps
    flat = out_cache_loc.view(-1)
    for place, (request, start) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        flat[place * per_request : (place + 1) * per_request] = req_to_token[request, start : start + per_request].to(flat.dtype)


def build_draft_decode_metadata_cpu(req_to_token, req_pool_indices, seq_lens, topk, num_steps, pool_len):
    """One row of cache rows per branch: the request's sequence, then the branch's own `num_steps` rows of those behind it."""
    rows = req_to_token[req_pool_indices.long()].repeat_interleave(topk, dim=0)
    for request, length in enumerate(seq_lens.tolist()):
        branches = rows[request * topk, length : length + topk * num_steps].clone().view(topk, num_steps)
        rows[request * topk : (request + 1) * topk, length : length + num_steps] = branches
    return rows


def copy_all_layer_kv_cache_cpu(data_ptrs, strides, tgt_loc, src_loc):
    """Copy cache rows src -> tgt in every layer's buffer; all rows are read before the first is written."""
    moves = [(target, source) for target, source in zip(tgt_loc.tolist(), src_loc.tolist(), strict=True) if target != source]
    for pointer, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        rows = [(target, ctypes.string_at(pointer + stride * source, stride)) for target, source in moves]
        for target, row in rows:
            ctypes.memmove(pointer + stride * target, row, stride)


# --- the draft tree (a chain is one of a single branch) and its greedy verification ---


def build_tree_kernel_efficient_cpu(
    parent_list, selected_index, verified_seq_len, tree_mask, positions,
    retrieve_index, retrieve_next_token, retrieve_next_sibling, topk, depth, draft_token_num, tree_mask_mode,
):  # fmt: skip
    """Links, positions and mask of each request's tree: node 0 is the last accepted token, node i the i-th drafted one.

    `selected_index` names the drafted ones among all candidates; candidate c descends from candidate
    `parent_list[c // topk]`, those of the first step (c < topk) from node 0.
    """
    requests, width = verified_seq_len.numel(), draft_token_num
    retrieve_index.view(requests, width).copy_(torch.arange(requests * width).view(requests, width))
    retrieve_next_token.fill_(-1)
    retrieve_next_sibling.fill_(-1)
    sees_prefix = int(tree_mask_mode) == 0  # full mask: prefix columns stand in it as well
    flat, filled = tree_mask.view(-1), 0
    for request, length in enumerate(verified_seq_len.tolist()):
        selected = selected_index[request].tolist()
        node_of = {candidate: node for node, candidate in enumerate(selected, start=1)}
        parents = [0 if c < topk else node_of[int(parent_list[request, c // topk])] for c in selected]
        sees = torch.eye(width, dtype=torch.bool)
        for node, parent in enumerate(parents, start=1):
            sees[node] |= sees[parent]
        for node in range(width - 1, 0, -1):  # from behind, so that the likelier sibling is met first
            parent = parents[node - 1]
            retrieve_next_sibling[request, node] = retrieve_next_token[request, parent]
            retrieve_next_token[request, parent] = node
        positions.view(requests, width)[request] = length + sees.sum(1) - 1
        prefix = torch.ones(width, length if sees_prefix else 0, dtype=torch.bool)
        block = torch.cat([prefix, sees], dim=1).reshape(-1)
        flat[filled : filled + block.numel()] = block.to(flat.dtype)
        filled += block.numel()


def verify_tree_greedy_cpu(
    predicts, accept_index, accept_token_num, candidates,
    retrive_index, retrive_next_token, retrive_next_sibling, target_predict,
):  # fmt: skip
    """Accept the path of drafts that equal the target's own choice; `predicts` receives that choice along the path."""
    requests, width = candidates.shape
    chosen = target_predict.reshape(requests, width)
    for request in range(requests):
        place, accepted = 0, 0
        accept_index[request, 0] = retrive_index[request, 0]
        predicts[int(retrive_index[request, 0])] = chosen[request, 0].to(predicts.dtype)
        while accepted + 1 < accept_index.shape[1]:
            follower = int(retrive_next_token[request, place])
            while follower >= 0 and int(candidates[request, follower]) != int(chosen[request, place]):
                follower = int(retrive_next_sibling[request, follower])
            if follower < 0:
                break
            place, accepted = follower, accepted + 1
            accept_index[request, accepted] = retrive_index[request, place]
            predicts[int(retrive_index[request, place])] = chosen[request, place].to(predicts.dtype)
        accept_token_num[request] = accepted


def fill_bonus_tokens_cpu(accept_tokens, accept_lens, bonus_tokens, accept_stride):
    """The last accepted slot of each request is its bonus token."""
    rows = torch.arange(accept_lens.numel())
    bonus_tokens.copy_(accept_tokens.reshape(-1)[rows * accept_stride + accept_lens.long() - 1].to(bonus_tokens.dtype))


def fill_accept_out_cache_loc_cpu(accept_index, out_cache_loc, accept_out_cache_loc):
    """Cache rows of the accepted tokens, packed."""
    kept = accept_index.reshape(-1)
    kept = kept[kept >= 0].long()
    accept_out_cache_loc.view(-1)[: kept.numel()] = out_cache_loc[kept]


# --- attention over the paged cache ---


def _attend(query, key_buffer, value_buffer, rows, mask, scale):
    """query [n, heads, d] against the cache rows of one request [m]; returns [n, heads, d]."""
    key = key_buffer[rows].transpose(0, 1)[None].to(query.dtype)  # [1, kv_heads, m, d]
    value = value_buffer[rows].transpose(0, 1)[None].to(query.dtype)
    grouped = query.shape[1] != key.shape[1]
    out = scaled_dot_product_attention(
        query.transpose(0, 1)[None], key, value, attn_mask=mask, scale=scale, enable_gqa=grouped
    )  # [1, heads, n, d]
    return out[0].transpose(0, 1)


def _extend_attention(
    query, key, value, out, key_buffer, value_buffer, key_scale, value_scale, req_to_token, req_pool_indices,
    seq_lens, extend_lens, extend_start, max_extend_len, scale, logit_cap, is_cross, window,
    encoder_lens, sinks, tree_mask, is_causal,
):  # fmt: skip
    """New tokens of each request (already in the cache) attend to its whole sequence, causally or along their tree.

    `tree_mask` holds [num_new, num_new] of every request, one after the other.
    """
    filled = 0
    for place, request in enumerate(req_pool_indices.tolist()):
        num_new, length, start = int(extend_lens[place]), int(seq_lens[place]), int(extend_start[place])
        if not num_new:
            continue
        rows = req_to_token[request, :length].long()
        mask = torch.ones(num_new, length, dtype=torch.bool).tril(length - num_new) if is_causal else None
        if tree_mask is not None:
            mask[:, length - num_new :] = tree_mask[filled : filled + num_new * num_new].view(num_new, num_new)
            filled += num_new * num_new
        out[start : start + num_new] = _attend(query[start : start + num_new], key_buffer, value_buffer, rows, mask, scale)


def _decode_attention(
    query, key_buffer, value_buffer, key_scale, value_scale, out, key, value, cache_loc, attn_logits,
    req_to_token, req_pool_indices, seq_lens, scale, logit_cap, is_cross, window, encoder_lens, sinks,
):  # fmt: skip
    """One token of each request: store its key and value, then attend to the whole sequence."""
    if key is not None:
        rows = cache_loc.long()
        key_buffer[rows] = key.view(-1, *key_buffer.shape[1:]).to(key_buffer.dtype)
        value_buffer[rows] = value.view(-1, *value_buffer.shape[1:]).to(value_buffer.dtype)
    for place, request in enumerate(req_pool_indices.tolist()):
        rows = req_to_token[request, : int(seq_lens[place])].long()
        out[place : place + 1] = _attend(query[place : place + 1], key_buffer, value_buffer, rows, None, scale)


# SGLang reaches these two as torch.ops.sgl_kernel.*; the namespace object accepts plain functions.
object.__setattr__(torch.ops.sgl_kernel, "extend_attention_cpu", _extend_attention)
object.__setattr__(torch.ops.sgl_kernel, "decode_attention_cpu", _decode_attention)
