"""The layer kinds of a model card: what attention and feed-forward sections may hold.

Dims are plain counts; each section carries the source key and the mark (vendor, measured,
estimate) of all its numbers. What a kind costs is in `perfmodel.operators`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PositiveInt,
    StrictBool,
    ValidationInfo,
    model_validator,
)

Dim = Annotated[PositiveInt, Field(le=10**9, strict=True)]


def _resolve_source(key: str, info: ValidationInfo) -> str:
    sources = (info.context or {}).get("sources", {})
    if key not in sources:
        raise ValueError(f"source key is not in [sources]; known: {', '.join(sources) or 'none'}")
    return sources[key]


Source = Annotated[str, AfterValidator(_resolve_source)]


class Section(BaseModel):
    """A table of a card: unknown keys are errors; one mark and source for all its numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    kind: Literal["vendor", "measured", "estimate"]
    source: Source


class Indexer(BaseModel):
    """Lightning indexer: small heads that score every entry and keep the top k.

    With `candidates` only so many entries are scored, which an earlier layer has chosen. Keys come
    from a compressor of their own, or with `key_from_entry` from the compressed entry.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    heads: Dim
    head_dim: Dim
    top_k: Dim
    candidates: Dim | None = None
    key_from_entry: StrictBool = False


class Indexed(Section):
    """Attention that may pick entries; `index_shared` takes the picks of the last layer that did.

    Such a layer has no indexer weights, keys or scan of its own: its `indexer` is that layer's.
    """

    indexer: Indexer | None = None
    index_shared: StrictBool = False

    @model_validator(mode="after")
    def _has_picks(self) -> Indexed:
        if self.index_shared and self.indexer is None:
            raise ValueError("index_shared without indexer; expected that of the sharing layer")
        return self


class CompressedAttention(Indexed):
    """DeepSeek V4 attention: one shared KV head; `compression` 0 is the pure sliding window.

    `kv_shared` layers read the compressed entries (and index keys) of the last layer of the same
    compression that makes them, and keep a window alone.
    """

    type: Literal["compressed"]
    heads: Dim
    head_dim: Dim
    q_lora_rank: Dim
    o_groups: Dim
    o_lora_rank: Dim
    window: Dim
    compression: Annotated[int, Field(ge=0, le=4096, strict=True)]
    overlap: StrictBool = False
    kv_shared: StrictBool = False

    @model_validator(mode="after")
    def _whole_groups(self) -> CompressedAttention:
        if self.heads % self.o_groups:
            raise ValueError(f"o_groups {self.o_groups} does not divide heads {self.heads}")
        if not self.compression and (self.kv_shared or self.indexer):
            raise ValueError("compression 0 is a window alone; expected no kv_shared or indexer")
        return self


class MLA(Indexed):
    """Multi-head latent attention, with or without sparse selection and an output gate.

    Without `q_lora_rank` queries come from one full projection.
    """

    type: Literal["mla"]
    heads: Dim
    q_lora_rank: Dim | None = None
    kv_lora_rank: Dim
    nope_dim: Dim
    rope_dim: Dim
    v_dim: Dim
    output_gate: StrictBool = False


class KDA(Section):
    """Kimi delta attention: a constant recurrent state and a short convolution.

    The output gate is a full projection, or of `gate_rank`.
    """

    type: Literal["kda"]
    heads: Dim
    head_dim: Dim
    decay_rank: Dim
    gate_rank: Dim | None = None
    conv_kernel: Dim
    chunk: Dim


class GQA(Section):
    """Grouped-query attention: full, or over a sliding `window`; sinks and norms are not counted."""

    type: Literal["gqa"]
    heads: Dim
    kv_heads: Dim
    head_dim: Dim
    window: Dim | None = None
    output_gate: StrictBool = False

    @model_validator(mode="after")
    def _whole_groups(self) -> GQA:
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads {self.kv_heads} does not divide heads {self.heads}")
        return self


class GatedDelta(Section):
    """Gated DeltaNet: a constant recurrent state per value head and a short convolution."""

    type: Literal["gated_delta"]
    heads: Dim  # value heads, which hold the state
    key_heads: Dim
    key_dim: Dim
    value_dim: Dim
    conv_kernel: Dim
    chunk: Dim


class Mamba2(Section):
    """Mamba-2: a recurrent state of `head_dim` x `state_dim` a head, and a short convolution.

    `groups` share their input and output maps of the state (B and C) as KV heads are shared.
    """

    type: Literal["mamba2"]
    heads: Dim
    head_dim: Dim
    state_dim: Dim
    groups: Dim
    conv_kernel: Dim
    chunk: Dim

    @model_validator(mode="after")
    def _whole_groups(self) -> Mamba2:
        if self.heads % self.groups:
            raise ValueError(f"groups {self.groups} does not divide heads {self.heads}")
        return self


class BlockSparse(Section):
    """Grouped-query attention over chosen blocks of the context (MiniMax M3).

    Index heads score every token's index key; a block's score is its best one. Attended are the
    `top_blocks` best blocks and the last `local_blocks`.
    """

    type: Literal["block_sparse"]
    heads: Dim
    kv_heads: Dim
    head_dim: Dim
    block_tokens: Dim
    top_blocks: Dim
    local_blocks: Annotated[int, Field(ge=0, le=10**6, strict=True)]
    index_heads: Dim
    index_head_dim: Dim

    @model_validator(mode="after")
    def _whole_groups(self) -> BlockSparse:
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads {self.kv_heads} does not divide heads {self.heads}")
        return self


# Matrices of a feed-forward layer: gate, up and down; or up and down alone, as with relu squared.
Matrices = Annotated[int, Field(ge=2, le=3, strict=True)]


class MoE(Section):
    """Routed experts, shared experts and (where `latent_dim` is set) latent projections.

    Shared experts work at the hidden width; `shared_intermediate` is the inner width of all of
    them together, by default `shared_experts` x `intermediate`.
    """

    type: Literal["moe"]
    experts: Dim
    experts_per_token: Dim
    intermediate: Dim
    shared_experts: Annotated[int, Field(ge=0, le=64, strict=True)]
    shared_intermediate: Dim | None = None
    matrices: Matrices = 3
    latent_dim: Dim | None = None
    hash_layers: Annotated[int, Field(ge=0, le=1000, strict=True)] = 0

    @model_validator(mode="after")
    def _enough(self) -> MoE:
        if self.experts_per_token > self.experts:
            raise ValueError(
                f"experts_per_token {self.experts_per_token} is more than experts {self.experts}"
            )
        if self.shared_intermediate is not None and not self.shared_experts:
            raise ValueError(
                f"shared_intermediate {self.shared_intermediate} without shared experts; "
                "expected shared_experts of at least 1"
            )
        return self

    @property
    def shared_width(self) -> int:
        """Inner width of the shared experts together; 0 where there are none."""
        return self.shared_intermediate or self.shared_experts * self.intermediate


class Dense(Section):
    """A dense feed-forward layer, gated unless it has two `matrices`."""

    type: Literal["dense"]
    intermediate: Dim
    matrices: Matrices = 3


RECURRENT = (KDA, GatedDelta, Mamba2)  # what keeps a state instead of a cache
NONE = "none"  # in ATTENTION/FFN: the layer has no such part


def part_counts(order: Sequence[str]) -> tuple[Counter[str], Counter[str]]:
    """Layers of each attention and of each feed-forward name in a list of ATTENTION/FFN."""
    attention, _, ffn = zip(*(x.partition("/") for x in order), strict=True)
    return Counter(a for a in attention if a != NONE), Counter(f for f in ffn if f != NONE)


Attention = Annotated[
    CompressedAttention | MLA | KDA | GQA | GatedDelta | Mamba2 | BlockSparse,
    Field(discriminator="type"),
]
FeedForward = Annotated[MoE | Dense, Field(discriminator="type")]
