"""
Tests of nanoTRA: offline, on a CPU, in a few minutes.

    python -m pytest -q test_tra.py

Oracles are plain loops written from the equations; they share no code with what they test. The
threshold is a step: two summation orders can disagree on a score that rounds to about 0, and then
every count to its left shifts by one. So equality is asserted in float64, or in float32 on fixed
seeds.
"""
import ast
import contextlib
import dataclasses
import fcntl
import hashlib
import http.server
import io
import json
import math
import os
import random
import re
import resource
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import timeit
import traceback
import types
import warnings
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import data
import eval as evaluation
import tra
from data import make_task
from tra import Config, Decoder, tra_blockwise, tra_dense

ROOT = Path(__file__).resolve().parent
TEXTS = Path(os.environ.get('NANOTRA_TEXT', 'nowhere'))
needs_text = pytest.mark.skipif(not TEXTS.exists(), reason='set NANOTRA_TEXT to a folder that has '
                                'wikitext-2/, wikitext-103-raw/ and tiktoken_cache/: see README.md')
ATTENTIONS = tra.ATTENTIONS

@pytest.fixture(autouse=True)
def eager():
    """Uncompiled and on one thread: tests are small, and to compile many shapes takes minutes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.compiler.set_stance('force_eager'):
        yield
    torch.set_num_threads(threads)

@pytest.fixture
def compiling(eager):
    with torch.compiler.set_stance('default'):
        yield

def inputs(B=1, H=1, T=64, D=8, dtype=torch.float64, seed=0, Tq=None):
    """q, k normalised as in the model, v, log_gate"""
    rng = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, H, T, D, generator=rng, dtype=torch.float64) for _ in range(3))
    log_gate = F.logsigmoid(torch.randn(B, H, T, generator=rng, dtype=torch.float64))
    q, k = F.rms_norm(q, (D,)), F.rms_norm(k, (D,))
    q, log_gate = (x[:, :, -(Tq or T):] for x in (q, log_gate))
    return [x.to(dtype).contiguous().requires_grad_() for x in (q, k, v, log_gate)]

def noise(like, seed=1):
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(seed), dtype=like.dtype)

def grads(out, xs, dout):
    found = torch.autograd.grad(out, xs, dout.to(out.dtype), allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(xs, found)]

def close(a, b, tolerance):
    """to tolerance, relative to the largest value where that exceeds 1"""
    a, b = (torch.as_tensor(x).double() for x in (a, b))
    assert a.shape == b.shape
    assert torch.isfinite(a).all()
    error, scale = (a - b).abs().max(), max(1.0, b.abs().max())
    assert error <= tolerance * scale, f'differs by {error:.2e}, largest value {scale:.2e}'

def same_with_gradients(a, b, xs, tolerance, of_gradients=None):
    dout = noise(a)
    close(a, b, tolerance)
    for x, y in zip(grads(a, xs, dout), grads(b, xs, dout)):
        close(x, y, of_gradients or tolerance)

# --------------------------------------------------------------------------------------------------
# tra.py: TRA against loops

def loop_tra(q, k, v, log_gate, dout, threshold=0.0, distance=True):
    """
    One head in numpy: q (Tq, D), k, v (T, D), log_gate (Tq). Returns out and the gradients of the
    four, by the chain rule.
    """
    Tq, D = q.shape
    T = len(k)
    out, dq, dk, dv, dg = *(np.zeros_like(x) for x in (q, q, k, v)), np.zeros(Tq)
    for row in range(Tq):
        i = T - Tq + row
        kept, logits, distances, c = [], [], [], 0
        for j in range(i, -1, -1):
            s = float(q[row] @ k[j]) / math.sqrt(D)
            if s > threshold:
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

SWITCHES = [{}, {'distance': False}, {'threshold': -math.inf}, {'threshold': 0.5}]
NAMES = ['tra', 'no distance', 'no sparsity', 'other threshold']

def three_ways(monkeypatch):
    """tra_dense, and tra_blockwise by tiles and by the plain walk"""
    yield tra_dense
    for plain in (0, 10 ** 6):
        monkeypatch.setattr(tra, 'PLAIN', plain)
        yield tra_blockwise

@pytest.mark.parametrize('T', [1, 2, 3, 63, 64, 65, 127, 200, 513])
@pytest.mark.parametrize('D', [1, 8, 64])
@pytest.mark.parametrize('switches', SWITCHES, ids=NAMES)
def test_dense_and_blockwise_equal_the_loops(T, D, switches, monkeypatch):
    B, H = (2, 3) if T < 100 else (1, 1)
    single = inputs(B, H, T, D, torch.float32, seed=T + D)
    dout = noise(single[0])
    expected = loop_tra_heads(single, dout, **switches)
    for function in three_ways(monkeypatch):
        for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
            xs = [x.detach().to(dtype).requires_grad_() for x in single]
            out = function(*xs, **switches)
            for a, b in zip([out, *grads(out, xs, dout)], expected):
                close(a, b, tolerance)

@pytest.mark.parametrize('T, dropout', [(100, 0.0), (700, 0.0), (300, 0.1)])
def test_compiled_kernel_equals_dense(T, dropout, compiling):
    xs = inputs(3, 4, T, 16, torch.float32, seed=5)
    noise = random_rows(xs)
    out = tra_blockwise(*xs, dropout=dropout, noise=noise)
    same_with_gradients(out, tra_dense(*xs, dropped=full_mask(noise, xs, dropout)), xs, 1e-5)
    assert not tra.compiled.broken

@pytest.mark.parametrize('T, Tq', [(65, 1), (65, 64), (300, 17), (300, 128), (300, 299),
                                   (513, 200)])
def test_fewer_queries_than_keys(T, Tq, monkeypatch):
    xs = inputs(1, 2, T, 4, seed=T + Tq, Tq=Tq)
    dout = noise(xs[0])
    expected = loop_tra_heads(xs, dout)
    for function in three_ways(monkeypatch):
        out = function(*xs)
        for a, b in zip([out, *grads(out, xs, dout)], expected):
            close(a, b, 1e-10)

@pytest.mark.parametrize('switches', SWITCHES, ids=NAMES)
def test_gradcheck(switches, monkeypatch):
    for T, D, Tq in ((20, 2, None), (70, 1, 33)):
        xs = inputs(1, 1, T, D, seed=T, Tq=Tq)
        for function in three_ways(monkeypatch):
            assert torch.autograd.gradcheck(lambda *x: function(*x, **switches), xs, eps=1e-7)

@pytest.mark.parametrize('T', [1, 64, 200])
def test_rows_that_keep_nothing(T, monkeypatch):
    empty = torch.zeros(T, dtype=torch.bool)
    empty[::3] = True
    for function in three_ways(monkeypatch):
        q, k, v, log_gate = xs = inputs(1, 2, T, 4)
        with torch.no_grad():
            q[:, :, empty] = -1.0
            q[:, :, ~empty] = 1.0
            k.fill_(0.5)  # so an empty row scores below 0 everywhere
        out = function(*xs)
        assert (out[:, :, empty] == 0).all() and (out[:, :, ~empty] != 0).any() == (T > 1)
        gq, gk, gv, gg = grads(out, xs, torch.ones_like(out))
        assert (gq[:, :, empty] == 0).all() and (gg[:, :, empty] == 0).all()
        assert all(torch.isfinite(g).all() for g in (gq, gk, gv, gg))
        with torch.no_grad():
            q.zero_()  # a score of exactly 0 is not kept: nothing is
        out = function(*xs)
        assert (out == 0).all()
        assert all((g == 0).all() for g in grads(out, xs, torch.ones_like(out)))

def test_counts_are_exact_in_bfloat16(monkeypatch):
    T = 700  # every key kept: counts up to 700, where bfloat16 would stick at 256
    q = k = torch.ones(1, 1, T, 4, dtype=torch.bfloat16)
    v = torch.arange(T, dtype=torch.float32).view(1, 1, T, 1).expand(1, 1, T, 4).to(torch.bfloat16)
    log_gate = torch.full((1, 1, T), -2 ** -9, dtype=torch.bfloat16)
    i, j = torch.arange(T)[:, None], torch.arange(T)[None, :]
    exact, stuck = ((torch.clamp(i - j + 1, max=most) * -2 ** -9).masked_fill(j > i, -math.inf)
                    .softmax(-1) @ v.float() for most in (T, 256))
    assert (stuck - exact).abs().max() > 5  # so what follows could fail
    for autocast in (False, True):
        with torch.autocast('cpu', torch.bfloat16, enabled=autocast):
            for function in three_ways(monkeypatch):
                out = function(q, k, v, log_gate)
                assert out.dtype == torch.bfloat16
                close(out, exact, 2 ** -8)

def test_what_the_kernel_refuses():
    q, k, v, log_gate = inputs(1, 1, 40, 8)
    for xs, words in (((q * 20, k * 20, v, log_gate), 'exp overflows'),
                      ((q * math.nan, k, v, log_gate), 'scores may reach nan'),
                      ((q, k, v, log_gate - math.inf), 'log_gate must be finite'),
                      ((q, k, v, -log_gate), 'at most 0'),
                      ((q, k[:, :, :9], v[:, :, :9], log_gate), '40 queries, but 9 keys')):
        with pytest.raises(ValueError, match=words):
            tra_blockwise(*xs)

GATES = ['never', 'slow', 'fast', 'at once', 'one stubborn row', 'one stubborn head', 'mixed']

@pytest.mark.parametrize('gates, scale, plain, switches',
                         [(g, scale, 0, {}) for g in GATES for scale in (0.3, 1.0, 2.5)] +
                         [(g, 1.0, 1000, {}) for g in GATES] +
                         [('mixed', 1.0, plain, {'threshold': -math.inf}) for plain in (0, 1000)])
def test_early_exit_changes_nothing(gates, scale, plain, switches, monkeypatch):
    """the tail that is left out is below rounding, whatever the gates and the size of q and k"""
    monkeypatch.setattr(tra, 'PLAIN', plain)
    T = 700
    q, k, v, log_gate = xs = inputs(2, 2, T, 8, seed=3)
    with torch.no_grad():
        q *= scale
        k *= scale
        log_gate.copy_({'never': torch.zeros(T), 'slow': torch.full((T,), -0.01),
                        'at once': torch.full((T,), -50.0),
                        'mixed': -torch.logspace(-4, 2, T)}.get(gates, torch.full((T,), -2.0)))
        if gates == 'one stubborn row':
            log_gate[0, 0, 690] = -1e-4
        if gates == 'one stubborn head':
            log_gate[1, 1] = -1e-4
    fast, dense = tra_blockwise(*xs, **switches), tra_dense(*xs, **switches)
    same_with_gradients(fast, dense, xs, 1e-14, 1e-13)

def test_early_exit_happens(monkeypatch):
    """by tile: forgetful heads stop; a stubborn row, or one without a key, keeps its tile going"""
    q, k, v, log_gate = (x.detach() for x in inputs(1, 2, 2048, 8))

    def reach(log_gate):
        """how many key blocks each tile visits"""
        ctx, visited = types.SimpleNamespace(save_for_backward=lambda *_: None), torch.zeros(32)
        monkeypatch.setattr(tra.Walk, 'apply', lambda *args: tra.Walk.forward(ctx, *args))
        tra_blockwise(q, k, v, log_gate)
        for i, _, _ in ctx.steps:
            visited[i] += 1
        return visited.view(16, 2)
    full = torch.arange(1.0, 17)[:, None].expand(16, 2)
    assert torch.equal(reach(torch.full_like(log_gate, 0.0)), full)
    forgets = torch.full_like(log_gate, -3.0)
    assert torch.equal(reach(forgets), full.clamp(max=2))
    stubborn = forgets.clone()
    stubborn[0, 1, 1200] = -1e-5
    expected = full.clamp(max=2).clone()
    expected[1200 // 128, 1] = 1200 // 128 + 1
    assert torch.equal(reach(stubborn), expected)
    q[0, 0, 1999] = 0  # keeps nothing
    expected = full.clamp(max=2).clone()
    expected[1999 // 128, 0] = 1999 // 128 + 1
    assert torch.equal(reach(forgets), expected)

def python(code, **env):
    return subprocess.check_output([sys.executable, '-c', code], cwd=ROOT, text=True,
                                   env={**os.environ, **env})

def test_long_sequences_need_little_memory():
    small, large, larger = map(int, python('''
import resource, torch, torch.nn.functional as F
from tra import tra_blockwise
def run(T):
    xs = [torch.randn(1, 4, T, 64) for _ in range(3)] + [F.logsigmoid(torch.randn(1, 4, T))]
    xs = [(F.rms_norm(x, (64,)) if n < 2 else x).requires_grad_() for n, x in enumerate(xs)]
    tra_blockwise(*xs).sum().backward()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(run(256), run(16384), run(32768))
''').split())
    assert large - small < 1_000_000 and larger - small < 1_000_000  # kilobytes

def test_one_warning_and_right_results_without_a_compiler(tmp_path):
    error, seen = python('''
import warnings, torch
from tra import tra_blockwise, tra_dense
xs = [torch.randn(1, 2, 70, 8, requires_grad=True) for _ in range(3)] + [-torch.rand(1, 2, 70)]
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter('always')
    out = tra_blockwise(*xs)
    out.sum().backward()
print(float((out - tra_dense(*xs)).abs().max()), sum('uncompiled' in str(x.message) for x in seen))
''', CXX=str(tmp_path / 'none'), TORCHINDUCTOR_CACHE_DIR=str(tmp_path)).split()
    assert float(error) < 1e-5 and int(seen) == 1

# --------------------------------------------------------------------------------------------------
# dropout

def random_rows(xs, seed=11):
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(2 ** 31, xs[3].shape, generator=rng, dtype=torch.int32)

def full_mask(noise, xs, dropout):
    """what the kernel drops of all weights, as a matrix"""
    Tq, T = xs[0].size(2), xs[1].size(2)
    distance = torch.arange(T - Tq, T)[:, None] - torch.arange(T)
    return tra.dropout_mask(noise[..., None], distance, dropout, xs[0].dtype)

@pytest.mark.parametrize('plain', [0, 1000])
def test_dropout_in_the_kernel_equals_dense(plain, monkeypatch):
    monkeypatch.setattr(tra, 'PLAIN', plain)
    for T, Tq in ((50, None), (300, None), (300, 100)):
        xs = inputs(2, 2, T, 4, seed=T, Tq=Tq)
        noise = random_rows(xs)
        out = tra_blockwise(*xs, dropout=0.3, noise=noise)
        same_with_gradients(out, tra_dense(*xs, dropped=full_mask(noise, xs, 0.3)), xs, 1e-10)
        assert torch.equal(out, tra_blockwise(*xs, dropout=0.3, noise=noise))
        assert not torch.allclose(out, tra_blockwise(*xs))
        a, b = (tra_blockwise(*xs, dropout=0.3) for _ in range(2))
        assert not torch.allclose(a, b)  # drawn anew at every call

@pytest.mark.parametrize('p', [0.01, 0.5])
def test_dropout_mask_looks_random(p):
    x = torch.empty(1, 8, 400, 1, dtype=torch.float64)
    xs = x, x, x, x[..., 0]
    mask = full_mask(random_rows(xs), xs, p)[0]
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

def test_dropout_is_off_in_eval():
    idx = torch.randint(7, (2, 30))
    for attn in ATTENTIONS:
        size = dict(vocab_size=7, n_layer=1, n_head=2, n_embd=16, attn=attn)
        model = Decoder(Config(dropout=0.5, **size))
        assert not torch.equal(model(idx)[0], model(idx)[0])
        model.eval()
        plain = Decoder(Config(dropout=0.0, **size))
        plain.load_state_dict(model.state_dict())
        assert torch.equal(model(idx)[0], plain(idx)[0])

# --------------------------------------------------------------------------------------------------
# the other attentions against loops, and their gradients against differences

def loop_attention(q, k, v, bias):
    """One head, numpy: softmax over j <= i of q_i . k_j / sqrt(D) + bias(i, j); positions i, j"""
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
    """q_i . e at the position p_ij, a sum of gates from j to i, between whole ones interpolated"""
    D, npos = table.shape

    def bias(i, j):
        p = 0.0
        for l in range(j, i + 1):
            p += 1 / (1 + math.exp(-float(q[i - first] @ k[l]) / math.sqrt(D)))
        p = min(p, npos - 1)
        low, high = math.floor(p), math.ceil(p)
        at = [float(q[i - first] @ table[:, n]) for n in (low, high)]
        return at[0] * (1 - (p - low)) + at[1] * (p - low)
    return bias

def loop_stick(q, k, v):
    """One head, numpy: what is left of a stick of length 1, broken by the keys before the query"""
    (Tq, D), T = q.shape, len(k)
    out = np.zeros((Tq, v.shape[1]))
    for row in range(Tq):
        left = 1.0
        for j in range(T - Tq + row - 1, -1, -1):
            beta = 1 / (1 + math.exp(-float(q[row] @ k[j]) / math.sqrt(D)))
            out[row] += left * beta * v[j]
            left *= 1 - beta
    return out

@pytest.mark.parametrize('H', [1, 4, 6])
@pytest.mark.parametrize('T, Tq', [(1, 1), (23, 23), (23, 5)])
def test_baselines_equal_their_loops(H, T, Tq, monkeypatch):
    monkeypatch.setattr(tra, 'ROWS', 7)  # several chunks of rows
    q, k, v, _ = inputs(1, H, T, 4, Tq=Tq)
    gates = F.logsigmoid(torch.randn(1, H, T, dtype=torch.float64))
    table = torch.randn(4, 5, dtype=torch.float64)
    slopes = {1: [1 / 256], 2: [1 / 16, 1 / 256], 3: [1 / 16, 1 / 256, 1 / 4],
              4: [1 / 4, 1 / 16, 1 / 64, 1 / 256],  # of 6 the last two: of those for 8, 1st and 3rd
              6: [1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8]}
    assert tra.alibi_slopes(H).tolist() == pytest.approx(slopes[H])
    half = slopes[(H + 1) // 2] + [0.0] * H
    full_q = torch.cat([torch.zeros(1, H, T - Tq, 4, dtype=torch.float64), q], 2)
    rotated = tra.rotate(q, T - Tq, 100.0), tra.rotate(k, 0, 100.0)
    got = {'nope': tra.nope(q, k, v), 'alibi': tra.alibi(q, k, v), 'nape': tra.nape(q, k, v),
           'fot': tra.fot(q, k, v, gates), 'cope': tra.cope(q, k, v, table),
           'rope': tra.nope(*rotated, v), 'stick': tra.stick(q, k, v)}
    for h in range(H):
        qh, kh, vh, g, fq = (x[0, h].detach().numpy() for x in (q, k, v, gates, full_q))
        turned = loop_rotate(fq, 100.0)[T - Tq:], loop_rotate(kh, 100.0)
        cope_bias = loop_cope_bias(qh, kh, table.numpy(), T - Tq)
        expected = {
            'nope': loop_attention(qh, kh, vh, lambda i, j: 0),
            'alibi': loop_attention(qh, kh, vh, lambda i, j: -slopes[H][h] * (i - j)),
            'nape': loop_attention(qh, kh, vh, lambda i, j: -half[h] * (i - j)),
            'fot': loop_attention(qh, kh, vh, lambda i, j: sum(g[l] for l in range(j + 1, i + 1))),
            'cope': loop_attention(qh, kh, vh, cope_bias),
            'rope': loop_attention(*turned, vh, lambda i, j: 0),
            'stick': loop_stick(qh, kh, vh)}
        for name in expected:
            close(got[name][0, h], expected[name], 1e-10)

def test_baseline_gradients(monkeypatch):
    monkeypatch.setattr(tra, 'ROWS', 7)
    q, k, v, gates = inputs(1, 2, 9, 4)
    table = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    for function, *more in ((tra.nope,), (tra.alibi,), (tra.nape,), (tra.fot, gates),
                            (tra.cope, table), (tra.stick,)):
        assert torch.autograd.gradcheck(function, (q, k, v, *more))
    assert torch.autograd.gradcheck(lambda x: tra.rotate(x, 3, 100.0), (q,))

# --------------------------------------------------------------------------------------------------
# the decoder

def small(attn='tra', **options):
    torch.manual_seed(0)
    options = dict(vocab_size=13, n_layer=2, n_head=2, n_embd=16, dropout=0.0, attn=attn) | options
    model = Decoder(Config(**options))
    for p in model.parameters():  # CoPE's table starts at 0: make everything matter
        torch.nn.init.normal_(p, std=0.5)
    return model.eval()

@pytest.mark.parametrize('pre_norm', [True, False])
def test_decoder_equals_numpy(pre_norm):
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
        q, k, v = np.split(x @ w[a + 'qkv.weight'].T + (w[a + 'qkv.bias'] if pre_norm else 0), 3, 1)
        gate = np.log(sigmoid(x @ w[a + 'gate.weight'].T + w[a + 'gate.bias']))
        heads = [loop_tra(norm(q[:, h]), norm(k[:, h]), v[:, h], gate[:, n], 0 * q[:, h])[0]
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
    size = dict(vocab_size=1000, n_embd=64, n_layer=2)
    model = Decoder(Config(**size, pre_norm=False))
    embed, head = model.embed.weight, model.head.weight
    assert embed.abs().max() <= 0.01 and embed.abs().max() > 0.0099
    assert abs(head.std() - 0.02) < 0.001
    for name, p in Decoder(Config(**size, attn='fot', keep_at_start=False)).named_parameters():
        if p.dim() == 2 and p.numel() > 1000:
            std = 0.01 if name.endswith(('proj.weight', 'down.weight')) else 0.02
            assert abs(p.std() - std) < 0.001
        else:
            assert 'gate.weight' in name or (p == (1 if 'norm' in name else 0)).all()
    assert (Decoder(Config(**size, attn='cope')).blocks[0].attn.table == 0).all()
    assert head.data_ptr() != embed.data_ptr()
    block = 2 * 64 + 4 * 64 * 64 + 64 + 64 * 4 + 4 + 64 * 256 + 256 + 128 * 64 + 64
    assert sum(p.numel() for p in model.parameters()) == 2 * 1000 * 64 + 64 + 2 * block
    assert not list(model.buffers())
    biases = {n.split('.', 2)[-1] for n, _ in model.named_parameters() if n.endswith('bias')}
    assert biases == {'attn.proj.bias', 'attn.gate.bias', 'mlp.up.bias', 'mlp.down.bias'}

@pytest.mark.parametrize('keep_at_start, width, threshold', (
    (False, 128, 0), (True, 64, 0), (True, 512, 0), (True, 128, 0.25), (True, 256, 0.5)))
def test_every_key_is_kept_at_the_start(keep_at_start, width, threshold, monkeypatch):
    """
    A plain start keeps half of the keys, by chance. keep_at_start keeps all but a few, in every
    layer and at any width, and spreads the gates over the layers.
    """
    seen = []

    def spy(q, k, v, log_gate, least, *more, dropout):
        T, scores = q.size(2), q @ k.mT / math.sqrt(q.size(3))
        keep = (scores > least).tril()
        share = keep.sum() / (q.size(0) * q.size(1) * T * (T + 1) / 2)
        seen.append((float(share), float(log_gate.exp().mean())))
        middle = (least + math.sqrt(q.size(3))) / 2 if keep_at_start else 0
        assert abs(scores.mean() - middle) < 0.5
        return tra_dense(q, k, v, log_gate)

    monkeypatch.setitem(tra.ATTENTIONS, 'tra', spy)
    for seed in range(3):
        torch.manual_seed(seed)
        config = Config(vocab_size=50, n_layer=3, n_head=width // 64, n_embd=width,
                        keep_at_start=keep_at_start, tra_threshold=threshold)
        with torch.no_grad():
            Decoder(config).eval()(torch.randint(50, (8, 40)))
    shares, gates = zip(*seen)
    assert min(shares) > 0.99 if keep_at_start else 0.35 < min(shares) and max(shares) < 0.65
    for n, bias in enumerate((-2, 1, 4) if keep_at_start else (0, 0, 0)):
        assert all(abs(gate - 1 / (1 + math.exp(-bias))) < 0.06 for gate in gates[n::3])

def test_all_attentions_start_alike():
    """One formula for all: 0.02 sqrt(C) in the bias of q and k, 0 in v's; the gates by layer."""
    for attn in ATTENTIONS:
        model = Decoder(Config(vocab_size=50, n_layer=2, n_head=2, n_embd=16, attn=attn))
        for block, gate in zip(model.blocks, (-2, 4)):
            bias = block.attn.qkv.bias
            assert torch.allclose(bias[:32], torch.tensor(0.08)) and (bias[32:] == 0).all()
            assert attn not in ('tra', 'fot') or (block.attn.gate.bias == gate).all()
    for options in (dict(keep_at_start=False), dict(pre_norm=False)):   # the paper's: no such bias
        model = Decoder(Config(vocab_size=50, n_layer=2, n_head=2, n_embd=16, **options))
        assert model.blocks[0].attn.qkv.bias is None

def test_loss_ignores_minus_one():
    model = small('nope')
    idx = torch.randint(13, (2, 9))
    targets = idx.roll(-1, 1)
    targets[:, ::2] = -1
    logits, loss = model(idx, targets)
    terms = [-logits[b, t].log_softmax(-1)[targets[b, t]]
             for b in range(2) for t in range(9) if targets[b, t] >= 0]
    close(loss, sum(terms) / len(terms), 1e-6)
    assert model(idx)[1] is None

@pytest.mark.parametrize('attn', ATTENTIONS)
def test_causality(attn):
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
def test_cached_decoding_equals_the_full_pass(attn):
    model = small(attn).double()        # in float32 a score of about 0 can fall on either side
    idx = torch.randint(13, (2, 1100))
    full = model(idx)[0]
    for sizes in ([1] * 1100, [1, 7, 64, 300, 500, 100, 20, 108]):
        cache = model.new_cache()
        parts = [model(part, cache=cache)[0] for part in idx.split(sizes, 1)]
        close(torch.cat(parts, 1), full, 1e-9)
    assert len(cache[0].buffers) == (3 if attn == 'fot' else 2)     # k, v and FoT's gates

@pytest.mark.parametrize('attn', ATTENTIONS)
def test_generate(attn):
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

def test_generate_refuses_and_leaves_the_mode():
    model = small().train()
    for prompt, options, words in ((torch.zeros(1, 0, dtype=torch.long), {}, 'at least one token'),
                                   (torch.tensor([[1]]), {'temperature': -1.0}, 'temperature')):
        with pytest.raises(ValueError, match=words):
            model.generate(prompt, 1, **options)
    with pytest.raises(IndexError):
        model.generate(torch.tensor([[99]]), 1)
    assert model.training

def test_a_model_can_be_compiled(compiling):
    """the compiler leaves the kernel alone, in one call a layer, and compiles what is around it"""
    graphs = []

    def backend(graph, _):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph
    model = small().train()
    idx = torch.randint(13, (2, 80))
    loss = torch.compile(model, backend=backend)(idx, idx)[1]
    expected = model(idx, idx)[1]
    same_with_gradients(loss, expected, list(model.parameters()), 1e-6)
    assert len(graphs) <= 5 and sum(map(len, graphs)) < 200     # two more with each layer

def test_settings_of_the_threshold_reach_the_formula():
    x = noise(torch.zeros(1, 20, 16, dtype=torch.float64))
    root = math.sqrt(8)
    for options, thresholds in (({}, [0] * 3),
                                ({'tra_threshold': 0.3}, [0, 0.15 * root, 0.3 * root]),
                                ({'tra_threshold': 0.3, 'n_layer': 1}, [0]),
                                ({'tra_threshold': 0.3, 'tra_sparsity': False}, [-math.inf] * 3)):
        model = small(**{'n_layer': 3, **options}).double()
        for block, threshold in zip(model.blocks, thresholds, strict=True):
            out = tra_dense(*block.attn.project(x)[:4], threshold=threshold)
            close(block.attn(x), block.attn.proj(out.transpose(1, 2).flatten(2)), 1e-12)

def test_bad_configs():
    for options, words in ((dict(attn='rpoe'), ['rpoe', 'rope', 'tra']),
                           (dict(n_embd=10, n_head=4), ['10', '4']),
                           (dict(n_embd=12, n_head=4, attn='rope'), ['even', '3']),
                           (dict(tra_threshold=1.0), ['tra_threshold', '1.0']),
                           (dict(tra_threshold=math.nan), ['tra_threshold', 'nan']),
                           (dict(dropout=1.0), ['dropout', '1.0']),
                           (dict(n_layer=0), ['n_layer', '0'])):
        with pytest.raises(ValueError) as error:
            Config(vocab_size=5, **options)
        assert all(word in str(error.value) for word in words) and '\n' not in str(error.value)

# --------------------------------------------------------------------------------------------------
# a GPU that pretends: numbers are computed on the CPU, but .device says gpu:0, mixing devices
# raises as on CUDA, and waits for the device and launches are counted. In a process of its own: a
# backend can be named only once.

def pretend_gpu():
    """(a context that counts, a function from a tensor to what it holds)"""
    from torch.overrides import TorchFunctionMode
    from torch.utils import backend_registration as registration
    from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
    from torch.utils._pytree import tree_leaves, tree_map_only

    class Module(registration._DummyBackendModule):
        get_amp_supported_dtype = lambda self: [torch.bfloat16]
    registration._setup_privateuseone_for_python_backend('gpu', Module())

    # autocast: matrix products in 16 bits, as on CUDA
    autocast, library = 'AutocastPrivateUse1', torch.library.Library('aten', 'IMPL')
    fallback = torch.library.Library('_', 'IMPL')
    fallback.fallback(torch.library.fallthrough_kernel, autocast)

    def in_16_bits(op):
        keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, autocast))
        narrow = lambda x: x.bfloat16() if x.dtype == torch.float32 else x

        def call(*args, **kwargs):
            with torch._C._ExcludeDispatchKeyGuard(keys):
                return op(*tree_map_only(torch.Tensor, narrow, args), **kwargs)
        return call
    for name in ('matmul', 'linear', 'mm', 'bmm', 'addmm', 'baddbmm',
                 'scaled_dot_product_attention'):
        library.impl(name, in_16_bits(getattr(torch.ops.aten, name).default), autocast)

    class GpuTensor(torch.Tensor):
        @staticmethod
        def __new__(cls, held):
            return torch.Tensor._make_wrapper_subclass(
                cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(),
                dtype=held.dtype, device='gpu:0')

        def __init__(self, held):
            self.held = held
        __torch_dispatch__ = None                           # the mode below answers for it

    class OverCpu(TorchFunctionMode):
        """torch.tensor([...], device=...) copies from the CPU: here in sight of the mode below"""
        def __torch_function__(self, function, types, args=(), kwargs=None):
            kwargs = dict(kwargs or {})
            copies = function in (torch.tensor, torch.as_tensor)
            device = kwargs.pop('device', None) if copies else None
            out = function(*args, **kwargs)
            return out if device is None else out.to(device)

    class PretendGpu(TorchDispatchMode):
        keep = library, fallback

        def __init__(self):
            super().__init__()
            self.waits, self.launches = Counter(), Counter()

        def wait(self, what):
            frames = [(Path(f.filename).name, f.lineno) for f in traceback.extract_stack()]
            ours = [x for x in frames if x[0] in ('tra.py', 'train.py', 'eval.py')]
            self.waits[(*ours, what)] += 1

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            kwargs, name = kwargs or {}, function._schema.name.partition('::')[2]
            composite = torch._C._dispatch_has_kernel_for_dispatch_key(
                function.name(), 'CompositeImplicitAutograd')
            if composite:                                   # such as .to(): see what it is made of
                with torch._C.DisableTorchFunction(), self:
                    return function.decompose(*args, **kwargs)
            tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            ours, target = [isinstance(x, GpuTensor) for x in tensors], kwargs.get('device')
            on_gpu = any(ours) if target is None else torch.device(target).type == 'gpu'
            if name == 'copy_':
                on_gpu = ours[0]
            if name in ('_to_copy', 'copy_'):
                later = kwargs.get('non_blocking') or args[2:] == (True,)
                if len({*ours, on_gpu}) > 1 and not later:
                    self.wait(f'copy {"to" if on_gpu else "from"} gpu')
            elif any(ours):
                indexes = name == 'index' or name.startswith(('index_put', '_index_put'))
                index = [x for x in args[1] if x is not None] if indexes else []
                if index and not ours[0]:
                    raise RuntimeError('indices should be on the same device (cpu)')
                if not index and any(not our and x.dim() for our, x in zip(ours, tensors)):
                    raise RuntimeError(f'{function}: expected all tensors on one device')
                if name in ('_local_scalar_dense', 'nonzero', 'masked_select', 'equal') or any(
                        x.dtype == torch.bool or not isinstance(x, GpuTensor) for x in index):
                    self.wait(name)
            free = function.is_view or name.startswith(
                ('empty', 'detach', 'alias', 'lift', '_unsafe'))
            self.launches[name] += on_gpu and not free
            if target is not None:
                kwargs = {**kwargs, 'device': 'cpu'}
            real = tree_map_only(GpuTensor, lambda x: x.held, (args, kwargs))
            if name == 'baddbmm' and real[1].get('beta') == 0:  # lets NaN through, as MPS did
                out = function(*real[0], **{**real[1], 'beta': 1})
            else:
                out = function(*real[0], **real[1])
            if name.startswith(('empty', 'new_empty')) and on_gpu and out.is_floating_point():
                out.fill_(math.nan)                         # fresh memory holds anything
            if not on_gpu:
                return out
            out = tree_map_only(torch.Tensor, GpuTensor, out)
            return return_and_correct_aliasing(function, args, kwargs, out) if any(ours) else out

    @contextlib.contextmanager
    def pretending():
        with torch.compiler.set_stance('force_eager'), OverCpu(), PretendGpu() as gpu:
            yield gpu
    return pretending, lambda x: x.held

def on_the_gpu():
    """What the test below runs in a process of its own."""
    pretending, held = pretend_gpu()

    def training_step(model, idx, dtype=torch.float32):
        """loss and gradients"""
        device = model.embed.weight.device.type
        with torch.autocast(device, torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss = model(idx, idx)[1]
        loss.backward()
        return [loss, *(p.grad for p in model.parameters() if p.grad is not None)]

    def on_both(config, idx, dtype):
        torch.manual_seed(0)
        model = Decoder(config)
        expected = training_step(model, idx, dtype)
        with pretending() as gpu:
            torch.manual_seed(0)
            model, idx = Decoder(config).to('gpu'), idx.to('gpu')
            gpu.waits.clear()
            got = training_step(model, idx, dtype)
            assert not gpu.waits, gpu.waits
        for a, b in zip(got, expected, strict=True):
            close(held(a).detach(), b.detach(), 1e-4 if dtype == torch.float32 else 0.03)

    size = dict(vocab_size=13, n_layer=2, n_head=2, n_embd=16, dropout=0.0)
    idx = torch.randint(13, (2, 150), generator=torch.Generator().manual_seed(0))
    for attn in ATTENTIONS:
        for dtype in (torch.float32, torch.bfloat16):
            on_both(Config(**size, attn=attn), idx, dtype)

    # heads that forget at different speeds, so that some tiles stop early and others are picked out
    for T in (18 * 128, 18 * 256):
        q, k, v, log_gate = xs = inputs(1, 4, T, 8, torch.float32)
        log_gate.data[:, 1:] = -3.0
        log_gate.data[:, 0] = 0.0
        out = tra_blockwise(*xs, bound=3.0)
        expected = [out, *grads(out, xs, torch.ones_like(out))]
        with pretending() as gpu:
            ys = [x.detach().to('gpu').requires_grad_() for x in xs]
            gpu.waits.clear()
            out = tra_blockwise(*ys, bound=3.0)
            got = [out, *torch.autograd.grad(out, ys, torch.ones_like(out))]
            assert sum(gpu.waits.values()) <= 2 * (T > 8 * 256) * 4, gpu.waits    # asked twice
        for a, b in zip(got, expected, strict=True):
            close(held(a).detach(), b.detach(), 1e-4)

    # cached decoding
    model = small()
    prompt = torch.randint(13, (1, 300), generator=torch.Generator().manual_seed(0))
    expected = model.generate(prompt, 5, temperature=0)
    with pretending() as gpu:
        model, prompt = model.to('gpu'), prompt.to('gpu')
        gpu.waits.clear()
        got = model.generate(prompt, 5, temperature=0)
        assert not gpu.waits, gpu.waits
    assert torch.equal(held(got), expected)

    # ten steps of train.py: it waits where it logs or saves, and nowhere else
    lines = (ROOT / 'train.py').read_text().splitlines()
    loop, due = (next(n for n, line in enumerate(lines, 1) if line.startswith(words))
                 for words in ('while step < max_iters', '    if telling or saving'))

    def at_the_end(*_):
        raise EOFError
    data.save_checkpoint, data.read_checkpoint = lambda *_: None, at_the_end
    data.pick_machine = lambda *_: types.SimpleNamespace(
        device='gpu', dtype='float32', compile=False, autocast=contextlib.nullcontext(), why='')
    with tempfile.TemporaryDirectory() as folder, pretending() as gpu:
        size = dict(n_layer=2, n_head=2, n_embd=16, train_length=128, batch_size=4)
        sys.argv = ['train.py', *as_args(size | dict(
            max_iters=10, log_interval=5, eval_n=2, out_dir=f'{folder}/run'))]
        with contextlib.suppress(EOFError):
            runpy.run_path(ROOT / 'train.py', run_name='train')
        assert (Path(folder) / 'run' / 'metrics.jsonl').read_text().count('"loss"') >= 3
    waits = [line for (name, line), *_ in gpu.waits if name == 'train.py' and line >= loop]
    assert waits and min(waits) >= due, gpu.waits

    # launches of attention, forward and backward, at the sizes of flip-flop and wikitext (the batch
    # changes none); a compiled tile function makes about 5
    for H, T, most in ((4, 512, 70), (8, 128, 70)):
        with pretending() as gpu:
            xs = [x.detach().to('gpu').requires_grad_() for x in inputs(2, H, T, 64, torch.float32)]
            calls = 0

            def counted(function):
                def call(*args):
                    nonlocal calls
                    calls += 1
                    before = gpu.launches.copy()
                    out = function(*args)
                    gpu.launches = before
                    return out
                return call
            plain = tra.fast_tile, tra.fast_gradients
            tra.fast_tile, tra.fast_gradients = map(counted, plain)
            gpu.launches.clear()
            out = tra_blockwise(*xs, bound=8.1)
            out.backward(torch.ones_like(out))
            tra.fast_tile, tra.fast_gradients = plain
            launches = gpu.launches.total() + 5 * calls
            assert calls and launches <= most, (launches, gpu.launches)
            print(f'H={H} T={T}: {launches} launches')

def test_the_gpu_path_on_a_device_that_pretends():
    done = python('import test_tra; test_tra.on_the_gpu(); print("all done")')
    assert done.endswith('all done\n')

# --------------------------------------------------------------------------------------------------
# data.py: the simulators and solvers are plain Python on decoded text

SYNTHETIC = {'flipflop': 32, 'copy': 10, 'induct': 10, 'instruct': 10}


def evaluation_set(task, split, length, n, **kwargs):
    """idx and targets of an evaluation set, whole."""
    idx, targets = zip(*task.eval_batches(split, length, n, **kwargs))
    return np.concatenate(idx), np.concatenate(targets)


def texts_and_answers(task, idx, targets):
    """Each row as text without padding, and what is scored: {position that predicts: character}."""
    for row, target in zip(idx, targets):
        scored = [(t, token) for t, token in enumerate(target.tolist()) if token != -1]
        yield task.decode(row), {t: task.decode([token]) for t, token in scored}


def data_py(*args, **env):
    return subprocess.run([sys.executable, 'data.py', *map(str, args)], cwd=ROOT, text=True,
                          env={**os.environ, **env}, capture_output=True, timeout=60)

# --------------------------------------------------------------------------------------------------
# the synthetic tasks, against simulators


def simulate_flipflop(text):
    """Walk the string with one bit of memory; returns what must be scored."""
    assert len(text) % 2 == 0 and text[0] == 'w' and text[-2] == 'r'
    memory, expected = None, {}
    for t in range(0, len(text), 2):
        instruction, bit = text[t], text[t + 1]
        assert instruction in 'wir' and bit in '01'
        if instruction == 'w':
            memory = bit
        elif instruction == 'r':
            assert bit == memory
            expected[t] = memory
    return expected


def within_3_sigma(hits, n, p):
    return abs(hits - n * p) <= 3 * (n * p * (1 - p)) ** 0.5


@pytest.mark.parametrize('split, p', [('train', 0.7), ('val', 0.8), ('sparse', 0.98),
                                      ('dense', 0.1), ('nonstationary', None)])
def test_flipflop_against_simulator(split, p):
    task = make_task('flipflop', 128, p_ignore=0.7)
    idx, targets = (task.batch(3, 5, 2000) if split == 'train' else
                    evaluation_set(task, split, 128, 2000))
    assert idx.shape == targets.shape == (2000, 128) and idx.dtype == targets.dtype == np.int64
    middle, bits = '', ''
    for text, scored in texts_and_answers(task, idx, targets):
        assert scored == simulate_flipflop(text)
        middle += text[2:-2:2]
        bits += ''.join(text[t + 1] for t in range(0, len(text), 2) if text[t] != 'r')
    assert within_3_sigma(bits.count('1'), len(bits), 0.5)
    if p is not None:
        for instruction, share in (('i', p), ('w', (1 - p) / 2), ('r', (1 - p) / 2)):
            assert within_3_sigma(middle.count(instruction), len(middle), share), instruction
    else:       # the density of a stretch of 8 pairs varies far more than one p would allow
        ignored = (idx[:, 16:112:2] == task.encode('i')).reshape(2000, 6, 8).mean(axis=2)
        assert abs(ignored.mean() - (0.8 + 0.98 + 0.1) / 3) < 0.02 and ignored.std() > 0.3
        assert (ignored <= 0.25).mean() > 0.2 and (ignored == 1).mean() > 0.2


def test_flipflop_any_even_length_and_fast():
    task = make_task('flipflop', 512)
    for length in (4, 6, 130, 2048):
        for split in task.splits:
            idx, targets = evaluation_set(task, split, length, 5)
            assert idx.shape == (5, length)
            for text, scored in texts_and_answers(task, idx, targets):
                assert scored == simulate_flipflop(text)
    for seconds, work in ((0.5, lambda: next(task.eval_batches('sparse', 131072, 1))),
                          (0.005, lambda: task.batch(0, 0, 64))):
        assert min(timeit.repeat(work, number=1, repeat=20)) < seconds


def solve(name, text):
    """(number of symbols, {position that predicts: character}), from the question alone."""
    question, rest = text.split('|')
    if name == 'copy':
        assert rest == question
        return len(question), {len(question) + i: c for i, c in enumerate(question)}
    if name == 'induct':
        expected = {}
        for i in range(0, len(rest), 2):
            where = question.rindex(rest[i])                    # the latest place counts
            assert where + 1 < len(question), 'this key has no successor'
            expected[len(question) + 1 + i] = question[where + 1]
            assert rest[i + 1] == question[where + 1]
        return len(question), expected
    kind, x = question[0], question[1:]
    answers = {'=': x, '<': x[::-1], '^': x[:1], '$': x[-1:], '#': '+' * len(x),
               '%': '01'[len(x) % 2]}
    assert rest == answers[kind] + '.'
    return len(x), {len(question) + i: c for i, c in enumerate(rest)}


@pytest.mark.parametrize('name, options', [
    ('copy', {}), ('copy', dict(repeats=False)), ('induct', {}),
    ('induct', dict(repeats=False, n_queries=3)), ('induct', dict(n_symbols=2, n_queries=4)),
    ('instruct', {}), ('instruct', dict(n_symbols=100, repeats=False)),
    *((name, dict(vary_alphabet=True)) for name in ('copy', 'induct', 'instruct'))])
def test_answers_lengths_and_buckets(name, options):
    task = make_task(name, 10, **options)
    fewest = {'copy': 1, 'induct': 2, 'instruct': 0}[name]
    m = options.get('n_queries', 1)
    for length, lo in [('train', fewest), (7, fewest), (10, fewest), (20, 11), (26, 17)]:
        idx, targets = (task.batch(0, 0, 2000) if length == 'train' else
                        evaluation_set(task, 'val', length, 2000))
        hi = 10 if length == 'train' else length
        width = {'copy': 2 * hi + 1, 'induct': hi + 1 + 2 * m, 'instruct': 2 * hi + 3}[name]
        assert idx.shape == targets.shape == (2000, width)
        assert idx.min() >= 0 and idx.max() < task.vocab_size
        sizes, kinds = [], []
        for (text, scored), row in zip(texts_and_answers(task, idx, targets), idx):
            n, expected = solve(name, text)
            assert scored == expected
            assert len(set(row[len(text):])) <= 1, 'only padding may follow the text'
            assert max(scored) < len(text) - 1, 'padding is scored'
            if not options.get('repeats', True):
                x = text.split('|')[0]
                assert len(set(x)) == len(x)
            sizes.append(n)
            kinds.append(text[0])
        counts = [sizes.count(n) for n in range(lo, hi + 1)]
        expected = 2000 / len(counts)
        assert sum(counts) == 2000 and all(abs(c - expected) < 5 * expected ** 0.5 for c in counts)
        if name == 'instruct':
            assert all(abs(kinds.count(k) - 2000 / 6) < 100 for k in '=<^$#%')


def test_alphabets_vary_in_training_alone():
    """sizes from 2 to all, each as often as the next, and every symbol as often as the next"""
    task, plain = (make_task('copy', 1000, n_symbols=6, vary_alphabet=x) for x in (True, False))
    rows = [task.decode(row).split('|')[0] for row in task.batch(0, 0, 2000)[0]]
    sizes = [len(set(x)) for x in rows if len(x) > 100]         # so long a row has all it may have
    assert all(abs(sizes.count(n) / len(sizes) - 1 / 5) < 0.04 for n in range(2, 7))
    assert all(abs(''.join(rows).count(c) / len(''.join(rows)) - 1 / 6) < 0.02 for c in 'abcdef')
    tests = [evaluation_set(x, 'val', 2000, 5) for x in (task, plain)]
    assert np.array_equal(*tests)


def test_instruct_has_a_split_for_each_instruction():
    task = make_task('instruct', 10)
    for split, sign in zip(data.KINDS, '=<^$#%', strict=True):
        for text, scored in texts_and_answers(task, *evaluation_set(task, split, 20, 200)):
            assert text[0] == sign and scored == solve('instruct', text)[1]


@pytest.mark.parametrize('name, length, options, lengths, splits', [
    ('flipflop', 512, {}, (512,), ('val', 'sparse', 'dense', 'nonstationary')),
    ('copy', 50, {}, (50, 100, 150, 200, 250, 300), ('val',)),
    ('copy', 50, dict(repeats=False, n_symbols=120), (50, 100), ('val',)),
    ('induct', 50, {}, (50, 100, 150, 200, 250, 300), ('val',)),
    ('instruct', 50, {}, tuple(range(50, 501, 50)), ('val', *data.KINDS))])
def test_default_lengths_and_splits(name, length, options, lengths, splits):
    task = make_task(name, length, **options)
    assert task.lengths == lengths and task.splits == splits
    numbers = {entry.number for entry in data.TASKS.values()}
    assert len(numbers) == len(data.TASKS), 'two tasks would share their random numbers'


@pytest.mark.parametrize('name', SYNTHETIC)
def test_streams_are_pure_and_sets_are_fixed(name):
    L = SYNTHETIC[name]
    task, other = make_task(name, L), make_task(name, L, p_ignore=0.3)
    same = lambda a, b: all(np.array_equal(x, y) for x, y in zip(a, b))
    assert same(task.batch(1, 7, 8), task.batch(1, 7, 8))
    assert not same(task.batch(1, 7, 8), task.batch(1, 8, 8))
    assert not same(task.batch(1, 7, 8), task.batch(2, 7, 8))
    for split in task.splits:
        for length in (L, 3 * L + L % 2):
            many = evaluation_set(task, split, length, 1000)
            np.random.seed(0), task.batch(0, 0, 4)
            few = [x[:100] for x in many]
            assert same(evaluation_set(other, split, length, 100), few)
            assert same(evaluation_set(task, split, length, 1000, batch_tokens=777), many)
            assert not same(few, evaluation_set(task, split, length, 100, seed=1))
            for idx, _ in task.eval_batches(split, length, 1000, batch_tokens=777):
                assert idx.size <= 777 or len(idx) == 1
    sets = {evaluation_set(task, split, L, 50)[0].tobytes() for split in task.splits}
    assert len(sets) == len(task.splits)


@pytest.mark.parametrize('name, length, options, expected', [
    ('flipflop', 512, {}, 'c62bf4a 17eb969 5c2a1fb 8481bdf 8686503'),
    ('flipflop', 128, {'p_ignore': 0.5}, 'efc1b83 7693938 22b2da3 7494301 2ba1cdd'),
    ('copy', 50, {}, '14095e4 f0321e7'),
    ('copy', 16, {'n_symbols': 96, 'repeats': False}, '0696cfd 1edc81a'),
    ('induct', 50, {'n_queries': 8}, '5bf4338 bedde04'),
    ('induct', 16, {'n_symbols': 96, 'repeats': False}, '8061b7e 0501790'),
    ('instruct', 50, {}, '44f1c61 c7463cf 3a2cfd4 a8bf0bb 8846c86 d703023 0579614 c0b6e09'),
    ('instruct', 8, {'n_symbols': 80, 'repeats': False},
     '7367cba bf3dafb 3c47144 95978f6 d06466f 01aa811 cb3b6f1 c8e939f'),
    ('wikitext', 16, {}, 'c90e7cf 126090a 449bf8a'),
])
def test_published_streams_and_sets_are_unchanged(name, length, options, expected, tmp_path):
    """checksums of the first sequences of a training stream, and of every split at three lengths"""
    if name == 'wikitext':
        options = tiny_text(tmp_path)
    task, found = make_task(name, length, **options), ''
    for split in ('train', *task.splits):
        digest = hashlib.sha256()
        for x in (1, 2, 4 if name != 'wikitext' else 3):
            batch = (task.batch(x, 7 * x, 5) if split == 'train'
                     else evaluation_set(task, split, x * length, 5, seed=x // 2))
            for array in batch:
                digest.update(array.astype('<i8').tobytes())
        found += digest.hexdigest()[:7] + ' '
    assert found.split() == expected.split()


@pytest.mark.parametrize('name', SYNTHETIC)
def test_decode_and_encode(name):
    task = make_task(name, SYNTHETIC[name], n_symbols=60)
    for row in task.batch(0, 0, 50)[0]:
        text = task.decode(row)
        assert task.encode(text) == row[:len(text)].tolist()
        assert task.decode(task.encode(text)) == text
    with pytest.raises(ValueError, match="'é'"):
        task.encode(text + 'é')


@pytest.mark.parametrize('args, kwargs, words', [
    (('flipfop', 8), {}, "'flipfop'"), (('flipflop', 7), {}, '7 must be even'),
    (('flipflop', 2), {}, 'at least 4'), (('flipflop', 8), dict(p_ignore=1.5), 'p_ignore 1.5'),
    (('copy', 0), {}, 'at least 1'), (('induct', 1), {}, 'at least 2'),
    (('copy', 27), dict(repeats=False), 'n_symbols, now 26'),
    (('copy', 5), dict(n_symbols=1), 'n_symbols 1'),
    (('induct', 5), dict(n_queries=0), 'n_queries 0'),
    (('copy', 5), dict(repeats=False, vary_alphabet=True), 'vary_alphabet=True'),
    (('wikitext', 5), dict(dataset='wiki'), "'wiki'"),
    (('wikitext', 5), dict(tokenizer='bpe'), "'bpe'"),
    (('flipflop', 8), dict(split='spars'), "'spars'"),
    (('copy', 20), dict(repeats=False, split='val', length=30), 'length 30')])
def test_make_task_errors(args, kwargs, words):
    split, length = kwargs.pop('split', None), kwargs.pop('length', 1)
    with pytest.raises(ValueError, match=words) as error:
        task = make_task(*args, **kwargs)
        next(task.eval_batches(split, length, 1))
    assert '\n' not in str(error.value)

# --------------------------------------------------------------------------------------------------
# the download, against a loopback server

TEXT = {'train': ' = A title = \n \n Some words , and more . \n' * 8000, 'valid': ' valid \n',
        'test': ' tést \n'}
GOOD = {f'wikitext-2-raw/wiki.{k}.raw': v for k, v in TEXT.items()}


def make_zip(members=GOOD, *more):
    """A zip of {name: text}, and of more (name or ZipInfo, text) which may come twice."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, 'w') as archive, warnings.catch_warnings(action='ignore'):
        for name, text in [*members.items(), *more]:
            archive.writestr(name, text)
    return buffer.getvalue()


@pytest.fixture
def web(monkeypatch):
    """A server in moods named by the path: /ok/x.zip, /cut/x.zip ... `log` holds (mood, Range)."""
    monkeypatch.setattr(data, 'TIMEOUT', (1, 0.3))
    monkeypatch.setattr(data, 'BACKOFF', 0.01)
    log, closing = [], threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            mood, ranged = self.path.split('/')[1], self.headers.get('Range')
            log.append((mood, ranged))
            if mood.isdigit() or 'python' in self.headers['User-Agent'].lower():
                return self.send_error(int(mood) if mood.isdigit() else 403)
            body = web.zip if mood != 'wrong' else b'not what you wanted'
            start = int(ranged[6:-1]) if ranged and mood != 'norange' else 0
            if start >= len(body):
                return self.send_error(416)
            place = {'loop': self.path, 'astray': 'http://[::x/'}.get(mood, '')
            odd = {'many': '4, 5', 'words': 'some', 'long': '9' * 5000}
            self.send_response(302 if place else 206 if start else 200)
            self.send_header('Content-Range', f'bytes {start}-{len(body) - 1}/{len(body)}')
            self.send_header('Content-Length', odd.get(mood, str(len(body) - start)))
            self.send_header('Location', place)
            self.end_headers()
            cut = mood == 'stall' or (mood in ('cut', 'norange') and len(log) == 1)
            self.wfile.write(body[start:len(body) // 2 if cut else None])
            if mood == 'stall':
                closing.wait(10)
        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    def web(*moods, zip=None):
        web.zip = zip or make_zip()
        log.clear()
        urls = [f'http://127.0.0.1:{server.server_port}/{mood}/x.zip' for mood in moods]
        digest = hashlib.sha256(web.zip).hexdigest()
        monkeypatch.setitem(data.SOURCES, 'wikitext2', {'mirrors': urls, 'sha256': digest})
        return log
    yield web
    closing.set()
    server.shutdown()
    server.server_close()


def is_prepared(data_dir):
    folder = data_dir / 'wikitext2-bytes'
    meta = json.loads((folder / 'meta.json').read_text())
    for split, theirs in (('train', 'train'), ('val', 'valid'), ('test', 'test')):
        raw = TEXT[theirs].encode()
        assert np.fromfile(folder / f'{split}.bin', dtype=np.uint16).tolist() == list(raw)
        assert meta['tokens'][split] == meta['bytes'][split] == len(raw)
    assert {p.name for p in folder.iterdir()} == {'meta.json', *(f'{x}.bin' for x in data.BINS)}
    return meta['vocab_size'] == 256


@pytest.mark.parametrize('moods, asked', [
    (['ok'], ['ok']), (['cut'], ['cut', 'cut']), (['norange'], ['norange', 'norange']),
    *(([mood, 'ok'], [mood, 'ok']) for mood in ('404', '403', '500', 'wrong', 'stall')),
    *(([mood, 'ok'], None) for mood in ('words', 'many', 'long', 'loop', 'astray'))])
def test_download(web, tmp_path, capsys, moods, asked):
    log = web(*moods)
    data.prepare('wikitext2', 'bytes', tmp_path)
    found = [mood for mood, _ in log]
    assert is_prepared(tmp_path) and (found == asked if asked else found[-1] == 'ok')
    if moods[0] in ('cut', 'stall'):            # the second goes on where the first stopped
        assert log[0][1] is None and int(log[1][1][6:-1]) > 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ['wikitext2-bytes', 'x.zip']
    log.clear()
    capsys.readouterr()
    data.prepare('wikitext2', 'bytes', tmp_path)                # the second call has nothing to do
    assert log == [] and 'already there' in capsys.readouterr().out


def test_download_resumes_over_runs_and_repairs(web, tmp_path):
    log, zip, folder = web('ok'), make_zip(), tmp_path / 'wikitext2-bytes'
    for name, left, damaged, asked in [
            ('x.zip.part', zip[:1000], 'train.bin', ['bytes=1000-']),       # killed on the way
            ('x.zip.part', zip, 'val.bin', [f'bytes={len(zip)}-']),         # after the last byte
            ('x.zip.part', b'no zip', 'meta.json', ['bytes=6-', None]),     # then all again
            ('x.zip', zip[:-1] + b'x', 'test.bin', [None])]:
        data.prepare('wikitext2', 'bytes', tmp_path)
        (tmp_path / 'x.zip').unlink()
        (tmp_path / name).write_bytes(left)
        (folder / damaged).write_bytes(b'')
        log.clear()
        data.prepare('wikitext2', 'bytes', tmp_path)
        assert is_prepared(tmp_path) and [ranged for _, ranged in log] == asked


@pytest.mark.parametrize('moods, asked', [
    (['wrong', '403', '404', 'stall'], 10), (['wrong'], 1), (['500'], 6), (['stall', '500'], 7)])
def test_no_mirror_delivers(web, tmp_path, moods, asked):
    log = web(*moods)
    with pytest.raises(ValueError) as error:
        data.prepare('wikitext2', 'bytes', tmp_path)
    words = {'wrong': 'wrong sha256', 'stall': 'timed out'}
    for word in ('--from=PATH', *(words.get(mood, mood) for mood in moods)):
        assert word in str(error.value) and '\n' not in str(error.value)
    assert len(log) == asked
    left = [path.name for path in tmp_path.rglob('*') if not path.is_dir()]
    assert left == ['x.zip.part'] * ('stall' in moods), 'a file with the wrong checksum must go'


LINK = zipfile.ZipInfo('wiki.train.raw')
LINK.external_attr = 0o120777 << 16


@pytest.mark.parametrize('zip, words', [
    (make_zip(GOOD, (LINK, '/etc/passwd')), 'holds a link'),
    (make_zip(GOOD, ('wikitext-2-raw/wiki.test.raw', 'x')), 'one wiki.test.raw or .* not 2'),
    (make_zip(GOOD, ('../wiki.test.tokens', 'x')), "'../wiki.test.tokens', a path outside"),
    (make_zip(GOOD, ('/etc/x', 'x')), "'/etc/x', a path outside"),
    (make_zip(GOOD, ('a\\..\\..\\x', 'x')), 'a path outside'),
    (make_zip(GOOD, ('x.ééé', 'x')).replace('ééé'.encode(), b'\xff' * 6), 'read: .utf-8'),
    (make_zip({'wiki.train.raw': 'x', 'wiki.test.raw': 'x'}), 'one wiki.valid.raw .* not 0'),
    (make_zip({**GOOD, 'wikitext-2-raw/wiki.test.raw': b'\xff\xfe'}), 'cannot be read: .utf-8'),
    (make_zip()[:-40], 'not a zip'), (b'hello', 'not a zip'),
    (make_zip().replace(b' valid \n', b' salid \n'), 'Bad CRC')])
def test_bad_zips(web, tmp_path, zip, words):
    web('ok', zip=zip)
    local = tmp_path / 'local.zip'
    local.write_bytes(zip)
    for source in (None, local):
        with pytest.raises(ValueError, match=words) as error:
            data.prepare('wikitext2', 'bytes', tmp_path / 'data', source)
        assert '\n' not in str(error.value)
        folder = tmp_path / 'data' / 'wikitext2-bytes'
        assert not (folder / 'meta.json').exists()
        for path in folder.glob('*.bin'):               # a split that was done may stay, but whole
            assert path.stat().st_size == 2 * len(TEXT[data.BINS[path.stem]].encode())
        with pytest.raises(ValueError, match='wikitext2 --data_dir=.* --tokenizer=bytes'):
            make_task('wikitext', 8, data_dir=tmp_path / 'data', dataset='wikitext2',
                      tokenizer='bytes')


@pytest.mark.parametrize('change', [
    '', '[]', '3', '{"tokens": 3}', '\xff', {'vocab_size': 'x'}, {'bytes': {}}, {'tokens': [1]}])
def test_damaged_text_is_not_used(tmp_path, change):
    text = tiny_text(tmp_path)
    meta = tmp_path / 'wikitext2-bytes' / 'meta.json'
    good = json.loads(meta.read_text())
    bad = json.dumps({**good, **change}) if isinstance(change, dict) else change
    meta.write_text(bad, encoding='latin-1')
    with pytest.raises(ValueError, match='no complete data in .* run python data.py'):
        make_task('wikitext', 8, **text)
    meta.write_text(json.dumps({**good, 'vocab_size': 10}))             # the tokens go up to 19
    with pytest.raises(ValueError, match='train.bin is damaged: token 19 in a vocabulary of 10'):
        make_task('wikitext', 8, **text)


def test_bins_appear_whole_or_not_at_all(tmp_path):
    for name, text in TEXT.items():
        (tmp_path / f'wiki.{name}.raw').write_text(text)
    seen = []
    def encode(text):
        seen.append([p.name for p in (tmp_path / 'data' / 'wikitext2-bytes').iterdir()])
        if 'valid' in text:
            raise OSError('disk full')
        return list(text.encode())
    with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError, match='disk full'):
        patch.setattr(data, 'load_tokenizer', lambda name: (256, encode, None))
        data.prepare('wikitext2', 'bytes', tmp_path / 'data', tmp_path)
    assert 'train.bin' not in seen[0] and 'train.bin' in seen[-1] and 'val.bin' not in seen[-1]
    assert not list(tmp_path.rglob('val.bin*')) and not list(tmp_path.rglob('meta.json'))
    data.prepare('wikitext2', 'bytes', tmp_path / 'data', tmp_path)
    assert not list(tmp_path.rglob('*.tmp'))
    assert json.loads(next(tmp_path.rglob('meta.json')).read_text())['source'] == 'local'


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / 'x'
    for error in (OSError, KeyboardInterrupt, None):
        with contextlib.suppress(OSError, KeyboardInterrupt), data.atomic(path) as f:
            f.write(b'new')
            if error:
                raise error
        assert path.exists() == (error is None) and len(list(tmp_path.iterdir())) == path.exists()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError, match='write .*x: full'):
        patch.setattr(torch, 'save', lambda *_: exec('raise RuntimeError("full")'))
        data.save_checkpoint(path, {})
    assert path.read_bytes() == b'new' and list(tmp_path.iterdir()) == [path]

# --------------------------------------------------------------------------------------------------
# the text itself


@needs_text
def test_pieces_give_the_tokens_of_the_whole(monkeypatch):
    monkeypatch.setenv('TIKTOKEN_CACHE_DIR', str(TEXTS / 'tiktoken_cache'))
    _, encode, decode = data.load_tokenizer('gpt2')
    real = (TEXTS / 'wikitext-103-raw' / 'wiki.test.raw').read_text()[:400_000]
    odd = "a  b \n\n\n c\u00a0 d \n \n\n= e's  \t x\u3000 y 'll 12 \n\nz        w" * 300 + 't  \n '
    chinese = '天地玄黄，宇宙洪荒。日月盈昃（辰宿）列张\u3000 寒\u00a0来“暑往”１２、a。 '
    for text in (real, real.replace('\n', '\r\n'), odd, 'x' * 5000, ' \n' * 5000, '', chinese * 99,
                 chinese.replace(' ', '') * 99, "it's we'll,don't.x'' 's" * 400):
        for size in (257, 4096):
            parts = list(data.pieces(io.BytesIO(text.encode()), size))
            assert ''.join(parts) == text
            assert [token for part in parts for token in encode(part)] == encode(text)
            assert len(parts) > len(text) // size // 2 or ',' not in text.replace('，', ',')
    assert decode(encode(real[:1000])) == real[:1000]


@pytest.mark.parametrize('unit', ['天地玄黄，', '天'])
def test_text_without_spaces_takes_linear_time(unit):
    """ten times the text: not a hundred times the work, counted in characters looked at"""
    looked = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data.re, 'match', lambda pattern, text: looked.append(len(text)))
        for n in (10_000, 100_000):
            looked.append(0)
            assert ''.join(data.pieces(io.BytesIO((unit * n).encode()), 4096)) == unit * n
    assert sum(looked) == 110_000 * len(unit)


@needs_text
def test_wikitext2_from_a_folder(tmp_path):
    cache = {'TIKTOKEN_CACHE_DIR': str(TEXTS / 'tiktoken_cache')}
    run = data_py('wikitext2', f'--from={TEXTS / "wikitext-2"}', '--data_dir', tmp_path, **cache)
    assert run.returncode == 0 and run.stdout.count('wrote') == 3, run.stderr
    run = data_py('show', 'wikitext', '--dataset=wikitext2', '--data_dir', tmp_path, '--split=test',
                  '--n=4', **cache)
    assert run.returncode == 0 and len(run.stdout.splitlines()) == 4, run.stderr
    task = make_task('wikitext', 64, data_dir=tmp_path, dataset='wikitext2')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('TIKTOKEN_CACHE_DIR', cache['TIKTOKEN_CACHE_DIR'])
        for split, theirs in (('val', 'valid'), ('test', 'test')):
            raw = (TEXTS / 'wikitext-2' / f'wiki.{theirs}.tokens').read_text()
            assert task.decode(task.tokens(split)) == raw
            assert task.meta['bytes'][split] == len(raw.encode())
        assert all(line.replace('\\n', '\n') in raw for line in run.stdout.splitlines())
        assert task.encode('Hello world') == [15496, 995]
    assert task.vocab_size == 50257 and task.splits == ('val', 'test')
    assert task.lengths == (128, 256, 512, 1024, 2048, 4096)


def test_windows_of_text(tmp_path):
    task = make_task('wikitext', 16, **tiny_text(tmp_path))
    for split in ('train', 'val', 'test'):
        idx, targets = (task.batch(0, 3, 3000) if split == 'train' else
                        evaluation_set(task, split, 16, 3000, batch_tokens=100))
        assert idx.shape == targets.shape == (3000, 16) and idx.dtype == targets.dtype == np.int64
        text = task.tokens(split).tolist()
        windows = {tuple(text[i:i + 17]) for i in range(len(text) - 16)}    # each can be drawn
        assert {(*x, y[-1]) for x, y in zip(idx.tolist(), targets.tolist())} == windows
        assert np.array_equal(idx[:, 1:], targets[:, :-1])
    with pytest.raises(ValueError, match='length 61 is beyond the 61 tokens of test'):
        next(task.eval_batches('test', 61, 1))

# --------------------------------------------------------------------------------------------------
# the command line


@pytest.mark.parametrize('name', SYNTHETIC)
def test_show(name):
    task = make_task(name, 12)
    for args, (idx, targets) in (([], task.batch(1, 0, 3)), (
            ['--split=val'], evaluation_set(task, 'val', 12, 3, seed=1))):
        args = ('show', name, '--n=3', '--length', 12, '--seed=1', *args)
        run = data_py(*args)
        assert run.returncode == 0 and run.stderr == ''
        assert run.stdout.splitlines() == [task.decode(row) for row in idx]
        samples = [json.loads(line) for line in data_py(*args, '--json').stdout.splitlines()]
        assert [sample['text'] for sample in samples] == run.stdout.splitlines()
        assert [sample['tokens'] for sample in samples] == idx.tolist()
        assert [sample['targets'] for sample in samples] == targets.tolist()


def test_show_to_any_listener():
    """one who has seen enough, and one who cannot read Chinese: no complaint"""
    show = f'{sys.executable} data.py show copy --n_symbols=999'
    run = lambda line: subprocess.run(line, shell=True, cwd=ROOT, capture_output=True, text=True)
    for n in (3, 30_000):
        done = run(f'{show} --n={n} | head -1')
        assert done.stdout.count('\n') == 1 and done.stderr == ''
    done = run(f'PYTHONIOENCODING=ascii {show} --n=9')
    assert done.returncode == 0 and '??' in done.stdout and done.stderr == ''
    endless = subprocess.Popen([*show.split()[:4], '--n=99999999', '--split=val'], cwd=ROOT,
                               text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    endless.stdout.readline()
    endless.send_signal(signal.SIGINT)
    assert endless.communicate()[1].startswith('\nstopped;') and endless.returncode == 130


def test_each_process_takes_its_own_gpu(monkeypatch):
    """before it uses any, or all of them would open the first as well"""
    calls, used = [], lambda n, device: calls.append(('use', device)) or np.zeros(n)
    for name, change in {
            'cuda.is_available': lambda: True, 'cuda.is_bf16_supported': lambda **_: True,
            'cuda.set_device': calls.append, 'set_float32_matmul_precision': calls.append,
            'zeros': used, 'autocast': lambda *args, enabled: (args, enabled)}.items():
        monkeypatch.setattr(f'torch.{name}', change)
    for rank, device, chosen in (('0', 'cuda', 'cuda:0'), ('0', 'cuda:1', 'cuda:1'),
                                 ('3', 'auto', 'cuda:3')):
        monkeypatch.setenv('LOCAL_RANK', rank)
        machine = data.pick_machine(device)
        assert calls == [chosen, 'high', ('use', chosen)]
        assert (machine.device, machine.dtype, machine.compile) == (chosen, 'bfloat16', True)
        assert machine.autocast == (('cuda', torch.bfloat16), True)
        calls.clear()
    monkeypatch.setenv('WORLD_SIZE', '4')
    with pytest.raises(ValueError, match="'cuda:1' is for one process"):
        data.pick_machine('cuda:1')


@pytest.mark.parametrize('device', ['nonsense', 'meta', 'cuda:99', 'cpu:x'])
def test_devices_that_do_not_work(device):
    with pytest.raises(ValueError, match=f"device '{device}' does not work here: ") as error:
        data.pick_machine(device)
    assert '\n' not in str(error.value)


@pytest.mark.parametrize('args, words', [
    ('', 'command'), ('shw', "'shw'"), ('show flop', "'flop'"), ('show copy --n=x', "'x'"),
    ('show copy --n=-1', 'negative'), ('show copy --seed=-1', 'non-negative'),
    ('show copy --repeats=maybe', "'maybe'"), ('show copy --lenth=3', '--lenth=3'),
    ('show flipflop --split=spars', "'spars'"), ('show flipflop --length=9', '9 must be even'),
    ('show flipflop --length=2000000000000', 'does not fit in memory'),
    ('show wikitext --data_dir=nowhere', 'python data.py wikitext103 --data_dir=nowhere'),
    ('wikitext2 --from=nowhere --tokenizer=bytes', "'nowhere'"),
    ('wikitext2 --tokenizer=bpe', "'bpe'"),
    ('wikitext2 --data_dir=nowhere', 'TIKTOKEN_CACHE_DIR')])
def test_bad_command_lines(args, words, tmp_path):
    no_network = {'TIKTOKEN_CACHE_DIR': str(tmp_path), 'https_proxy': 'http://127.0.0.1:9'}
    run = data_py(*args.split(), **no_network)
    assert run.returncode == 2 and run.stdout == '' and words in run.stderr, run.stderr
    assert run.stderr.startswith('data.py: ') and run.stderr.count('\n') == 1


def test_help():
    for args, word in ((['-h'], 'python data.py show flipflop'), (['wikitext2', '-h'], '--from'),
                       (['show', '-h'], '--n_queries')):
        run = data_py(*args)
        assert run.returncode == 0 and word in run.stdout


# --------------------------------------------------------------------------------------------------
# eval.py: tiny random models, saved as train.py saves them

def coin_model(task, attn='tra', seed=0, dropout=0.01, **settings):
    """A random model that answers 0 or 1 to flip-flop, right about half of the time."""
    torch.manual_seed(seed)
    model = Decoder(Config(vocab_size=task.vocab_size, n_layer=2, n_head=2, n_embd=16, attn=attn,
                           dropout=dropout, **settings))
    with torch.no_grad():
        model.embed.weight.normal_()
        model.head.weight.normal_()
        if task.name == 'flipflop':
            model.head.weight[1], model.head.weight[2:] = -model.head.weight[0], 0
    return model

def save_run(folder, task='flipflop', train_length=8, attn='tra', seed=0, name='best.pt', step=5,
             **config):
    settings = {k: v for k, v in config.items() if k in make_task.__kwdefaults__}
    model = coin_model(make_task(task, train_length, **settings), attn, seed)
    folder.mkdir(parents=True, exist_ok=True)
    run = {'out_dir': str(folder), 'data_dir': config.pop('data_dir', 'data')}
    config = {'task': task, 'train_length': train_length, 'attn': attn, 'seed': seed, **config}
    torch.save({'model': model.state_dict(), 'optimizer': {}, 'step': step, 'best': 0.5,
                'config': config, 'run': run, 'model_config': dataclasses.asdict(model.config)},
               folder / name)
    return str(folder)

@pytest.fixture
def command(monkeypatch, capsys):
    """eval.py with these arguments, as a script: exit code, stdout, stderr"""
    def run(*argv):
        monkeypatch.setattr(sys, 'argv', ['eval.py', *map(str, argv)])
        monkeypatch.setattr(sys, 'excepthook', sys.excepthook)
        data.one_line_errors('eval.py')
        try:
            code = evaluation.main()
        except SystemExit as stop:              # -h
            code = stop.code
        except BaseException as error:
            with pytest.raises(SystemExit) as stop:
                sys.excepthook(type(error), error, error.__traceback__)
            code = stop.value.code
        out, err = capsys.readouterr()
        return code or 0, out, err
    return run

def tiny_text(folder, tokenizer='bytes', vocab_size=256, bytes_per_token=1):
    rng = np.random.default_rng(0)
    where = folder / f'wikitext2-{tokenizer}'
    where.mkdir(parents=True)
    sizes = {'train': 200, 'val': 70, 'test': 61}
    for split, size in sizes.items():
        rng.integers(0, 20, size).astype(np.uint16).tofile(where / f'{split}.bin')
    meta = {'vocab_size': vocab_size, 'tokens': sizes,
            'bytes': {k: int(v * bytes_per_token) for k, v in sizes.items()}}
    (where / 'meta.json').write_text(json.dumps(meta))
    return {'dataset': 'wikitext2', 'tokenizer': tokenizer, 'data_dir': str(folder)}

@pytest.mark.parametrize('name, attn', [('flipflop', 'tra'), ('flipflop', 'rope'), ('copy', 'tra')])
def test_exact_match_and_token_error_by_plain_loops(name, attn):
    task = make_task(name, 4 if name == 'copy' else 10, n_symbols=2)
    model = coin_model(task, attn).eval()
    n, right, wrong, scored, nats = 25, 0, 0, 0, 0.0
    for idx, targets in task.eval_batches('val', task.train_length, n):
        for tokens, target in zip(idx.tolist(), targets.tolist()):
            fine = True
            for t in (t for t in range(len(tokens)) if target[t] != -1):
                with torch.no_grad():
                    logits = model(torch.tensor([tokens[:t + 1]]))[0][0, -1].tolist()
                scored += 1
                nats += math.log(sum(math.exp(x) for x in logits)) - logits[target[t]]
                if logits.index(max(logits)) != target[t]:
                    wrong, fine = wrong + 1, False
            right += fine
    row = evaluation.evaluate(model, task, 'val', task.train_length, n)
    assert name == 'copy' or 0 < right < n
    assert row['loss'] == pytest.approx(nats / scored, rel=1e-4)
    assert row == {'split': 'val', 'length': task.train_length, 'n': n, 'exact_match': right / n,
                   'token_error': wrong / scored, 'tokens': scored, 'upper95': None,
                   'loss': row['loss']}

@pytest.mark.parametrize('window, attn', [(1, 'tra'), (7, 'rope'), (20, 'tra'), (60, 'rope')])
def test_perplexity_token_by_token(tmp_path, window, attn):
    task = make_task('wikitext', 8, **tiny_text(tmp_path, 'gpt2', 30, bytes_per_token=4))
    model = coin_model(task, attn).eval()
    text = [int(t) for t in task.tokens('test')]
    nats = []
    with torch.no_grad():
        for t in range(len(text) - 1):
            visible = text[t // window * window:t + 1]
            logits = model(torch.tensor([visible]))[0][0, -1].double()
            nats.append(float(logits.logsumexp(0) - logits[text[t + 1]]))
    for n in (None, 33):
        row = evaluation.evaluate(model, task, 'test', window, n)
        some = nats[:n]
        mean = sum(some) / len(some)
        assert row['window'] == window and row['tokens'] == len(some)
        assert row['perplexity'] == pytest.approx(math.exp(mean), rel=1e-4)
        assert row['bits_per_byte'] == pytest.approx(mean / math.log(2) / 4, rel=1e-4)
        for b in row['by_position']:  # position p sees p tokens
            here = [x for t, x in enumerate(some) if b['first'] <= t % window + 1 <= b['last']]
            assert b['loss'] == pytest.approx(np.mean(here), rel=1e-4)
        assert [b['first'] for b in row['by_position']] == [
            p for p in (1, 2, 3, 5, 9, 17, 33) if p <= min(window, len(some))]
    row = evaluation.evaluate_text(lambda idx, targets: (None, np.full(idx.shape, 1000.0)), task,
                                   'test', window, 60, 4096)
    assert row['loss'] == 1000 and math.isfinite(row['perplexity'])     # exp(1000) is not

@pytest.mark.parametrize('attn', ATTENTIONS)
def test_chunks_through_the_cache_change_nothing(attn, monkeypatch):
    task = make_task('flipflop', 8)
    model = coin_model(task, attn).double().eval()
    idx, targets = next(task.eval_batches('dense', 70, 2))
    scored = targets >= 0
    with torch.no_grad():
        logits = model(torch.as_tensor(idx))[0]
    right = torch.as_tensor(targets).clamp(min=0)[..., None]
    whole = -logits.log_softmax(-1).gather(-1, right)[..., 0].numpy()
    for chunk in (19, 70):
        monkeypatch.setattr(evaluation, 'chunk_size', lambda *_: chunk)
        said, loss = evaluation.predict(model, 'cpu', contextlib.nullcontext(), None, idx, targets)
        np.testing.assert_allclose(loss, np.where(scored, whole, 0), atol=1e-12)
        assert (said == np.where(scored, logits.argmax(-1).numpy(), -1)).all()

def test_chunks_are_bounded_and_leave_no_trace():
    for attn in ATTENTIONS:
        rows = evaluation.chunk_size(Config(vocab_size=5, n_head=4, attn=attn), 1, 131072)
        assert rows <= 4096 if attn == 'tra' else rows * 131072 <= 2 ** 24, attn
    task = make_task('flipflop', 8)
    model = coin_model(task, dropout=0.5).train()
    before = torch.get_rng_state()
    first = evaluation.evaluate(model, task, 'val', 8, 10)
    assert model.training and all(m.training for m in model.modules())
    assert torch.equal(before, torch.get_rng_state())
    assert first == evaluation.evaluate(model, task, 'val', 8, 10)
    assert evaluation.evaluate(model.eval(), task, 'val', 8, 10) == first and not model.training

def test_json_schema_and_files(tmp_path, command):
    run = save_run(tmp_path / 'run', seed=3)
    code, out, err = command(run, '--json', '--n=6', '--lengths=1x,3x,10', '--split=sparse,val',
                             f'--out={tmp_path}/r.md')
    result = json.loads(out)
    assert code == 0 and list(result) == ['runs']
    [r] = result['runs']
    assert r | {'config': 0, 'rows': 0, 'mistakes': 0} == {
        'run': run, 'task': 'flipflop', 'attn': 'tra', 'seed': 3, 'train_length': 8, 'step': 5,
        'checkpoint': 'best.pt', 'trained': 5, 'config': 0, 'rows': 0, 'mistakes': 0}
    assert [(row['split'], row['length'], row['n']) for row in r['rows']] == [
        (split, length, 6) for split in ('sparse', 'val') for length in (8, 24, 10)]
    assert all({'exact_match', 'token_error', 'upper95'} <= set(row) for row in r['rows'])
    text = (tmp_path / 'r.md').read_text()
    assert 'best.pt, step 5' in text and '| sparse |     24 |' in text
    assert text.index('| sparse') < text.index('| val') and 0 < len(r['mistakes']) <= 3
    for m in r['mistakes']:
        assert m['text'] in text.replace('\n    ', '\n') and '^  said' in m['text']
        assert m['wrong'] == len(m['positions']) > 0
        task = make_task('flipflop', 8)
        *_, (idx, _) = task.eval_batches(m['split'], m['length'], m['sequence'] + 1)
        assert all(idx[-1][p - 1] == data.READ for p in m['positions'])

    wiki = save_run(tmp_path / 'wiki', 'wikitext', **tiny_text(tmp_path / 'there'))
    (tmp_path / 'there').rename(tmp_path / 'here')
    assert 'no complete data' in command(wiki)[2]
    code, out, err = command(wiki, '--json', '--lengths=8,32', '--n=10', '--dtype=bfloat16',
                             f'--data_dir={tmp_path}/here')
    rows = json.loads(out)['runs'][0]['rows']
    assert [(row['split'], row['window'], row['tokens']) for row in rows] == [
        ('test', 8, 32), ('test', 32, 32)]
    assert all({'perplexity', 'bits_per_byte', 'by_position'} <= set(row) for row in rows)
    exact = json.loads(command(wiki, '--json', '--lengths=8', f'--data_dir={tmp_path}/here')[1])
    assert exact['runs'][0]['rows'][0]['loss'] != rows[0]['loss']

def test_mistakes_are_marked_and_their_absence_is_bounded():
    task = make_task('flipflop', 8)
    tokens = task.encode('w1i0i1r1w0i1r0')
    said = np.full(14, -1)
    said[[6, 12]] = 0, 1
    assert evaluation.marked(task, tokens, said, [7, 13]) == (
        'w1i0i1r1w0i1r0\n       ^     ^  said 0 1')
    assert evaluation.marked(task, tokens, said, [7], before=3, after=2) == (
        '...i1r1w...\n      ^  said 0')
    for n, bound in ((60, 3 / 60), (2, 1)):     # the rule of three
        row = evaluation.evaluate_sequences(lambda idx, targets: (targets, np.zeros(targets.shape)),
                                            task, 'dense', 8, n, 4096, [])
        assert row['exact_match'] == 1 and row['token_error'] == 0 and row['upper95'] == bound

def test_best_before_last_a_choice_and_runs_that_are_not_done(tmp_path, command):
    run = save_run(tmp_path / 'run', name='last.pt', step=9, max_iters=20)
    assert 'tra (step 9 of 20), trained at 8, seed 0 (last.pt, step 9)' in command(run, '--n=2')[1]
    save_run(tmp_path / 'run', name='best.pt', step=7, max_iters=20)
    assert 'tra (step 9 of 20), trained at 8, seed 0 (best.pt, step 7)' in command(run, '--n=2')[1]
    assert '(last.pt, step 9)' in command(run, '--n=2', '--checkpoint=last.pt')[1]
    other = save_run(tmp_path / 'other', name='last.pt', step=20, max_iters=20, seed=1)
    save_run(tmp_path / 'other', name='best.pt', step=7, max_iters=20, seed=1)
    out = command(run, other, '--n=2')[1]       # the second is complete: its best came early
    assert '\n| tra (step 9 of 20) |' in out and '\n| tra                |' in out

def test_seeds_of_a_setting_are_one_line(tmp_path, command):
    runs = [save_run(tmp_path / f'{attn}-{seed}', attn=attn, seed=seed) for attn, seed in
            (('tra', 0), ('rope', 0), ('tra', 1), ('tra', 2))]
    args = ['--split=val', '--n=20', '--mistakes=0']
    table = lambda *args: command(*args)[1].split('exact match:')[1]
    out = command(*runs, *args)[1]
    exact = [json.loads(command(run, *args, '--json')[1])['runs'][0]['rows'][0]['exact_match']
             for run in runs]
    assert '\n| tra (3 seeds) |' in out and '±: standard deviation' in out and 'token error:' in out
    seeds = [exact[0], exact[2], exact[3]]
    mean = sum(seeds) / 3
    spread = math.sqrt(sum((x - mean) ** 2 for x in seeds) / 2)
    assert f'| {mean:.3f} ± {spread:.3f} |' in out
    assert re.search(rf'\n\| rope +\| +{exact[1]:.3f} \|', out)
    saved = tmp_path / 'saved.json'             # results stand for runs
    command(*runs[:2], *args, f'--out={saved}')
    assert table(saved, *runs[2:], *args) == out.split('exact match:')[1]
    command(*runs, '--n=20', '--lengths=1x,2x', '--mistakes=0', f'--out={saved}')
    assert table(saved, '--split=val', '--lengths=1x') == out.split('exact match:')[1]
    # no run counts twice, and no seed: the same in another folder gets a line of its own
    for twice in ((runs[0], runs[1], runs[0] + '/.'), (saved, runs[2])):
        code, out, err = command(*twice, '--n=2', '--lengths=1x')
        assert code == 2 and 'is there twice' in err and err.count('\n') == 1
    again = save_run(tmp_path / 'again', seed=1)
    assert re.search(r'\n\| tra-1 .*\n\| again .*\n\| rope ', table(runs[2], again, runs[1], *args))
    # as many of each length as asked for
    [run] = json.loads(command(runs[0], '--lengths=1x,2x', '--n=5,3', '--json')[1])['runs']
    assert {(row['length'], row['n']) for row in run['rows']} == {(8, 5), (16, 3)}
    # runs of different n say so
    command(runs[1], '--split=val', '--n=7', f'--out={saved}')
    assert re.search(r'\n\| sequences +\| +7 to 20 \|\n', table(runs[0], saved, *args))

def test_summary_of_several_tasks():
    """at the longest length, the mean over splits and seeds, the best of each task bold"""
    def run(task, attn, values, **config):
        rows = [{'split': f's{n % 2}', 'length': length, 'exact_match': x}
                for n, (length, x) in enumerate(values)]
        return {'task': task, 'attn': attn, 'rows': rows, 'config': config}
    text = [{'split': 'test', 'window': 128 * n, 'bits_per_byte': n} for n in (1, 2)]
    more = [text[1] | {'bits_per_byte': 3}]
    table = evaluation.format_summary([
        run('copy', 'tra', [(8, 1.0), (8, 1.0), (32, 0.5), (32, 0.7)], tra_sparsity=True),
        run('copy', 'tra', [(32, 0.1), (32, 0.3)], tra_sparsity=True),              # a second seed
        run('copy', 'tra', [(8, 0.9), (16, 0.9)], tra_sparsity=False),              # not so long
        run('copy', 'tra', [(32, 0.2)], tra_threshold=1.0, tra_sparsity=True),
        run('copy', 'fot', [(32, 0.8), (32, 0.0)]),
        {'task': 'wikitext', 'attn': 'tra', 'rows': text, 'config': {}},
        {'task': 'wikitext', 'attn': 'fot', 'config': {}, 'rows': more}])
    assert [[cell.strip() for cell in line.split('|')[1:-1]] for line in table.splitlines()] == [
        ['', 'copy 32', 'wikitext 256'], ['-' * 25, '-' * 10 + ':', '-' * 13 + ':'],
        ['tra', '**0.400**', '**2.000**'], ['tra, tra_sparsity=False', '-', '-'],
        ['tra, tra_threshold=1.0', '0.200', '-'], ['fot', '**0.400**', '3.000']]

def test_format_table():
    row = {'split': 'val', 'length': 8, 'n': 1000, 'exact_match': 1.0, 'token_error': 0.0,
           'upper95': 0.003, 'tokens': 2000}
    other = {**row, 'length': 131072, 'exact_match': 0.9999, 'token_error': 1e-5, 'upper95': None}
    assert evaluation.format_table([other, row]) == '\n'.join([
        '| split |  length | sequences | scored | error below | exact match | token error |',
        '|-------|--------:|----------:|-------:|------------:|------------:|------------:|',
        '| val   |       8 |     1,000 |  2,000 |       0.003 |       1.000 |       0.000 |',
        '| val   | 131,072 |     1,000 |  2,000 |           - |    0.999900 |     1.0e-05 |'])
    wiki = {'split': 'test', 'window': 128, 'perplexity': 21.345, 'bits_per_byte': 1.2, 'tokens': 9}
    assert evaluation.format_table([wiki]).splitlines()[2] == (
        '| test  |    128 |      9 |      21.34 |         1.200 |')
    # each n with its own bound; of a setting that erred somewhere there is none
    few, wrong = {**row, 'n': 50, 'upper95': 0.06}, {**other, 'length': 8, 'n': 5}
    out = evaluation.format_settings([(x, [{'rows': rows}]) for x, rows in zip('abc', (
        [row], [few], [wrong]))])
    assert '| sequences   |    5 to 1,000 |' in out and '| error below | 0.003 to 0.06 |' in out

class Trap:
    """a pickled object that, loaded carelessly, leaves a file behind"""

    def __reduce__(self):
        return os.system, ('touch trapped',)

def test_errors_are_one_line(tmp_path, command, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_run(Path('run'))
    save_run(Path('copy'), 'copy', 4)
    saved = torch.load('run/best.pt', weights_only=True)
    model, config, size = saved['model'], saved['config'], saved['model_config']
    for name, content in {
            'damaged': b'no checkpoint', 'cut': Path('run/best.pt').read_bytes()[:2000], 'no': b'',
            'trap': {'model': Trap()}, 'other': {'model': {}}, 'list': [1], 'empty': None,
            'nan': {**saved, 'model': {**model, 'norm.weight': torch.full((16,), math.nan)}},
            'huge': {**saved, 'model_config': {**size, 'n_embd': 2 ** 24}},
            'newer': {**saved, 'model_config': {**size, 'of_tomorrow': 1}},
            'type': {**saved, 'config': {**config, 'train_length': '8'}},
            'step': {**saved, 'step': 'five'}, 'settings': {**saved, 'config': 5},
            'iters': {**saved, 'config': {**config, 'max_iters': 'many'}}}.items():
        Path(name).mkdir()
        if isinstance(content, bytes):
            Path(name, 'best.pt').write_bytes(content)
        elif content is not None:
            torch.save(content, Path(name, 'best.pt'))
    result = command('run', '--json', '--n=3', '--split=val')[1]
    texts = ['', '[]', '[' * 100000, '{"kernel": []}', '{"runs": []}', '{"runs": 5}',
             '{"runs": [5]}']
    for of_row, key, value in [  # results with one field that is wrong
            (0, 'rows', [{}]), (0, 'config', 'x'), (0, 'train_length', '8'), (0, 'step', None),
            (0, 'rows', []), (0, 'mistakes', [{'text': 1}]), (1, 'n', '7'), (1, 'length', 'x'),
            (1, 'loss', 'x'), (1, 'exact_match', None), (1, 'exact_match', math.nan)]:
        changed = json.loads(result)
        [run] = changed['runs']
        (run['rows'][0] if of_row else run)[key] = value
        texts.append(json.dumps(changed))
    for n, text in enumerate([*texts, result]):
        Path(f'{n}.json').write_text(text)
    for words, cases in {
            'is no result of eval.py': [f'{n}.json' for n in range(len(texts))],
            'no such split and length': [f'{len(texts)}.json --lengths=3x'],
            'no model': [f'{len(texts)}.json --sample=w1'], 'which run': [''],
            'last.pt is missing': ['nowhere', 'empty', 'run --checkpoint=last.pt'],
            'best.pt cannot be read': ['damaged', 'cut', 'no'], 'best.pt is refused': ['trap'],
            "has no 'model_config'": ['other'], "has no 'model'": ['list'], 'finite': ['nan'],
            'does not fit': ['huge'], 'does not fit this code': ['newer', 'type', 'iters'],
            "'step' is no int": ['step'], "'config' is no dict": ['settings'],
            'must be even and at least 4': ['run --lengths=2', 'run --lengths=1x,9'],
            'copy length 0': ['copy --lengths=0'], 'memory': [f'copy --lengths={10 ** 13}'],
            'neither a length': ['run --lengths=8y'], 'of one task': ['run copy --plot'],
            "split 'test'": ['run --split=test'],
            'at least 1': ['run --n=0', 'run --n=x', 'run --n=5,'],
            '--nn=3': ['run --nn=3'], '2 numbers for 1': ['run --lengths=1x --n=5,6'],
            '.md or .json': ['run --out=x.txt'], 'no such folder': ['run --out=nowhere/x.md'],
            'must end in .png': ['run --plot=x.pdf'], "'z' is not a token": ['run --sample=wz'],
            'at least one token': ['run --sample='], '1 to 96': ['run --attention=' + 'w1' * 60],
            'is for --attention': ['run --heads=1.1'],
            '2 layers of 2 heads': [f'run --attention=w1 --heads={x}' for x in ('3.1', '1.1,1')],
            'unknown': ['run --dtype=float8'],
            'does not work here': ['run --device=nonsense']}.items():
        for args in cases:
            code, out, err = command(*args.split())
            assert code == 2 and out == '' and words in err, (args, err)
            assert err.startswith('eval.py: ') and err.count('\n') == 1, (args, err)

def test_what_is_stopped_halfway_keeps_what_is_done(tmp_path, command, monkeypatch):
    run, other, calls = save_run(tmp_path / 'run'), save_run(tmp_path / 'other', attn='rope'), []
    evaluate = evaluation.evaluate
    def interrupted(*args):
        calls.append(args)
        if len(calls) % 3 == 0:
            raise KeyboardInterrupt
        return evaluate(*args)
    with monkeypatch.context() as patch:
        patch.setattr(evaluation, 'evaluate', interrupted)
        code, out, err = command(run, '--n=2')
        assert code == 130 and 'stopped early' in out and '| sparse' in out and 'dense' not in out
        saved = tmp_path / 'saved.json'
        code, out, err = command(run, other, '--n=2', '--json', f'--out={saved}')
        results = json.loads(out)['runs']
        assert code == 130 and [(len(r['rows']), r['interrupted']) for r in results] == [
            (2, True), (0, True)] and saved.read_text() == out
        code, out, err = command(saved)         # can be read, and still says that it is not whole
        assert code == 0 and 'stopped early' in out and '\n| rope ' in out and 'sparse 8' in out
        patch.setattr(evaluation, 'load_run', lambda *args: exec('raise KeyboardInterrupt'))
        assert command(run) == (130, '', '\nstopped\n')
    # weights that overflow: never a NaN in a table or a file
    weights = torch.load(tmp_path / 'run' / 'best.pt', weights_only=True)
    weights['model']['head.weight'] *= 1e38
    torch.save(weights, tmp_path / 'run' / 'best.pt')
    code, out, err = command(run, '--n=2', '--json')
    assert code == 2 and out == '' and 'the loss is not finite' in err and err.count('\n') == 1
    code, out, err = command(other, run, '--n=2', '--json')
    assert code == 2 and 'the loss is not finite' in err
    assert [(len(r['rows']), 'interrupted' in r) for r in json.loads(out)['runs']] == [
        (4, False), (0, True)]

def test_the_file_is_written_whatever_becomes_of_the_words(tmp_path, command, monkeypatch):
    """a reader that has gone, an output without ±, a full disk"""
    results, out = ROOT / 'results' / 'induct.json', tmp_path / 'out.md'
    table = command(results)[1]
    process = subprocess.Popen([sys.executable, ROOT / 'eval.py', results, f'--out={out}'],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    assert process.stderr.read() == '' and process.wait() == 128 + signal.SIGPIPE
    assert out.read_text() == table and '±' in table
    with monkeypatch.context() as patch:
        patch.setattr(sys, 'stdout', io.TextIOWrapper(io.BytesIO(), encoding='ascii'))
        assert command(results)[0] == 0
        assert sys.stdout.buffer.getvalue().decode() == table.replace('±', '?')
    monkeypatch.setattr(os, 'fsync', lambda _: exec('raise OSError("no space left on device")'))
    code, words, err = command(results, '--split=val', '--lengths=1x', f'--out={out}')
    assert code == 2 and 'no space left' in err and words == '' and out.read_text() == table

def test_ctrl_c_while_eval_imports_torch(tmp_path):
    (tmp_path / 'torch.py').write_text('raise KeyboardInterrupt')
    done = subprocess.run([sys.executable, ROOT / 'eval.py', '-h'], capture_output=True, text=True,
                          env={**os.environ, 'PYTHONPATH': str(tmp_path)})
    assert (done.returncode, done.stdout, done.stderr) == (130, '', '\nstopped\n')

def is_picture(path):
    content = path.read_bytes()
    width, height = (int.from_bytes(content[at:at + 4], 'big') for at in (16, 20))
    assert content[:8] == b'\x89PNG\r\n\x1a\n' and len(content) > 5000
    return 500 < width < 3400 and height > 300

def test_pictures(tmp_path, command, monkeypatch):
    plt = pytest.importorskip('matplotlib.pyplot')
    figures = []                # of each picture: how many panels, and all that is written in it
    def close(fig):
        texts = [text.get_text() for ax in fig.axes for text in ax.texts]
        legend = [text.get_text() for legend in fig.legends for text in legend.get_texts()]
        colours = {line.get_label(): line.get_color() for line in fig.axes[0].get_lines()}
        figures.append((len(fig.axes), texts, legend, colours))
    monkeypatch.setattr(plt, 'close', close)
    run, rope = save_run(tmp_path / 'run'), save_run(tmp_path / 'rope', attn='rope')
    wiki = save_run(tmp_path / 'wiki', 'wikitext', **tiny_text(tmp_path))
    for args, path in [
            (('--plot', run, rope, '--n=3', '--lengths=1x,4x'), 'run/eval.png'),
            ((run, '--n=2', '--split=val', f'--plot={tmp_path}/one.png'), 'one.png'),
            ((wiki, '--plot', '--lengths=4,32'), 'wiki/eval.png'),
            ((run, '--attention=w1i0r1'), 'run/attention.png'),
            ((rope, run, '--attention=2', '--lengths=6'), 'rope/attention.png'),
            ((rope, run, '--attention=2', '--heads=2.1', f'--plot={tmp_path}/x.png'), 'x.png')]:
        assert command(*args)[0] == 0 and is_picture(tmp_path / path), args
    assert [panels for panels, *_ in figures] == [4, 1, 2, 4 + 1, 8 + 1, 2 + 1]     # 1: the scale
    assert figures[1][1] == ['trained at 8', 'tra'] and not figures[1][2]           # no legend
    results = ROOT / 'results' / 'induct.json'
    assert command(results, f'--plot={tmp_path}/x.png')[0] == 0
    _, texts, legend, colours = figures[-1]                 # long names, or many, are in a legend
    runs = json.loads(results.read_text())['runs']
    assert legend == [label for label, _ in evaluation.group(runs)] and 'fot (2 seeds)' in legend
    assert not set(legend) & set(texts)
    for label in legend:
        assert colours[label] == evaluation.COLOURS[re.match(r'\w+', label)[0]]
    assert figures[0][3]['rope'] == evaluation.COLOURS['rope']
    ours = {'tra', 'rope', 'nope', 'alibi', 'nape', 'cope', 'fot', 'stick'}     # a fork has more
    assert ours <= set(evaluation.COLOURS) and ours <= set(ATTENTIONS)
    assert len({*evaluation.COLOURS.values()}) == len(evaluation.COLOURS)

def test_pictures_without_matplotlib(tmp_path, command, monkeypatch):
    run = save_run(tmp_path / 'run')
    monkeypatch.setitem(sys.modules, 'matplotlib', None)
    for flag in ('--plot', '--attention=w1'):
        assert command(run, flag) == (
            2, '', 'eval.py: pictures need matplotlib: pip install matplotlib\n')

@pytest.mark.parametrize('attn', ATTENTIONS)
def test_attention_parts_are_those_of_the_model(attn):
    task = make_task('flipflop', 8)
    model = coin_model(task, attn).eval()
    idx, outputs = torch.tensor([task.encode('w1i0i1w0r0')]), []
    hooks = [block.attn.register_forward_hook(lambda module, args, out: outputs.append(
        (module, args[0], out))) for block in model.blocks]
    model(idx)
    for hook in hooks:
        hook.remove()
    for parts, (module, x, out) in zip(evaluation.attention_parts(model, idx), outputs):
        v = module.qkv(x)[0, :, 32:].view(10, 2, 8).transpose(0, 1)                 # (H, T, D)
        y = (torch.tensor(parts['weights']) @ v).transpose(0, 1).reshape(10, 16)
        torch.testing.assert_close(module.proj(y), out[0], atol=1e-5, rtol=1e-4)
        assert ('gate' in parts) == ('keep' in parts) == (attn == 'tra')
        if attn == 'tra':
            gate = module.gate(x)[0].sigmoid().T.detach()
            np.testing.assert_allclose(parts['gate'], gate, atol=1e-6)
            assert ((parts['weights'] > 0) <= (parts['keep'] > 0)).all()
            for h, i, j in np.argwhere(parts['keep']):      # and counted one by one
                assert parts['count'][h, i, j] == sum(parts['keep'][h, i, j:i + 1]), (h, i, j)

def test_sample(tmp_path, command):
    run, other = save_run(tmp_path / 'run'), save_run(tmp_path / 'other', attn='rope', seed=1)
    code, out, err = command(run, '--sample=w1i0r', '--tokens=3')
    assert code == 0 and out.startswith('w1i0r') and len(out) == 5 + 3 + 1
    assert out == command(run, '--sample=w1i0r', '--tokens=3')[1]
    out = command(run, other, '--sample=w1', '--temperature=2', '--top_k=3', '--json')[1]
    assert [len(json.loads(line)['text']) for line in out.splitlines()] == [2 + 16] * 2
    wiki = save_run(tmp_path / 'wiki', 'wikitext', **tiny_text(tmp_path))
    assert command(wiki, '--sample=The ', '--tokens=5')[1].startswith('The ')

def test_benchmark(command, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluation, 'BENCH', {
        'kernel': (64, 128, 192), 'forgetful': (256, 512), 'generate': (64,),
        'step': ((1, 2, 16, 1, 0.0), (1, 2, 16, 1, 0.01)), 'repeats': 1, 'seconds': 0, 'tokens': 256,
        'longest': {'never': 128, 'SDPA': 128, 'dense': 64}})
    code, out, _ = command('--bench', '--json', f'--out={tmp_path}/bench.md')
    result = json.loads(out)
    assert code == 0 and result['max_error'] < 1e-4
    for name, table in {'kernel': {'random': 3, 'never': 2, 'SDPA': 2, 'dense': 1, 'MB random': 3,
                                   'MB never': 2, 'MB SDPA': 2, 'MB dense': 1, 'never / SDPA': 2},
                        'forgetful': {'blockwise': 2}, 'generate': {'TRA': 1, 'RoPE': 1},
                        'step': {'TRA': 2, 'RoPE': 2, 'TRA / RoPE': 2}}.items():
        for key, measured in table.items():
            assert ['MB' in key or row[key] > 0 for row in result[name] if key in row] == (
                [True] * measured), key
    assert [row['size'] for row in result['kernel']] == [64, 128, 192]
    assert all(row['TRA / RoPE'] == row['TRA'] / row['RoPE'] for row in result['step'])
    text = (tmp_path / 'bench.md').read_text()
    assert text == evaluation.bench_report(result) + '\n' and 'blockwise grows as T^' in text
    assert f"{result['step'][0]['TRA / RoPE']:.2f} |\n| 1, 2, 16, 1, 0.01 |" in text

@pytest.mark.parametrize('device, waits', [('cpu', 0), ('cuda', 2), ('cuda:1', 2), ('mps', 2)])
def test_the_clock_waits_for_the_device(device, waits, monkeypatch):
    waited = []
    monkeypatch.setattr(torch.accelerator, 'synchronize', waited.append)
    monkeypatch.setitem(evaluation.BENCH, 'repeats', 1)
    evaluation.clock({'': lambda: None}, device)
    assert waited == [device] * waits

# --------------------------------------------------------------------------------------------------
# train.py: tiny runs, most in this process

TINY = {'train_length': 16, 'n_layer': 1, 'n_head': 2, 'n_embd': 16, 'dropout': 0.1,
        'batch_size': 8, 'max_iters': 20, 'learning_rate': 1e-2, 'log_interval': 1,
        'eval_interval': 10, 'save_interval': 5, 'eval_n': 8, 'final_n': 8, 'eval_lengths': 1}

def as_args(settings):
    return [f'--{key}={value}' for key, value in settings.items()]

def train(*args, **settings):
    """Runs train.py with these arguments in this process: (exit code, stdout, stderr)."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = [signal.getsignal(number) for number in numbers]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, 'argv', ['train.py', *map(str, args), *as_args(settings)])
        patch.setattr(sys, 'excepthook', sys.excepthook)
        patch.setattr(fcntl, 'flock', lambda *_: None)      # this process would lock itself out
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                try:
                    runpy.run_path(str(ROOT / 'train.py'), run_name='__main__')
                except Exception:
                    sys.excepthook(*sys.exc_info())         # as Python itself would
        except SystemExit as stop:
            code = stop.code or 0
    for number, handler in zip(numbers, handlers):
        signal.signal(number, handler)
    return code, out.getvalue(), err.getvalue()

def tiny(out_dir, *args, **changes):
    return train(*args, **{**TINY, 'out_dir': out_dir, **changes})

def refused(result, *words):
    """exit code 2 and one line that says these words"""
    code, err = result[0], result[-1]
    assert code == 2 and err.count('\n') == 1 and 'Traceback' not in err, err
    assert all(word in err for word in words), err

def start(*args, launcher=(sys.executable,), env={}, **options):
    env = {**os.environ, 'OMP_NUM_THREADS': '1', 'TORCHDYNAMO_DISABLE': '1', **env}
    return subprocess.Popen([*launcher, str(ROOT / 'train.py'), *args], cwd=ROOT, text=True,
                            env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)

def wait_for(process, text):
    assert any(text in line for line in process.stdout), f'train.py ended without {text!r}'

def load(folder, name='last.pt'):
    return torch.load(Path(folder) / name, weights_only=True)

def same(a, b, name='last.pt'):
    a, b = load(a, name)['model'], load(b, name)['model']
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)

def timeless(folder):
    """metrics.jsonl but for the milliseconds"""
    lines = (Path(folder) / 'metrics.jsonl').read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != 'ms'} for line in lines]

def losses(folder):
    return {entry['step']: entry['loss'] for entry in timeless(folder) if 'lr' in entry}

# --------------------------------------------------------------------------------------------------
# a whole run

def test_run_leaves_table_files_and_next_command(tmp_path):
    run = tmp_path / 'run'
    settings = {'eval_lengths': '1,2', 'weight_decay': 0.5}
    code, out, err = tiny(run, **settings)
    assert (code, err) == (0, '')
    assert 'step 20/20 | loss ' in out and '| eta 0:00:00' in out and 'device cpu' in out
    assert 'step 1/20 | ' in out and 'first step in' in out
    best = load(run, 'best.pt')['step']
    assert out.count(f'\nfinal | flipflop | tra | seed 0 | best.pt, step {best} | val@16 ') == 1
    assert '--attn=rope' in out and 'python eval.py' in out
    files = ['best.pt', 'config.json', 'last.pt', 'metrics.jsonl']
    assert sorted(x.name for x in run.iterdir()) == files
    config = json.loads((run / 'config.json').read_text())
    assert config['n_embd'] == 16 and config['eval_lengths'] == [1, 2] and config['device'] == 'cpu'
    checkpoint = load(run)
    fields = {'model', 'optimizer', 'step', 'best', 'logged', 'config', 'model_config', 'run'}
    assert set(checkpoint) == fields
    assert checkpoint['step'] == 20 and checkpoint['model_config']['vocab_size'] == 5
    # what may change on resume is kept apart from what makes the run what it is
    assert checkpoint['config']['max_iters'] == 20 and checkpoint['config']['seed'] == 0
    assert {'out_dir', 'eval_n', 'data_dir', 'device'} < set(checkpoint['run'])
    assert {**checkpoint['config'], **checkpoint['run'], 'eval_lengths': [1, 2]} == config
    matrices, vectors = checkpoint['optimizer']['param_groups']
    assert (matrices['weight_decay'], vectors['weight_decay']) == (0.5, 0.0)
    assert len(matrices['params']) == sum(p.dim() >= 2 for p in checkpoint['model'].values())
    assert len(matrices['params'] + vectors['params']) == len(checkpoint['model'])

    before = timeless(run)
    assert len(losses(run)) == 20 and len([entry for entry in before if 'final' in entry]) == 8
    with open(run / 'metrics.jsonl', 'ab') as f:                        # killed in mid-line
        f.write(b'{"step": 3\n\xff\xfe')
    code, out, _ = tiny(run, resume=True, **settings)                   # finished: the table again
    assert code == 0 and 'complete' in out and 'final | ' in out and '| loss' not in out
    assert timeless(run) == before
    refused(tiny(run), '--resume=True', '--overwrite=True')             # not overwritten silently
    assert tiny(run, overwrite=True, max_iters=5)[0] == 0 and max(losses(run)) == 5
    code, out, _ = tiny(run, resume=True, max_iters=8, log_interval=2)  # what may change
    assert 'max_iters was 5 and is 8' in out
    assert code == 0 and list(losses(run)) == [1, 2, 3, 4, 5, 6, 8]

def test_the_final_table_is_the_one_of_eval(tmp_path, command):
    """of best.pt, although the weights got worse afterwards"""
    code, out, _ = tiny(tmp_path, eval_interval=1, max_iters=40, learning_rate=0.05, eval_n=32)
    errors = [e['token_error'] for e in timeless(tmp_path)
              if e.get('split') == 'val' and 'final' not in e]
    best = load(tmp_path, 'best.pt')
    # of equals the later one, which has learned for longer
    latest = max(i + 1 for i, error in enumerate(errors) if error == min(errors))
    assert best['best'] == min(errors) and best['step'] == latest
    table = [line for line in out.splitlines() if line.startswith('|')]
    assert len(table) > 3 and 'evaluating best.pt' in out and f'best.pt, step {latest}' in out
    printed = command(tmp_path, '--n=8')[1]
    assert '\n'.join(table) in printed and f'best.pt, step {latest}' in printed

def test_evaluation_and_logging_do_not_touch_training(tmp_path):
    tiny(tmp_path / 'a', eval_interval=3, save_interval=2, log_interval=4)
    tiny(tmp_path / 'b', eval_interval=1000, save_interval=1000, log_interval=1000)
    assert same(tmp_path / 'a', tmp_path / 'b')
    tiny(tmp_path / 'c', seed=1)
    assert not same(tmp_path / 'a', tmp_path / 'c')

@pytest.mark.parametrize('task', ['flipflop', 'copy'])     # rows of copy differ in scored tokens
def test_gradient_accumulation_is_one_large_batch(tmp_path, task):
    tiny(tmp_path / 'a', task=task, dropout=0, batch_size=8)
    tiny(tmp_path / 'b', task=task, dropout=0, batch_size=2, gradient_accumulation_steps=4)
    a, b = losses(tmp_path / 'a'), losses(tmp_path / 'b')
    assert max(abs(a[step] - b[step]) for step in a) < 1e-4

@pytest.mark.parametrize('warmup, floor', [(0.05, 0.1), (0, 1)])
def test_learning_rate_schedule(tmp_path, warmup, floor):
    tiny(tmp_path, max_iters=100, warmup_ratio=warmup, min_lr_ratio=floor, learning_rate=2e-3,
         eval_interval=100)
    rates = [entry['lr'] for entry in timeless(tmp_path) if 'lr' in entry]
    rising = [4e-4, 8e-4, 1.2e-3, 1.6e-3, 2e-3] if warmup else []
    falling = 100 - len(rising)
    cosine = [2e-3 * (floor + (1 - floor) * (1 + math.cos(math.pi * step / falling)) / 2)
              for step in range(falling)]
    assert rates == pytest.approx(rising + cosine)

def test_compile_and_bfloat16(tmp_path):
    code, out, err = tiny(tmp_path, attn='nope', compile='true', dtype='bfloat16', max_iters=3)
    assert code == 0, err
    assert 'compile True (as told)' in out and 'dtype bfloat16 (as told)' in out
    weights = load(tmp_path)['model']
    assert all('_orig_mod' not in key and p.dtype == torch.float32 for key, p in weights.items())

def test_perplexity_beyond_floats(tmp_path):
    """a loss whose exponential overflows is evaluated, logged and saved"""
    text = tiny_text(tmp_path)
    code, _, err = tiny(tmp_path / 'run', task='wikitext', **text, max_iters=3, learning_rate=100,
                        min_lr_ratio=1, warmup_ratio=0, weight_decay=0, eval_n=32)
    assert code == 0 and load(tmp_path / 'run', 'best.pt')['best'] > 709, err

def test_interactive_python_has_the_model(tmp_path):
    run = start(*as_args({**TINY, 'max_iters': 5, 'out_dir': tmp_path}), stdin=subprocess.PIPE,
                launcher=(sys.executable, '-i'))
    out = run.communicate("print('at hand:', type(model).__name__, type(optimizer).__name__, "
                          'source.name, step)\n')[0]
    assert run.returncode == 0 and 'at hand: Decoder AdamW flipflop 5' in out, out

# --------------------------------------------------------------------------------------------------
# runs that are cut short

def test_killed_three_times_ends_in_the_same_weights(tmp_path):
    settings = {**TINY, 'max_iters': 300, 'save_interval': 25, 'eval_interval': 100}
    a, b = tmp_path / 'whole', tmp_path / 'killed'
    whole = start(*as_args({**settings, 'out_dir': a}))
    for kill in range(4):
        run = start(*as_args({**settings, 'out_dir': b, 'resume': kill > 0}))
        if kill < 3:
            wait_for(run, f'step {75 * kill + 40}/')
            time.sleep(random.random() / 4)
            run.kill()
            run.wait()
            assert load(b)['step'] < 300
        else:
            assert 'final | ' in run.communicate()[0]
    assert 'final | ' in whole.communicate()[0]
    assert same(a, b) and same(a, b, 'best.pt') and timeless(a) == timeless(b)

def test_signals_save_and_say_how_to_resume(tmp_path):
    """also when nobody listens: tee has died of the same signal, or head has seen enough"""
    endless = {**TINY, 'max_iters': 100000, 'save_interval': 100000, 'eval_interval': 100000}
    cases = [(signal.SIGHUP, 'open'), (signal.SIGINT, 'open'), (signal.SIGTERM, 'closed'),
             (signal.SIGPIPE, 'closed')]
    for number, stdout in cases:                            # one by one: endless runs are greedy
        folder = tmp_path / number.name
        run = start(*as_args({**endless, 'out_dir': folder}))
        wait_for(run, 'step 7/')
        if number == signal.SIGHUP:                         # a second one is refused while it lives
            second = start(*as_args({**TINY, 'out_dir': folder, 'overwrite': True}))
            out = second.communicate()[0]
            refused((second.returncode, out), f'another process is training in {folder}')
        if stdout == 'closed':
            run.stdout.close()
        if number != signal.SIGPIPE:
            run.send_signal(number)
        out = run.communicate()[0] if stdout == 'open' else ''
        # it may find its stdout closed before the signal comes
        codes = [128 + number] + [128 + signal.SIGPIPE] * (stdout == 'closed')
        assert run.wait(60) in codes and 'Traceback' not in out
        step = load(folder)['step']
        assert step >= 7
        if stdout == 'open':
            assert f'{number.name}: stopped after step {step}' in out
            assert f'--out_dir={folder} --resume=True' in out

def test_ctrl_c_in_the_last_evaluation_ends_the_run(tmp_path, monkeypatch):
    evaluate, calls = evaluation.evaluate, []
    def interrupted(*args):
        calls.append(args)
        if len(calls) == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return evaluate(*args)
    monkeypatch.setattr(evaluation, 'evaluate', interrupted)
    monkeypatch.setattr(os, 'write', lambda *_: exec('raise BrokenPipeError'))
    code, out, err = tiny(tmp_path, max_iters=3)
    assert code == 130 and 'stopped after step 3' in out and 'final | ' not in out and err == ''
    assert load(tmp_path)['step'] == load(tmp_path, 'best.pt')['step'] == 3

def test_ctrl_c_while_train_imports_torch(tmp_path):
    (tmp_path / 'torch.py').write_text('import os, signal, time\n'
                                       'os.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)\n')
    run = start(env={'PYTHONPATH': str(tmp_path)})
    assert run.communicate()[0] == '\nstopped\n' and run.returncode == 130

def test_two_processes_train_as_one_and_resume(tmp_path):
    settings = {**TINY, 'task': 'copy', 'train_length': 7, 'dropout': 0, 'max_iters': 60,
                'gradient_accumulation_steps': 2}
    assert train(**{**settings, 'out_dir': tmp_path / 'one'})[0] == 0
    torchrun = (sys.executable, '-m', 'torch.distributed.run', '--nproc_per_node=2', '--standalone')
    run = start(*as_args({**settings, 'out_dir': tmp_path / 'two'}), launcher=torchrun)
    wait_for(run, 'step 10/')
    run.send_signal(signal.SIGTERM)
    out = run.communicate()[0]
    step = load(tmp_path / 'two')['step']
    assert 10 <= step < 60 and out.count('stopped after step') == 1
    assert out.count(f'step {step}/') == 1
    resumed = as_args({**settings, 'out_dir': tmp_path / 'two', 'resume': True})
    run = start(*resumed, launcher=torchrun)
    out = run.communicate()[0]
    assert run.returncode == 0 and out.count('final | ') == 1 and 'processes: 2' in out
    one, two = losses(tmp_path / 'one'), losses(tmp_path / 'two')
    assert list(one) == list(two) == list(range(1, 61)) and one[60] < one[1] - 0.1
    assert max(abs(one[step] - two[step]) for step in one) < 1e-4

def test_loss_that_is_not_finite_stops_the_run(tmp_path):
    for warmup, name in ((0, 'at once'), (1, 'later')):
        code, _, err = tiny(tmp_path / name, learning_rate=9e18, save_interval=1, max_iters=50,
                            warmup_ratio=warmup)
        assert 'not finite at step' in code and f'{name}/last.pt is as it was' in code
    assert all(p.isfinite().all() for p in load(tmp_path / 'later')['model'].values())

def test_overwrite_gives_the_old_run_away_late(tmp_path):
    """only when the new one has made a step and saved it"""
    files = lambda: {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    tiny(tmp_path, max_iters=3)
    before = files()
    refused(tiny(tmp_path, overwrite=True, n_embd=2 ** 40), 'this does not fit in memory')
    full = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
    run = start(*as_args({**TINY, 'out_dir': tmp_path, 'overwrite': True}), preexec_fn=full)
    out = run.communicate()[0]
    assert run.returncode == 2 and f'train.py: cannot write {tmp_path}/last.pt: ' in out
    assert 'Traceback' not in out and files() == before

# --------------------------------------------------------------------------------------------------
# settings

def settings_of(*args):
    """{setting: value}, as -h shows them"""
    code, out, err = train(*args, '-h')
    assert code == 0, err
    found = re.findall(r"(?m)^  --(\w+) +\w+ +('[^']*'|\([^)]*\)|\S+) +\w", out)
    return {key: ast.literal_eval(value) for key, value in found}

def test_files_and_flags(tmp_path):
    file = tmp_path / 'x.py'
    file.write_text('"""A comment."""\n# another\ndropout = 0\neval_lengths = [1, 2, 2 * 4]\n'
                    'attn = "rope"\ncompile = False\nout_dir = "auto"\nmin_lr_ratio = -0.0\n'
                    'n_embd = 4 * 64\nbatch_size = 1024 // 3 - (1 + 1)\nlearning_rate = 3 / 1000\n')
    s = settings_of('--seed', '7', '--attn=fot', file, '--compile=false', '--eval-n', '4 * 8',
                    '--resume=true')
    assert s['attn'] == 'fot' and s['seed'] == 7 and s['resume'] is True and s['compile'] is False
    assert s['dropout'] == 0.0 and type(s['dropout']) is float and s['eval_lengths'] == (1, 2, 8)
    assert s['out_dir'] == 'out/x-fot-7' and s['n_layer'] == 4
    assert (s['n_embd'], s['batch_size'], s['learning_rate'], s['eval_n']) == (256, 339, 0.003, 32)
    s = settings_of('--learning_rate', '3e-4', '--eval_lengths=1,4,16')
    assert s['eval_lengths'] == (1, 4, 16) and s['learning_rate'] == 3e-4
    assert settings_of('--eval_lengths=4', '--grad_clip=-0')['eval_lengths'] == (4,)
    assert settings_of()['out_dir'] == 'out/flipflop-tra-0'
    s = settings_of('--tra_sparsity=false', '--eval_n=8', '--n_embd', '4*8', '--max_iters=9')
    assert s['out_dir'] == 'out/flipflop-tra-0-tra_sparsity=False-n_embd=32'
    assert settings_of('--out_dir=True story', '--out_dir=1')['out_dir'] == '1'

def test_help_lists_every_setting():
    """key, type, value and comment of each; defaults of the model are those of tra.Config"""
    code, out, _ = train('-h')
    lines = [line.split(maxsplit=3) for line in out.splitlines() if line.startswith('  --')]
    assert code == 0 and all(len(line) == 4 for line in lines)
    assert ['--n_layer', 'int', '4', 'blocks'] in lines
    defaults = settings_of()
    assert [line[0] for line in lines] == [f'--{key}' for key in defaults] and len(defaults) > 40
    for field in dataclasses.fields(Config)[1:]:                    # all but vocab_size
        assert defaults[field.name] == field.default, field.name
    for key, default in make_task.__kwdefaults__.items():
        assert defaults[key] == default, key

@pytest.mark.parametrize('line, complaint', [
    ('n_layers = 4', "x.py:2: unknown setting 'n_layers', did you mean 'n_layer'?"),
    ('n_layer = 2.5', 'x.py:2: n_layer wants a value like 4, not 2.5'),
    ('n_layer = True', 'x.py:2: n_layer wants'),
    ('n_layer = 1000 * 1000000000000000000', 'x.py:2: n_layer wants'),
    ('dropout = "high"', 'x.py:2: dropout wants'),
    ('dropout = 1e999', 'x.py:2: dropout wants'),
    ('task = None', "x.py:2: task wants a value like 'flipflop', not None"),
    ('eval_lengths = (1, "2")', 'x.py:2: eval_lengths wants'),
    ('eval_lengths = ()', 'x.py:2: eval_lengths wants'),
    ('batch_size = 9 ** 9 ** 9', 'x.py:2: batch_size wants'),
    ('batch_size = 1 // 0', 'x.py:2: batch_size wants'),
    ('batch_size = "a" * 4', 'x.py:2: batch_size wants'),
    ('seed = n_embd * 2', 'x.py:2: seed wants a value like 0, not n_embd * 2'),
    ('batch_size = open("/etc/passwd")', 'x.py:2: batch_size wants'),
    ('batch_size = [x for x in (1,)]', 'x.py:2: batch_size wants'),
    ('import os', 'x.py:2: not like batch_size = 32: import os'),
    ('seed = batch_size = 1', 'x.py:2: not like'),
    ('seed = = 1', 'invalid syntax (x.py, line 2)'),
    ('task = "\x00"', 'null bytes'),
])
def test_bad_config_file(tmp_path, line, complaint):
    file = tmp_path / 'x.py'
    file.write_text(f'seed = 1\n{line}\n')
    refused(train(file), complaint)

@pytest.mark.parametrize('args, complaint', [
    ('--batchsize=3', "unknown setting 'batchsize', did you mean 'batch_size'?"),
    ('--batchsize 3', "unknown setting 'batchsize', did you mean 'batch_size'?"),
    ('--n_layer=two', 'n_layer wants a value like 4, not two'),
    ('--n_layer=', 'n_layer wants a value like 4, not ()'),
    ('--n_layer=3;seed=4', 'invalid syntax'),
    ('--resume=maybe', 'resume wants a value like False'),
    ('--resume', '--resume needs a value'),
    ('--resume --seed=1', '--resume needs a value'),
    ('--compile=perhaps', "compile 'perhaps' is unknown"),
    ('config/missing.py', "No such file or directory: 'config/missing.py'"),
    ('--task=chess', "task 'chess' is unknown"),
    ('--attn=linear', "unknown attn 'linear'"),
    ('--n_embd=10 --n_head=4', 'n_embd (10) must be divisible by n_head (4)'),
    ('--train_length=7', 'flipflop length 7 must be even'),
    ('--task=copy --repeats=False --train_length=20', 'n_symbols'),
    ('--max_iters=0', 'max_iters wants a value like 20000, not 0'),
    ('--eval_lengths=2,0', 'eval_lengths wants a value like (1, 4), not (2, 0)'),
    ('--seed=-1', 'seed wants a value like 0, not -1'),
    ('--learning_rate=-1e-3', 'learning_rate wants'),
    ('--warmup_ratio=2', 'warmup_ratio and min_lr_ratio are shares, at most 1'),
    ('--beta2=1', 'Invalid beta parameter at index 1'),
    ('--device=tpu9', "device 'tpu9' does not work here"),
    ('--dtype=float16', "dtype 'float16' is unknown"),
    ('--resume=True --overwrite=True', 'choose one'),
    ('--resume=True', 'out/flipflop-tra-0/last.pt is missing'),
    ('--out_dir=', 'out_dir is empty'),
    ('--task=wikitext --data_dir=nowhere', 'python data.py wikitext103 --data_dir=nowhere'),
    ('RANK=1', 'RANK is 1 and WORLD_SIZE 1'),
    ('RANK=1 WORLD_SIZE=2 --device=cuda:1', "device 'cuda:1' is for one process"),
])
def test_bad_flag(tmp_path, monkeypatch, args, complaint):
    monkeypatch.chdir(tmp_path)
    for variable in re.findall(r'[A-Z_]+=\d', args):
        monkeypatch.setenv(*variable.split('='))
    refused(train(*re.sub(r'[A-Z_]+=\d', '', args).split()), complaint)
    assert not Path('out').exists()

def test_a_run_that_is_missing_has_a_neighbour(tmp_path):
    (tmp_path / 'copy-tra-0-n_embd=64').mkdir()
    (tmp_path / 'copy-tra-0-n_embd=64' / 'last.pt').touch()
    with pytest.raises(ValueError, match='tra-0/last.pt is missing, did you mean .*-n_embd=64.$'):
        data.read_checkpoint(tmp_path / 'copy-tra-0' / 'last.pt')
    with pytest.raises(ValueError, match='is missing$'):
        data.read_checkpoint(tmp_path / 'nowhere' / 'x' / 'last.pt')

def test_bad_checkpoints(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny('run', max_iters=3)
    last, good = Path('run/last.pt'), load('run')
    changed = lambda key, **changes: {**good, key: {**good[key], **changes}}
    weight = lambda value: changed('model', **{'embed.weight': value})
    for complaint, content, changes in (
            ('n_embd=16, but now it is 32', good, {'n_embd': 32}),
            ("attn='tra', but now it is 'rope'", good, {'attn': 'rope'}),
            ('seed=0, but', good, {'seed': 1}),
            ('batch_size=8, but', good, {'batch_size': 4}),
            ('vocab_size', good, {'task': 'copy'}),
            ('step 3 is beyond max_iters 2', good, {'max_iters': 2}),
            ('step -1 is beyond', {**good, 'step': -1}, {}),
            ("n_wings=2, but now it is 'unknown here'", changed('config', n_wings=2), {}),
            ('size mismatch for embed.weight', weight(torch.zeros(7, 16)), {}),
            ("'embed.weight' is not a tensor of finite", weight(torch.full((5, 16), math.nan)), {}),
            ("'embed.weight' is not a tensor of finite", weight('x'), {}),
            ("KeyError('optimizer')", {k: v for k, v in good.items() if k != 'optimizer'}, {}),
            ('it has no moments', changed('optimizer', state={}), {}),
            ('cannot be resumed', {**good, 'best': 'low'}, {}),
            ("its 'step' is no int", {**good, 'step': 'three'}, {}),
            ("its 'config' is no dict", {**good, 'config': [1]}, {}),
            ('no checkpoint', {'weights': 1}, {}),
            ('damaged', None, {}),
            ('pickled object', {**good, 'config': Trap()}, {})):
        torch.save(good if content is None else content, last)
        if content is None:
            last.write_bytes(last.read_bytes()[:-1000])
        before = last.read_bytes()
        result = tiny('run', **{'max_iters': 3, 'resume': True, **changes})
        refused(result, 'run/last.pt', complaint)
        assert last.read_bytes() == before
    assert not Path('trapped').exists()

def test_folders_that_cannot_be_used(tmp_path):
    (tmp_path / 'file').write_text('')
    refused(tiny(tmp_path / 'file' / 'run'), str(tmp_path / 'file'))
    for name in ('metrics.jsonl', 'config.json', 'best.pt'):        # part of a run is a run
        (tmp_path / name[:2]).mkdir()
        (tmp_path / name[:2] / name).write_text('{}')
        refused(tiny(tmp_path / name[:2]), f'already holds a run ({name})')
    run = start(*as_args({**TINY, 'out_dir': tmp_path / 'x'}),
                env={'TORCHINDUCTOR_CACHE_DIR': '/dev/null/x', 'TORCHDYNAMO_DISABLE': '0'})
    out = run.communicate()[0]
    assert run.returncode == 2 and 'train.py: ' in out and "'/dev/null/x'" in out.splitlines()[-1]

# --------------------------------------------------------------------------------------------------
# README.md, results/ and config/

README, RESULTS = ((ROOT / name).read_text() for name in ('README.md', 'results/README.md'))

def test_readme_is_short():
    lines = README.splitlines()
    assert len(lines) <= 200
    for line in lines + RESULTS.splitlines():
        assert len(line) <= 100 or line.startswith(('|', '<!--')), line
    assert lines.index('```bash') < 40
    counts = dict(re.findall(r'`(\w+\.py)`\s\((\d+)', README))
    assert counts == {f'{name}.py': str(len((ROOT / f'{name}.py').read_text().splitlines()))
                      for name in ('tra', 'train', 'data', 'eval')}

def test_tables_are_those_of_the_results(command, monkeypatch):
    """A table stands below <!-- results/NAME.json --FLAGS: TITLE -->: what eval.py prints of it."""
    monkeypatch.chdir(ROOT)
    found = [x for page in (README, RESULTS) for x in re.findall(
        r'<!-- ((?:results/[\w.]+ ?)+)([^:>]*): ([^>]*) -->\n+(?:```\n)?((?:\|.*\n)+)', page)]
    tables = [x for page in (README, RESULTS) for x in re.findall(r'(?m)(?:^\|.*\n)+', page)]
    assert {x[3] for x in found} == {x for x in tables if not x.startswith(('| start', '| rate'))}
    for paths, flags, title, table in found:
        result = json.loads(Path(paths.split()[0]).read_text())
        if 'kernel' in result:
            printed = evaluation.bench_report(result)
        else:
            assert all(set(r) >= {'config', 'seed', 'step'} for r in result['runs'])
            printed = command(*paths.split(), *flags.split())[1]
        table = table.rstrip() if title == 'table' else f'{title}:\n\n{table.rstrip()}'
        assert table in printed, (paths, title)
    used = {path for x in found for path in x[0].split()}
    used |= {'results/start.json', 'results/why.json'}
    assert used == {str(path) for path in Path('results').glob('*.json')}

def test_table_of_starts():
    """a cell has the exact match of each seed; of flip-flop the lowest of the splits"""
    runs = json.loads((ROOT / 'results/start.json').read_text())['scratch']
    table = re.search(r'\| start .*\n\|-.*\n((?:\|.*\n)+)', RESULTS)[1]
    for line in table.splitlines():
        start, *cells = (cell.strip() for cell in line.split('|')[1:-1])
        for cell, (task, steps) in zip(cells, (('flipflop', 100), ('copy', 500), ('induct', 500))):
            values = [min(x for key, x in run['exact_match'].items() if key.endswith('@1'))
                      for run in runs if (run['start'], run['config'], run['changed']) ==
                      (start, f'{task}_cpu', {'max_iters': steps})]
            assert cell == (', '.join(f'{x:.2f}' for x in values) or '-'), (start, task)

def test_table_of_rates():
    """a cell has the exact match at the training length"""
    runs = json.loads((ROOT / 'results/start.json').read_text())['scratch']
    found = {}
    for run in runs:
        changed = {'learning_rate': 4e-4, 'attn': 'tra', **run['changed']}
        if (run['config'], run['seed']) == ('induct_paper_cpu', 100) and set(changed) == {
                'max_iters', 'learning_rate', 'attn'} and changed['max_iters'] == 1000 and (
                run['start'] == 'bias 0.02 sqrt(C) + gates by layer'):
            rate = f'{changed["learning_rate"]:.0e}'.replace('e-0', 'e-')
            found[rate, changed['attn']] = f'{run["exact_match"]["val@1"]:.2f}'
    head, rows = re.search(r'(\| rate .*\n)\|-.*\n((?:\|.*\n)+)', RESULTS).groups()
    lines = (head + rows).splitlines()
    head, *rows = ([x.strip() for x in line.split('|')[1:-1]] for line in lines)
    assert {(row[0], attn): cell for row in rows for attn, cell in zip(head[1:], row[1:])} == found

def test_numbers_in_prose_stand_in_a_table():
    """Shares, ratios and bits: in a table of the pages, or in bench, why or start.json."""
    tables = '\n'.join(re.findall(r'(?m)^\|.*', README + RESULTS))
    bench = evaluation.bench_report(json.loads((ROOT / 'results/bench.json').read_text()))
    more = ((ROOT / f'results/{name}.json').read_text() for name in ('why', 'start'))
    known = tables + bench + ''.join(more)
    theirs = {'1.12', '1.14', '2.13', '3.11'}               # the paper's times RoPE; torch, Python
    for page in (README, RESULTS):
        prose = re.sub(r'(?s)```.*?```|<!--.*?-->|`[^`\n]*`|\]\([^)]*\)', '', page)
        prose = re.sub(r'(?m)^\|.*', '', prose)
        for number in re.findall(r'(?<![\w.])\d+\.\d+', prose):
            assert number in theirs or re.search(rf'(?<![\d.]){re.escape(number)}', known), number

def test_reproduce_skips_and_resumes(tmp_path):
    """a run is trained, then skipped; one that was cut short is resumed; a failure is told"""
    for path in (*ROOT.glob('*.py'), *ROOT.glob('config/*'), ROOT / 'results/reproduce.sh'):
        (tmp_path / path.relative_to(ROOT)).parent.mkdir(exist_ok=True)
        (tmp_path / path.relative_to(ROOT)).write_text(path.read_text())
    env = {**os.environ, 'PYTHON': sys.executable, 'TORCHDYNAMO_DISABLE': '1'}
    def run(*flags):
        done = subprocess.run(['bash', 'results/reproduce.sh', 'run', 'a', 'config/flipflop_cpu.py',
                               *as_args({**TINY, 'max_iters': 3}), *flags], cwd=tmp_path, text=True,
                              capture_output=True, env=env)
        return done.returncode, done.stdout
    code, out = run()
    assert code == 0 and 'a begins' in out and re.search(r'a ends: .*val@', out)
    assert run() == (0, '')
    metrics = tmp_path / 'out/a/metrics.jsonl'
    metrics.write_text(metrics.read_text().replace('"final": true', '"final": false'))
    assert run()[0] == 0
    assert 'resumed out/a/last.pt at step 3' in (tmp_path / 'out/a.log').read_text()
    (tmp_path / 'out/a/metrics.jsonl').unlink()
    code, out = run('--n_embd=12')
    assert code == 255 and 'n_embd' in out
    usage = subprocess.check_output(['bash', 'results/reproduce.sh'], cwd=tmp_path, text=True)
    assert 'reproduce.sh demo' in usage and 'set -e' not in usage

SORT = """```diff
--- data.py
+def sort(rng, n, lo, hi, n_symbols, repeats, **_):
+    x, size, sep = draw(rng, n, lo, hi, n_symbols, repeats)
+    answer = np.sort(np.where(np.arange(hi) < size[:, None], x, n_symbols))     # unused ones last
+    return pack([(x, size, False), sep, (answer, size, True)], pad=n_symbols + 1)
+
 INSTRUCTIONS = '=<^$#%'         # token ids S+2 to S+7, and what they ask for:
@@
     'copy': Task(1, copy),
+    'sort': Task(5, sort),
```"""

def test_kernel_of_the_readme():
    """the lines for somebody's own model print what their comment says"""
    [code] = re.findall(r'```python\n(.*?)```', README, re.S)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(code, {})
    assert len(code.splitlines()) <= 5
    assert out.getvalue().strip() == code.splitlines()[-1].split('# ')[1]

def test_readme_changes_work(tmp_path):
    """the lines that add an attention, and a task, in a copy: it trains and is evaluated"""
    for path in ROOT.glob('*.py'):
        (tmp_path / path.name).write_text(path.read_text())
    for name, diff in re.findall(r'```diff\n--- (\w+\.py)\n(.*?)```', README + SORT, re.S):
        text = (tmp_path / name).read_text()
        for hunk in diff.split('@@\n'):
            lines = hunk.splitlines(True)
            old, new = (''.join(x[1:] for x in lines if x[0] in signs) for signs in (' -', ' +'))
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        (tmp_path / name).write_text(text)
    tiny = {**TINY, 'max_iters': 2, 'train_length': 8, 'task': 'sort', 'attn': 'window'}
    for args, words in ((['train.py', *as_args(tiny), '--out_dir=out'], 'final | sort | window'),
                        (['eval.py', 'out', '--attention=cab|abc', '--plot=a.png'], '')):
        done = subprocess.run([sys.executable, *args], cwd=tmp_path, capture_output=True, text=True,
                              env={**os.environ, 'TORCHDYNAMO_DISABLE': '1'})
        assert done.returncode == 0 and words in done.stdout, done.stderr
    assert is_picture(tmp_path / 'a.png')

@pytest.mark.parametrize('path', sorted((ROOT / 'config').glob('*.py')), ids=lambda path: path.stem)
def test_config_file_is_sound(path):
    """headed by its command, short, and every setting known"""
    s, text = settings_of(path), path.read_text()
    assert f'python train.py config/{path.name}' in text.split('\n\n')[0]
    assert len(text.splitlines()) <= 25
    assert s['task'] == path.stem.split('_')[0] and s['attn'] == 'tra'

def test_flipflop_cpu_learns(tmp_path):
    code, out, err = train(ROOT / 'config' / 'flipflop_cpu.py', max_iters=50, log_interval=1,
                           eval_n=8, final_n=8, eval_lengths=1, out_dir=tmp_path)
    curve = losses(tmp_path)
    assert code == 0 and curve[50] < 0.5 * curve[1], err

@needs_text
def test_wikitext_cpu_learns(tmp_path):
    with contextlib.redirect_stdout(io.StringIO()):
        data.prepare('wikitext2', 'bytes', tmp_path, TEXTS / 'wikitext-2')
    code, out, err = train(ROOT / 'config' / 'wikitext_cpu.py', max_iters=20, log_interval=1,
                           eval_n=512, final_n=512, eval_lengths='1,2', data_dir=tmp_path,
                           out_dir=tmp_path / 'run')
    curve = losses(tmp_path / 'run')
    assert code == 0 and 'test@256' in out and curve[20] < curve[1] - 1, err

def test_readme_names_what_exists():
    for page in (README, RESULTS):
        headings = re.findall(r'(?m)^##+ .*', page)
        assert len(headings) == len(set(headings))
        for name in re.findall(r'\b(?:config|assets|results)/[\w.-]+|(?<![*\w$])\w+\.py\b', page):
            assert (ROOT / name).exists() or (ROOT / 'config' / name).exists(), name
    script = (ROOT / 'results/reproduce.sh').read_text()
    parts = re.search(r"parts='([\w ]+)'", script)[1].split()
    assert set(re.findall(r'reproduce\.sh (\w+)', README + RESULTS + script)) <= {*parts, 'all'}
    commands = re.sub('#.*', '', '\n'.join(re.findall(r'```bash\n(.*?)```', README, re.S)))
    helps = {}
    for script, args in re.findall(r'(\w+\.py)\b([^&\n]*)', commands):
        if script == 'test_tra.py':
            continue
        about = script, *([args.split()[0]] if script == 'data.py' else [])
        if about not in helps:
            command = [sys.executable, *about, '-h']
            helps[about] = subprocess.check_output(command, cwd=ROOT, text=True)
        for flag in re.findall(r'--\w+', args):
            assert flag in helps[about], (script, flag)
    assert {'train.py', 'eval.py', 'data.py'} <= {script for script, *_ in helps}
