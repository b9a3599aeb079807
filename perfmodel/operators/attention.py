"""Attention kinds: V4 compressed, MLA, grouped-query, block-sparse, delta rules, Mamba-2."""

from __future__ import annotations

from typing import Any

import sympy as sp

from perfmodel.layers import (
    GQA,
    KDA,
    MLA,
    BlockSparse,
    CompressedAttention,
    GatedDelta,
    Indexer,
    Mamba2,
)
from perfmodel.operators import families as fam
from perfmodel.operators.builder import DCP, SEQS, TP, Builder, T
from perfmodel.symbolic import smaller, symbol


def compressed(b: Builder, a: CompressedAttention) -> None:
    """CSA (indexer over T/4), HCA (dense over T/128) or the pure sliding window."""
    h, cache = b.model.shape.hidden_size, b.precision.cache
    width = a.heads * a.head_dim
    b.linear("q_down+kv", "attention", h, a.q_lora_rank + a.head_dim)
    b.elementwise("norm+rope", 2 * (a.q_lora_rank + a.head_dim) + 2 * h)
    b.linear("q_up", "attention", a.q_lora_rank, width, shards=TP)
    window_bytes = cache.window_entry_bytes or cache.entry_bytes
    stored: sp.Expr = smaller(a.window, T) * window_bytes
    window = b.mean_capped(a.window, 1)
    attended: sp.Expr = window
    read: sp.Expr = smaller(a.window, b.last_context())
    if window_bytes != cache.entry_bytes:  # read in entries of the compressed cache
        read *= window_bytes / cache.entry_bytes
    if a.compression:
        entries = sp.floor(T / a.compression)
        last = sp.floor(b.last_context() / a.compression)
        if not a.kv_shared:
            _compressor(b, a)
            stored += entries * cache.entry_bytes
        if a.indexer:
            i = a.indexer
            if not a.index_shared:
                _index(b, a, i, entries, last)
            if not (a.index_shared or a.kv_shared):
                assert cache.index_key_bytes is not None, "the card was checked"
                stored += entries * cache.index_key_bytes
            picked = b.mean_capped(i.top_k, a.compression)
            attended = picked + window
            # decode gathers per query; prefill reads each entry once and reuses it on chip
            read += b.query * picked if b.decode else last
        else:
            attended = window + (entries if b.decode else b.mean_context() / a.compression)
            read += last
    _core(b, a.heads, a.head_dim, a.head_dim, attended, read, sparse=True)
    b.elementwise("inverse_rope", 2 * width / TP)
    b.linear(
        "o_down", "attention", width // a.o_groups, a.o_lora_rank,
        groups=a.o_groups, shards=smaller(TP, a.o_groups), kernels=2,
    )  # fmt: skip
    b.linear("o_up", "attention", a.o_groups * a.o_lora_rank, h, shards=TP, kernels=2)
    b.all_reduce("all_reduce", h)
    b.cache("kv", stored, DCP)


def _compressor(b: Builder, a: CompressedAttention) -> None:
    """One entry of `compression` tokens; of one token it is a plain projection."""
    h = b.model.shape.hidden_size
    if a.compression == 1:
        b.linear("compressor", "compressor", h, a.head_dim)
        return
    # keys and gates, twice as wide where entries overlap (each mixes two strides)
    wide = 2 * a.head_dim * (2 if a.overlap else 1)
    ape = (a.compression if not a.overlap else 2 * a.compression) * a.head_dim
    b.linear("compressor", "compressor", h, wide, kernels=2, extra_params=ape)


def _index(b: Builder, a: CompressedAttention, i: Indexer, entries: sp.Expr, last: sp.Expr) -> None:
    """Query, head weights and (where the layer makes entries) keys; then the scan.

    Candidates differ from query to query: a prefill reads every key.
    """
    h = b.model.shape.hidden_size
    b.linear("index_query", "indexer", a.q_lora_rank, i.heads * i.head_dim)
    b.linear("index_weight", "compressor", h, i.heads)
    if not a.kv_shared and i.key_from_entry:
        b.linear("index_key", "indexer", a.head_dim, i.head_dim)
    elif not a.kv_shared:
        b.linear("index_compressor", "compressor", h, 2 * i.head_dim * 2, kernels=2)
    mean = entries if b.decode else b.mean_context() / a.compression
    if i.candidates:
        mean = b.mean_capped(i.candidates, a.compression)
        last = smaller(b.query * mean, last) if b.decode else last
    _indexer(b, i.heads, i.head_dim, mean, last)


def mla(b: Builder, a: MLA) -> None:
    """Multi-head latent attention: absorbed in decode and when sparse, else full heads."""
    h, cache = b.model.shape.hidden_size, b.precision.cache
    qk, latent = a.nope_dim + a.rope_dim, a.kv_lora_rank + a.rope_dim
    absorbed = b.decode or a.indexer is not None
    if a.q_lora_rank is None:
        b.linear("q", "attention", h, a.heads * qk, shards=TP)
        b.linear("kv_down", "attention", h, latent)
        b.elementwise("norm+rope", 2 * latent + 2 * h)
    else:
        b.linear("q_down+kv_down", "attention", h, a.q_lora_rank + latent)
        b.elementwise("norm+rope", 2 * (a.q_lora_rank + latent) + 2 * h)
        b.linear("q_up", "attention", a.q_lora_rank, a.heads * qk, shards=TP)
    # One weight serves two uses: absorbed into queries and outputs, or unfolding cached latents.
    seen = b.tokens if absorbed else SEQS * b.last_context()
    b.linear(
        "kv_up", "attention", a.kv_lora_rank, a.heads * (a.nope_dim + a.v_dim),
        shards=TP, tokens=seen, kernels=2,
    )  # fmt: skip
    attended, read = b.mean_context(), b.last_context()
    stored: sp.Expr = T * cache.entry_bytes
    if a.indexer:
        i = a.indexer
        if not a.index_shared:
            assert cache.index_key_bytes is not None, "the card was checked"
            b.linear("index_query", "indexer", a.q_lora_rank or h, i.heads * i.head_dim)
            b.linear("index_key", "indexer", h, i.head_dim)
            b.linear("index_weight", "compressor", h, i.heads)
            _indexer(b, i.heads, i.head_dim, b.mean_context(), b.last_context())
            stored += T * cache.index_key_bytes
        attended = b.mean_capped(i.top_k, 1)
        read = b.query * attended if b.decode else b.last_context()
    dims = (latent, a.kv_lora_rank) if absorbed else (qk, a.v_dim)
    _core(b, a.heads, *dims, attended, read, sparse=a.indexer is not None)
    if a.output_gate:
        b.linear("gate", "attention", h, a.heads * a.v_dim, shards=TP, kernels=2)
    b.linear(
        "o", "attention", a.heads * a.v_dim, h, shards=TP, kernels=2, stored_as="attention_out"
    )
    b.all_reduce("all_reduce", h)
    b.cache("kv", stored, DCP)


def kda(b: Builder, a: KDA) -> None:
    """Kimi delta attention: projections, short convolution and a state read and written once.

    FLOPs a token and head: prefill arXiv 2510.26692, equation 13 (chunk C: 6 d^2 + 3 C d + C^2);
    decode about 7 d^2, our count of the state update and read-out.
    """
    h, cache = b.model.shape.hidden_size, b.precision.cache
    assert cache.state_value_bytes is not None and cache.conv_value_bytes is not None
    width, d = a.heads * a.head_dim, a.head_dim
    conv_params = 3 * width * a.conv_kernel
    if a.gate_rank is None:
        b.linear("qkv+gate", "attention", h, 4 * width, shards=TP, extra_params=conv_params)
        b.linear("decay_down+beta", "attention", h, a.decay_rank + a.heads)
    else:
        b.linear("qkv", "attention", h, 3 * width, shards=TP, extra_params=conv_params)
        b.linear("decay_down+gate_down+beta", "attention", h, a.decay_rank + a.gate_rank + a.heads)
        b.linear("gate_up", "attention", a.gate_rank, width, shards=TP)
    b.linear("decay_up", "attention", a.decay_rank, width, shards=TP)
    b.elementwise("conv", 2 * 3 * width / TP)
    state = a.heads * d * d * cache.state_value_bytes
    conv = (a.conv_kernel - 1) * 3 * width * cache.conv_value_bytes
    per_token = 7 * d * d if b.decode else 6 * d * d + 3 * a.chunk * d + a.chunk**2
    _recurrence(b, a.heads, per_token, state + conv, 5 * width)
    b.elementwise("norm+gate", 3 * width / TP)
    b.linear("o", "attention", width, h, shards=TP, stored_as="attention_out")
    b.all_reduce("all_reduce", h)
    b.cache("state", sp.Float(state) + sp.Float(conv), TP)


def gqa(b: Builder, a: GQA) -> None:
    """Grouped-query attention; a rank holds its share of the KV heads, at least one of them."""
    h, cache = b.model.shape.hidden_size, b.precision.cache
    held = _grouped_qkv(b, a, gates=a.output_gate)
    attended, read = b.mean_context(), b.last_context()
    stored: sp.Expr = T * cache.entry_bytes
    if a.window:
        attended, stored = b.mean_capped(a.window, 1), smaller(a.window, T) * cache.entry_bytes
        read = smaller(a.window, T) if b.decode else smaller(a.window, T) + b.query
    _core(b, a.heads, a.head_dim, a.head_dim, attended, read, held=held)
    if a.output_gate:
        b.elementwise("gate", 3 * a.heads * a.head_dim / TP)
    b.linear("o", "attention", a.heads * a.head_dim, h, shards=TP, stored_as="attention_out")
    b.all_reduce("all_reduce", h)
    b.cache("kv", stored, held)


def _grouped_qkv(b: Builder, a: GQA | BlockSparse, gates: bool) -> sp.Expr:
    """Projections of queries (and their gates), keys and values; the ways KV heads are split."""
    h = b.model.shape.hidden_size
    held = smaller(TP, a.kv_heads)  # beyond as many ranks the KV heads are replicated
    q = a.heads * a.head_dim * (2 if gates else 1)
    kv = 2 * a.kv_heads * a.head_dim
    b.linear("qkv", "attention", h, q + kv, shards=_split(q, TP, kv, held))
    b.elementwise("norm+rope", 2 * h + 2 * (a.heads * a.head_dim / TP + kv / held), kernels=2)
    return held


def _split(x: Any, ways: Any, y: Any, other_ways: Any) -> sp.Expr:
    """The ways x + y is split where x is split `ways` and y `other_ways`."""
    return (x + y) / (x / ways + y / other_ways)


def block_sparse(b: Builder, a: BlockSparse) -> None:
    """Grouped-query attention over the best blocks of the context and the last ones.

    An index head scores every token for its KV heads; its key is one vector a token, on every rank.
    A block is as good as its best token, so a score a block is all that is written. The last block
    counts as full. Blocks are contiguous: the core has the rates of dense attention. Queries that
    are verified together read no more than the whole cache.
    """
    h, cache = b.model.shape.hidden_size, b.precision.cache
    assert cache.index_key_bytes is not None, "the card was checked"
    held = _grouped_qkv(b, a, gates=False)
    ways = smaller(TP, a.index_heads)
    queries, key = a.index_heads * a.index_head_dim, a.index_head_dim
    b.linear("index_query+key", "indexer", h, queries + key, shards=_split(queries, ways, key, 1))
    heads = a.index_heads / ways
    _indexer(b, heads, a.index_head_dim, b.mean_context(), b.last_context(), heads / a.block_tokens)
    attended = b.mean_capped((a.top_blocks + a.local_blocks) * a.block_tokens, 1)
    read = smaller(b.query * attended, T) if b.decode else b.last_context()
    _core(b, a.heads, a.head_dim, a.head_dim, attended, read, held=held)
    b.linear("o", "attention", a.heads * a.head_dim, h, shards=TP, stored_as="attention_out")
    b.all_reduce("all_reduce", h)
    b.cache("kv", T * cache.entry_bytes, held)
    b.cache("index_keys", T * cache.index_key_bytes, DCP)


def gated_delta(b: Builder, a: GatedDelta) -> None:
    """Gated DeltaNet: as KDA with one decay a head and fewer key heads than value heads.

    FLOPs a token and head as in `kda`, with d^2 = key_dim x value_dim.
    """
    h, cache = b.model.shape.hidden_size, b.precision.cache
    assert cache.state_value_bytes is not None and cache.conv_value_bytes is not None
    keys, values = a.key_heads * a.key_dim, a.heads * a.value_dim
    mixed = 2 * keys + values  # channels of the convolution: queries, keys, values
    b.linear(
        "qkv+gate", "attention", h, mixed + values, shards=TP, extra_params=mixed * a.conv_kernel
    )
    b.linear("decay+beta", "attention", h, 2 * a.heads, shards=TP)
    b.elementwise("conv", 2 * mixed / TP)
    square = a.key_dim * a.value_dim
    state = a.heads * square * cache.state_value_bytes
    conv = (a.conv_kernel - 1) * mixed * cache.conv_value_bytes
    per_token = 7 * square if b.decode else 6 * square + 3 * a.chunk * a.key_dim + a.chunk**2
    _recurrence(b, a.heads, per_token, state + conv, mixed + 2 * values)
    b.elementwise("norm+gate", 3 * values / TP)
    b.linear("o", "attention", values, h, shards=TP, stored_as="attention_out")
    b.all_reduce("all_reduce", h)
    b.cache("state", sp.Float(state) + sp.Float(conv), TP)


def mamba2(b: Builder, a: Mamba2) -> None:
    """Mamba-2: one projection in, a short convolution, a state per head, a projection out.

    Ranks share out the heads; a group's maps B and C are replicated beyond as many ranks as groups.
    FLOPs a token and head are our count. Decode: decay of the state, update and read-out, 5 P N
    (head_dim P, state_dim N). Prefill in chunks of C: update and read-out once a chunk, 4 P N; and
    within a chunk the causal half of C B^T (one a group) and of its product with the inputs.
    """
    h, cache = b.model.shape.hidden_size, b.precision.cache
    assert cache.state_value_bytes is not None and cache.conv_value_bytes is not None
    inner, maps = a.heads * a.head_dim, 2 * a.groups * a.state_dim
    held = smaller(TP, a.groups)
    own = 2 * inner + a.heads  # gate, inputs and step sizes
    b.linear(
        "in", "mamba", h, own + maps, shards=_split(own, TP, maps, held),
        extra_params=(inner + maps) * a.conv_kernel,
    )  # fmt: skip
    b.elementwise("norm+conv", 2 * h + 2 * (inner / TP + maps / held), kernels=2)
    copied = TP / held  # maps of all ranks together, over those of one
    square = a.head_dim * a.state_dim
    if b.decode:
        per_token: Any = 5 * square
    else:
        shared = a.state_dim * a.groups * copied / a.heads
        per_token = 4 * square + (smaller(a.chunk, b.query) + 1) * (a.head_dim + shared)
    state = a.heads * square * cache.state_value_bytes
    values = (a.conv_kernel - 1) * cache.conv_value_bytes  # bytes of a convolved channel
    _recurrence(
        b, a.heads, per_token, state + values * (inner + maps * copied),
        2 * inner + a.heads + maps * copied,
    )  # fmt: skip
    b.elementwise("norm+gate", 3 * inner / TP)
    b.linear("out", "mamba", inner, h, shards=TP)
    b.all_reduce("all_reduce", h)
    per_head, per_group = state + values * inner, values * maps
    b.cache("state", sp.Float(per_head + per_group), _split(per_head, TP, per_group, held))


def _recurrence(b: Builder, heads: int, per_token: Any, state: Any, values: Any) -> None:
    """The core of a recurrent layer: `state` bytes a sequence, `values` in and out a token."""
    b.add(
        "core",
        fam.DELTA_RULE,
        dict(
            m=b.tokens, b=SEQS, H=heads, s=TP, f=per_token, y=state, n_act=values, a=2, **_scan(b)
        ),
        rate="bf16",
        compute_class=b.attention_class(),
        memory_class="stream" if b.decode else "scan",
        kernels=1 + smaller(1, b.query - 1) if b.decode else 5,
    )


def _scan(b: Builder) -> dict[str, Any]:
    """How often the state moves, and the scan of a prefill.

    Decode reads the state once and writes it once a token (a verify step keeps every one, so that
    it can go back to the last accepted). Prefill is chunked: state read and written once, tokens
    scanned in order.
    """
    if b.decode:
        return dict(n_rw=1 + b.query, tau=0, q=b.query)
    return dict(n_rw=2, tau=symbol("tau_scan_token"), q=b.query)


def _core(
    b: Builder, heads: int, d_qk: int, d_v: int, attended: sp.Expr, read: sp.Expr,
    held: Any = 1, sparse: bool = False,
) -> None:  # fmt: skip
    """The softmax core. Latent KV is one head: replicated over TP, split only by DCP (`held` 1).

    A decode-context-parallel rank holds 1/dcp of the context and dcp times its heads, so its
    FLOPs stay the same; queries are gathered and partial outputs merged over the dcp group.
    """
    cache = b.precision.cache
    b.add(
        "core",
        fam.ATTENTION,
        dict(
            m=b.tokens, b=SEQS, H=heads, s=TP, A=attended, d_qk=d_qk, d_v=d_v, R=read,
            e=cache.entry_bytes / held, dcp=DCP, a=2,
            l=0 if sparse else symbol("tau_context_decode" if b.decode else "tau_context_prefill"),
            h=symbol("tau_sparse_heads") if sparse and not b.decode else 0,
        ),
        rate=cache.attention_rate,
        compute_class=b.attention_class(),
        memory_class="sparse" if sparse and b.decode else "attention",
        kernels=4 if b.decode and not sparse else 2,
    )  # fmt: skip
    b.collective(
        "context_gather", "all_to_all", 2 * b.tokens * heads / TP * DCP * (d_qk + d_v), DCP, 1
    )


def _indexer(
    b: Builder, heads: Any, dim: int, mean: sp.Expr, last: sp.Expr, scores: Any = 1
) -> None:
    """Index heads score every entry and the best are chosen from `scores` numbers an entry."""
    cache = b.precision.cache
    b.add(
        "index_scan",
        fam.INDEXER,
        dict(
            m=b.tokens, b=SEQS, H=heads, d=dim, A=mean, R=last, e=cache.index_key_bytes,
            dcp=DCP, z=2 * cache.score_bytes * scores,
        ),
        rate=cache.index_rate,
        compute_class="gemm",
        memory_class="attention",
        kernels=2,
    )  # fmt: skip


KINDS = {
    CompressedAttention: compressed,
    MLA: mla,
    KDA: kda,
    GQA: gqa,
    GatedDelta: gated_delta,
    Mamba2: mamba2,
    BlockSparse: block_sparse,
}
