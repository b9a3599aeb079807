"""The cost formulas of every operator family, each written once.

All quantities are for one GPU and one layer. The formulas are named definitions (see
`perfmodel.symbolic.Chain`); `builder` binds their inputs to a model's dims and a step's symbols.
1 MAC = 2 FLOP.
"""

from __future__ import annotations

import sympy as sp

from perfmodel.symbolic import Chain, either, larger, smaller


def _linear() -> Chain:
    c = Chain("linear", "dense projection, g independent groups, weights split s ways")
    two = c.const("c_mac", 2, "FLOP/token", "one multiply and one add per weight and token")
    m = c.input("m", "token", "tokens on this GPU")
    g = c.input("g", "1", "groups")
    n_in = c.input("n_in", "1", "inputs of a group", r"n_\mathrm{in}")
    n_out = c.input("n_out", "1", "outputs of a group", r"n_\mathrm{out}")
    s = c.input("s", "1", "ways the weights are split (tensor parallel)")
    w = c.input("w", "B", "bytes per weight", r"\beta_w")
    a = c.input("a", "B/token", "bytes per activation value", r"\beta_a")
    c.define("flops", "FLOP", "FLOPs", two * m * g * n_in * n_out / s, "F")
    c.define("weight_bytes", "B", "weights read", g * n_in * n_out * w / s, "X_w")
    c.define("act_bytes", "B", "activations in and out", a * m * g * (n_in + n_out) / s, "X_a")
    return c


def _experts() -> Chain:
    c = Chain("experts", "routed experts of one mixture-of-experts layer on one GPU")
    two = c.const("c_mac", 2, "FLOP/token", "one multiply and one add per weight and token")
    big_m = c.input("M", "token", "tokens routed in the expert-parallel group")
    one = c.const("one", 1, "token", "one token: makes the exponent dimensionless")
    e = c.input("E", "1", "routed experts")
    k = c.input("k", "1", "experts per token")
    extra = c.input("R", "1", "replicas of busy experts, on top of E", "R")
    ep = c.input("ep", "1", "expert-parallel ranks")
    etp = c.input("etp", "1", "tensor-parallel ways inside an expert")
    h = c.input("h", "1", "expert input width")
    d = c.input("d", "1", "expert intermediate width")
    n_mat = c.input(
        "n_mat", "1", "matrices in an expert (gate, up, down; 2: no gate)", r"n_\mathrm{mat}"
    )
    w = c.input("w", "B", "bytes per weight", r"\beta_w")
    a = c.input("a", "B/token", "bytes per activation value", r"\beta_a")
    r = c.input("r", "token", "rows of tile padding per touched expert", r"r_\mathrm{tile}")
    phi = c.input("phi", "1", "load of the busiest rank over the mean", r"\varphi")
    nu = c.input("nu", "1", "variance of the experts' popularity, whose mean is 1", r"\nu")
    xi = c.input("xi", "1", "1: wait for the rank with most experts touched; 0: the mean", r"\xi")
    held = c.define(
        "held",
        "1",
        "experts on the fullest rank, replicas included",
        sp.ceiling((e + extra) / ep),
        r"n_\mathrm{held}",
    )
    # A token misses an expert of popularity x with chance (1 - k/E)^x, so M - 1 tokens do with that
    # to the M - 1. Its mean over a gamma distribution of x (mean 1, variance nu) is the power below;
    # the first token gets exactly k experts. As nu goes to 0 it is uniform routing,
    # E (1 - (1 - k/E)^M).
    mean = c.define(
        "mean_touched",
        "1",
        "experts of a rank that get at least one token, mean of all ranks",
        held * (1 - (1 - k / e) * (1 - nu * sp.log(1 - k / e) * (big_m / one - 1)) ** (-1 / nu)),
        r"\bar n_\mathrm{touched}",
    )
    # The layer waits for the rank with most of them: of ep draws with a binomial spread, the
    # largest lies about sqrt(2 ln ep) standard deviations above the mean.
    spread = sp.sqrt(2 * sp.log(ep) * mean * (1 - mean / held))
    touched = c.define(
        "touched",
        "1",
        "touched experts of the busiest rank",
        smaller(held, mean + xi * spread),
        r"n_\mathrm{touched}",
    )
    pairs = c.define(
        "pairs", "token", "token-expert pairs on this rank", phi * big_m * k * held / (e + extra)
    )
    c.define(
        "flops",
        "FLOP",
        "FLOPs, padding included",
        two * (pairs + r * touched) * n_mat * h * d / etp,
        "F",
    )
    c.define(
        "weight_bytes", "B", "weights of touched experts", touched * n_mat * h * d * w / etp, "X_w"
    )
    c.define(
        "act_bytes", "B", "activations in and out", a * pairs * (2 * h + n_mat * d / etp), "X_a"
    )
    return c


def _attention() -> Chain:
    c = Chain("attention", "softmax attention core over a KV cache")
    two = c.const("c_mac", 2, "FLOP/token**2", "one multiply and one add per pair and dimension")
    m = c.input("m", "token", "query tokens on this GPU")
    b = c.input("b", "1", "sequences on this GPU")
    heads = c.input("H", "1", "query heads")
    s = c.input("s", "1", "ways the heads are split")
    big_a = c.input("A", "token", "entries attended by a query (mean)")
    d_qk = c.input("d_qk", "1", "query and key dims of a head", r"d_{qk}")
    d_v = c.input("d_v", "1", "value dims of a head", r"d_v")
    big_r = c.input("R", "token", "cache entries read per sequence")
    e = c.input(
        "e", "B/token", "bytes of a cache entry (all KV heads held here)", r"\beta_\mathrm{kv}"
    )
    dcp = c.input("dcp", "1", "ways the context is split (decode context parallel)")
    a = c.input("a", "B/token", "bytes per activation value", r"\beta_a")
    pad = c.input("l", "token", "entries of padding a query computes", r"l_\mathrm{pad}")
    least = c.input("h", "1", "heads that the kernel computes at least", r"h_\mathrm{min}")
    c.define(
        "flops", "FLOP", "score and value products, padding included",
        two * m * larger(heads / s, least) * (big_a + pad) * (d_qk + d_v), "F",
    )  # fmt: skip
    c.define("kv_bytes", "B", "cache read", b * big_r * e / dcp, r"X_\mathrm{kv}")
    c.define("act_bytes", "B", "queries in, outputs out", a * m * heads / s * (d_qk + d_v), "X_a")
    return c


def _indexer() -> Chain:
    c = Chain("indexer", "lightning indexer: scores every entry, then selects the top k")
    two = c.const("c_mac", 2, "FLOP/token**2", "one multiply and one add per pair and dimension")
    m = c.input("m", "token", "query tokens on this GPU")
    b = c.input("b", "1", "sequences on this GPU")
    heads = c.input("H", "1", "index heads (replicated over tensor parallel ranks)")
    d = c.input("d", "1", "dims of an index head")
    big_a = c.input("A", "token", "entries scored by a query (mean)")
    big_r = c.input("R", "token", "index keys read per sequence")
    e = c.input("e", "B/token", "bytes of an index key", r"\beta_\mathrm{idx}")
    dcp = c.input("dcp", "1", "ways the context is split")
    z = c.input("z", "B/token**2", "bytes per score, written then read by the selector", r"\beta_z")
    c.define("flops", "FLOP", "index scores", two * m * heads * d * big_a / dcp, "F")
    c.define("kv_bytes", "B", "index keys read", b * big_r * e / dcp, r"X_\mathrm{kv}")
    c.define("act_bytes", "B", "scores written and read", z * m * big_a / dcp, "X_a")
    return c


def _delta_rule() -> Chain:
    c = Chain("delta_rule", "delta rules and Mamba-2: a constant state instead of a KV cache")
    m = c.input("m", "token", "tokens on this GPU")
    b = c.input("b", "1", "sequences on this GPU")
    heads = c.input("H", "1", "heads")
    s = c.input("s", "1", "ways the heads are split")
    f = c.input("f", "FLOP/token", "FLOPs per token and head", "f_h")
    state = c.input("y", "B", "bytes of state per sequence and layer, recurrent and conv")
    width = c.input("n_act", "1", "activation values per token in and out", r"n_\mathrm{act}")
    a = c.input("a", "B/token", "bytes per activation value", r"\beta_a")
    rw = c.input("n_rw", "1", "times the state is read or written in a step", r"n_\mathrm{rw}")
    turn = c.input("tau", "s/token", "a token's turn: sequences are scanned in order", r"\tau_t")
    q = c.input("q", "token", "tokens of a sequence")
    c.define("flops", "FLOP", "state update and read-out", m * heads * f / s, "F")
    c.define("kv_bytes", "B", "state read and written", rw * b * state / s, r"X_\mathrm{kv}")
    c.define("act_bytes", "B", "projected inputs and outputs", a * m * width / s, "X_a")
    c.define("serial_s", "s", "the scan along the longest sequence", turn * q)
    return c


def _elementwise() -> Chain:
    c = Chain("elementwise", "norms, residual mixing and other memory passes")
    m = c.input("m", "token", "tokens on this GPU")
    n = c.input("n", "1", "values read and written per token")
    f = c.input("f", "FLOP/token", "FLOPs per token")
    a = c.input("a", "B/token", "bytes per value", r"\beta_a")
    c.define("flops", "FLOP", "FLOPs", m * f, "F")
    c.define("act_bytes", "B", "values read and written", a * m * n, "X_a")
    return c


def _collective() -> Chain:
    c = Chain("collective", "one collective: latency by tier, then bytes over the slower tier")
    x = c.input("x", "B", "payload of one GPU")
    g = c.input("g", "1", "GPUs in the group")
    v = c.input("v", "1", "how often the payload crosses a link (all-reduce 2, others 1)")
    dom = c.input("D", "1", "GPUs of one NVLink domain")
    bw_in = c.input(
        "W_in", "B/s", "NVLink bandwidth x efficiency, one direction", r"W_\mathrm{nvl}"
    )
    bw_out = c.input(
        "W_out", "B/s", "scale-out bandwidth x efficiency, one direction", r"W_\mathrm{out}"
    )
    lat = c.input("l", "s", "latency inside the domain", r"\ell_\mathrm{nvl}")
    lat_out = c.input(
        "l_out", "s", "extra latency once the group leaves the domain", r"\ell_\mathrm{out}"
    )
    # The share of peers outside the domain; ranks fill a domain before they leave it.
    out = c.define(
        "share_out",
        "1",
        "share of the payload that leaves the NVLink domain",
        larger(0, 1 - dom / g),
        "o",
    )
    sent = c.define("message_bytes", "B", "bytes each GPU sends", v * x * (g - 1) / g, "X_m")
    t_in = c.define("t_in", "s", "time on NVLink", sent * (1 - out) / bw_in, r"t_\mathrm{nvl}")
    t_out = c.define(
        "t_out", "s", "time on the scale-out network", sent * out / bw_out, r"t_\mathrm{out}"
    )
    c.define(
        "link_s",
        "s",
        "transfer time: both tiers run at once",
        larger(t_in, t_out),
        r"t_\mathrm{link}",
    )
    on = smaller(1, g - 1)
    far = sp.ceiling(out)
    c.define(
        "latency_s", "s", "latency (none for a group of one)", on * lat + far * lat_out, r"\ell"
    )
    return c


def _all_reduce() -> Chain:
    c = Chain("all_reduce", "sum over tensor-parallel ranks: one-shot, two-shot or across domains")
    x = c.input("x", "B", "payload of one GPU")
    g = c.input("g", "1", "GPUs in the group")
    dom = c.input("D", "1", "GPUs of one NVLink domain")
    w1 = c.input("W_one", "B/s", "NVLink bandwidth x efficiency, one-shot", r"W_1")
    w2 = c.input("W_two", "B/s", "NVLink bandwidth x efficiency, two-shot", r"W_2")
    bw_out = c.input("W_out", "B/s", "scale-out bandwidth x efficiency", r"W_\mathrm{out}")
    l1 = c.input("l_one", "s", "latency, one-shot", r"\ell_1")
    l2 = c.input("l_two", "s", "latency, two-shot", r"\ell_2")
    lr = c.input("l_rank", "s", "latency of each rank beyond two", r"\ell_r")
    lat_out = c.input("l_out", "s", "extra latency across domains", r"\ell_\mathrm{out}")
    out = c.define(
        "share_out", "1", "share of the payload that leaves the NVLink domain",
        larger(0, 1 - dom / g), "o",
    )  # fmt: skip
    on = smaller(1, g - 1)
    far = sp.ceiling(out)
    one = c.define("one_bytes", "B", "each rank reads all others whole", x * (g - 1), "X_1")
    two = c.define(
        "two_bytes", "B", "each rank reduces its part and gathers the others'", 2 * x * (g - 1) / g,
        "X_2",
    )  # fmt: skip
    t_two = c.define(
        "t_two", "s", "transfer, two-shot: both tiers run at once",
        larger(two * (1 - out) / w2, two * out / bw_out),
    )  # fmt: skip
    gain = c.define(
        "gain", "s", "what one shot saves, in a group of one domain",
        either(far, 0, t_two + on * l2 - one / w1 - on * l1),
    )  # fmt: skip
    c.define("link_s", "s", "transfer of the faster way", either(gain, one / w1, t_two))
    c.define("message_bytes", "B", "bytes of the faster way", either(gain, one, two))
    c.define(
        "latency_s", "s", "latency (none for a group of one)",
        on * either(gain, l1, l2) + lr * larger(0, g - 2) + far * lat_out, r"\ell",
    )  # fmt: skip
    return c


def _exchange() -> Chain:
    c = Chain("exchange", "tokens to their experts or back: straight, or gathered by every rank")
    x = c.input("x", "B", "one copy of a GPU's tokens")
    k = c.input("k", "1", "experts of a token")
    once = c.input("once", "1", "1: a rank or domain gets a token once; 0: once for each expert")
    g = c.input("g", "1", "GPUs in the group")
    tp = c.input("tp", "1", "GPUs that share a token")
    dom = c.input("D", "1", "GPUs of one NVLink domain")
    bw_in = c.input("W_in", "B/s", "NVLink bandwidth x efficiency", r"W_\mathrm{nvl}")
    bw_ag = c.input("W_ag", "B/s", "NVLink bandwidth x efficiency, gathering", r"W_\mathrm{ag}")
    bw_out = c.input("W_out", "B/s", "scale-out bandwidth x efficiency", r"W_\mathrm{out}")
    lat = c.input("l", "s", "latency of the straight way", r"\ell_\mathrm{nvl}")
    lat_ag = c.input("l_ag", "s", "latency of gathering", r"\ell_\mathrm{ag}")
    lat_out = c.input("l_out", "s", "extra latency across domains", r"\ell_\mathrm{out}")
    n_dom = c.define("domains", "1", "NVLink domains of the group", sp.ceiling(g / dom), "n_D")
    # k experts drawn from g ranks fall on g (1 - (1 - 1/g)^k) of them; as much for domains.
    ranks = c.define(
        "ranks", "1", "ranks that get a token", g * (1 - (1 - 1 / g) ** k), r"n_\mathrm{r}"
    )
    away = c.define(
        "away", "1", "other domains that get a token",
        (n_dom - 1) * (1 - (1 - 1 / n_dom) ** k), r"n_\mathrm{away}",
    )  # fmt: skip
    near = c.define(
        "near", "1", "copies of a token to GPUs of its domain", k * (smaller(g, dom) - 1) / g
    )
    beyond = c.define(
        "beyond", "1", "copies of a token to other domains", k * larger(0, g - dom) / g
    )
    far = larger(0, 1 - dom / g)
    inside = c.define(
        "inside_bytes", "B", "bytes a GPU sends over NVLink",
        x / tp * either(once, ranks * (g - 1) / g, near),
    )  # fmt: skip
    out = c.define(
        "outside_bytes", "B", "bytes a GPU sends to other domains",
        x / tp * either(once, away, beyond),
    )  # fmt: skip
    all_ = c.define("gathered_bytes", "B", "bytes each GPU receives when gathering",
                    x / tp * (g - 1))  # fmt: skip
    t_s = c.define("t_straight", "s", "transfer, straight: both tiers run at once",
                   larger(inside / bw_in, out / bw_out))  # fmt: skip
    on = smaller(1, g - 1)
    l_s = c.define("l_straight", "s", "latency, straight (none for a group of one)",
                   on * lat + sp.ceiling(far) * lat_out)  # fmt: skip
    t_g = c.define("t_gather", "s", "transfer, gathering", all_ / bw_ag)
    # Gathering is for small messages inside a domain; engines switch by size.
    gain = c.define(
        "gain", "s", "what gathering saves, in a group of one domain",
        either(g - dom, 0, t_s + l_s - t_g - on * lat_ag),
    )  # fmt: skip
    c.define("link_s", "s", "transfer of the faster way", either(gain, t_g, t_s))
    c.define("latency_s", "s", "latency of the faster way", either(gain, on * lat_ag, l_s))
    c.define("message_bytes", "B", "bytes of the faster way", either(gain, all_, inside + out))
    return c


def _send() -> Chain:
    c = Chain("send", "hidden states passed on from stage to stage of a pipeline")
    x = c.input("x", "B", "payload of one GPU and send")
    pp = c.input("pp", "1", "pipeline stages")
    g = c.input("g", "1", "GPUs of all stages")
    dom = c.input("D", "1", "GPUs of one NVLink domain")
    bw_in = c.input("W_in", "B/s", "NVLink bandwidth x efficiency", r"W_\mathrm{nvl}")
    bw_out = c.input("W_out", "B/s", "scale-out bandwidth x efficiency", r"W_\mathrm{out}")
    lat = c.input("l", "s", "latency of a send", r"\ell_\mathrm{send}")
    lat_out = c.input("l_out", "s", "extra latency across domains", r"\ell_\mathrm{out}")
    # stages fill a domain before they leave it: so many of the pp - 1 borders lie between domains
    far = c.define(
        "far", "1", "sends that cross a domain border", smaller(pp - 1, sp.ceiling(g / dom) - 1)
    )
    c.define("message_bytes", "B", "bytes sent, all borders", x * (pp - 1), "X_m")
    c.define(
        "link_s", "s", "transfer time, all borders", x * ((pp - 1 - far) / bw_in + far / bw_out)
    )
    c.define("latency_s", "s", "latency, all borders", (pp - 1) * lat + far * lat_out, r"\ell")
    return c


LINEAR = _linear()
EXPERTS = _experts()
ATTENTION = _attention()
INDEXER = _indexer()
DELTA_RULE = _delta_rule()
ELEMENTWISE = _elementwise()
COLLECTIVE = _collective()
ALL_REDUCE = _all_reduce()
EXCHANGE = _exchange()
SEND = _send()
FAMILIES = {
    c.name: c
    for c in (
        LINEAR,
        EXPERTS,
        ATTENTION,
        INDEXER,
        DELTA_RULE,
        ELEMENTWISE,
        COLLECTIVE,
        ALL_REDUCE,
        EXCHANGE,
        SEND,
    )
}
