"""
Threshold Relative Attention (TRA): the whole model in one file.

Paper: "TRA: Better Length Generalisation with Threshold Relative Attention",
Opper, Fernandez, Smolensky and Gao, TMLR 2025, https://arxiv.org/abs/2503.23174

Softmax attention gives every key some weight, and position encodings measure distance over all
keys. Both change when sequences grow: there is more to average over, and distances appear that were
never trained. TRA changes two things. A key whose score is not positive leaves the softmax
altogether, and distance counts only the keys that stayed:

    s_ij    = q_i . k_j / sqrt(D)                 q and k RMS-normalised over the head dimension D
    keep_ij = (j <= i) and (s_ij > 0)             selective sparsity
    c_ij    = #{ l kept by i : j <= l <= i }      contextual distance: the nearest kept key is at 1
    g_i     = log sigmoid(w . x_i + b)  <= 0      how fast query i forgets, one gate a head
    l_ij    = s_ij + g_i c_ij                     where kept
    a_ij    = softmax of l_ij over the kept j     a row that keeps nothing outputs exactly 0
    o_i     = sum_j a_ij v_j

Why lengths hold: the keys that query i keeps have the distinct counts 1, 2, 3, ..., and the nearest
alone adds more than e^{g_i} to the softmax's sum. So all that lies beyond count c has a share of at
most exp(max s) (e^{g_i c} + e^{g_i (c+1)} + ...): a geometric series, finite because the gate
e^{g_i} is below 1. However long the sequence, what is far away cannot add up.

Reading order: `tra_dense` is the formula; then the model around it, as in nanoGPT; then the other
attentions it is compared with. Behind the divider the same formula again, fast and in memory linear
in T: `tra_blockwise`, which is what runs. "The notebook" is the authors' only published code, a
flip-flop run; where this model differs from it, the place says so.

Sizes: B batch, T sequence, C embedding, H heads, D = C / H head dimension.
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
    mlp_ratio: int = 2             # hidden size of the MLP, in embeddings
    dropout: float = 0.01          # on attention weights and on the MLP's hidden layer
    attn: str = 'tra'              # a name in ATTENTIONS, below
    tra_sparsity: bool = True      # False: ablation, every key is kept; distance is i - j + 1
    tra_distance: bool = True      # False: ablation, keys are dropped, but distance does not count
    rope_theta: float = 500_000.0  # base of the rotary angles
    cope_npos: int = 64            # number of positions CoPE can tell apart
    pre_norm: bool = True          # False: the notebook's blocks, which trained far worse
    keep_at_start: bool = False    # True: TRA keeps nearly every key at first, see Decoder.keep_all

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
        if self.keep_at_start and not self.pre_norm:
            raise ValueError('keep_at_start is for pre-norm blocks: pre_norm must be True with it')
        if not 0 <= self.dropout < 1:
            raise ValueError(f'dropout must be in [0, 1), not {self.dropout}')

# --------------------------------------------------------------------------------------------------
# TRA, the formula

def widen(x):
    """16 bits to float32: bfloat16 cannot count past 256"""
    return x if x.dtype == torch.float64 else x.float()

def in_full_precision(attention):
    """The attention computed in float32 or float64, whatever its inputs are and autocast says."""
    @functools.wraps(attention)
    def call(q, k, v, log_gate, *args, **kwargs):
        with torch.autocast(q.device.type, enabled=False):
            out = attention(*(widen(x) for x in (q, k, v, log_gate)), *args, **kwargs)
        return out.to(v.dtype)
    return call

@in_full_precision
def tra_dense(q, k, v, log_gate, sparsity=True, distance=True, mask=1.0):
    """
    TRA as the equations say it, with T x T matrices: the function to learn from.

    q (B, H, Tq, D), k and v (B, H, T, D), log_gate (B, H, Tq); the queries are the last Tq of the T
    positions, all of them in training, one in decoding. mask is dropout's, of the weights' shape.

    `keep` and `count` come from comparisons: to the gradient they are constants. s, g and v learn
    through the keys that are kept, and a dropped pair learns nothing from that query.
    """
    Tq, T, D = q.size(2), k.size(2), q.size(3)
    i = torch.arange(T - Tq, T, device=q.device)[:, None]
    j = torch.arange(T, device=q.device)[None, :]
    scores = q @ k.mT / math.sqrt(D)                            # s_ij     (B, H, Tq, T)
    keep = (j <= i) & (scores > 0 if sparsity else True)        # keep_ij
    count = keep.flip(-1).cumsum(-1).flip(-1)                   # c_ij: kept keys, from j rightwards
    logits = scores + (log_gate[..., None] * count if distance else 0)                  # l_ij
    logits = logits.masked_fill(~keep, torch.finfo(q.dtype).min)
    weights = logits.softmax(-1).masked_fill(~keep, 0)          # a_ij; an empty row is all 0
    return (weights * mask) @ v                                 # o_i      (B, H, Tq, D)

# --------------------------------------------------------------------------------------------------
# The model

class Attention(nn.Module):
    """One of ATTENTIONS, in two steps: `project` makes what it needs, `attend` does it."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        C, H = config.n_embd, config.n_head
        self.qkv = nn.Linear(C, 3 * C, bias=False)
        self.proj = nn.Linear(C, C)
        if config.attn in ('tra', 'fot'):
            self.gate = nn.Linear(C, H)
        if config.attn == 'cope':
            self.table = nn.Parameter(torch.zeros(C // H, config.cope_npos))

    def project(self, x, cache=None):
        """x (B, T, C) to q (B, H, T, D), k and v of all tokens so far, and what else is needed."""
        c = self.config
        q, k, v = self.qkv(x).unflatten(-1, (3, c.n_head, -1)).transpose(1, 3).unbind(2)
        q, k = (F.rms_norm(y, y.shape[-1:], eps=1e-6).to(v.dtype) for y in (q, k))  # |q| = sqrt(D)
        if c.attn == 'rope':
            start = cache.length if cache else 0
            q, k = rotate(q, start, c.rope_theta), rotate(k, start, c.rope_theta)
        if c.attn in ('tra', 'fot'):
            log_gate = F.logsigmoid(widen(self.gate(x))).transpose(1, 2)                # (B, H, T)
        # FoT's gates belong to keys and have to be cached with them, TRA's gate is the query's own
        keys = [k, v, log_gate] if c.attn == 'fot' else [k, v]
        if cache is not None:
            keys = cache.append(*keys)
        if c.attn == 'cope':
            keys = [*keys, self.table]
        if c.attn == 'tra':
            bound = 1.01 * math.sqrt(q.size(-1))    # no score is larger: |q| |k| / sqrt(D), rounded
            return q, *keys, log_gate, c.tra_sparsity, c.tra_distance, bound
        return q, *keys

    def attend(self, q, k, v, *more):
        """With the identity for v, this returns the weights themselves."""
        dropout = self.config.dropout if self.training else 0.0
        return ATTENTIONS[self.config.attn](q, k, v, *more, dropout=dropout)

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
    def __init__(self, config):
        super().__init__()
        self.pre_norm = config.pre_norm
        self.norm1 = nn.RMSNorm(config.n_embd, eps=1e-6)
        self.attn = Attention(config)
        self.norm2 = nn.RMSNorm(config.n_embd, eps=1e-6)
        self.mlp = MLP(config)

    def forward(self, x, cache=None):
        if self.pre_norm:
            x = x + self.attn(self.norm1(x), cache)
            return x + self.mlp(self.norm2(x))
        x = self.norm1(x)                                       # the notebook: on the stream itself
        x = self.norm2(x + self.attn(x, cache))
        return x + self.mlp(x)

class Decoder(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = nn.RMSNorm(config.n_embd, eps=1e-6)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.pre_norm:
            self.initialise()
            if config.keep_at_start:
                self.keep_all()
        else:  # as the notebook, whose norms undo the scale of the stream; else PyTorch's defaults
            nn.init.uniform_(self.embed.weight, -0.01, 0.01)
            nn.init.normal_(self.head.weight, std=0.02)

    def initialise(self):
        """GPT-2's: what a layer adds to the stream starts no larger than the embedding in it."""
        for name, p in self.named_parameters():
            if name.endswith('bias'):
                nn.init.zeros_(p)
            elif p.dim() == 2 and not name.endswith('table'):
                adds = name.endswith(('proj.weight', 'down.weight'))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * self.config.n_layer) if adds else 0.02)

    @torch.no_grad()
    def keep_all(self):
        """
        A dropped key gets no gradient from the query that drops it, and what a softmax gains on one
        key it takes from the others: nothing lifts all scores of a head together. So the half of
        all pairs that begins below 0 tends to stay there. Here, embeddings get a common direction u
        and W_q u = W_k u = z: every query shares a part with every key, nearly all scores start
        above 0, and training decides what to drop. z is larger than the other weights, or they
        would soon outgrow it. The gates start sharp in the first layer, which has to single out a
        neighbour, and slow in the last, which has to look far.
        """
        C = self.config.n_embd
        u = F.normalize(torch.randn(C), dim=0)
        self.embed.weight += 0.5 * self.embed.weight.norm(dim=1).mean() * u
        for n, block in enumerate(self.blocks):
            z = 0.1 * torch.randn(C)
            for w in block.attn.qkv.weight.chunk(3)[:2]:                # W_q and W_k (C, C)
                w += torch.outer(z - w @ u, u)                          # now w @ u is z
            if self.config.attn in ('tra', 'fot'):                      # e^g from 0.12 to 0.98
                block.attn.gate.bias += -2 + 6 * n / max(1, self.config.n_layer - 1)

    def trunk(self, idx, cache=None):
        """(B, T) -> (B, T, C): everything but the head. cache: of new_cache, idx continues it."""
        x = self.embed(idx)
        for n, block in enumerate(self.blocks):
            x = block(x, cache[n] if cache else None)
        return self.norm(x)

    def forward(self, idx, targets=None, cache=None):
        """
        idx (B, T) -> logits (B, T, vocab_size), and the mean cross-entropy over the targets that
        are not -1 (or None). Those that are -1 go through the head too: to pick out the others, a
        GPU would have to be waited for, and the tasks that have them have tiny vocabularies.
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
                    if top_k is not None:
                        least = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]
                        logits = logits.masked_fill(logits < least, -math.inf)
                    new = torch.multinomial((logits / temperature).softmax(-1), 1)
                idx = torch.cat([idx, new], 1)
        finally:
            self.train(was_training)
        return idx

class Cache:
    """What a layer keeps of each token, k and v above all, in buffers that double when full."""

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
# The attentions that TRA is compared with: causal all, with s_ij = q_i . k_j / sqrt(D) of the same
# normalised q and k; q (B, H, Tq, D) are the last queries of k and v (B, H, T, D), as above.

ROWS = 1024  # queries at a time where an attention needs a matrix, so that memory stays linear in T

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
    """Nothing but the causal mask; bias(i, j), where given, is added to the scores."""
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
    """2^(-8h / H), h = 1 .. H; else those of the power of two below, then its h = 1/2, 3/2, ..."""
    power = 2 ** math.floor(math.log2(H))
    h = torch.arange(1, power + 1, device=device), torch.arange(H - power, device=device) + 0.5
    return torch.exp2(torch.cat(h) * -8 / power)

def alibi(q, k, v, slopes=None, dropout=0.0):
    """s_ij - m_h (i - j), with one slope m_h a head"""
    slopes = alibi_slopes(q.size(1), q.device) if slopes is None else slopes
    return nope(q, k, v, lambda i, j: slopes[:, None, None] * (j - i), dropout)

def nape(q, k, v, dropout=0.0):
    """Half of the heads, rounded up, are ALiBi's, with its slopes for so many; the rest NoPE's."""
    slopes = alibi_slopes((q.size(1) + 1) // 2, q.device)
    return alibi(q, k, v, F.pad(slopes, (0, q.size(1) // 2)), dropout)

def fot(q, k, v, log_gate, dropout=0.0):
    """The Forgetting Transformer: s_ij + the sum of log_gate (B, H, T) over j+1 .. i"""
    decay = log_gate.cumsum(-1)[..., None]
    return nope(q, k, v, lambda i, j: decay[:, :, i[:, 0]] - decay[:, :, j[0]].mT, dropout)

def cope(q, k, v, table, dropout=0.0):
    """
    CoPE: a key's position is the sum of gates sigmoid(s) from it to the query, p_ij = sum_{l=j..i}
    sigmoid(s_il); q_i . e[p_ij] is added to its score, interpolated between whole positions. The
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
    off what is left, a_ij = beta_ij prod_{j<l<i} (1 - beta_il). The weights need not sum to 1.
    """
    def attend(q, k, v, i, j):
        scores = widen(q @ k.mT / math.sqrt(q.size(-1)))
        left = F.logsigmoid(-scores).masked_fill(j >= i, 0)     # log(1 - beta)
        later = left.flip(-1).cumsum(-1).flip(-1) - left        # summed over the keys after j
        weights = (F.logsigmoid(scores) + later).exp().masked_fill(j >= i, 0)
        return F.dropout(weights.to(v.dtype), dropout) @ v
    return by_rows(attend, q, k, v)

# Name: a function of what Attention.project returns, and of dropout. A new attention of q, k and v
# is such a function and a line here; one that needs more gets it in project.
ATTENTIONS = {
    'tra': lambda *args, **kwargs: tra_blockwise(*args, **kwargs),      # tra_dense, faster: below
    'rope': nope,                                                       # project has rotated q, k
    'nope': nope,
    'alibi': alibi,
    'nape': nape,
    'cope': cope,
    'fot': fot,
    'stick': stick,
}

# ==================================================================================================
# You have read TRA. The rest computes tra_dense faster, and in memory linear in T.
#
# The idea is FlashAttention's, walked from right to left: go through the keys a span at a time,
# from the query back to the start, and carry for each query how many keys it has kept so far
# (`count`), the sum of its weights (`total`) and of its weighted values (`out`). Then divide.
#
# Softmax may subtract any constant from a row. We take g_i, so that l_ij = s_ij + g_i (c_ij - 1).
# Then the nearest kept key has l = s > 0, the sum is above 1, and no l exceeds the largest score,
# sqrt(D) for normalised q and k: nothing overflows or vanishes, and the running maximum that
# FlashAttention has to carry falls away.
#
# The early exit. Query i has kept c keys so far; those it keeps further left have the distinct
# counts c + 1, c + 2, ... So all the weight still to come, however long the sequence, is at most
#
#     exp(bound) (e^{g c} + e^{g (c+1)} + ...)  =  exp(bound + g c) / (1 - e^g)
#
# where no score exceeds bound. The sum so far is at least 1 (e^-bound if every key is kept, for
# then the nearest may have any score). Once the tail is below rounding beside it, the rest of the
# walk cannot change the result and is left out: heads that forget cost O(T), not O(T^2).
#
# The threshold is a step. A score that is 0 but for rounding may be kept here and dropped there,
# where terms are summed in another order, and then all counts to its left differ by one. So the
# two functions agree to rounding save for such ties, rare in float32, hardly ever in float64.

PLAIN = 48      # up to so many queries plain_walk is faster: tiles would be mostly empty
PLANES = 8      # see tile

@torch.compiler.disable     # a compiled model calls it as it is, and does not unroll the walk
@in_full_precision
def tra_blockwise(q, k, v, log_gate, sparsity=True, distance=True, bound=None, dropout=0.0,
                  seed=None):
    """
    tra_dense's result: what the model trains, evaluates and decodes with. No score may exceed
    `bound`; the model knows one, else it is computed. A `seed`, a tensor, makes dropout repeatable.
    """
    (B, H, Tq, D), T = q.shape, k.size(2)
    if Tq > T:
        raise ValueError(f'{Tq} queries, but {T} keys: the queries are the last of the positions')
    if bound is None:
        bound = float((q.norm(dim=-1).amax() * k.norm(dim=-1).amax()).detach()) / math.sqrt(D)
        if not (log_gate.isfinite() & (log_gate <= 0)).all():
            raise ValueError('log_gate must be finite and at most 0: take F.logsigmoid of a number')
    if not bound <= 80:  # NaN included
        raise ValueError(f'scores may reach {bound:.0f}, and exp overflows: RMS-normalise q and k')
    if not distance:
        log_gate = torch.zeros_like(log_gate)
    log_gate = log_gate[..., None]                              # (B, H, Tq, 1)
    needed = enough(bound, log_gate.detach(), sparsity)
    rows = None
    if dropout:
        seed = torch.randint(2 ** 31, (), device=q.device) if seed is None else seed
        rows = hash_rows(seed, B, H, Tq, T)
    walk = plain_walk if Tq <= PLAIN else tiled_walk
    out, total = walk(q, k, v, log_gate, needed, rows, sparsity, dropout)
    return out * total.masked_fill(total == 0, 1).reciprocal()  # a row that kept nothing stays 0

def enough(bound, log_gate, sparsity):
    """How many kept keys make the rest of a row too small to matter; infinite for g = 0."""
    least = 0 if sparsity else -bound                           # the nearest key's score, at least
    tail = bound - torch.log(-torch.expm1(log_gate)) - least    # at c = 0, in logarithms
    rounding = math.log(torch.finfo(log_gate.dtype).eps / 64)
    return ((tail - rounding) / log_gate.abs()).clamp(min=1)

def plain_walk(q, k, v, log_gate, needed, rows, sparsity, dropout):
    """
    For few queries, as in decoding: `out` (B, H, Tq, D) and `total` (B, H, Tq, 1), by spans of keys
    that grow as the early exit becomes less likely. A GPU takes all keys at once: to ask it whether
    to go on would take longer.
    """
    Tq, T = q.size(2), k.size(2)
    i = torch.arange(T - Tq, T, device=q.device)[:, None]
    out, total, count = 0, 0, torch.zeros_like(log_gate)
    start, stop = max(0, T - 256) if q.device.type == 'cpu' else 0, T
    while stop > 0:
        j = torch.arange(start, stop, device=q.device)
        scores = q @ k[:, :, start:stop].mT / math.sqrt(q.size(-1))         # (B, H, Tq, span)
        keep = (j <= i) & (scores > 0 if sparsity else True)
        counts = count + keep.flip(-1).cumsum(-1).flip(-1)
        weights = torch.where(keep, scores + log_gate * (counts - 1), -math.inf).exp()
        total = total + weights.sum(-1, keepdim=True)
        if dropout:
            weights = weights * dropout_mask(rows, i - j, dropout, q.dtype)
        out = out + weights @ v[:, :, start:stop]
        count = counts[..., :1]
        start, stop = max(0, 3 * start - 2 * stop), start                   # twice as long
        if stop and (count >= needed).all():
            break
    return out, total

# Dropout without a T x T mask to store: whether a weight is dropped is a hash of (seed, head,
# query, distance to the key), so that the backward pass finds the same mask again.

def mix(x):
    """An integer hash, int32 to int32: every bit of x moves about half of the result's bits."""
    x = (x ^ ((x >> 16) & 0xffff)) * 0x45d9f3b
    x = (x ^ ((x >> 16) & 0xffff)) * 0x45d9f3b
    return x ^ ((x >> 16) & 0xffff)

def hash_rows(seed, B, H, Tq, T):
    """(B, H, Tq, 1), of the queries of all heads of the batch"""
    head = torch.arange(1, B * H + 1, device=seed.device, dtype=torch.int32).view(B, H, 1, 1)
    query = torch.arange(T - Tq, T, device=seed.device, dtype=torch.int32)[:, None]
    return mix(mix(seed.to(torch.int32) + mix(head)) + query)

def dropout_mask(rows, distance, dropout, dtype):
    """1 / (1 - dropout) where a weight stays, else 0; rows of hash_rows, distance i - j."""
    x = mix(rows + distance.to(torch.int32) * -0x61c88647)      # 2^32 / golden ratio: far apart
    return ((x & 0x7fffffff) >= int(dropout * 2 ** 31)).to(dtype) / (1 - dropout)

# Tiles. Queries and keys are cut into blocks; a tile is one block of queries against one of keys.
# One function computes a tile, torch.func.vjp of that same function its gradients, and both go
# through torch.compile. A call has its price: the tiles of all heads and several blocks share one.

def compiled(function):
    """torch.compile, or after one warning the function itself where there is no compiler."""
    fast = None  # until the first call: to load the compiler takes seconds

    @functools.wraps(function)
    def call(*args):
        nonlocal fast
        if compiled.broken or len(args[0]) == 1:    # a lone tile would be compiled once more
            return function(*args)
        fast = fast or torch.compile(function, dynamic=False, recompile_limit=64, options={
            'max_pointwise_cat_inputs': 0, 'max_complex_pointwise_cat_inputs': 0})  # cat in place
        for x in args:                              # compile once for any number of tiles
            if isinstance(x, torch.Tensor) and x.dim() == 3:
                torch._dynamo.maybe_mark_dynamic(x, 0)
        try:
            return fast(*args)
        except torch._dynamo.exc.TorchDynamoException as error:
            compiled.broken = True
            warnings.warn('torch.compile does not work here, so the TRA kernel runs uncompiled and '
                          f'slower ({type(error).__name__}: {str(error).strip().splitlines()[0]})')
            return function(*args)
    return call

compiled.broken = False

def tile(q, k, v, log_gate, count, seen, rows, sparsity, dropout):
    """
    What N tiles add to their queries' `out` (N, block, D) and `total` (N, block, 1), and `count`
    with their kept keys. q (N, block, D), k (N, D, block), v (N, block, D), the rest (N, block, 1);
    `seen` (block, 1) is the last key, as a place in the tile, that a query may see.

    c_ij could be count + keep @ torch.ones(block, block).tril(), but that is a matmul as large as
    q @ k. So the keys of a block are dealt out like cards into PLANES hands: plane p holds the keys
    p, p + PLANES, p + 2 PLANES, ... A group, one key of each plane, is then PLANES keys in a row.
    How many are kept in the groups further right takes a triangle PLANES^2 times smaller; inside a
    group it takes PLANES additions of whole planes.
    """
    planes = (q @ k / math.sqrt(q.size(-1))).unflatten(-1, (PLANES, -1)).unbind(-2)
    groups = planes[0].size(-1)                                 # a plane is (N, block, groups)
    ones = torch.ones(groups, groups, device=q.device, dtype=q.dtype)
    ahead = seen - PLANES * torch.arange(groups, device=q.device, dtype=q.dtype)    # of each group
    keep = [(ahead >= p) & (s > 0 if sparsity else True) for p, s in enumerate(planes)]
    kept = sum(x.to(q.dtype) for x in keep).expand_as(planes[0])
    count = count + kept @ ones.tril(-1)                        # kept in the groups further right
    log_gate = log_gate.expand_as(count)                        # so that its gradient is one sum
    weights = []
    for p in reversed(range(PLANES)):
        count = count + keep[p]                                 # c_ij
        logits = torch.where(keep[p], planes[p] + log_gate * (count - 1), -math.inf)
        weights.insert(0, logits.exp())
    total = sum(weights).sum(-1, keepdim=True)
    if dropout:
        weights = [w * dropout_mask(rows, ahead - p, dropout, q.dtype)
                   for p, w in enumerate(weights)]
    return (torch.cat(weights, -1) @ v, total), count[..., :1]

def tile_gradients(dout, dtotal, q, k, v, log_gate, *rest):
    """The gradients of q, k, v and log_gate from those of out and total, and count again."""
    _, vjp, count = torch.func.vjp(lambda *x: tile(*x, *rest), q, k, v, log_gate, has_aux=True)
    return *vjp((dout, dtotal)), count

fast_tile, fast_gradients = compiled(tile), compiled(tile_gradients)

def tiled_walk(q, k, v, log_gate, needed, rows, sparsity, dropout):
    """
    The same as plain_walk, for many queries. Keys are padded on the right to whole blocks, queries
    on both sides to the same grid. No real query sees a padded key, which lies in its future, and
    padded queries are cut off again. Of all this, autograd takes care; the walk has its own.
    """
    (B, H, Tq, _), T = q.shape, k.size(2)
    block = 128 if T > 256 else 64
    if q.device.type != 'cpu':
        block *= 2                                              # a GPU wants few calls and large
    offset, left = divmod(T - Tq, block)                        # blocks before the first query's
    right = -T % block

    def cut(x, left=0, planes=1):
        """(B, H, T, D) -> (blocks * B * H, block, D): block by block, all heads of one together"""
        x = F.pad(x, (0, 0, left, right)) if left or right else x
        x = x.unflatten(2, (-1, block // planes, planes)).permute(2, 0, 1, 4, 3, 5)
        return x.reshape(-1, block, x.size(-1))

    tiles = [x if x is None else cut(x, left) for x in (q, log_gate, needed, rows)]
    k, v = cut(k, planes=PLANES).mT.contiguous(), cut(v, planes=PLANES)
    sums = Walk.apply(*tiles, k, v, B * H, offset, sparsity, dropout)
    sums = (x.unflatten(0, (-1, B, H)).movedim(0, 2).flatten(2, 3) for x in sums)
    return (x[:, :, left:left + Tq] if left or right else x for x in sums)

class Walk(torch.autograd.Function):
    """
    All tiles of q (N, block, D) against k and v, right to left. As tiles are stored, the key block
    d to the left, for any run of query tiles, is one slice; once many of a run have made the early
    exit, the others are picked out by index. The steps are kept: the backward pass repeats them.
    """
    @staticmethod
    def forward(ctx, q, log_gate, needed, rows, k, v, heads, offset, sparsity, dropout):
        N, block, _ = q.shape
        cpu = q.device.type == 'cpu'
        chunk = max(1, (2 ** 19 if cpu else 2 ** 25) // block ** 2)     # tiles in a call
        count, total = torch.zeros_like(log_gate), torch.zeros_like(log_gate)
        out = torch.zeros(N, block, v.size(-1), device=q.device, dtype=q.dtype)
        ctx.steps, ctx.options = [], (sparsity, dropout)
        ctx.save_for_backward(q, log_gate, rows, k, v)
        for start in range(0, N, chunk):
            run = torch.arange(start, min(start + chunk, N))            # on the CPU: it steers
            index, d = torch.arange(start, min(start + chunk, N), device=q.device), 0
            while len(run):
                lo, hi, shift = int(run[0]), int(run[-1]) + 1, (offset - d) * heads
                i, j = slice(lo, hi), slice(lo + shift, hi + shift)
                if hi - lo > len(run):
                    i, j = index, index + shift
                seen = torch.arange(block, device=q.device, dtype=q.dtype)[:, None] + d * block
                ctx.steps.append((i, j, seen))
                sums, count[i] = fast_tile(q[i], k[j], v[j], log_gate[i], count[i], seen,
                                           None if rows is None else rows[i], sparsity, dropout)
                out[i] += sums[0]
                total[i] += sums[1]
                # who is done? a GPU has to be waited for: ask it after 8, 16, 32, ... steps only
                if d > 0 if cpu else d >= 8 and d & (d - 1) == 0:
                    done = (count[i] >= needed[i]).flatten(1).all(1).cpu()
                    if 2 * done.sum() >= len(done):                     # picking costs too
                        run = run[~done]
                        index = run.to(q.device)
                d += 1
                run = run[run >= (d - offset) * heads]                  # at the first key, done
                index = index[len(index) - len(run):]
        return out, total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout, dtotal):
        q, log_gate, rows, k, v = ctx.saved_tensors
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        dlog_gate, count = torch.zeros_like(log_gate), torch.zeros_like(log_gate)
        with torch.autocast(q.device.type, enabled=False):
            for i, j, seen in ctx.steps:
                *parts, count[i] = fast_gradients(
                    dout[i], dtotal[i], q[i], k[j], v[j], log_gate[i], count[i], seen,
                    None if rows is None else rows[i], *ctx.options)
                for x, at, part in zip((dq, dk, dv, dlog_gate), (i, j, j, i), parts):
                    x[at] += part
        return dq, dlog_gate, None, None, dk, dv, None, None, None, None
