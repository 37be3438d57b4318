"""
Threshold Relative Attention (TRA): the whole model in one file.

Paper: "TRA: Better Length Generalisation with Threshold Relative Attention",
Opper, Fernandez, Smolensky and Gao, TMLR 2025, https://arxiv.org/abs/2503.23174

The idea. Softmax attention gives every key some weight, and position encodings measure distance over all keys. Both
change when sequences grow: there is more to average over, and distances appear that were never trained. TRA changes two
things. A key whose score is not positive leaves the softmax altogether, and distance counts only the keys that stayed:

    s_ij    = q_i . k_j / sqrt(D)                     q and k RMS-normalised over the head dimension D
    keep_ij = (j <= i) and (s_ij > 0)                 selective sparsity
    c_ij    = #{ l kept : j <= l <= i }               contextual distance: the nearest kept key is at 1
    g_i     = log sigmoid(w . x_i + b)  <= 0          how fast query i forgets, one gate per head
    l_ij    = s_ij + g_i c_ij                         where kept
    a_ij    = softmax of l_ij over the kept keys      a row that keeps nothing outputs exactly 0
    o_i     = sum_j a_ij v_j

Why lengths hold: the keys that query i keeps have the distinct counts 1, 2, 3, ..., and the nearest alone adds more than e^{g_i}
to the softmax's sum. So all that lies beyond count c has a share of at most exp(max s) (e^{g_i c} + e^{g_i (c+1)} + ...), a
geometric series. However long the sequence, what is far away cannot add up.

Reading order: `tra_dense` is the formula, `tra_blockwise` computes the same in memory linear in T and is what runs, then
the five baselines, then the decoder around them. `Config.pre_norm` is the one default that differs from the authors'
notebook: it trains far better (README.md, "Differences from the paper").

Sizes: B batch, T sequence, C embedding, H heads, D head dimension.
"""
import functools
import math
import warnings
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

ATTENTIONS = ('tra', 'rope', 'nope', 'alibi', 'cope', 'fot')


@dataclass
class Config:
    vocab_size: int
    n_layer: int = 4
    n_head: int = 4
    n_embd: int = 256
    mlp_ratio: int = 2             # hidden size of the MLP, in embeddings
    dropout: float = 0.01          # on attention weights and on the MLP's hidden layer
    attn: str = 'tra'              # one of ATTENTIONS
    tra_sparsity: bool = True      # False: ablation, every causal key is kept and distance is plain i - j + 1
    tra_distance: bool = True      # False: ablation, keys are dropped but the gate times distance is not added
    rope_theta: float = 500_000.0  # base of the rotary angles
    cope_npos: int = 64            # number of positions CoPE can tell apart
    pre_norm: bool = True          # False: the notebook's blocks, which normalise the residual stream itself
    keep_at_start: bool = False    # True: initialised so that TRA keeps every key at first, see Decoder.keep_all

    def __post_init__(self):
        if self.attn not in ATTENTIONS:
            raise ValueError(f"unknown attn '{self.attn}': choose one of {', '.join(ATTENTIONS)}")
        for name in ('vocab_size', 'n_layer', 'n_head', 'n_embd', 'mlp_ratio', 'cope_npos'):
            if getattr(self, name) < 1:
                raise ValueError(f'{name} must be at least 1, not {getattr(self, name)}')
        if self.n_embd % self.n_head:
            raise ValueError(f'n_embd ({self.n_embd}) must be divisible by n_head ({self.n_head})')
        if self.attn == 'rope' and self.n_embd // self.n_head % 2:
            raise ValueError(f'rope rotates pairs: n_embd / n_head must be even, not {self.n_embd // self.n_head}')
        if self.keep_at_start and not self.pre_norm:
            raise ValueError('keep_at_start changes the initialisation of pre-norm blocks: pre_norm must be True with it')
        if not 0 <= self.dropout < 1:
            raise ValueError(f'dropout must be in [0, 1), not {self.dropout}')


# ----------------------------------------------------------------------------------------------------------------------
# TRA, the formula

def tra_dense(q, k, v, log_gate, sparsity=True, distance=True, dropout=0.0, seed=None, return_parts=False):
    """
    TRA as the equations say it, with T x T matrices: the function to learn from.

    q (B, H, Tq, D), k and v (B, H, T, D), log_gate (B, H, Tq); the queries are the last Tq of the T positions.
    Returns (B, H, Tq, D), and with return_parts also a dict of keep, count and weights, each (B, H, Tq, T).
    """
    B, H, Tq, D = q.shape
    T = k.size(2)
    dtype_out = v.dtype
    q, k, v, log_gate = (widen(x) for x in (q, k, v, log_gate))
    if not distance:
        log_gate = torch.zeros_like(log_gate)
    i = torch.arange(T - Tq, T, device=q.device)[:, None]
    j = torch.arange(T, device=q.device)[None, :]
    with torch.autocast(q.device.type, enabled=False):
        scores = q @ k.mT / math.sqrt(D)                                    # s_ij     (B, H, Tq, T)
        keep = (j <= i) & ((scores > 0) if sparsity else True)              # keep_ij  (B, H, Tq, T)
        keep = keep.expand_as(scores)
        count = keep.to(q.dtype).flip(-1).cumsum(-1).flip(-1)                 # c_ij: kept keys from j rightwards
        logits = scores + log_gate[..., None] * count                       # l_ij
        logits = logits.masked_fill(~keep, -math.inf)
        top = logits.amax(-1, keepdim=True).clamp(min=torch.finfo(q.dtype).min)  # finite, even where nothing is kept
        weights = torch.exp(logits - top)
        total = weights.sum(-1, keepdim=True)
        weights = weights / total.masked_fill(total == 0, 1)                # a_ij; a row that keeps nothing stays 0
        dropped = weights
        if dropout:
            head = torch.arange(B * H, device=q.device).view(B, H, 1, 1)
            dropped = weights * dropout_mask(row_hash(seed, head, i), (i - j).to(torch.int32), dropout, q.dtype)
        out = (dropped @ v).to(dtype_out)                                   # o_i      (B, H, Tq, D)
    return (out, {'keep': keep, 'count': count, 'weights': weights}) if return_parts else out


def widen(x):
    """bfloat16 and float16 to float32: 16 bits cannot count past 256 (or 2048)"""
    return x if x.dtype == torch.float64 else x.float()


# Dropout without storing a T x T mask: whether a weight is dropped is a hash of (seed, head, query, distance to the key), so
# that the backward pass computes the same mask again. "head" numbers the heads of the whole batch.

def mix(x):
    """An integer hash, int32 to int32: every bit of x moves about half of the result's bits."""
    x = (x ^ ((x >> 16) & 0xffff)) * 0x45d9f3b
    x = (x ^ ((x >> 16) & 0xffff)) * 0x45d9f3b
    return x ^ ((x >> 16) & 0xffff)


def row_hash(seed, head, query):
    return mix(mix(seed.to(torch.int32) + mix(head.to(torch.int32) + 1)) + query.to(torch.int32))


def dropout_mask(rows, distance, dropout, dtype):
    """1 / (1 - dropout) where a weight stays, 0 where it is dropped. rows (hashes) and distance i - j, int32, broadcast."""
    stays = (mix(rows + distance * -0x61c88647) & 0x7fffffff) >= int(dropout * 2 ** 31)  # 2^32 / golden ratio: far apart
    return stays.to(dtype) * (1 / (1 - dropout))


# ----------------------------------------------------------------------------------------------------------------------
# TRA, the kernel
#
# FlashAttention's idea, walked from right to left. Queries and keys are cut into blocks; a tile is one block of queries
# against one block of keys. For a block of queries we visit the key blocks from the diagonal back to the start and carry,
# for each query, how many keys it has kept so far (`count`), the sum of its weights (`total`) and the weighted values
# (`out`). Three things make it short and fast:
#
# 1. No running maximum. Softmax may subtract any constant from a row; we take g_i, so l_ij = s_ij + g_i (c_ij - 1). Then the
#    nearest kept key has l = s > 0, the sum is at least 1, and l never exceeds the largest score, which is sqrt(D) for
#    normalised q and k: the sum neither overflows nor vanishes, and FlashAttention's rescaling falls away.
# 2. Counting inside a tile. c_ij needs a running sum along the keys, which vector units are bad at. So the keys of a tile
#    are dealt out like cards into PLANES hands: plane p holds the keys p, p + PLANES, p + 2 PLANES, ... A group, one key
#    of each plane, is then PLANES consecutive keys. How many keys are kept in the groups further right is one small matmul
#    with a triangle of ones; inside a group it is PLANES additions of whole vectors.
# 3. Many tiles at a time. The tiles of all batches and heads, and of several query blocks, go through one batched matmul
#    and one compiled function, so that the cost of a call is shared. CHUNK tiles still fit the CPU's caches.
#
# Where the time then goes, `python eval.py --bench` says by torch.profiler: on 2 CPU cores about two thirds are the seven matmuls
# of a tile, forward and backward, as in any attention, and a tenth to a sixth the two compiled functions.

PLANES = 8
CHUNK = 64
FEW = 16    # up to so many queries, as in cached decoding, no tiles are cut: see tra_few
SHORT = 48  # up to so many keys a tile would be mostly padding, and the formula itself is faster


def compiled(function):
    """torch.compile, or the plain function, after one warning, where the machine has no compiler."""
    fast = None  # until the first call: to load the compiler takes seconds

    @functools.wraps(function)
    def call(*args):
        nonlocal fast
        if compiled.broken or len(args[0]) == 1:  # torch.compile would compile once more for a lone tile
            return function(*args)
        fast = fast or torch.compile(function, dynamic=False, recompile_limit=64)
        for x in args:  # the number of tiles varies along the walk: compile once for all of them
            if isinstance(x, torch.Tensor) and x.dim() > 1:
                torch._dynamo.maybe_mark_dynamic(x, 0)
        try:
            return fast(*args)
        except torch._dynamo.exc.TorchDynamoException as error:
            compiled.broken = True
            warnings.warn(f'torch.compile does not work here, so the TRA kernel runs uncompiled and slower '
                          f'({type(error).__name__}: {str(error).strip().splitlines()[0]})')
            return function(*args)
    return call


compiled.broken = False


def exp(x):
    """
    e^x for x < 88. In float32 on a CPU by hand: 2^n e^r with n whole and |r| <= ln(2) / 2, the series of e^r, and n written into the
    exponent bits. The compiler's exp is a call for every 8 numbers, around which all registers are saved: too slow.
    """
    if x.dtype != torch.float32 or x.device.type != 'cpu':
        return torch.exp(x)
    x = x.clamp(min=-87)                                                    # less is 0 to all purposes
    n = (x * 1.44269504).round()                                            # x log2(e)
    r = x - n * 0.693359375 + n * 2.12194440e-4                             # x - n ln(2), in two parts: the first is exact
    series = 1 / math.factorial(7)
    for k in range(6, -1, -1):
        series = series * r + 1 / math.factorial(k)
    return series * ((n.to(torch.int32) + 127) << 23).view(torch.float32)


def by_plane(rows):
    return rows.unflatten(-1, (PLANES, -1)).unbind(-2)


def count_kept(scores, count, last, sparsity):
    """
    For the rows of all tiles, scores (rows, block), by plane: the scores, keep_ij and c_ij, each a list of (rows, block / PLANES);
    and how many keys each row keeps in its tile. `count` (rows) is what it kept to the right of the tile, `last` (rows) the last
    key of the tile that it may see.
    """
    planes = by_plane(scores)
    groups = planes[0].size(1)
    first = torch.arange(groups, device=scores.device, dtype=scores.dtype) * PLANES
    keep = [(s > 0) & (first + p <= last[:, None]) if sparsity else (first + p <= last[:, None]).expand_as(s)
            for p, s in enumerate(planes)]
    kept = sum(x.to(scores.dtype) for x in keep)                            # in each group
    later = kept @ torch.ones(groups, groups, device=scores.device, dtype=scores.dtype).tril(-1)
    running = count[:, None] + later                                        # kept in all groups further right
    counts = []
    for x in reversed(keep):
        running = running + x
        counts.insert(0, running)
    return planes, keep, counts, kept.sum(-1)


def dropout_by_plane(rows, last, block, dropout, dtype):
    """A function of (plane, tile of that plane) to the tile with dropout applied."""
    if not dropout:
        return lambda p, x: x                                               # not even times 1: that would be one more pass
    distance = last.to(torch.int32)[:, None] - torch.arange(0, block, PLANES, device=last.device, dtype=torch.int32)
    return lambda p, x: x * dropout_mask(rows[:, None], distance - p, dropout, dtype)


# The two tile functions take tiles (N, block, block) and numbers by query (N, block), and see them as N * block rows: with a
# single loop over rows, the compiler fuses everything after the count, sums included, into one pass over the tile.

@compiled
def forward_tile(scores, log_gate, count, last, rows, sparsity, dropout):
    """A tile's unnormalised weights (N, block, block), dropout applied; by query, their sum before dropout and keys kept."""
    log_gate, last, rows = (x.flatten() for x in (log_gate, last, rows))
    planes, keep, counts, kept = count_kept(scores.flatten(0, 1), count.flatten(), last, sparsity)
    drop = dropout_by_plane(rows, last, scores.size(2), dropout, scores.dtype)
    weights, sums = [], 0
    for p, (s, stay, c) in enumerate(zip(planes, keep, counts)):
        weight = torch.where(stay, exp(s + log_gate[:, None] * (c - 1)), 0.0)
        weights.append(drop(p, weight))
        sums = sums + weight
    return torch.cat(weights, 1).view_as(scores), sums.sum(-1).view_as(count), kept.view_as(count)


@compiled
def backward_tile(scores, dweights, log_gate, count, lse, delta, last, rows, sparsity, dropout):
    """
    A tile's weights a_ij again, times the dropout mask m_ij, and dl_ij = a_ij (m_ij dO_i . v_j - delta_i) with delta_i = dO_i . O_i;
    by query, the gate's gradient sum_j dl_ij c_ij (c or c - 1: the dl of a row sum to 0) and keys kept.
    """
    log_gate, lse, delta, last, rows = (x.flatten() for x in (log_gate, lse, delta, last, rows))
    planes, keep, counts, kept = count_kept(scores.flatten(0, 1), count.flatten(), last, sparsity)
    drop = dropout_by_plane(rows, last, scores.size(2), dropout, scores.dtype)
    weights, dlogits, sums = [], [], 0
    for p, (s, dw, stay, c) in enumerate(zip(planes, by_plane(dweights.flatten(0, 1)), keep, counts)):
        weight = torch.where(stay, exp(s + log_gate[:, None] * (c - 1) - lse[:, None]), 0.0)
        dlogit = weight * (drop(p, dw) - delta[:, None])
        weights.append(drop(p, weight))
        dlogits.append(dlogit)
        sums = sums + dlogit * (c - 1)
    return (torch.cat(weights, 1).view_as(scores), torch.cat(dlogits, 1).view_as(scores), sums.sum(-1).view_as(count),
            kept.view_as(count))


class Tiling:
    """
    Where each tile lies. Keys are padded on the right to whole blocks; queries, the last Tq of the T positions, are padded
    on both sides to the same grid. No real query sees a padded key (it lies in its future), and padded queries are cut off
    again. Tiles are stored block by block, all batches and heads of a block together: (blocks * B * H, block, ...). So "the
    key block d blocks to the left", for any run of query tiles, is one contiguous slice.
    """

    def __init__(self, q, k):
        self.B, self.H, self.Tq, self.D = q.shape
        self.T = k.size(2)
        self.BH = self.B * self.H
        self.scale = 1 / math.sqrt(self.D)
        self.block = 128 if self.T > 256 else 64
        self.offset = (self.T - self.Tq) // self.block                      # the block of the first query
        self.left = self.T - self.Tq - self.offset * self.block             # padding before it
        self.right = -self.T % self.block
        self.N = (self.left + self.Tq + self.right) // self.block * self.BH
        self.device, self.dtype = q.device, widen(q).dtype
        self.chunk = CHUNK * (128 // self.block) ** 2 * (1 if q.device.type == 'cpu' else 16)  # a GPU wants more to do at a time

    def queries(self, x):
        """(B, H, Tq, ...) to tiles (N, block, ...)"""
        return self.cut(x, self.left, (self.block,))

    def keys(self, x):
        """(B, H, T, ...) to tiles, the keys of a block dealt into planes"""
        return self.cut(x, 0, (self.block // PLANES, PLANES))

    def cut(self, x, left, shape):
        if left or self.right:
            x = F.pad(x, (0, 0) * (x.dim() - 3) + (left, self.right))
        x = x.unflatten(2, (-1, *shape)).movedim(2, 0)                      # (blocks, B, H, block, ...), of keys groups, planes
        if len(shape) == 2:
            x = x.transpose(3, 4)
        return x.reshape(-1, self.block, *x.shape[3 + len(shape):]).to(self.dtype)

    def uncut_queries(self, x, like):
        return self.uncut(x.unflatten(0, (-1, self.B, self.H)), self.left, self.Tq, like)

    def uncut_keys(self, x, like):
        x = x.unflatten(0, (-1, self.B, self.H)).unflatten(3, (PLANES, -1)).transpose(3, 4)
        return self.uncut(x, 0, self.T, like)

    def uncut(self, x, left, length, like):
        x = x.movedim(0, 2).reshape(self.B, self.H, -1, *like.shape[3:])
        return x[:, :, left:left + length].to(like.dtype).contiguous()

    def rows(self):
        """zeros for a number kept per query"""
        return torch.zeros(self.N, self.block, device=self.device, dtype=self.dtype)

    def scratch(self):
        """
        A matmul (N, block, block), alpha times, into the same memory at every step: fresh memory would cost more than the matmul.
        """
        room = torch.empty(min(self.N, self.chunk), self.block, self.block, device=self.device, dtype=self.dtype)
        return lambda a, b, alpha=1.0: room[:len(a)].baddbmm_(a, b, beta=0, alpha=alpha)

    def hashes(self, seed, dropout):
        """what dropout_mask needs to know of each query, (N, block)"""
        if not dropout:
            return self.rows()
        blocks = torch.arange(self.N // self.BH, device=self.device)[:, None, None] + self.offset
        query = blocks * self.block + torch.arange(self.block, device=self.device)
        return row_hash(seed, torch.arange(self.BH, device=self.device)[:, None], query).flatten(0, 1)

    def full_reach(self):
        """how many key blocks each query tile has to visit, itself included; on the CPU, because it steers the walk"""
        return self.offset + 1 + torch.arange(self.N) // self.BH

    def may_stop(self, d):
        """whether to look, after step d, which tiles are done: a GPU has to be waited for, so there at 8, 16, 32, ... only"""
        return d > 0 if self.device.type == 'cpu' else d >= 8 and d & (d - 1) == 0

    def walk(self, reach):
        """
        Yields (query tiles, key tiles, last visible key, d) for every step, right to left for each run of query tiles. Tiles
        are slices where they lie side by side, else indices. The caller may lower `reach` on the way.
        """
        last = torch.arange(self.block, device=self.device, dtype=self.dtype).repeat(min(self.N, self.chunk), 1)
        for start in range(0, self.N, self.chunk):
            d = 0
            while len(i := (reach[start:start + self.chunk] > d).nonzero()[:, 0]):
                lo, hi = start + int(i[0]), start + int(i[-1]) + 1
                shift = (self.offset - d) * self.BH                         # from a query's tile to the key tile d to its left
                if hi - lo == len(i):
                    yield slice(lo, hi), slice(lo + shift, hi + shift), last[:len(i)] + d * self.block, d
                else:
                    i = (i + start).to(self.device)
                    yield i, i + shift, last[:len(i)] + d * self.block, d
                d += 1


def add_matmul(x, i, a, b, alpha=1.0, first=False):
    """x[i] += alpha a @ b, without a copy where the tiles i are a slice; the first time x is written, not added to."""
    if isinstance(i, slice):
        x[i].baddbmm_(a, b, beta=0 if first else 1, alpha=alpha)
    else:
        x[i] = torch.baddbmm(x[i], a, b, alpha=alpha)


# The early exit. Query i has kept c keys so far; those it keeps further left have the distinct counts c + 1, c + 2, ..., and no
# score exceeds a bound (|q_i| |k_j| / sqrt(D), which is sqrt(D) for normalised q and k). So all the weight still to come,
# however long the sequence, is at most
#
#     exp(bound) (e^{g c} + e^{g (c+1)} + ...)  =  exp(bound + g c) / (1 - e^g)              (l = s + g (c - 1), as above)
#
# The sum so far is at least 1, because the nearest kept key has e^s > 1 (at least e^-bound without sparsity). So once the tail is
# below rounding beside it, which takes a number of kept keys that the gate alone decides, the rest of the walk cannot change the
# result and is left out: heads that forget cost O(T), not O(T^2). It is the bound that makes lengths hold, see the top.

def enough(bound, log_gate, sparsity):
    """How many kept keys make all the rest of a query's row too small to matter: 1 or more, infinite if it never forgets."""
    least = 0 if sparsity else -bound                                       # the nearest key's score, at least
    tail = bound - torch.log(-torch.expm1(log_gate)) - least                # at c = 0, in logarithms
    return ((tail - math.log(torch.finfo(log_gate.dtype).eps / 64)) / log_gate.abs()).clamp(min=1)


# Custom operators: to torch.compile each is one opaque node, so that compiling a model does not unroll the walk into it.

@torch.library.custom_op('nanotra::forward', mutates_args=())
def tra_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_gate: torch.Tensor, seed: torch.Tensor,
                sparsity: bool, dropout: float, bound: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """out (B, H, Tq, D); and by tile, for the backward pass, the log of each query's sum of weights, and the reach."""
    t = Tiling(q, k)
    with torch.autocast(q.device.type, enabled=False):
        tq, tg = t.queries(q), t.queries(log_gate)
        tk, tv = t.keys(k), t.keys(v)
        rows = t.hashes(seed, dropout)
        count, total, out = t.rows(), t.rows(), torch.empty_like(tq)
        matmul, reach = t.scratch(), t.full_reach()
        needed = t.queries(enough(bound, widen(log_gate), sparsity))        # 0 for padding
        for i, j, last, d in t.walk(reach):
            scores = matmul(tq[i], tk[j].mT, t.scale)                       # (tiles, block, block)
            weights, sums, kept = forward_tile(scores, tg[i], count[i], last, rows[i], sparsity, dropout)
            add_matmul(out, i, weights, tv[j], first=d == 0)
            count[i] += kept
            total[i] += sums
            if t.may_stop(d):
                done = (count[i] >= needed[i]).all(1).cpu()
                if 2 * done.sum() >= len(done):                             # what goes on must be gathered: is it worth it?
                    reach[i] = torch.where(done, d + 1, reach[i])
        empty = total == 0                                                  # rows that kept nothing output 0
        out /= total.masked_fill(empty, 1)[..., None]
        return t.uncut_queries(out, v), total.masked_fill(empty, 1).log(), reach


@torch.library.custom_op('nanotra::backward', mutates_args=())
def tra_backward(dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_gate: torch.Tensor,
                 seed: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, reach: torch.Tensor, sparsity: bool,
                 dropout: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of q, k, v and log_gate: the same walk, every tile computed again from its inputs and lse."""
    t = Tiling(q, k)
    with torch.autocast(q.device.type, enabled=False):
        tq, tg = t.queries(q), t.queries(log_gate)
        tk, tv = t.keys(k), t.keys(v)
        tdout, delta = t.queries(dout), t.queries((widen(dout) * widen(out)).sum(-1))
        rows = t.hashes(seed, dropout)
        count, dlog_gate, dq = t.rows(), t.rows(), torch.empty_like(tq)
        dk, dv = torch.empty_like(tk), torch.empty_like(tv)
        for x in (dk, dv):
            x[:t.offset * t.BH] = 0                                         # the other key tiles are written at d = 0
        matmul, matmul2 = t.scratch(), t.scratch()
        for i, j, last, d in t.walk(reach):
            scores = matmul(tq[i], tk[j].mT, t.scale)
            dweights = matmul2(tdout[i], tv[j].mT)
            weights, dlogits, sums, kept = backward_tile(scores, dweights, tg[i], count[i], lse[i], delta[i], last,
                                                         rows[i], sparsity, dropout)
            add_matmul(dq, i, dlogits, tk[j], t.scale, first=d == 0)
            add_matmul(dk, j, dlogits.mT, tq[i], t.scale, first=d == 0)
            add_matmul(dv, j, weights.mT, tdout[i], first=d == 0)
            dlog_gate[i] += sums
            count[i] += kept
        return (t.uncut_queries(dq, q), t.uncut_keys(dk, k), t.uncut_keys(dv, v),
                t.uncut_queries(dlog_gate, log_gate))


@tra_forward.register_fake
def _(q, k, v, log_gate, seed, sparsity, dropout, bound):
    t = Tiling(q, k)
    return torch.empty_like(v[:, :, :q.size(2)]).contiguous(), t.rows(), t.full_reach()


@tra_backward.register_fake
def _(dout, q, k, v, log_gate, seed, out, lse, reach, sparsity, dropout):
    return tuple(torch.empty_like(x).contiguous() for x in (q, k, v, log_gate))


def _save(ctx, inputs, output):
    q, k, v, log_gate, seed, ctx.sparsity, ctx.dropout, _ = inputs
    ctx.save_for_backward(q, k, v, log_gate, seed, *output)
    ctx.mark_non_differentiable(*output[1:])


def _gradients(ctx, dout, *_):
    return *tra_backward(dout, *ctx.saved_tensors, ctx.sparsity, ctx.dropout), None, None, None, None


tra_forward.register_autograd(_gradients, setup_context=_save)


def tra_blockwise(q, k, v, log_gate, sparsity=True, distance=True, dropout=0.0, seed=None, bound=None):
    """
    The result of tra_dense, in memory linear in T: what the model trains, evaluates and decodes with. `bound` is a number
    that no score exceeds; the model knows one, otherwise it is computed.
    """
    if not distance:
        log_gate = torch.zeros_like(log_gate)
    if bound is None:
        with torch.no_grad():  # |q . k| <= |q| |k|
            bound = float(q.norm(dim=-1).amax() * k.norm(dim=-1).amax()) / math.sqrt(q.size(-1))
    if bound > 80:
        raise ValueError(f'scores may reach {bound:.0f}, and exp overflows beyond 80: RMS-normalise q and k')
    if seed is None:
        seed = torch.zeros((), dtype=torch.int64, device=q.device)
    if k.size(2) <= SHORT:
        return tra_dense(q, k, v, log_gate, sparsity, dropout=dropout, seed=seed)
    if q.size(2) <= FEW and not dropout and not torch.compiler.is_compiling():  # its loop ends as the numbers say
        return tra_few(q, k, v, log_gate, sparsity, bound)
    return tra_forward(q, k, v, log_gate, seed, sparsity, dropout, bound)[0]


def tra_few(q, k, v, log_gate, sparsity, bound):
    """For cached decoding, where a few queries meet many keys: the formula and the early exit, over ever longer spans."""
    Tq, T, dtype_out = q.size(2), k.size(2), v.dtype
    q, log_gate = widen(q) / math.sqrt(q.size(-1)), widen(log_gate)[..., None]
    i = torch.arange(T - Tq, T, device=q.device)[:, None]
    count = total = out = torch.zeros_like(log_gate)                        # (B, H, Tq, 1)
    needed = enough(bound, log_gate, sparsity)
    stop, span = T, 256
    while stop > 0:
        start = max(0, stop - span)
        j = torch.arange(start, stop, device=q.device)
        scores = q @ widen(k[:, :, start:stop]).mT                          # (B, H, Tq, span)
        keep = (j <= i) & ((scores > 0) if sparsity else True)
        counts = count + keep.to(q.dtype).flip(-1).cumsum(-1).flip(-1)
        weights = torch.exp(scores + log_gate * (counts - 1)).masked_fill(~keep, 0)
        out = out + weights @ widen(v[:, :, start:stop])
        total = total + weights.sum(-1, keepdim=True)
        count = counts[..., :1]
        stop, span = start, 2 * span
        if stop and (count >= needed).all():
            break
    return (out / total.masked_fill(total == 0, 1)).to(dtype_out)


# ----------------------------------------------------------------------------------------------------------------------
# The baselines: q (B, H, Tq, D) the last queries of k, v (B, H, T, D); all causal, all with s_ij = q_i . k_j / sqrt(D) of
# RMS-normalised q and k, as TRA

ROWS = 1024  # queries at a time where a baseline needs a matrix of its own, so that memory stays linear in T


def row_chunks(q, k):
    """(first, last + 1, i, j): query ranges, and the positions i (rows, 1) and j (1, keys) of the keys they may see."""
    Tq, T = q.size(2), k.size(2)
    for start in range(0, Tq, ROWS):
        stop = min(start + ROWS, Tq)
        i = torch.arange(T - Tq + start, T - Tq + stop, device=q.device)[:, None]
        j = torch.arange(T - Tq + stop, device=q.device)[None, :]
        yield start, stop, i, j


def nope(q, k, v, dropout=0.0, bias=None):
    """
    Nothing but the causal mask, through torch's fused attention; bias(i, j), where given, is added to the scores.
    """
    if bias is None and q.size(2) in (1, k.size(2)):  # a lone last query sees every key
        return F.scaled_dot_product_attention(q, k, v, is_causal=q.size(2) > 1, dropout_p=dropout)
    out = []
    for start, stop, i, j in row_chunks(q, k):
        mask = j <= i
        if bias is not None:
            mask = bias(i, j).masked_fill(~mask, -math.inf).to(q.dtype)
        keys = j.size(1)
        out.append(F.scaled_dot_product_attention(q[:, :, start:stop], k[:, :, :keys], v[:, :, :keys], attn_mask=mask,
                                                  dropout_p=dropout))
    return torch.cat(out, 2)


def rotate(x, start, theta):
    """RoPE: pair m of position t turns by t theta^(-2m / D), so that q . k depends on the difference of positions."""
    D, T = x.size(-1), x.size(2)
    a, b = widen(x).chunk(2, -1)  # pair m is (x_m, x_{m + D/2})
    frequency = theta ** (-torch.arange(0, D, 2, device=x.device, dtype=a.dtype) / D)
    angle = torch.arange(start, start + T, device=x.device, dtype=a.dtype)[:, None] * frequency  # (T, D / 2)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1).to(x.dtype)


def alibi_slopes(H):
    """2^(-8h / H), h = 1 .. H; otherwise those of the power of two below, then every other one of the power above."""
    power = 2 ** math.floor(math.log2(H))
    slopes = [2 ** (-8 * h / power) for h in range(1, power + 1)]
    return slopes + [2 ** (-8 * h / (2 * power)) for h in range(1, 2 * power + 1, 2)][:H - power]


def alibi(q, k, v, dropout=0.0):
    """s_ij - m_h (i - j)"""
    slope = torch.tensor(alibi_slopes(q.size(1)), device=q.device, dtype=widen(q).dtype)[:, None, None]
    return nope(q, k, v, dropout, bias=lambda i, j: slope * (j - i))


def fot(q, k, v, decay, dropout=0.0):
    """The Forgetting Transformer: s_ij + c_i - c_j, where decay c (B, H, T) is the running sum of log forget gates."""
    decay = decay[..., None]
    return nope(q, k, v, dropout, bias=lambda i, j: decay[:, :, i[:, 0]] - decay[:, :, j[0]].mT)


def cope(q, k, v, table, dropout=0.0):
    """
    CoPE: the position of a key is the sum of gates sigmoid(s) from it to the query, p_ij = sum_{l=j..i} sigmoid(s_il), and
    q_i . e[p_ij] is added to the score, between whole positions interpolated. table e (D, npos), shared by the heads.
    """
    out, npos = [], table.size(1)
    for start, stop, i, j in row_chunks(q, k):
        qi, keys = q[:, :, start:stop], j.size(1)
        scores = widen(qi @ k[:, :, :keys].mT / math.sqrt(q.size(-1)))
        gates = scores.sigmoid().masked_fill(j > i, 0)
        position = gates.flip(-1).cumsum(-1).flip(-1).clamp(max=npos - 1)    # p_ij (B, H, rows, keys)
        low, high = position.floor(), position.ceil()
        at = widen(qi @ table.to(q.dtype))                                  # q_i . e[n] (B, H, rows, npos)
        part = position - low
        scores = scores + at.gather(-1, low.long()) * (1 - part) + at.gather(-1, high.long()) * part
        weights = scores.masked_fill(j > i, -math.inf).softmax(-1).to(v.dtype)
        out.append(F.dropout(weights, dropout) @ v[:, :, :keys])
    return torch.cat(out, 2)


# ----------------------------------------------------------------------------------------------------------------------
# The decoder

class Cache:
    """Keys, values and whatever else an attention keeps per token, in buffers that double when full."""

    def __init__(self):
        self.length, self.buffers = 0, None

    def append(self, *new):
        """Adds (B, H, t, ...) tensors and returns everything so far, each (B, H, length, ...)."""
        stop = self.length + new[0].size(2)
        if self.buffers is None or stop > self.buffers[0].size(2):
            capacity = max(64, 2 * stop)
            grown = [x.new_zeros(*x.shape[:2], capacity, *x.shape[3:]) for x in new]
            for x, old in zip(grown, self.buffers or []):
                x[:, :, :self.length] = old[:, :, :self.length]
            self.buffers = grown
        for x, y in zip(self.buffers, new):
            x[:, :, self.length:stop] = y
        self.length = stop
        return [x[:, :, :stop] for x in self.buffers]


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        C, H = config.n_embd, config.n_head
        self.qkv = nn.Linear(C, 3 * C, bias=False)
        self.proj = nn.Linear(C, C)
        if config.attn in ('tra', 'fot'):
            self.gate = nn.Linear(C, H)  # apart from qkv, because only the gate has a bias; one matrix for all was no faster
        if config.attn == 'cope':
            self.table = nn.Parameter(torch.zeros(C // H, config.cope_npos))

    def forward(self, x, cache=None):
        c = self.config
        B, T, C = x.shape
        dropout = c.dropout if self.training else 0.0
        q, k, v = (y.view(B, T, c.n_head, -1).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))  # (B, H, T, D)
        q, k = (F.rms_norm(y, y.shape[-1:], eps=1e-6).to(v.dtype) for y in (q, k))
        start = cache.length if cache else 0
        if c.attn == 'rope':
            q, k = rotate(q, start, c.rope_theta), rotate(k, start, c.rope_theta)
        kept = [k, v]
        if c.attn in ('tra', 'fot'):
            log_gate = F.logsigmoid(widen(self.gate(x))).transpose(1, 2)                         # (B, H, T)
        if c.attn == 'fot':  # its gates belong to the keys, so the cache holds them; TRA's belong to the query
            before = cache.buffers[2][:, :, start - 1:start] if start else 0
            kept.append(before + log_gate.cumsum(-1))
        if cache is not None:
            kept = cache.append(*kept)
        k, v = kept[:2]
        if c.attn == 'tra':
            seed = torch.randint(2 ** 31, (), device=x.device) if dropout else None
            bound = 1.01 * math.sqrt(C // c.n_head)  # of normalised q and k, 16-bit rounding included
            y = tra_blockwise(q, k, v, log_gate, c.tra_sparsity, c.tra_distance, dropout, seed, bound)
        elif c.attn == 'alibi':
            y = alibi(q, k, v, dropout)
        elif c.attn == 'fot':
            y = fot(q, k, v, kept[2], dropout)
        elif c.attn == 'cope':
            y = cope(q, k, v, self.table, dropout)
        else:  # rope has turned q and k already
            y = nope(q, k, v, dropout)
        return self.proj(y.transpose(1, 2).reshape(B, T, C))


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
        x = self.norm1(x)
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
        else:  # as the notebook, whose norms undo the scale of the stream; the rest has PyTorch's defaults
            nn.init.uniform_(self.embed.weight, -0.01, 0.01)
            nn.init.normal_(self.head.weight, std=0.02)

    def initialise(self):
        """
        GPT-2's: all that adds to the residual stream starts about as small as the embedding, so that the second layer can still
        tell the tokens apart. With PyTorch's defaults what attention adds is far larger than the embedding it is added to.
        """
        for name, p in self.named_parameters():
            if name.endswith('bias'):
                nn.init.zeros_(p)
            elif p.dim() == 2 and not name.endswith('table'):
                last = name.endswith(('proj.weight', 'down.weight'))        # the last matrix of a branch
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * self.config.n_layer) if last else 0.02)

    @torch.no_grad()
    def keep_all(self):
        """
        A dropped key gets no gradient from the query that drops it, and what a softmax gains on one key it takes from the others: nothing
        lifts all scores of a head together. So the half of all pairs of tokens that begins below 0 tends to stay there. Here, embeddings
        get a common direction u, and W_q u = W_k u = z: every query shares a part with every key, nearly all scores start positive, and
        training decides what to drop. z is larger than the other weights, or they would soon outgrow it. The gates start sharp in the
        first layer, which has to single out a neighbour, and slow in the last, which has to look far.
        """
        C = self.config.n_embd
        u = F.normalize(torch.randn(C), dim=0)
        self.embed.weight += 0.5 * self.embed.weight.norm(dim=1).mean() * u
        for n, block in enumerate(self.blocks):
            z = 0.1 * torch.randn(C)
            for w in block.attn.qkv.weight.chunk(3)[:2]:                    # W_q and W_k (C, C)
                w += torch.outer(z - w @ u, u)                              # now w @ u is z
            if self.config.attn in ('tra', 'fot'):
                block.attn.gate.bias += -2 + 6 * n / max(1, self.config.n_layer - 1)    # e^g from 0.12 to 0.98

    def forward(self, idx, targets=None, cache=None):
        """
        idx (B, T) -> logits (B, T, vocab_size), and the mean cross-entropy over the targets that are not -1 (or None).
        cache, from new_cache(), makes idx the continuation of what it has seen.
        """
        logits = self.head(self.trunk(idx, cache))
        if targets is None:
            return logits, None
        # Targets that are not scored go through the head too: to pick the others out, a GPU would have to be waited for, and
        # the tasks that have them have vocabularies so small that head and loss are nothing beside the rest.
        return logits, F.cross_entropy(widen(logits).flatten(0, 1), targets.flatten(), ignore_index=-1)

    def trunk(self, idx, cache=None):
        """(B, T) -> (B, T, C): everything but the head"""
        x = self.embed(idx)
        for n, block in enumerate(self.blocks):
            x = block(x, cache[n] if cache else None)
        return self.norm(x)

    def new_cache(self):
        return [Cache() for _ in self.blocks]

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, chunk=1024):
        """Continues idx (B, T) by max_new_tokens tokens; temperature 0 is greedy. Long prompts are read in chunks."""
        if idx.size(1) == 0:
            raise ValueError('generate needs at least one token to continue')
        was_training = self.training
        self.eval()
        cache, new = self.new_cache(), idx
        for _ in range(max_new_tokens):
            for part in new.split(chunk, 1):
                x = self.trunk(part, cache)
            logits = self.head(x[:, -1]).float()  # (B, vocab_size)
            if temperature == 0:
                new = logits.argmax(-1, keepdim=True)
            else:
                logits = logits / temperature
                if top_k is not None:
                    least = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]
                    logits = logits.masked_fill(logits < least, -math.inf)
                new = torch.multinomial(logits.softmax(-1), 1)
            idx = torch.cat([idx, new], 1)
        self.train(was_training)
        return idx
