"""
Threshold Relative Attention (TRA): the whole model in one file.

Paper: "TRA: Better Length Generalisation with Threshold Relative Attention",
Opper, Fernandez, Smolensky and Gao, TMLR 2025, https://arxiv.org/abs/2503.23174

Softmax attention gives every key some weight, and most position encodings measure distance over
all keys. Both change when sequences grow: there is more to average over, and distances appear that
were never trained. TRA changes two things. A key whose score is not positive leaves the softmax
altogether, and distance counts only the keys that stayed:

    s_ij    = q_i . k_j / sqrt(D)                 q and k RMS-normalised over the head dimension D
    keep_ij = (j <= i) and (s_ij > 0)             selective sparsity
    c_ij    = #{ m kept by i : j <= m <= i }      contextual distance: the nearest kept key is at 1
    g_i     = log sigmoid(w . x_i + b)  <= 0      x_i is what attention reads; w, b the head's
    l_ij    = s_ij + g_i c_ij                     where kept
    a_ij    = softmax of l_ij over the kept j     a row that keeps nothing outputs exactly 0
    o_i     = sum_j a_ij v_j

The gate e^{g_i}, between 0 and 1, says how much of a weight is left for each kept key further back.

Why lengths hold: the keys that query i keeps have the distinct counts 1, 2, 3, ..., and the nearest
alone, its score above 0, adds more than e^{g_i} to the softmax's sum. No score exceeds sqrt(D). So
all that lies beyond count c has a share of at most e^{sqrt(D)} (e^{g_i c} + e^{g_i (c+1)} + ...): a
geometric series, finite because the gate is below 1. However long the sequence, what is far away
cannot add up.

Reading order: `tra_dense` is the formula; then the model around it, as in nanoGPT; then the other
attentions it is compared with. After the divider the same formula again, fast and in memory linear
in T: `tra_blockwise`, which is what runs.

Sizes: B batch, T sequence, Tq queries (the last of the T), C embedding, H heads, D = C / H.
Written for PyTorch 2.13.
"""
import functools
import math
import warnings
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

@dataclass(kw_only=True)
class Config:
    vocab_size: int
    n_layer: int = 4
    n_head: int = 4
    n_embd: int = 256
    mlp_ratio: int = 2             # hidden size of the MLP, in multiples of n_embd
    dropout: float = 0.01          # on attention weights and on the MLP's hidden layer
    attn: str = 'tra'              # tra, rope, nope, alibi, nape, cope, fot or stick
    tra_threshold: float = 0.0     # a key is kept if its cosine with the query, s / sqrt(D), is
                                   # above it: in the last layer, rising from 0 in the first
    tra_sparsity: bool = True      # False: ablation, every key is kept; distance is i - j + 1
    tra_distance: bool = True      # False: ablation, keys are dropped, without a distance term
    rope_theta: float = 500_000.0  # base of the rotary angles
    cope_npos: int = 64            # number of positions CoPE can tell apart
    pre_norm: bool = True          # False: the blocks of the authors' notebook: far worse
    keep_at_start: bool = True     # False: GPT-2's plain start: Decoder.keep_all

    def __post_init__(self):
        if self.attn not in ATTENTIONS:
            raise ValueError(f'unknown attn {self.attn!r}: choose one of {", ".join(ATTENTIONS)}')
        for name in ('vocab_size', 'n_layer', 'n_head', 'n_embd', 'mlp_ratio', 'cope_npos'):
            if getattr(self, name) < 1:
                raise ValueError(f'{name} must be at least 1, not {getattr(self, name)}')
        D, rest = divmod(self.n_embd, self.n_head)
        if rest:
            raise ValueError(f'n_embd ({self.n_embd}) must be divisible by n_head ({self.n_head})')
        if self.attn == 'rope' and D % 2:
            raise ValueError(f'rope rotates pairs: n_embd / n_head must be even, not {D}')
        for name in ('tra_threshold', 'dropout'):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f'{name} must be in [0, 1), not {getattr(self, name)}')

def widen(x):
    """16 bits to float32: bfloat16 cannot count past 256"""
    return x if x.dtype == torch.float64 else x.float()

def in_full_precision(attention):
    """The attention in float32 or float64, its result as the inputs were; autocast is off."""
    @functools.wraps(attention)
    def call(q, k, v, log_gate, *args, **kwargs):
        with torch.autocast(q.device.type, enabled=False):
            out = attention(*(widen(x) for x in (q, k, v, log_gate)), *args, **kwargs)
        return out.to(v.dtype)
    return call

# --------------------------------------------------------------------------------------------------
# TRA, the formula

@in_full_precision
def tra_dense(q, k, v, log_gate, threshold=0.0, distance=True, dropped=1.0):
    """
    TRA as the equations say it, with T x T matrices: the function to learn from.

    q (B, H, Tq, D), k and v (B, H, T, D), log_gate g (B, H, Tq). A threshold of -inf keeps every
    key. Dropout, in tests, is a factor 0 or 1 / (1 - p) for each weight.

    `keep` and `count` come from comparisons: to the gradient they are constants. s, g and v learn
    through the keys that are kept; a dropped key learns nothing from that query.
    """
    Tq, T, D = q.size(2), k.size(2), q.size(3)
    i = torch.arange(T - Tq, T, device=q.device)[:, None]
    j = torch.arange(T, device=q.device)[None, :]
    scores = q @ k.mT / math.sqrt(D)                            # s_ij     (B, H, Tq, T)
    keep = (j <= i) & (scores > threshold)                      # keep_ij
    count = keep.flip(-1).cumsum(-1).flip(-1)                   # c_ij: kept keys, from j rightwards
    logits = scores                                             # l_ij
    if distance:
        logits = logits + log_gate[..., None] * count
    lowest = torch.finfo(q.dtype).min                           # with -inf, empty rows would be NaN
    weights = logits.masked_fill(~keep, lowest).softmax(-1)
    weights = weights.masked_fill(~keep, 0)                     # a_ij
    return (weights * dropped) @ v                              # o_i      (B, H, Tq, D)

# --------------------------------------------------------------------------------------------------
# The model

class Attention(nn.Module):
    """`project` makes q, k, v and the like, `attend` weighs and sums: one of ATTENTIONS."""

    def __init__(self, config, depth):
        super().__init__()
        self.config, self.depth = config, depth                 # 0 the first layer, 1 the last
        C, H = config.n_embd, config.n_head
        self.threshold = config.tra_threshold * depth * math.sqrt(C // H)   # the paper's is 0
        if not config.tra_sparsity:
            self.threshold = -math.inf
        self.qkv = nn.Linear(C, 3 * C, bias=config.pre_norm and config.keep_at_start)
        self.proj = nn.Linear(C, C)
        if config.attn in ('tra', 'fot'):
            self.gate = nn.Linear(C, H)
        if config.attn == 'cope':
            self.table = nn.Parameter(torch.zeros(C // H, config.cope_npos))

    def project(self, x, cache=None):
        """x (B, T, C) to q (B, H, T, D), k and v of all tokens so far, and what else is needed."""
        config = self.config
        q, k, v = self.qkv(x).unflatten(-1, (3, config.n_head, -1)).transpose(1, 3).unbind(2)
        # each (B, H, T, D); norms come in float32 where autocast is on
        q, k = (F.rms_norm(y, y.shape[-1:], eps=1e-6).to(v.dtype) for y in (q, k))  # |q| = sqrt(D)
        if config.attn == 'rope':
            start = 0 if cache is None else cache.length
            q, k = rotate(q, start, config.rope_theta), rotate(k, start, config.rope_theta)
        if config.attn in ('tra', 'fot'):
            log_gate = F.logsigmoid(widen(self.gate(x))).transpose(1, 2)                # (B, H, T)
        # FoT's gates belong to keys and have to be cached with them, TRA's gate is the query's own
        keys = [k, v, log_gate] if config.attn == 'fot' else [k, v]
        if cache is not None:
            keys = cache.append(*keys)
        if config.attn == 'cope':
            return q, *keys, self.table
        if config.attn == 'tra':
            bound = 1.01 * math.sqrt(q.size(-1))    # tra_blockwise asks: no score is larger
            return q, *keys, log_gate, self.threshold, config.tra_distance, bound
        return q, *keys

    def attend(self, q, k, v, *rest):
        """(B, H, T, D); in eval mode, with an identity matrix for v, the weights a_ij."""
        dropout = self.config.dropout if self.training else 0.0
        return ATTENTIONS[self.config.attn](q, k, v, *rest, dropout=dropout)

    def forward(self, x, cache=None):
        y = self.attend(*self.project(x, cache))                # (B, H, T, D)
        return self.proj(y.transpose(1, 2).flatten(2))          # (B, T, C)

class MLP(nn.Module):
    """SwiGLU: (W1 x) * silu(W2 x), then back."""

    def __init__(self, config):
        super().__init__()
        hidden = config.mlp_ratio * config.n_embd
        self.up = nn.Linear(config.n_embd, 2 * hidden)
        self.down = nn.Linear(hidden, config.n_embd)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        linear, gate = self.up(x).chunk(2, -1)
        return self.down(self.dropout(linear * F.silu(gate)))

class Block(nn.Module):
    def __init__(self, config, depth):
        super().__init__()
        self.pre_norm = config.pre_norm
        self.norm1 = nn.RMSNorm(config.n_embd, eps=1e-6)
        self.attn = Attention(config, depth)
        self.norm2 = nn.RMSNorm(config.n_embd, eps=1e-6)
        self.mlp = MLP(config)

    def forward(self, x, cache=None):
        if self.pre_norm:
            x = x + self.attn(self.norm1(x), cache)
            return x + self.mlp(self.norm2(x))
        x = self.norm1(x)                                       # the normed x is the stream
        x = self.norm2(x + self.attn(x, cache))
        return x + self.mlp(x)

class Decoder(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.blocks = nn.ModuleList(Block(config, n / max(1, config.n_layer - 1))
                                    for n in range(config.n_layer))
        self.norm = nn.RMSNorm(config.n_embd, eps=1e-6)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.pre_norm:
            self.initialise()
            if config.keep_at_start:
                self.keep_all()
        else:  # the notebook's; all other weights have PyTorch's defaults
            nn.init.uniform_(self.embed.weight, -0.01, 0.01)
            nn.init.normal_(self.head.weight, std=0.02)

    def initialise(self):
        """GPT-2's: 0.02, and less for the matrices that add to the stream. Gates start at 1/2."""
        for name, p in self.named_parameters():
            if name.endswith('bias'):
                nn.init.zeros_(p)
            elif p.dim() == 2 and not name.endswith('table'):
                adds = name.endswith(('proj.weight', 'down.weight'))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * self.config.n_layer) if adds else 0.02)

    @torch.no_grad()
    def keep_all(self):
        """
        A plain start drops half of all pairs by chance, and a dropped pair gets no gradient. Nor do
        the others bring it back: the gradients of a row's scores sum to 0, so nothing lifts all
        scores of a head together. So q and k start with a common bias b, and training decides what
        to drop. The weights add components of 0.02 sqrt(C), so the mean score is sqrt(D) b^2 / (b^2
        + 0.02^2 C): b puts it half-way from the threshold to sqrt(D). The gates start small in the
        first layer, for neighbours, and near 1 in the last, for keys far away.
        """
        for block in self.blocks:
            cosine = self.config.tra_threshold * block.attn.depth
            b = 0.02 * math.sqrt(self.config.n_embd * (1 + cosine) / (1 - cosine))
            q, k, v = block.attn.qkv.bias.chunk(3)
            q += b
            k += b
            if self.config.attn in ('tra', 'fot'):
                block.attn.gate.bias += -2 + 6 * block.attn.depth       # e^g from 0.12 to 0.98

    def trunk(self, idx, cache=None):
        """(B, T) -> (B, T, C): everything but the head. With a cache, idx continues it."""
        x = self.embed(idx)
        for n, block in enumerate(self.blocks):
            x = block(x, None if cache is None else cache[n])
        return self.norm(x)

    def forward(self, idx, targets=None, cache=None):
        """
        idx (B, T) -> logits (B, T, vocab_size), and the mean cross-entropy over the targets that
        are not -1; None without targets.
        """
        logits, loss = self.head(self.trunk(idx, cache)), None
        if targets is not None:
            loss = F.cross_entropy(widen(logits).flatten(0, 1), targets.flatten(), ignore_index=-1)
        return logits, loss

    def new_cache(self):
        return [Cache() for _ in self.blocks]

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, chunk=1024):
        """Continues idx (B, T); temperature 0 is greedy. Long prompts are read in chunks."""
        if idx.size(1) == 0:
            raise ValueError('generate needs at least one token to continue')
        if temperature < 0:
            raise ValueError(f'temperature must be at least 0, not {temperature}')
        was_training = self.training
        self.eval()
        try:
            cache, new = self.new_cache(), idx
            for _ in range(max_new_tokens):
                for part in new.split(chunk, 1):
                    x = self.trunk(part, cache)
                logits = self.head(x[:, -1]).float()            # (B, vocab_size)
                if temperature == 0:
                    new = logits.argmax(-1, keepdim=True)
                else:
                    if top_k:
                        least = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]
                        logits = logits.masked_fill(logits < least, -math.inf)
                    new = torch.multinomial((logits / temperature).softmax(-1), 1)
                idx = torch.cat([idx, new], 1)
        finally:
            self.train(was_training)
        return idx

class Cache:
    """For decoding: what a layer stores of each token, in buffers that double when full."""

    def __init__(self):
        self.length, self.buffers = 0, None

    def append(self, *new):
        """Adds (B, H, t, ...) tensors and returns everything so far, each (B, H, length, ...)."""
        start, stop = self.length, self.length + new[0].size(2)
        if self.buffers is None or stop > self.buffers[0].size(2):
            grown = [x.new_zeros(*x.shape[:2], max(64, 2 * stop), *x.shape[3:]) for x in new]
            for x, old in zip(grown, self.buffers or []):
                x[:, :, :start] = old[:, :, :start]
            self.buffers = grown
        for x, y in zip(self.buffers, new):
            x[:, :, start:stop] = y
        self.length = stop
        return [x[:, :, :stop] for x in self.buffers]

# --------------------------------------------------------------------------------------------------
# The attentions that TRA is compared with, all causal, all with s_ij = q_i . k_j / sqrt(D) of the
# same normalised q and k. Under autocast their scores are in 16 bits; TRA's are not.

ROWS = 1024  # queries at a time, so that evaluation needs no matrix of T x T

def by_rows(attention, q, k, v):
    """
    attention(q, k, v, i, j) for ROWS queries at a time and the keys up to the last of them, where i
    (rows, 1) and j (1, keys) are their positions.
    """
    out = []
    for start in range(0, q.size(2), ROWS):
        rows = q[:, :, start:start + ROWS]
        stop = k.size(2) - q.size(2) + start + rows.size(2)     # the position after the last row
        i = torch.arange(stop - rows.size(2), stop, device=q.device)[:, None]
        j = torch.arange(stop, device=q.device)[None, :]
        out.append(attention(rows, k[:, :, :stop], v[:, :, :stop], i, j))
    return torch.cat(out, 2)

def nope(q, k, v, bias=None, dropout=0.0):
    """No position encoding. Those below that add to the scores call it with a bias(i, j)."""
    if bias is None and q.size(2) in (1, k.size(2)):            # a lone last query sees every key
        return F.scaled_dot_product_attention(q, k, v, is_causal=q.size(2) > 1, dropout_p=dropout)

    def attend(q, k, v, i, j):
        mask = j <= i
        if bias is not None:
            mask = bias(i, j).masked_fill(~mask, -math.inf).to(q.dtype)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
    return by_rows(attend, q, k, v)

def rotate(x, start, theta):
    """RoPE: pair m of position t turns by t theta^(-2m / D), so that q . k depends on i - j."""
    D, T = x.size(-1), x.size(2)
    a, b = widen(x).chunk(2, -1)                                # pair m is (x_m, x_{m + D/2})
    frequency = theta ** (-torch.arange(0, D, 2, device=x.device, dtype=a.dtype) / D)
    t = torch.arange(start, start + T, device=x.device, dtype=a.dtype)[:, None]
    cos, sin = (t * frequency).cos(), (t * frequency).sin()     # (T, D / 2)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype)

def alibi_slopes(H, device=None):
    """2^(-8h / H), h = 1 .. H; else the power of two below H, then h = 1/2, 3/2, ... of the same"""
    power = 2 ** math.floor(math.log2(H))
    whole, half = torch.arange(1, power + 1, device=device), torch.arange(H - power, device=device)
    return torch.exp2(torch.cat([whole, half + 0.5]) * -8 / power)

def alibi(q, k, v, slopes=None, dropout=0.0):
    """s_ij - m_h (i - j), with one slope m_h a head"""
    slopes = alibi_slopes(q.size(1), q.device) if slopes is None else slopes
    return nope(q, k, v, lambda i, j: slopes[:, None, None] * (j - i), dropout)

def nape(q, k, v, dropout=0.0):
    """Half of the heads, rounded up, are ALiBi's, as if they were all; the rest are NoPE's."""
    slopes = alibi_slopes((q.size(1) + 1) // 2, q.device)
    return alibi(q, k, v, F.pad(slopes, (0, q.size(1) // 2)), dropout)

def fot(q, k, v, log_gate, dropout=0.0):
    """The Forgetting Transformer: s_ij + the sum of log_gate (B, H, T) over j+1 .. i"""
    decay = log_gate.cumsum(-1)[..., None]
    return nope(q, k, v, lambda i, j: decay[:, :, i[:, 0]] - decay[:, :, j[0]].mT, dropout)

def cope(q, k, v, table, dropout=0.0):
    """
    CoPE: a key's position is the sum of gates sigmoid(s) from it to the query, p_ij = sum_{m=j..i}
    sigmoid(s_im); q_i . e[p_ij] is added to its score, interpolated between whole positions. The
    table e (D, npos) is shared by the heads.
    """
    def attend(q, k, v, i, j):
        scores = widen(q @ k.mT / math.sqrt(q.size(-1)))
        gates = scores.sigmoid().masked_fill(j > i, 0)
        position = gates.flip(-1).cumsum(-1).flip(-1).clamp(max=table.size(1) - 1)      # p_ij
        low = position.floor()
        at = widen(q @ table.to(q.dtype))                       # q_i . e[n]  (B, H, rows, npos)
        below, above = at.gather(-1, low.long()), at.gather(-1, position.ceil().long())
        scores = scores + below + (position - low) * (above - below)
        weights = scores.masked_fill(j > i, -math.inf).softmax(-1)
        return F.dropout(weights.to(v.dtype), dropout) @ v
    return by_rows(attend, q, k, v)

def stick(q, k, v, dropout=0.0):
    """
    Stick-breaking: going back from the query, each key before it breaks its share beta = sigmoid(s)
    off what is left, a_ij = beta_ij prod_{j<m<i} (1 - beta_im). The weights need not sum to 1; the
    first query has no key before it and outputs 0.
    """
    def attend(q, k, v, i, j):
        scores = widen(q @ k.mT / math.sqrt(q.size(-1)))
        left = F.logsigmoid(-scores).masked_fill(j >= i, 0)     # log(1 - beta)
        later = left.flip(-1).cumsum(-1).flip(-1) - left        # summed over the keys after j
        weights = (F.logsigmoid(scores) + later).exp().masked_fill(j >= i, 0)
        return F.dropout(weights.to(v.dtype), dropout) @ v
    return by_rows(attend, q, k, v)

# Each is called with what Attention.project returns, and dropout=.
# A new attention of q, k and v is such a function and a line here; one that needs more gets it in
# project.
ATTENTIONS = {
    'tra': lambda *args, dropout: tra_blockwise(*args, dropout=dropout),    # defined below
    'rope': nope,                                                       # project has rotated q, k
    'nope': nope,
    'alibi': alibi,
    'nape': nape,
    'cope': cope,
    'fot': fot,
    'stick': stick,
}

# ==================================================================================================
# You have read TRA. The rest computes tra_dense faster.
#
# The idea is FlashAttention's, walked from right to left: go through the keys a span at a time,
# from the query back to the start, and carry for each query how many keys it has kept so far
# (`count`), the sum of its weights (`total`) and of its weighted values (`out`). Then divide.
#
# Softmax may subtract any constant from a row. We take g_i: l_ij - g_i = s_ij + g_i (c_ij - 1).
# Then the weight of the nearest kept key is e^s > 1, and none exceeds e^bound, where no score
# exceeds bound (sqrt(D) for normalised q and k): nothing overflows or vanishes, and the running
# maximum that FlashAttention has to carry falls away.
#
# The early exit. Query i has kept c keys so far; those it keeps further left have the distinct
# counts c + 1, c + 2, ... So all the weight still to come, however long the sequence, is at most
#
#     exp(bound) (e^{g c} + e^{g (c+1)} + ...)  =  exp(bound + g c) / (1 - e^g)
#
# The sum so far is at least 1 (e^threshold if that is not 0, e^-bound if every key is kept). Once
# the tail is below rounding beside it, the rest of the walk cannot change the result and is left
# out: heads that forget cost O(T), not O(T^2), unless they hardly keep a key.
#
# The threshold is a step. A score that is 0 but for rounding may be kept by one function and
# dropped by the other, which sums in another order, and then all counts to its left differ by one.
# So the two agree to rounding save for such ties, rare in float32 and rarer in float64.

# Up to this many queries plain_walk is faster, tiles being mostly empty: 1.5 times at T = 48,
# 14 times for one query on 8,192 keys (one core; set it to 0 and time both).
PLAIN = 48
PLANES = 8      # see tile

@torch.compiler.disable     # a compiled model calls it as it is, and does not unroll the walk
@in_full_precision
def tra_blockwise(q, k, v, log_gate, threshold=0.0, distance=True, bound=None, dropout=0.0,
                  noise=None):
    """
    The same as tra_dense, and what the model runs. No score may exceed `bound`; the model knows
    one, else it is computed. `noise`, random int32 of log_gate's shape, decides what dropout drops;
    it is drawn unless given.
    """
    Tq, T, D = q.size(2), k.size(2), q.size(3)
    if Tq > T:
        raise ValueError(f'{Tq} queries, but {T} keys: the queries are the last of the positions')
    if bound is None:       # not called by the model: look at the numbers
        bound = float((q.norm(dim=-1).amax() * k.norm(dim=-1).amax()).detach()) / math.sqrt(D)
        if not (log_gate.isfinite() & (log_gate <= 0)).all():
            raise ValueError('log_gate must be finite and at most 0: take F.logsigmoid of a number')
    if not bound + math.log(T) <= 80:   # NaN included
        raise ValueError(f'scores may reach {bound:.0f}, and exp overflows: RMS-normalise q and k')
    if not distance:
        log_gate = torch.zeros_like(log_gate)
    if dropout and noise is None:
        noise = torch.randint(2 ** 31, log_gate.shape, device=q.device, dtype=torch.int32)
    walk = plain_walk if Tq <= PLAIN else tiled_walk
    out, total = walk(q, k, v, log_gate, noise, threshold, bound, dropout)
    return out * total.masked_fill(total == 0, 1).reciprocal()  # division's backward is slower

def enough(bound, log_gate, threshold):
    """How many kept keys make the rest of a row too small to matter; infinite for g = 0."""
    least = max(threshold, -bound)                              # the nearest key's score, at least
    log_share = bound - torch.log(-torch.expm1(log_gate)) - least           # of the tail at c = 0
    rounding = math.log(torch.finfo(log_gate.dtype).eps / 64)   # with a margin
    return ((log_share - rounding) / log_gate.abs()).clamp(min=1)    # 1: or the sum so far may be 0

def plain_walk(q, k, v, log_gate, noise, threshold, bound, dropout):
    """
    `out` (B, H, Tq, D) and `total` (B, H, Tq, 1) of few queries, as in decoding, by spans of keys
    that grow as the early exit becomes less likely. A GPU takes all keys at once: to ask it whether
    to go on would take longer.
    """
    Tq, T = q.size(2), k.size(2)
    i = torch.arange(T - Tq, T, device=q.device)[:, None]
    log_gate = log_gate[..., None]
    out, total, count = 0, 0, torch.zeros_like(log_gate)
    span = 256 if q.device.type == 'cpu' else T
    start, stop = max(0, T - span), T
    while stop > 0:
        j = torch.arange(start, stop, device=q.device)
        scores = q @ k[:, :, start:stop].mT / math.sqrt(q.size(-1))         # (B, H, Tq, span)
        keep = (j <= i) & (scores > threshold)
        c = count + keep.flip(-1).cumsum(-1).flip(-1)
        weights = torch.where(keep, scores + log_gate * (c - 1), -math.inf).exp()
        total = total + weights.sum(-1, keepdim=True)
        if dropout:
            weights = weights * dropout_mask(noise[..., None], i - j, dropout, q.dtype)
        out = out + weights @ v[:, :, start:stop]
        count = c[..., :1]
        start, stop = max(0, start - 2 * (stop - start)), start
        if stop and (count >= enough(bound, log_gate.detach(), threshold)).all():
            break
    return out, total

# Dropout without a T x T mask to store: whether a weight is dropped is a hash of its query's random
# number and of the distance to its key, so that the backward pass finds the same mask again.

def mix(x):
    """An integer hash, int32 to int32: every bit of x moves about half of the result's bits."""
    x = (x ^ ((x >> 16) & 0xffff)) * 0x45d9f3b
    x = (x ^ ((x >> 16) & 0xffff)) * 0x45d9f3b
    return x ^ ((x >> 16) & 0xffff)

def dropout_mask(noise, i_minus_j, dropout, dtype):
    """1 / (1 - dropout) where a weight stays, else 0"""
    x = mix(noise + i_minus_j.to(torch.int32) * -0x61c88647)    # 2^32 / golden ratio, as an int32
    return ((x & 0x7fffffff) >= int(dropout * 2 ** 31)).to(dtype) / (1 - dropout)

# Tiles. Queries and keys are cut into blocks; a tile is one block of queries against one of keys.
# One function computes a tile, torch.func.vjp of that same function its gradients, and both go
# through torch.compile. Calls are expensive, so one takes tiles of many heads and several blocks.

def compiled(function):
    """torch.compile, or after one warning the function itself where there is no compiler."""
    fast = None  # until the first call: to load the compiler takes seconds

    @functools.wraps(function)
    def call(*args):
        nonlocal fast
        if compiled.broken:
            return function(*args)
        is_tiles = [isinstance(x, torch.Tensor) and x.dim() == 3 for x in args]
        if len(args[0]) == 1:       # torch.compile would specialise on 1: pass a lone tile twice
            args = [torch.cat([x, x]) if tiles else x for x, tiles in zip(args, is_tiles)]
            return tuple(x[:1] for x in call(*args))
        for x, tiles in zip(args, is_tiles):
            if tiles:               # any number of them, the one size that is not static
                torch._dynamo.maybe_mark_dynamic(x, 0)
        try:
            fast = fast or torch.compile(function, dynamic=False, recompile_limit=64, options={
                'max_pointwise_cat_inputs': 0, 'max_complex_pointwise_cat_inputs': 0})
            return fast(*args)
        except torch._dynamo.exc.TorchDynamoException as error:
            compiled.broken = True
            warnings.warn('torch.compile does not work here, so the TRA kernel runs uncompiled and '
                          f'slower ({type(error).__name__}: {str(error).strip().splitlines()[0]})')
            return function(*args)
    return call

compiled.broken = False

def tile(q, k, v, log_gate, count, seen, noise, threshold, dropout):
    """
    What N tiles add to their queries' `out` (N, block, D) and `total` (N, block, 1), and `count`
    with their kept keys. q (N, block, D), k (N, D, block), v (N, block, D), the rest (N, block, 1);
    `seen` (block, 1) is a query's position, counted from the first key of the tile.

    c_ij could be count + keep @ torch.ones(block, block).tril(), but that matmul is no smaller than
    q @ k. So the keys of a block come dealt out like cards into PLANES hands (see cut): first plane
    0 with the keys 0, PLANES, 2 PLANES, ..., then plane 1 with the keys after those, and so on. A
    group, one key of each plane, is then PLANES keys in a row. How many are kept in the groups
    further right takes a triangle PLANES^2 times smaller; inside a group it takes PLANES additions
    of whole planes. (The options of `compiled` make torch.cat no pass of its own.)
    """
    planes = (q @ k).unflatten(-1, (PLANES, -1)).unbind(-2)     # PLANES times (N, block, groups)
    planes = [s / math.sqrt(q.size(-1)) for s in planes]        # before unbind it costs a pass
    groups = planes[0].size(-1)
    ahead = seen - PLANES * torch.arange(groups, device=q.device, dtype=q.dtype)
    keep = [(ahead >= p) & (s > threshold) for p, s in enumerate(planes)]   # i - j is ahead - p
    kept = sum(x.to(q.dtype) for x in keep)                     # in each group
    triangle = torch.ones(groups, groups, device=q.device, dtype=q.dtype).tril(-1)
    c = count + kept @ triangle                                 # kept in the groups further right
    log_gate = log_gate.expand_as(c)                            # one sum for its gradient, not many
    weights = []
    for p in reversed(range(PLANES)):
        c = c + keep[p]                                         # c_ij
        logits = torch.where(keep[p], planes[p] + log_gate * (c - 1), -math.inf)
        weights.insert(0, logits.exp())
    total = sum(weights).sum(-1, keepdim=True)
    if dropout:
        weights = [w * dropout_mask(noise, ahead - p, dropout, q.dtype)
                   for p, w in enumerate(weights)]
    return torch.cat(weights, -1) @ v, total, c[..., :1]

def tile_gradients(dout, dtotal, q, k, v, log_gate, *rest):
    """The gradients of q, k, v and log_gate from those of out and total, and count again."""
    def sums(*inputs):
        out, total, count = tile(*inputs, *rest)
        return (out, total), count
    _, vjp, count = torch.func.vjp(sums, q, k, v, log_gate, has_aux=True)
    return *vjp((dout, dtotal)), count

fast_tile, fast_gradients = compiled(tile), compiled(tile_gradients)

def tiled_walk(q, k, v, log_gate, noise, threshold, bound, dropout):
    """
    The same as plain_walk, for many queries. Keys are padded on the right to whole blocks, queries
    on both sides to the same grid. No real query sees a padded key, which lies in its future, and
    padded queries are cut off again. All of this is left to autograd; Walk has its own backward.
    """
    (B, H, Tq, _), T = q.shape, k.size(2)
    block = 128 if T > 256 else 64
    scores_a_call, patience = 2 ** 18, 1        # patience: steps before the early exit is tried
    if q.device.type != 'cpu':                                  # a GPU wants calls few and large
        block, scores_a_call, patience = 2 * block, 2 ** 25, 8
    offset, left = divmod(T - Tq, block)    # blocks before the first query's, and places in its own
    right = -T % block

    def cut(x, pad=0, planes=1, turn=False):
        """
        (B, H, T, D) -> (blocks * B * H, block, D): block by block, all heads of one together, each
        block dealt into planes. turn: (blocks * B * H, D, block)
        """
        x = F.pad(x, (0, 0, pad, right)) if pad or right else x
        x = x.unflatten(2, (-1, block // planes, planes)).permute(2, 0, 1, 4, 3, 5)
        return x.movedim(5, 3).flatten(4).flatten(0, 2) if turn else x.flatten(3, 4).flatten(0, 2)

    needed = enough(bound, log_gate.detach(), threshold) if T > patience * block else None
    # padded with 0, so that padded queries are done at once
    per_query = [x if x is None else cut(x[..., None], left) for x in (log_gate, needed, noise)]
    sums = Walk.apply(cut(q, left), cut(k, 0, PLANES, turn=True), cut(v, 0, PLANES), *per_query,
                      B * H, offset, scores_a_call // block ** 2, patience, threshold, dropout)
    sums = [x.unflatten(0, (-1, B, H)).movedim(0, 2).flatten(2, 3) for x in sums]
    return [x[:, :, left:left + Tq] if left or right else x for x in sums]  # a slice costs a pass

class Walk(torch.autograd.Function):
    """
    All tiles of q (N, block, D) against k and v, right to left. Tile n is head n % BH of block
    n // BH, BH of all the batch, so the keys d blocks to the left of a run of query tiles are
    one slice. Once many of a run have made the early exit, the others are picked out by index. The
    steps are recorded, and the backward pass repeats them.
    """
    @staticmethod
    def forward(ctx, q, k, v, log_gate, needed, noise, BH, offset, tiles_a_call, patience,
                *options):
        N, block, _ = q.shape
        out = v.new_zeros(N, block, v.size(2))
        total, count = log_gate.new_zeros(2, *log_gate.shape)
        seen = torch.arange(len(k) // BH * block, device=q.device, dtype=q.dtype)
        seen = seen.view(-1, block, 1)                                  # seen[d]: see tile
        ctx.save_for_backward(q, k, v, log_gate, noise)
        ctx.steps, ctx.options = [], options
        for start in range(0, N, tiles_a_call):
            run, index, d = torch.arange(start, min(start + tiles_a_call, N)), None, 0
            while len(run):
                lo, hi, shift = int(run[0]), int(run[-1]) + 1, (offset - d) * BH
                i, j = slice(lo, hi), slice(lo + shift, hi + shift)
                if hi - lo > len(run):                                  # some are done: gaps
                    i, j = index, index + shift
                more_out, more_total, count[i] = fast_tile(
                    pick(q, i), pick(k, j), pick(v, j), pick(log_gate, i), pick(count, i), seen[d],
                    pick(noise, i), *options)
                add(out, i, more_out)
                add(total, i, more_total)
                ctx.steps.append((i, j, seen[d]))
                # who is done? the CPU is asked at every step, a GPU, which must wait, at 8, 16, ...
                if d >= patience and (patience == 1 or d & (d - 1) == 0):
                    done = (count[i] >= needed[i]).flatten(1).all(1).cpu()
                    if 2 * done.sum() >= len(done):                     # picking costs too
                        run = run[~done]
                        index = run.to(q.device)                        # the same numbers there
                d += 1
                gone = int((run < (d - offset) * BH).sum())             # they have met all keys
                run, index = run[gone:], None if index is None else index[gone:]
        return out, total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout, dtotal):
        q, k, v, log_gate, noise = ctx.saved_tensors
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
        dlog_gate, count = log_gate.new_zeros(2, *log_gate.shape)
        with torch.autocast(q.device.type, enabled=False):
            for i, j, seen in ctx.steps:
                *gradients, count[i] = fast_gradients(
                    pick(dout, i), pick(dtotal, i), pick(q, i), pick(k, j), pick(v, j),
                    pick(log_gate, i), pick(count, i), seen, pick(noise, i), *ctx.options)
                for x, at, part in zip((dq, dk, dv, dlog_gate), (i, j, j, i), gradients):
                    add(x, at, part)
        return dq, dk, dv, dlog_gate, *[None] * 8

# x[i] and x[i] += part are slow where i is an index, and for a slice += ends in a copy onto itself

def pick(x, i):
    if x is None:
        return None
    return x[i] if isinstance(i, slice) else x.index_select(0, i)

def add(x, i, part):
    if isinstance(i, slice):
        x[i].add_(part)
    else:
        x.index_add_(0, i, part)
