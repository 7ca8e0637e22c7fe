"""Plain torch in the place of SGLang's CPU kernels, which no package index has.

PyPI's `sglang-kernel` is built for CUDA alone. What SGLang 0.5.23 calls on a CPU while it serves an Eagle3 head is
here, as its callers need it and slowly: attention over the paged cache, the bookkeeping of cache slots, and building
and walking a draft tree. What is called and is not here fails by its name. Callers:
https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/layers/attention/intel_amx_backend.py
https://github.com/sgl-project/sglang/tree/v0.5.23/python/sglang/kernels/ops/speculative
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

# SGLang asks for a release of its kernels that is at least this.
__version__ = "0.4.10"
# SGLang's tree masks on a CPU: the new tokens of each request against each other, one request after the other.
QLEN_ONLY = 1

_library = torch.library.Library("sgl_kernel", "DEF")


def _operator(schema: str) -> Callable[[Callable], Callable]:
    def define(function: Callable) -> Callable:
        _library.define(schema)
        _library.impl(schema.partition("(")[0], function, "CPU")
        return function

    return define


def _attend(query: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scale: float, cap: float) -> Tensor:
    """Return attention `[T, H, V]` of queries `[T, H, D]` over keys `[S, G, D]` and values `[S, G, V]`.

    `seen` `[T, S]` says which keys a query may look at; heads share the keys of their group.
    """
    shared = query.shape[1] // keys.shape[1]
    keys, values = (part.float().repeat_interleave(shared, dim=1) for part in (keys, values))
    scores = torch.einsum("thd,shd->hts", query.float(), keys) * scale
    if cap > 0:
        scores = cap * torch.tanh(scores / cap)
    weights = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)
    return torch.einsum("hts,shv->thv", weights, values)


def _refuse(**asked: object) -> None:
    """Fail on what no Eagle3 head or its target asks for, rather than pass it over."""
    wanted = [name for name, value in asked.items() if value is not None and value is not False]
    if wanted:
        raise NotImplementedError(f"the stand-in for sgl_kernel has no {', '.join(wanted)}")


@_operator(
    "extend_attention_cpu(Tensor q, Tensor? k, Tensor? v, Tensor(a!) o, Tensor k_buffer, Tensor v_buffer, "
    "float k_scale, float v_scale, Tensor req_to_token, Tensor req_pool_indices, Tensor seq_lens, "
    "Tensor extend_seq_lens, Tensor extend_start_loc, int max_len_extend, float sm_scale, float logit_cap, "
    "bool is_cross_attn, int sliding_window, Tensor? encoder_lens, Tensor? sinks, Tensor? tree_mask, bool is_causal)"
    " -> ()"
)
def extend_attention_cpu(
    q, k, v, o, k_buffer, v_buffer, k_scale, v_scale, req_to_token, req_pool_indices, seq_lens, extend_seq_lens,
    extend_start_loc, max_len_extend, sm_scale, logit_cap, is_cross_attn, sliding_window, encoder_lens, sinks,
    tree_mask, is_causal,
):  # fmt: skip
    """Attend from the new tokens of each request to those in its cache and to each other."""
    _refuse(sinks=sinks, sliding_window=sliding_window > 0, cross_attention=is_cross_attn)
    masked = 0
    for request, total in enumerate(seq_lens.tolist()):
        new, start = int(extend_seq_lens[request]), int(extend_start_loc[request])
        if not new:
            continue
        known = total - new
        slots = req_to_token[int(req_pool_indices[request]), :total].long()
        keys, values = k_buffer[slots], v_buffer[slots]
        if k is not None:
            # The new tokens as they come, and not as the cache's dtype would have rounded them. MLA's have keys of each
            # head where nothing is cached, and the cache's one latent otherwise.
            fresh = [part[start : start + new] for part in (k, v)]
            fresh = [part if part.dim() == 3 else part[:, None] for part in fresh]
            old = [part[:known].to(fresh[0].dtype) for part in (keys, values)]
            keys, values = (torch.cat(pair) for pair in zip(old, fresh, strict=True)) if known else fresh
        seen = torch.ones(new, total, dtype=torch.bool)
        if tree_mask is not None:
            seen[:, known:] = tree_mask.view(-1)[masked : masked + new * new].view(new, new)
            masked += new * new
        elif is_causal:
            seen = seen.tril(known)
        o[start : start + new] = _attend(q[start : start + new], keys, values, seen, sm_scale, logit_cap)


@_operator(
    "decode_attention_cpu(Tensor q, Tensor(b!) k_buffer, Tensor(c!) v_buffer, float k_scale, float v_scale, "
    "Tensor(a!) o, Tensor? k, Tensor? v, Tensor? loc, Tensor(d!) attn_logits, Tensor req_to_token, "
    "Tensor req_pool_indices, Tensor seq_lens, float sm_scale, float logit_cap, bool is_cross_attn, "
    "int sliding_window, Tensor? encoder_lens, Tensor? sinks) -> ()"
)
def decode_attention_cpu(
    q, k_buffer, v_buffer, k_scale, v_scale, o, k, v, loc, attn_logits, req_to_token, req_pool_indices, seq_lens,
    sm_scale, logit_cap, is_cross_attn, sliding_window, encoder_lens, sinks,
):  # fmt: skip
    """Store one new token of each request, and attend from it to all in its cache."""
    _refuse(sinks=sinks, sliding_window=sliding_window > 0, cross_attention=is_cross_attn)
    if k is not None:
        rows = loc.long()
        k_buffer[rows] = k.view(len(rows), *k_buffer.shape[1:]).to(k_buffer.dtype)
        # MLA's values are a part of its keys: one buffer, written once.
        if v_buffer.data_ptr() != k_buffer.data_ptr():
            v_buffer[rows] = v.view(len(rows), *v_buffer.shape[1:]).to(v_buffer.dtype)
    for request, total in enumerate(seq_lens.tolist()):
        slots = req_to_token[int(req_pool_indices[request]), :total].long()
        seen = torch.ones(1, total, dtype=torch.bool)
        one = slice(request, request + 1)
        o[one] = _attend(q[one], k_buffer[slots], v_buffer[slots], seen, sm_scale, logit_cap)


@_operator("init_cpu_threads_env(str cpu_ids) -> str")
def init_cpu_threads_env(cpu_ids: str) -> str:
    """Bind no threads; the environment says how many there are."""
    return ""


def assign_req_to_token_pool_cpu(requests, req_to_token, starts, ends, slots, pool_len) -> None:
    """Write the slots of each request's new tokens, one request after the other, into its row."""
    at = 0
    for row, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True):
        req_to_token[row, start:end] = slots[at : at + end - start].to(req_to_token.dtype)
        at += end - start


def assign_extend_cache_locs_cpu(requests, req_to_token, starts, ends, slots, pool_len) -> None:
    """Read what `assign_req_to_token_pool_cpu` wrote."""
    at = 0
    for row, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True):
        slots[at : at + end - start] = req_to_token[row, start:end].to(slots.dtype)
        at += end - start


def assign_draft_cache_locs_contiguous_cpu(requests, req_to_token, lengths, slots, pool_len, topk, steps) -> None:
    """Read the slots that are kept behind each request's text for `topk` branches of `steps` drafts."""
    width = topk * steps
    for i, (row, start) in enumerate(zip(requests.tolist(), lengths.tolist(), strict=True)):
        slots[i * width : (i + 1) * width] = req_to_token[row, start : start + width].to(slots.dtype)


def build_draft_decode_metadata_cpu(req_to_token, requests, lengths, topk, steps, pool_len) -> Tensor:
    """Return the slots that each branch of each request sees: its text's, then the branch's own drafts'."""
    rows = torch.zeros(len(requests) * topk, pool_len, dtype=torch.int32)
    for i, (row, length) in enumerate(zip(requests.tolist(), lengths.tolist(), strict=True)):
        for branch in range(topk):
            own = req_to_token[row, length + branch * steps : length + (branch + 1) * steps]
            rows[i * topk + branch, : length + len(own)] = torch.cat([req_to_token[row, :length], own])
    return rows


def fill_bonus_tokens_cpu(accepted, lengths, bonus, stride) -> None:
    """Take the last of each request's accepted tokens."""
    at = torch.arange(len(lengths)) * stride + lengths.long() - 1
    bonus[: len(lengths)] = accepted.view(-1)[at].to(bonus.dtype)


def fill_accept_out_cache_loc_cpu(accepted, slots, kept) -> None:
    """Gather the slots of the accepted tokens; places without one are -1."""
    at = accepted.view(-1)
    at = at[at >= 0].long()
    kept.view(-1)[: len(at)] = slots.view(-1)[at]


def verify_tree_greedy_cpu(
    predicts, accept_index, accept_token_num, candidates, retrive_index, retrive_next_token, retrive_next_sibling,
    target_predict,
) -> None:  # fmt: skip
    """Walk each request's tree along the target's own tokens, as far as the drafts have them."""
    target = target_predict.reshape(-1)
    for request, tokens in enumerate(candidates.tolist()):
        children, siblings = retrive_next_token[request].tolist(), retrive_next_sibling[request].tolist()
        last, node, accepted = int(retrive_index[request, 0]), 0, 0
        accept_index[request, 0] = last
        while accepted + 1 < accept_index.shape[1]:
            node = children[node]
            while node != -1 and tokens[node] != int(target[last]):
                node = siblings[node]
            if node == -1:
                break
            predicts[last] = target[last].to(predicts.dtype)
            accepted += 1
            last = int(retrive_index[request, node])
            accept_index[request, accepted] = last
        accept_token_num[request] = accepted
        # Behind the last accepted token stands the bonus token.
        predicts[last] = target[last].to(predicts.dtype)


def build_tree_kernel_efficient_cpu(
    parent_list, selected_index, verified_seq_len, tree_mask, positions, retrive_index, retrive_next_token,
    retrive_next_sibling, topk, depth, draft_token_num, tree_mask_mode,
) -> None:  # fmt: skip
    """Lay out each request's tree: who sees whom, at which position, and each node's first child and next sibling.

    Node 0 is the last token of the text; node i is `selected_index[i - 1]`, a place in the table of all drafts, whose
    block of `topk` tells the parent by `parent_list`. Children are linked in the order of their likelihood.
    """
    if int(tree_mask_mode) != QLEN_ONLY:
        raise NotImplementedError("the stand-in for sgl_kernel builds tree masks of new tokens alone (QLEN_ONLY)")
    nodes = draft_token_num
    masks = tree_mask.view(-1, nodes, nodes)
    for request, length in enumerate(verified_seq_len.tolist()):
        chosen, parents = selected_index[request].tolist(), parent_list[request].tolist()
        # The parent of each node but the root; None where it was not chosen, which leaves the node without a way to it.
        above: list[int | None] = [None]
        for place in chosen[: nodes - 1]:
            block = place // topk
            parent = parents[block] if block else None
            above.append(0 if parent is None else chosen.index(parent) + 1 if parent in chosen else None)
        for node in range(nodes):
            retrive_index[request, node] = request * nodes + node
            masks[request, node] = False
            line, at = [node], above[node]
            while at is not None:
                line.append(at)
                at = above[at]
            masks[request, node, [*line, 0]] = True
            positions[request * nodes + node] = length + len(line) - 1
        for node in range(nodes - 1, 0, -1):
            parent = above[node]
            if parent is not None:
                retrive_next_sibling[request, node] = retrive_next_token[request, parent]
                retrive_next_token[request, parent] = node


def copy_all_layer_kv_cache_cpu(addresses, strides, to, source) -> None:
    """Copy rows of every layer's cache, given by its address; all are read before any is written."""
    for address, stride in zip(addresses.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(address + int(row) * stride, stride) for row in source.tolist()]
        for row, data in zip(to.tolist(), rows, strict=True):
            ctypes.memmove(address + int(row) * stride, data, stride)


def __getattr__(name: str) -> Callable:
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*_: object, **__: object) -> None:
        raise NotImplementedError(f"the stand-in for sgl_kernel has no {name}")

    return absent
