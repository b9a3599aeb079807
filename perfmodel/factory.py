"""The formulas of a factory: sessions that call, wait and come back, in steady state.

`LOOP` is one round of the closed loop; `pools.solve` iterates it to a fixed point. `METRICS` says
what is reported, with the basis in the name: which tokens, which power, which cost.
"""

from __future__ import annotations

from perfmodel.symbolic import Chain, larger, smaller


def _loop() -> Chain:
    c = Chain("factory", "one round of the closed loop, per call")
    threads = c.input("N_t", "1", "threads of all live sessions", r"N_t")
    own = c.input("agg", "1", "1: prefill on the GPUs that decode; 0: in a pool", r"a")
    dec = c.input("n_dec", "1", "decode instances", r"n_\mathrm{dec}")
    ranks = c.input("dp", "1", "attention ranks of a decode instance")
    servers = c.input("n_srv", "1", "ranks that prefill, of all instances", r"n_\mathrm{srv}")
    out = c.input("O", "token", "output tokens of a call")
    per = c.input("A", "token", "tokens a step yields per sequence (acceptance length)")
    cv2 = c.input("CV2", "1", "squared coefficient of variation of a prefill", r"c_v^2")
    gap = c.input("g", "s", "gap between two calls of a thread")
    t_step = c.input("t_step", "s", "decode step", r"t_\mathrm{step}")
    t_work = c.input("t_work", "s", "prefill of a call: kernels", r"t_\mathrm{work}")
    scale = c.input("s_pre", "1", "time of a prefill in the engine over its kernels'",
                    r"s_\mathrm{pre}")  # fmt: skip
    fetch = c.input("t_fetch", "s", "caches fetched from tiers below HBM", r"t_\mathrm{fetch}")
    send = c.input("t_send", "s", "cache sent from prefill to decode", r"t_\mathrm{send}")
    layers = c.input("n_layers", "1", "layers, one after the other, of a send", r"L")
    launch = c.input("t_launch", "s", "launches of a prefill", r"t_\mathrm{launch}")
    fixed = c.input("tau_req", "s", "fixed time of a request", r"\tau_\mathrm{req}")
    rate = c.input("X", "1/s", "calls per second, from the round before", "X")
    life0 = c.input("t_life", "s", "first to last token, from the round before", r"t_\mathrm{life}")
    cap = c.input("C_kv", "1", "sequences that fit where decode runs", r"C_\mathrm{kv}")
    pool = c.input(
        "C_pool", "1", "sequences that fit where caches wait, in HBM", r"C_\mathrm{pool}"
    )

    work = c.define("t_prefill", "s", "prefill of a call in the engine", scale * t_work)
    # Layer by layer, the fetch of one layer runs beside the prefill of the one before.
    serve = c.define("t_serve", "s", "time a call takes of a prefill rank", larger(work, fetch))
    each = c.define("N_srv", "1", "threads for each rank that prefills",
                    larger(threads / servers, 1), r"N_\mathrm{srv}")  # fmt: skip
    rho = c.define("rho", "1", "share of time that a rank prefills",
                   smaller(rate * serve / servers, 1), r"\rho")  # fmt: skip
    seen = c.define("seen", "1", "what an arriving call sees of it: all threads but its own",
                    rho * (each - 1) / each)  # fmt: skip
    left = c.define("t_left", "s", "mean time left of a prefill met at work", serve * (1 + cv2) / 2)
    met = c.define(
        "t_met", "s", "wait for prefills of others met at random (mean value analysis)",
        seen * left / larger(1 - seen, 1 / each),
    )  # fmt: skip
    # Of a send, all but the last layer's part goes beside the prefill.
    shown = c.define(
        "t_shown", "s", "what is left of the send after the prefill",
        (1 - own) * (larger(send - serve, 0) + send / layers),
    )  # fmt: skip
    others = c.define(
        "others", "1", "other threads for each decode rank", larger(threads / (dec * ranks) - 1, 0)
    )
    stall = c.define(
        "stall", "s/token", "prefills of others between two tokens",
        own * others * rate / threads * life0 * work / out,
    )  # fmt: skip
    tpot = c.define("tpot", "s/token", "mean time per output token", t_step / per + stall)
    life = c.define("t_decode", "s", "time from the first to the last token", out * tpot)
    alone = c.define(
        "t_alone",
        "s",
        "time to first token without others",
        serve + launch + fixed + shown + t_step,
    )
    # A rank prefills for one thread after the other: none comes round in less than all of them take.
    wait = c.define(
        "t_wait", "s", "wait for prefills of others",
        larger(met, each * serve - (alone + life + gap)),
    )  # fmt: skip
    begun = c.define("t_first", "s", "time to first token once there is room", wait + alone)
    holds = c.define(
        "t_holds", "s", "time that a call holds its place where decode runs", own * begun + life
    )
    full = c.define(
        "t_full", "s", "wait for room in the KV cache",
        larger(threads * holds / cap - (begun + life + gap), 0),
    )  # fmt: skip
    ttft = c.define("ttft", "s", "mean time to first token", begun + full)
    e2e = c.define("e2e", "s", "end-to-end latency of a call", ttft + life)
    after = c.define("X_next", "1/s", "calls per second", threads / (e2e + gap))
    c.define("batch", "1", "sequences that decode on an instance",
             larger(rate * life0 / dec, smaller(1, threads / dec)), "B")  # fmt: skip
    # What active calls leave of the pool is for the caches of threads that wait. Those of calls in
    # a queue are among them: they came back to find their history. Below zero, the tiers hold them.
    c.define("held", "s", "time of a gap that a cache is held in HBM",
             pool / after - own * (begun + life) - (1 - own) * (wait + serve) - full)  # fmt: skip
    return c


def _metrics() -> Chain:
    c = Chain("factory metrics", "basis in every name: which tokens, which power, which cost")
    rate = c.input("X", "1/s", "calls per second", "X")
    sessions = c.input("N", "1", "live sessions", "N")
    gpus = c.input("G", "1", "GPUs of all pools", "G")
    watts = c.input("P_gpu", "W", "power per GPU on the named basis", r"P_\mathrm{gpu}")
    usd = c.input("c_gpu", "USD/s", "cost per GPU and second on the named basis", r"c_\mathrm{gpu}")
    inp = c.input("I", "token", "input tokens of a call, cached ones too")
    hit = c.input("h", "1", "share of input tokens found in a cache")
    out = c.input("O", "token", "output tokens of a call")
    calls = c.input("n_calls", "1", "calls of a session", r"n_\mathrm{calls}")
    along = c.input("m", "1", "calls of a session at the same time", "m")
    tpot = c.input("tpot", "s/token", "mean time per output token")
    ttft = c.input("ttft", "s", "mean time to first token")
    e2e = c.input("e2e", "s", "end-to-end latency of a call")
    gap = c.input("g", "s", "gap between two calls of a thread")
    per_mw = c.const("watts", 1_000_000, "W/MW", "watts in a megawatt")
    per_mtok = c.const("mega", 1_000_000, "token/Mtoken", "tokens in a million")
    fleet = c.define("fleet", "W", "power of all GPUs on the named basis", gpus * watts, "P")
    cost = c.define("cost", "USD/s", "cost of all GPUs on the named basis", gpus * usd)
    fresh = c.define("fresh", "token", "input tokens of a call that are prefilled", inp * (1 - hit))
    c.define("interactivity", "token/s", "output tokens per second and user", 1 / tpot, "I_u")
    c.define("felt", "token/s", "output tokens per second and user, time to first token spread over them",
             1 / (tpot + ttft / out))  # fmt: skip
    for name, tokens, what in (
        ("output", out, "output tokens"),
        ("uncached", fresh + out, "uncached input and output tokens"),
        ("total", inp + out, "all tokens, cached ones too"),
    ):
        r = c.define(f"{name}_rate", "token/s", f"{what} per second", rate * tokens)
        c.define(f"{name}_gpu", "token/s", f"{what} per second and GPU", r / gpus)
        c.define(f"{name}_mw", "token/s/MW", f"{what} per second and megawatt", per_mw * r / fleet)
        c.define(f"joule_{name}", "J/token", f"energy over {what}", fleet / r)
        c.define(
            f"usd_{name}", "USD/Mtoken", f"all cost over millions of {what}", per_mtok * cost / r
        )
    c.define("usd_call", "USD", "cost of a call", cost / rate)
    c.define("usd_session", "USD", "cost of a session", cost / rate * calls)
    c.define("task", "s", "end-to-end latency of a session: calls and gaps, threads side by side",
             calls / along * (e2e + gap))  # fmt: skip
    c.define("sessions_gpu", "1", "live sessions for each GPU", sessions / gpus)
    c.define("sessions_mw", "1/MW", "live sessions for each megawatt", per_mw * sessions / fleet)
    return c


LOOP, METRICS = _loop(), _metrics()
