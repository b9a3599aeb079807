"""Model cards: the shape of a model as an ordered list of layers, with its precisions.

A card is data only. Its layer sections are those of `perfmodel.layers`.
"""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    model_validator,
)

from perfmodel.catalog import Bytes, Count, Date, Id, Text, short
from perfmodel.errors import InputError
from perfmodel.layers import (
    NONE,
    RECURRENT,
    Attention,
    BlockSparse,
    CompressedAttention,
    Dim,
    FeedForward,
    Section,
    Source,
    part_counts,
)
from perfmodel.precision import FORMATS, Format

# bytes or values of one cache entry: a megabyte is far beyond any
PerValue = Annotated[float, Field(gt=0, le=1e6, strict=True, allow_inf_nan=False)]


def _known_format(name: str) -> str:
    if name not in FORMATS:
        raise ValueError(f"unknown number format; known: {', '.join(FORMATS)}")
    return name


FormatName = Annotated[str, AfterValidator(_known_format)]


class Residual(Section):
    """How layers are joined: `mhc` (n streams, two sites a layer) or `attnres` (blocks)."""

    type: Literal["mhc", "attnres"]
    streams: Dim | None = None
    block_layers: Dim | None = None

    @model_validator(mode="after")
    def _complete(self) -> Residual:
        if self.type == "mhc" and self.streams is None:
            raise ValueError("an mhc residual needs streams")
        if self.type == "attnres" and self.block_layers is None:
            raise ValueError("an attnres residual needs block_layers")
        return self


class Shape(Section):
    hidden_size: Dim
    vocab_size: Dim
    context_tokens: Dim
    layers: Dim
    order: Annotated[list[str], Field(min_length=1, max_length=1000)]
    # a prefill runs the first `prefill_layers` for all tokens, the others for the last ones alone
    prefill_layers: Dim | None = None
    prefill_tail_tokens: Dim | None = None

    @model_validator(mode="after")
    def _both(self) -> Shape:
        if (self.prefill_layers is None) != (self.prefill_tail_tokens is None):
            raise ValueError("prefill_layers and prefill_tail_tokens: expected both or neither")
        if self.prefill_layers is not None and self.prefill_layers >= self.layers:
            raise ValueError(
                f"prefill_layers {self.prefill_layers}: expected fewer than layers {self.layers}"
            )
        return self


class Cache(BaseModel):
    """Bytes of what stays resident for a sequence."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    entry_bytes: PerValue
    window_entry_bytes: PerValue | None = None  # of windows, where they differ
    index_key_bytes: PerValue | None = None
    state_value_bytes: PerValue | None = None
    conv_value_bytes: PerValue | None = None
    tail_bytes_per_sequence: Annotated[
        float, Field(ge=0, le=1e12, strict=True, allow_inf_nan=False)
    ] = 0.0
    attention_rate: Literal["bf16", "fp8"]
    index_rate: Literal["bf16", "fp8", "fp4"] = "fp8"
    score_bytes: PerValue = 4.0


class Precision(Section):
    """A number format per tensor class; `default` holds for classes not named."""

    summary: Text
    weights: dict[str, FormatName]
    activations: dict[str, FormatName]
    cache: Cache
    without_fp4: str | None = None  # of `native`: the precision that chips without FP4 run
    labels: list[Text] = []  # what benchmark rows call it
    draft: FormatName | None = None  # of the draft's layers, where they are not as the model's

    @model_validator(mode="after")
    def _defaults(self) -> Precision:
        for name, table in (("weights", self.weights), ("activations", self.activations)):
            if "default" not in table:
                raise ValueError(f"{name} needs a `default` format")
            if unknown := set(table) - TENSOR_CLASSES - {"default"}:
                raise ValueError(
                    f"{name} names unknown tensor classes {sorted(unknown)}; "
                    f"known: {', '.join(sorted(TENSOR_CLASSES))}"
                )
        return self

    def weight(self, tensor_class: str) -> Format:
        return FORMATS[_of_class(self.weights, tensor_class)]

    def activation(self, tensor_class: str) -> Format:
        return FORMATS[_of_class(self.activations, tensor_class)]

    def of_draft(self) -> Precision:
        """The precision of a draft's layers: `draft` for all but the classes of UNQUANTISED."""
        if self.draft is None:
            return self
        both = {
            name: {c: _of_class(table, c) for c in UNQUANTISED} | {"default": self.draft}
            for name, table in (("weights", self.weights), ("activations", self.activations))
        }
        return self.model_copy(update=both)


def _of_class(table: dict[str, str], tensor_class: str) -> str:
    """A class's format; the attention output has its own in some checkpoints, else attention's."""
    if tensor_class == "attention_out" and tensor_class not in table:
        tensor_class = "attention"
    return table.get(tensor_class, table["default"])


TENSOR_CLASSES = frozenset(
    {
        "experts",
        "shared",
        "dense",
        "attention",
        "attention_out",
        "mamba",
        "compressor",
        "indexer",
        "router",
        "latent",
    }
    | {"head", "embedding", "residual", "vision", "draft_projection", "engram", "engram_tables"}
)


# classes that keep their format in a draft: shared with the model, or never quantised
UNQUANTISED = ("router", "head", "embedding", "residual")


class Draft(Section):
    """A draft head for speculation: layers run `passes` times a step, or once over a block."""

    method: Literal["mtp", "dspark"]
    layers: Annotated[list[str], Field(min_length=1, max_length=16)]
    block: StrictBool
    projections: Annotated[int, Field(ge=0, le=8, strict=True)] = 0
    max_tokens: Annotated[int, Field(ge=1, le=32, strict=True)]
    in_checkpoint: StrictBool
    acceptance: Annotated[
        dict[str, Annotated[float, Field(strict=True, allow_inf_nan=False)]], Field(min_length=1)
    ]

    @model_validator(mode="after")
    def _lengths(self) -> Draft:
        for k, v in self.acceptance.items():
            drafted = int(k) if k.isascii() and k.isdigit() and len(k) < 4 else 0
            if not 1 <= drafted <= self.max_tokens or not 1 <= v <= drafted + 1:
                raise ValueError(
                    f"acceptance {short(k)} = {v}: expected draft tokens (1 .. max_tokens) = "
                    "acceptance length, which counts the bonus token (1 .. draft tokens + 1)"
                )
        return self


class Published(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    total_parameters: Count | None = None
    active_parameters: Count | None = None
    checkpoint: Bytes | None = None


class Vision(Section):
    parameters: Dim


class Engram(Section):
    """Tables of vectors that layers look up by the last tokens, one table a layer.

    They lie in host memory; `rows_per_token` vectors of a table go through a projection to the
    hidden width, one key for each residual stream and one value.
    """

    table_rows: Annotated[list[Dim], Field(min_length=1, max_length=16)]
    row_dim: Dim
    rows_per_token: Dim

    @property
    def table_parameters(self) -> int:
        return sum(self.table_rows) * self.row_dim


Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]


class Uncertain(BaseModel):
    """A number of the card that is not public: where it may lie, and why."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    field: Text
    low: Number
    high: Number
    why: Text
    source: Source


class Model(BaseModel):
    """A whole model card."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    id: Id
    name: Text
    vendor: Text
    summary: Text
    date: Date | None = None
    notes: list[Text] = []
    also: list[Text] = []  # other names of the same shape, as Hugging Face writes them
    sources: dict[str, str]
    published: Published
    shape: Shape
    attention: dict[str, Attention]
    ffn: dict[str, FeedForward]
    residual: Residual | None = None
    vision: Vision | None = None
    engram: Engram | None = None
    precision: dict[str, Precision]
    draft: dict[str, Draft] = {}
    uncertain: list[Uncertain] = []

    @model_validator(mode="after")
    def _shared_from_before(self) -> Model:
        """Layers that share take from one before them; halves of a prefill have kinds apart."""
        made: set[int | str] = set()
        for i, layer in enumerate(self.shape.order):
            a = self.attention.get(layer.partition("/")[0])
            for flag, key in (
                ("index_shared", "picks"),
                ("kv_shared", getattr(a, "compression", None)),
            ):
                if getattr(a, flag, False) and key not in made:
                    raise ValueError(
                        f"shape.order[{i}] = {short(layer)}: {flag}, but no layer before it makes "
                        "what it shares; expected one"
                    )
            if getattr(a, "indexer", None) and not getattr(a, "index_shared", False):
                made.add("picks")
            if isinstance(a, CompressedAttention) and not a.kv_shared:
                made.add(a.compression)
        n = self.shape.prefill_layers
        if n is not None:
            early, late = (part_counts(x) for x in (self.shape.order[:n], self.shape.order[n:]))
            if both := sorted(
                {k for x, y in zip(early, late, strict=True) for k in set(x) & set(y)}
            ):
                raise ValueError(
                    f"shape.prefill_layers = {n}: {both[0]} is on both sides; expected layers "
                    "beyond it to have kinds of their own"
                )
        return self

    @model_validator(mode="after")
    def _consistent(self) -> Model:
        if both := sorted(set(self.attention) & set(self.ffn)):
            raise ValueError(f"ffn.{both[0]}: attention has this name too; expected another one")
        for kind in ("attention", "ffn"):
            if NONE in getattr(self, kind):
                raise ValueError(f"{kind}.{NONE}: the name is reserved for layers without {kind}")
        for where, names in [("shape.order", self.shape.order)] + [
            (f"draft.{n}.layers", d.layers) for n, d in self.draft.items()
        ]:
            for i, layer in enumerate(names):
                a, _, f = layer.partition("/")
                known = (a == NONE or a in self.attention) and (f == NONE or f in self.ffn)
                if not known or (a, f) == (NONE, NONE):
                    raise ValueError(
                        f"{where}[{i}] = {short(layer)}: expected ATTENTION/FFN with attention in "
                        f"{sorted(self.attention)} and ffn in {sorted(self.ffn)}, one of them "
                        f"may be {NONE}"
                    )
        if len(self.shape.order) != self.shape.layers:
            raise ValueError(
                f"shape.order: {len(self.shape.order)} layers listed; expected shape.layers = "
                f"{self.shape.layers}"
            )
        indexed = [
            n for n, a in self.attention.items()
            if isinstance(a, BlockSparse) or getattr(a, "indexer", None)
        ]  # fmt: skip
        recurrent = [n for n, a in self.attention.items() if isinstance(a, RECURRENT)]
        for n, p in self.precision.items():
            for key, users in (
                ("index_key_bytes", indexed),
                ("state_value_bytes", recurrent),
                ("conv_value_bytes", recurrent),
            ):
                if users and getattr(p.cache, key) is None:
                    raise ValueError(
                        f"precision.{n}.cache.{key}: missing; expected bytes because "
                        f"attention.{users[0]} keeps them"
                    )
        if "native" not in self.precision:
            raise ValueError("precision needs a `native` entry")
        if "auto" in self.precision:
            raise ValueError("precision.auto is reserved; expected another name")
        for n, p in self.precision.items():
            if p.without_fp4 is not None and p.without_fp4 not in self.precision:
                raise ValueError(
                    f"precision.{n}.without_fp4 = {p.without_fp4!r}: expected one of "
                    f"{', '.join(self.precision)}"
                )
        return self

    @model_validator(mode="after")
    def _uncertain_numbers(self) -> Model:
        for i, u in enumerate(self.uncertain):
            value = self.number(u.field)
            if value is None:
                raise ValueError(
                    f"uncertain[{i}].field = {short(u.field)}: expected a number of this card, "
                    "such as ffn.moe.intermediate"
                )
            if not u.low <= value <= u.high:
                raise ValueError(
                    f"uncertain[{i}].low = {u.low:g}: expected low <= {u.field} <= high, not "
                    f"{u.low:g} <= {value:g} <= {u.high:g}"
                )
        return self

    def number(self, path: str) -> float | None:
        """The plain number at a path such as `ffn.moe.intermediate`; None if there is none."""
        node: object = self
        for key in path.split("."):
            node = node.get(key) if isinstance(node, dict) else getattr(node, key, None)
        plain = isinstance(node, int | float) and not isinstance(node, bool)
        return float(node) if plain else None  # type: ignore[arg-type]

    @property
    def layers(self) -> int:
        return len(self.shape.order)

    @property
    def has_partial_layers(self) -> bool:
        """Whether some layers have only attention or only a feed-forward part."""
        return any(NONE in x.split("/") for x in self.shape.order)

    def attention_counts(self) -> Counter[str]:
        """Layers of each attention name, in order of first use."""
        return part_counts(self.shape.order)[0]

    def ffn_counts(self) -> Counter[str]:
        """Layers of each feed-forward name, in order of first use."""
        return part_counts(self.shape.order)[1]

    def precision_named(self, name: str) -> Precision:
        if name not in self.precision:
            raise InputError(
                f"precision: {name!r} is not on the card of {self.id}; "
                f"it has: {', '.join(self.precision)}"
            )
        return self.precision[name]
