"""Engine and protocol cards: what serving software and a benchmark's arrivals add to the steps.

Every constant is a time or a share with a meaning of its own, fitted once over many deployments
(`calibration/fit_serving.py`), never per model or per chip.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from perfmodel.catalog import Id, Number, Ratio, Scale, Seconds, Share, Text


class _Card(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class EngineValues(_Card):
    """The constants of a serving engine.

    kernel_scale: time a counted kernel costs in a step, over the machine's floor.
    quantise_fp8, quantise_fp4: kernels' worth of time to quantise the activations of a product, with
        block-scaled FP8 and with NVFP4 weights (0: fused into the pass before).
    decode_only: time of a kernel on a worker that only decodes, over one that also prefills.
    sequence: host time a step spends on each sequence of a rank (sampling, scheduling).
    prefill_scale: time of a prefill in a mixed engine over that of its kernels.
    deferred: share of the prefill of others that a request waits for before its first token,
        not between tokens, when requests come in step (equal lengths).
    prefill_kernel: launch of a counted kernel in a prefill, which runs without graphs.
    request: fixed time of a request before its prefill starts.
    memory_fraction: share of the memory an engine takes for weights, activations and cache.
    """

    kernel_scale: Scale
    quantise_fp8: Number
    quantise_fp4: Number
    decode_only: Ratio
    sequence: Seconds
    prefill_scale: Scale
    deferred: Share
    prefill_kernel: Seconds
    request: Seconds
    memory_fraction: Ratio


class Engine(_Card):
    """A whole engine card."""

    id: Id
    name: Text
    summary: Text
    notes: list[Text] = []
    sources: dict[str, str]
    values: EngineValues


class ProtocolValues(_Card):
    """How a benchmark sends requests.

    lengths: mean length over the nominal one.
    wave: share of all requests that arrive together, as the first ones of a closed loop do.
    in_step: 1 where all lengths are equal, so that requests stay in step; else 0.
    """

    lengths: Ratio
    wave: Share
    in_step: Share


class Protocol(_Card):
    """A whole protocol card."""

    id: Id
    name: Text
    summary: Text
    sources: dict[str, str]
    values: ProtocolValues
