"""
Tests of nanoTRA: offline, on a CPU, in a few minutes.

    python -m pytest -q test_tra.py

Oracles are plain loops written from the equations; they share no code with what they test. The threshold is a step: two
summation orders can disagree on a score that rounds to about 0, and then every count to its left shifts by one. So
equality is asserted in float64, or in float32 on fixed seeds.
"""
import json
import math
import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import tra
from tra import Config, Decoder, tra_blockwise, tra_dense

ROOT = Path(__file__).resolve().parent
ATTENTIONS = ['tra', 'rope', 'nope', 'alibi', 'cope', 'fot']


@pytest.fixture
def eager():
    """run the tile functions uncompiled: compiling each of many shapes would take minutes"""
    with torch.compiler.set_stance('force_eager'):
        yield


def inputs(B=1, H=1, T=64, D=8, dtype=torch.float64, seed=0, Tq=None):
    """q, k normalised as in the model, v, log_gate"""
    rng = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, H, T, D, generator=rng, dtype=torch.float64) for _ in range(3))
    log_gate = F.logsigmoid(torch.randn(B, H, T, generator=rng, dtype=torch.float64))
    q, k = F.rms_norm(q, (D,)), F.rms_norm(k, (D,))
    q, log_gate = (x[:, :, -(Tq or T):] for x in (q, log_gate))
    return [x.to(dtype).contiguous().requires_grad_() for x in (q, k, v, log_gate)]


def grads(out, xs, dout):
    return [torch.zeros_like(x) if g is None else g
            for x, g in zip(xs, torch.autograd.grad(out, xs, dout.to(out.dtype), allow_unused=True))]


def close(a, b, tolerance):
    """to tolerance, relative to the largest value where that exceeds 1"""
    a, b = (torch.as_tensor(x).double() for x in (a, b))
    assert a.shape == b.shape
    assert torch.isfinite(a).all()
    error, scale = (a - b).abs().max(), max(1.0, b.abs().max())
    assert error <= tolerance * scale, f'differs by {error:.2e}, largest value {scale:.2e}'


# ----------------------------------------------------------------------------------------------------------------------
# TRA against loops

def loop_tra(q, k, v, log_gate, dout, sparsity=True, distance=True):
    """One head: q (Tq, D), k, v (T, D), log_gate (Tq), numpy. Returns out and the gradients of the four, by the chain rule."""
    Tq, D = q.shape
    T = len(k)
    out, dq, dk, dv, dg = np.zeros_like(q), np.zeros_like(q), np.zeros_like(k), np.zeros_like(v), np.zeros(Tq)
    for row in range(Tq):
        i = T - Tq + row
        kept, logits, distances, c = [], [], [], 0
        for j in range(i, -1, -1):
            s = float(q[row] @ k[j]) / math.sqrt(D)
            if s > 0 or not sparsity:
                c += 1
                kept.append(j)
                distances.append(c if distance else 0)
                logits.append(s + log_gate[row] * distances[-1])
        if not kept:
            continue
        top = max(logits)
        e = [math.exp(x - top) for x in logits]
        a = [x / sum(e) for x in e]
        for w, j in zip(a, kept):
            out[row] += w * v[j]
        da = [float(dout[row] @ v[j]) for j in kept]
        mean = sum(x * y for x, y in zip(a, da))
        for w, d, j, c in zip(a, da, kept, distances):
            dl = w * (d - mean)
            dq[row] += dl * k[j] / math.sqrt(D)
            dk[j] += dl * q[row] / math.sqrt(D)
            dv[j] += w * dout[row]
            dg[row] += dl * c
    return out, dq, dk, dv, dg


def loop_tra_heads(xs, dout, **switches):
    B, H = xs[0].shape[:2]
    arrays = [x.detach().double().numpy() for x in (*xs, dout)]
    heads = [loop_tra(*(x[b, h] for x in arrays), **switches) for b in range(B) for h in range(H)]
    return [torch.tensor(np.stack(x)).unflatten(0, (B, H)) for x in zip(*heads)]


SWITCHES = [{}, {'distance': False}, {'sparsity': False}]


@pytest.mark.parametrize('T', [1, 2, 3, 63, 64, 65, 127, 200, 513])
@pytest.mark.parametrize('D', [1, 8, 64])
@pytest.mark.parametrize('switches', SWITCHES, ids=['tra', 'no distance', 'no sparsity'])
def test_dense_and_blockwise_equal_the_loops(T, D, switches, eager, monkeypatch):
    monkeypatch.setattr(tra, 'FEW', 0)  # the kernel at T = 1 too
    B, H = (2, 3) if T < 100 else (1, 1)
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        xs = inputs(B, H, T, D, dtype, seed=T + D)
        dout = torch.randn(xs[0].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
        expected = loop_tra_heads(xs, dout, **switches)
        for function in (tra_dense, tra_blockwise):
            out = function(*xs, **switches)
            for a, b in zip([out, *grads(out, xs, dout)], expected):
                close(a, b, tolerance)


@pytest.mark.parametrize('T', [100, 700])
def test_compiled_kernel_equals_dense(T):
    xs = inputs(3, 4, T, 16, torch.float32, seed=5)
    dout = torch.randn(xs[0].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    a, b = tra_blockwise(*xs), tra_dense(*xs)
    for x, y in zip([a, *grads(a, xs, dout)], [b, *grads(b, xs, dout)]):
        close(x, y, 1e-5)
    assert not tra.compiled.broken


@pytest.mark.parametrize('T, Tq', [(65, 1), (65, 64), (300, 17), (300, 128), (300, 299), (513, 200)])
@pytest.mark.parametrize('few', [0, 16, 1000])  # the tiles, both, the short way of decoding
def test_fewer_queries_than_keys(T, Tq, few, eager, monkeypatch):
    monkeypatch.setattr(tra, 'FEW', few)
    xs = inputs(1, 2, T, 4, seed=T + Tq, Tq=Tq)
    dout = torch.randn_like(xs[0])
    expected = loop_tra_heads(xs, dout)
    for function in (tra_dense, tra_blockwise):
        out = function(*xs)
        for a, b in zip([out, *grads(out, xs, dout)], expected):
            close(a, b, 1e-10)


@pytest.mark.parametrize('switches', SWITCHES, ids=['tra', 'no distance', 'no sparsity'])
def test_gradcheck(switches, eager):
    for T, D, Tq in ((20, 3, None), (70, 1, None), (70, 1, 33)):
        xs = inputs(1, 1, T, D, seed=T, Tq=Tq)
        assert torch.autograd.gradcheck(lambda *x: tra_blockwise(*x, **switches), xs, eps=1e-7)


@pytest.mark.parametrize('function', [tra_dense, tra_blockwise])
@pytest.mark.parametrize('T', [1, 64, 200])
def test_rows_that_keep_nothing(function, T, eager, monkeypatch):
    monkeypatch.setattr(tra, 'FEW', 0)
    q, k, v, log_gate = inputs(1, 2, T, 4)
    empty = torch.zeros(T, dtype=torch.bool)
    empty[::3] = True
    with torch.no_grad():
        q[:, :, empty] = -1.0
        q[:, :, ~empty] = 1.0
        k.fill_(0.5)  # so an empty row scores below 0 everywhere
    out = function(q, k, v, log_gate)
    assert (out[:, :, empty] == 0).all() and (out[:, :, ~empty] != 0).any() == (T > 1)
    gq, gk, gv, gg = grads(out, [q, k, v, log_gate], torch.ones_like(out))
    assert (gq[:, :, empty] == 0).all() and (gg[:, :, empty] == 0).all()
    assert all(torch.isfinite(g).all() for g in (gq, gk, gv, gg))

    with torch.no_grad():
        q.zero_()  # a score of exactly 0 is not kept: nothing is
    out = function(q, k, v, log_gate)
    assert (out == 0).all()
    assert all((g == 0).all() for g in grads(out, [q, k, v, log_gate], torch.ones_like(out)))


def test_counts_are_exact_in_bfloat16(eager):
    T = 700  # every key kept: counts up to 700, where bfloat16 would stick at 256
    q = k = torch.ones(1, 1, T, 4, dtype=torch.bfloat16)
    v = torch.arange(T, dtype=torch.float32).view(1, 1, T, 1).expand(1, 1, T, 4).to(torch.bfloat16)
    log_gate = torch.full((1, 1, T), -2 ** -9, dtype=torch.bfloat16)
    out, parts = tra_dense(q, k, v, log_gate, return_parts=True)
    i, j = torch.arange(T)[:, None], torch.arange(T)[None, :]
    assert torch.equal(parts['count'][0, 0], (i - j + 1).clamp(min=0).float())
    assert out.dtype == torch.bfloat16
    exact = tra_dense(*(x.double() for x in (q, k, v, log_gate)))
    for x in (out, tra_blockwise(q, k, v, log_gate)):
        close(x, exact, 2 ** -8)
    stuck = (parts['count'].clamp(max=256) * -2 ** -9).masked_fill(j > i, -math.inf).softmax(-1) @ v.float()
    assert (stuck - exact).abs().max() > 5  # so the line above could fail


def test_large_scores_are_refused(eager):
    q, k, v, log_gate = inputs(1, 1, 40, 8)
    with pytest.raises(ValueError, match='exp overflows'):
        tra_blockwise(q * 20, k * 20, v, log_gate)


GATES = ['never', 'slow', 'fast', 'at once', 'one stubborn row', 'one stubborn head', 'mixed']


@pytest.mark.parametrize('gates, scale, few, switches',
                         [(g, scale, 0, {}) for g in GATES for scale in (0.3, 1.0, 2.5)] +
                         [(g, 1.0, 1000, {}) for g in GATES] + [('mixed', 1.0, few, {'sparsity': False}) for few in (0, 1000)])
def test_early_exit_changes_nothing(gates, scale, few, switches, eager, monkeypatch):
    """the tail that is left out is below rounding: equal to the full formula, whatever the gates and the size of q and k"""
    monkeypatch.setattr(tra, 'FEW', few)
    T = 700
    q, k, v, log_gate = inputs(2, 2, T, 8, seed=3)
    with torch.no_grad():
        q *= scale
        k *= scale
        log_gate.copy_({'never': torch.zeros(T), 'slow': torch.full((T,), -0.01), 'fast': torch.full((T,), -2.0),
                        'at once': torch.full((T,), -50.0), 'mixed': -torch.logspace(-4, 2, T)}.get(gates, torch.full((T,), -2.0)))
        if gates == 'one stubborn row':
            log_gate[0, 0, 690] = -1e-4
        if gates == 'one stubborn head':
            log_gate[1, 1] = -1e-4
    xs, dout = [q, k, v, log_gate], torch.randn(q.shape, generator=torch.Generator().manual_seed(1), dtype=q.dtype)
    a, b = tra_blockwise(*xs, **switches), tra_dense(*xs, **switches)
    for x, y in zip([a, *grads(a, xs, dout)], [b, *grads(b, xs, dout)]):
        close(x, y, 1e-14 if y is b else 1e-13)


def test_early_exit_happens(eager):
    """by tile: heads that forget stop, one stubborn row keeps only its own tile going, rows with no key yet go on"""
    q, k, v, log_gate = inputs(1, 2, 2048, 8)
    reach = lambda g: tra.tra_forward(q, k, v, g, torch.tensor(0), True, 0.0, 8 ** 0.5)[2].view(16, 2)
    full = torch.arange(1, 17)[:, None].expand(16, 2)
    assert torch.equal(reach(torch.full_like(log_gate, 0.0)), full)
    forgets = torch.full_like(log_gate, -3.0)
    assert torch.equal(reach(forgets), full.clamp(max=2))
    stubborn = forgets.clone()
    stubborn[0, 1, 1200] = -1e-5
    expected = full.clamp(max=2).clone()
    expected[1200 // 128, 1] = 1200 // 128 + 1
    assert torch.equal(reach(stubborn), expected)
    with torch.no_grad():
        q[0, 0, 1999] = 0  # keeps nothing
    expected = full.clamp(max=2).clone()
    expected[1999 // 128, 0] = 1999 // 128 + 1
    assert torch.equal(reach(forgets), expected)


def test_long_sequences_need_little_memory():
    code = '''
import resource, torch, torch.nn.functional as F
from tra import tra_blockwise
def run(T):
    xs = [torch.randn(1, 4, T, 64) for _ in range(3)] + [F.logsigmoid(torch.randn(1, 4, T))]
    xs = [(F.rms_norm(x, (64,)) if n < 2 else x).requires_grad_() for n, x in enumerate(xs)]
    tra_blockwise(*xs).sum().backward()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(run(256), run(16384))
'''
    small, large = map(int, subprocess.check_output([sys.executable, '-c', code], cwd=ROOT, text=True).split())
    assert large - small < 1_000_000  # kilobytes


def test_one_warning_and_right_results_without_a_compiler(tmp_path):
    code = '''
import warnings, torch
from tra import tra_blockwise, tra_dense
xs = [torch.randn(1, 2, 70, 8, requires_grad=True) for _ in range(3)] + [-torch.rand(1, 2, 70)]
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter('always')
    out = tra_blockwise(*xs)
    out.sum().backward()
print(float((out - tra_dense(*xs)).abs().max()), sum('uncompiled' in str(x.message) for x in seen))
'''
    env = {**os.environ, 'CXX': str(tmp_path / 'none'), 'TORCHINDUCTOR_CACHE_DIR': str(tmp_path)}
    error, seen = subprocess.check_output([sys.executable, '-c', code], cwd=ROOT, text=True, env=env).split()
    assert float(error) < 1e-5 and int(seen) == 1


# ----------------------------------------------------------------------------------------------------------------------
# dropout

def test_dropout_in_the_kernel_equals_dense(eager):
    for T, Tq in ((50, None), (300, None), (300, 100)):
        xs = inputs(2, 2, T, 4, seed=T, Tq=Tq)
        dout, seed = torch.randn_like(xs[0]), torch.tensor(11)
        a, b = (f(*xs, dropout=0.3, seed=seed) for f in (tra_blockwise, tra_dense))
        for x, y in zip([a, *grads(a, xs, dout)], [b, *grads(b, xs, dout)]):
            close(x, y, 1e-10)
        assert torch.equal(a, tra_blockwise(*xs, dropout=0.3, seed=seed))
        assert not torch.allclose(a, tra_blockwise(*xs, dropout=0.3, seed=seed + 1))
        assert not torch.allclose(a, tra_blockwise(*xs))


def test_dropout_compiled_equals_dense():
    xs = inputs(2, 2, 300, 4, torch.float32)
    dout, seed = torch.randn_like(xs[0]), torch.tensor(11)
    a, b = (f(*xs, dropout=0.1, seed=seed) for f in (tra_blockwise, tra_dense))
    for x, y in zip([a, *grads(a, xs, dout)], [b, *grads(b, xs, dout)]):
        close(x, y, 1e-5)


@pytest.mark.parametrize('p', [0.01, 0.5])
def test_dropout_mask_looks_random(p):
    head, i, j = torch.arange(8).view(8, 1, 1), torch.arange(400).view(400, 1), torch.arange(400)
    mask = tra.dropout_mask(tra.row_hash(torch.tensor(3), head, i), tra.key_hash(j), p, torch.float64)
    stays = (mask > 0).double()
    assert torch.allclose(mask[mask > 0], torch.tensor(1 / (1 - p), dtype=torch.float64))
    sigma = math.sqrt(p * (1 - p))
    assert abs(stays.mean() - (1 - p)) < 4 * sigma / math.sqrt(stays.numel())
    for dims in ((1, 2), (0, 2), (0, 1)):  # by head, by query, by key
        means = stays.mean(dims)
        assert (means - (1 - p)).abs().max() < 5.5 * sigma / math.sqrt(stays.numel() / len(means))
    x = (stays - (1 - p)) / sigma
    for shifted in (x.roll(1, 0), x.roll(1, 1), x.roll(1, 2), x.roll((1, 1), (1, 2)), x.mT):
        assert abs((x * shifted).mean()) < 5 / math.sqrt(x.numel() / 2)


def test_dropout_is_off_in_eval(eager):
    idx = torch.randint(7, (2, 30))
    for attn in ATTENTIONS:
        model = Decoder(Config(7, 1, 2, 16, dropout=0.5, attn=attn))
        assert not torch.equal(model(idx)[0], model(idx)[0])
        model.eval()
        plain = Decoder(Config(7, 1, 2, 16, dropout=0.0, attn=attn))
        plain.load_state_dict(model.state_dict())
        assert torch.equal(model(idx)[0], plain(idx)[0])


# ----------------------------------------------------------------------------------------------------------------------
# the baselines against loops, and their gradients against differences

def loop_attention(q, k, v, bias):
    """One head, numpy: softmax over j <= i of q_i . k_j / sqrt(D) + bias(i, j); i, j are positions"""
    (Tq, D), T = q.shape, len(k)
    out = np.zeros((Tq, v.shape[1]))
    for row in range(Tq):
        i = T - Tq + row
        logits = [float(q[row] @ k[j]) / math.sqrt(D) + bias(i, j) for j in range(i + 1)]
        e = [math.exp(x - max(logits)) for x in logits]
        for j in range(i + 1):
            out[row] += e[j] / sum(e) * v[j]
    return out


def loop_rotate(x, theta):
    T, D = x.shape
    y = x.copy()
    for t in range(T):
        for m in range(D // 2):
            angle = t * theta ** (-2 * m / D)
            a, b = x[t, m], x[t, m + D // 2]
            y[t, m] = a * math.cos(angle) - b * math.sin(angle)
            y[t, m + D // 2] = a * math.sin(angle) + b * math.cos(angle)
    return y


def loop_cope_bias(q, k, table, first):
    """q_i . e at the position p_ij, a sum of gates from j to i, interpolated between whole positions"""
    D, npos = table.shape

    def bias(i, j):
        p = 0.0
        for l in range(j, i + 1):
            p += 1 / (1 + math.exp(-float(q[i - first] @ k[l]) / math.sqrt(D)))
        p = min(p, npos - 1)
        low, high = math.floor(p), math.ceil(p)
        return float(q[i - first] @ table[:, low]) * (1 - (p - low)) + float(q[i - first] @ table[:, high]) * (p - low)
    return bias


@pytest.mark.parametrize('H', [1, 4, 6])
@pytest.mark.parametrize('T, Tq', [(1, 1), (23, 23), (23, 5)])
def test_baselines_equal_their_loops(H, T, Tq, monkeypatch):
    monkeypatch.setattr(tra, 'ROWS', 7)  # several chunks of rows
    q, k, v, _ = inputs(1, H, T, 4, Tq=Tq)
    decay = F.logsigmoid(torch.randn(1, H, T, dtype=torch.float64)).cumsum(-1)
    table = torch.randn(4, 5, dtype=torch.float64)
    slopes = {1: [1 / 256], 4: [1 / 4, 1 / 16, 1 / 64, 1 / 256],  # the last two of 6: of the slopes for 8, the 1st and 3rd
              6: [1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8]}[H]
    assert tra.alibi_slopes(H) == pytest.approx(slopes)
    full_q = torch.cat([torch.zeros(1, H, T - Tq, 4, dtype=torch.float64), q], 2)
    got = {'nope': tra.nope(q, k, v), 'alibi': tra.alibi(q, k, v), 'fot': tra.fot(q, k, v, decay),
           'cope': tra.cope(q, k, v, table), 'rope': tra.nope(tra.rotate(q, T - Tq, 100.0), tra.rotate(k, 0, 100.0), v)}
    for h in range(H):
        qh, kh, vh, c, fq = (x[0, h].detach().numpy() for x in (q, k, v, decay, full_q))
        expected = {
            'nope': loop_attention(qh, kh, vh, lambda i, j: 0),
            'alibi': loop_attention(qh, kh, vh, lambda i, j: -slopes[h] * (i - j)),
            'fot': loop_attention(qh, kh, vh, lambda i, j: c[i] - c[j]),
            'cope': loop_attention(qh, kh, vh, loop_cope_bias(qh, kh, table.numpy(), T - Tq)),
            'rope': loop_attention(loop_rotate(fq, 100.0)[T - Tq:], loop_rotate(kh, 100.0), vh, lambda i, j: 0)}
        for name in expected:
            close(got[name][0, h], expected[name], 1e-10)


def test_baseline_gradients():
    q, k, v, _ = inputs(1, 2, 9, 4)
    decay = F.logsigmoid(torch.randn(1, 2, 9, dtype=torch.float64)).cumsum(-1).requires_grad_()
    table = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    for function, xs in ((tra.nope, (q, k, v)), (tra.alibi, (q, k, v)), (tra.fot, (q, k, v, decay)),
                         (tra.cope, (q, k, v, table)), (lambda x: tra.rotate(x, 3, 100.0), (q,))):
        assert torch.autograd.gradcheck(function, xs)


# ----------------------------------------------------------------------------------------------------------------------
# the decoder

def small(attn='tra', **options):
    torch.manual_seed(0)
    model = Decoder(Config(**{**dict(vocab_size=13, n_layer=2, n_head=2, n_embd=16, dropout=0.0, attn=attn), **options}))
    for p in model.parameters():  # the embedding starts at 0.01 and CoPE's table at 0: make everything matter
        torch.nn.init.normal_(p, std=0.5)
    return model.eval()


@pytest.mark.parametrize('pre_norm', [True, False])
def test_decoder_equals_numpy(pre_norm, eager):
    """the authors' architecture, written again from its description"""
    model = small(pre_norm=pre_norm, n_head=2).double()
    w = {name: p.detach().numpy() for name, p in model.named_parameters()}
    idx = torch.randint(13, (1, 21))

    def norm(x, scale=1.0):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale

    def sigmoid(x):
        return 1 / (1 + np.exp(-x))

    def attention(x, n):
        a = f'blocks.{n}.attn.'
        q, k, v = np.split(x @ w[a + 'qkv.weight'].T, 3, 1)
        gate = np.log(sigmoid(x @ w[a + 'gate.weight'].T + w[a + 'gate.bias']))
        heads = [loop_tra(norm(q[:, h]), norm(k[:, h]), v[:, h], gate[:, n], np.zeros_like(q[:, h]))[0]
                 for n, h in enumerate((slice(0, 8), slice(8, 16)))]
        return np.concatenate(heads, 1) @ w[a + 'proj.weight'].T + w[a + 'proj.bias']

    def mlp(x, n):
        m = f'blocks.{n}.mlp.'
        linear, gate = np.split(x @ w[m + 'up.weight'].T + w[m + 'up.bias'], 2, 1)
        return (linear * gate * sigmoid(gate)) @ w[m + 'down.weight'].T + w[m + 'down.bias']

    x = w['embed.weight'][idx[0].numpy()]
    for n in range(2):
        norm1, norm2 = (w[f'blocks.{n}.norm{m}.weight'] for m in (1, 2))
        if pre_norm:
            x = x + attention(norm(x, norm1), n)
            x = x + mlp(norm(x, norm2), n)
        else:
            x = norm(x, norm1)
            x = x + attention(x, n)
            x = norm(x, norm2)
            x = x + mlp(x, n)
    close(model(idx)[0][0], norm(x, w['norm.weight']) @ w['head.weight'].T, 1e-10)


def test_initialisation_and_sizes():
    model = Decoder(Config(1000, n_embd=64, n_layer=2))
    embed, head = model.embed.weight, model.head.weight
    assert embed.abs().max() <= 0.01 and embed.abs().max() > 0.0099 and abs(head.std() - 0.02) < 0.001
    assert head.data_ptr() != embed.data_ptr()
    block = 2 * 64 + 4 * 64 * 64 + 64 + 64 * 4 + 4 + 64 * 256 + 256 + 128 * 64 + 64
    assert sum(p.numel() for p in model.parameters()) == 2 * 1000 * 64 + 64 + 2 * block
    assert not list(model.buffers())
    biases = {n.split('.', 2)[-1] for n, _ in model.named_parameters() if n.endswith('bias')}
    assert biases == {'attn.proj.bias', 'attn.gate.bias', 'mlp.up.bias', 'mlp.down.bias'}


def test_loss_ignores_minus_one():
    model = small('nope')
    idx = torch.randint(13, (2, 9))
    targets = idx.roll(-1, 1)
    targets[:, ::2] = -1
    logits, loss = model(idx, targets)
    terms = [-logits[b, t].log_softmax(-1)[targets[b, t]] for b in range(2) for t in range(9) if targets[b, t] >= 0]
    close(loss, sum(terms) / len(terms), 1e-6)
    assert model(idx)[1] is None


@pytest.mark.parametrize('attn', ATTENTIONS)
def test_causality(attn, eager):
    model = small(attn)
    idx = torch.randint(13, (1, 150))
    before = model(idx)[0]
    for t in (1, 64, 70, 149):
        changed = idx.clone()
        changed[0, t] = (changed[0, t] + 1) % 13
        after = model(changed)[0]
        close(after[:, :t], before[:, :t], 1e-6)
        assert (after[:, t:] - before[:, t:]).abs().max() > 1e-3


@pytest.mark.parametrize('attn', ATTENTIONS)
@torch.no_grad()
def test_cached_decoding_equals_the_full_pass(attn, eager):
    model = small(attn)
    idx = torch.randint(13, (2, 1100))
    full = model(idx)[0]
    for sizes in ([1] * 1100, [1, 7, 64, 300, 500, 100, 20, 108]):
        cache = model.new_cache()
        parts = [model(part, cache=cache)[0] for part in idx.split(sizes, 1)]
        close(torch.cat(parts, 1), full, 1e-4)


@pytest.mark.parametrize('attn', ATTENTIONS)
def test_generate(attn, eager):
    model = small(attn)
    prompt = torch.randint(13, (3, 40))
    idx = prompt
    for _ in range(5):
        idx = torch.cat([idx, model(idx)[0][:, -1].argmax(-1, keepdim=True)], 1)
    assert torch.equal(model.generate(prompt, 5, temperature=0), idx)
    assert torch.equal(model.generate(prompt, 5, temperature=0, chunk=9), idx)
    assert torch.equal(model.generate(prompt, 5, top_k=1), idx)
    torch.manual_seed(1)
    a, b = model.generate(prompt, 20), model.generate(prompt, 20)
    assert a.shape == (3, 60) and torch.equal(a[:, :40], prompt) and not torch.equal(a, b)
    assert torch.equal(model.generate(prompt, 0), prompt)


def test_compiling_a_model_keeps_the_kernel_whole():
    """to the compiler the kernel is one node, forward and backward, and no graph break"""
    nodes = []

    def backend(graph, _):
        nodes.extend(str(node.target) for node in graph.graph.nodes)
        return graph
    model = small().train()
    idx = torch.randint(13, (2, 40))
    with torch.compiler.set_stance('default'):
        out = torch.compile(model, backend=backend, fullgraph=True)(idx, idx)[1]
    expected = model(idx, idx)[1]
    close(out, expected, 1e-6)
    assert sum('nanotra' in x for x in nodes) == 2 and len(nodes) < 200
    for a, b in zip(torch.autograd.grad(out, list(model.parameters())), torch.autograd.grad(expected, list(model.parameters()))):
        close(a, b, 1e-6)


def test_bad_configs():
    for options, words in ((dict(attn='rpoe'), ['rpoe', 'rope', 'tra']), (dict(n_embd=10, n_head=4), ['10', '4']),
                           (dict(n_embd=12, n_head=4, attn='rope'), ['even', '3']), (dict(dropout=1.0), ['dropout', '1.0']),
                           (dict(n_layer=0), ['n_layer', '0'])):
        with pytest.raises(ValueError) as error:
            Config(5, **options)
        assert all(word in str(error.value) for word in words) and '\n' not in str(error.value)
