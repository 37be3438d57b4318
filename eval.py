"""
Does what was learned on short sequences hold on long ones? Tables and pictures of the runs that train.py leaves.

    python eval.py out/RUN                                        the splits and lengths of the paper
    python eval.py out/TRA out/ROPE --lengths=1x,8x,64x --n=100   runs side by side, at multiples of the training length
    python eval.py out/RUN --split=sparse,dense --lengths=4096    some splits, a length of your own
    python eval.py out/TRA out/ROPE --plot                        the metric against length, eval.png in the first folder
    python eval.py out/TRA out/ROPE --attention=w1i0i1r1          what each head attends to, attention.png in the first folder
    python eval.py out/RUN --sample=w1i0r --tokens=1              what the model says next
    python eval.py out/RUN --json > result.json                   for programs; eval.py result.json prints the table again
    python eval.py --bench                                        what the kernel costs on this machine

Runs that differ in nothing but the seed are one setting, shown as mean and standard deviation.

A length is in tokens for flipflop; for copy, induct and instruct it is the most symbols of a bucket (data.py); for wikitext
it is the window. --n is sequences for each split and length: by default as many as make 2^18 tokens, but from 2 to 1000.
For wikitext it is tokens of text: by default all, and never less than the largest window.

--json and --out=FILE.json give

    {"runs": [{"run", "task", "attn", "seed", "train_length", "rows": [
        {"split", "length", "n", "exact_match", "token_error", "upper95"}           synthetic tasks
        {"split", "window", "perplexity", "bits_per_byte", "tokens"}]}]}            wikitext

upper95 is null where a sequence was wrong. Besides, a run has "config" (the settings it was trained with), "checkpoint" and
"step" (the file read, and its training step)
and "mistakes" ("split", "length", "sequence", how many tokens are "wrong", the first of their "positions", and "text" to look
at); a row has "loss" (nats for each scored token), and "tokens" (scored ones) or, for wikitext, "by_position" (loss where
"first" to "last" tokens of the window were visible). "interrupted": true stands beside "runs" if Ctrl-C ended the work.
"""
import argparse
import ctypes
import json
import math
import os
import pickle
import re
import statistics
import sys
import time
import warnings
from collections import Counter
from contextlib import nullcontext
from datetime import timedelta
from itertools import zip_longest
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F

import tra
from data import check, make_task

# ----------------------------------------------------------------------------------------------------------------------
# checkpoints

def read_checkpoint(path):
    """
    The dict that train.py saved. Only tensors and plain values are read: a file with any other pickled object, which could
    run code as it is loaded, is refused.
    """
    path = Path(path)
    check(path.is_file(), f'{path} is missing')
    try:
        with warnings.catch_warnings(action='ignore'):
            checkpoint = torch.load(path, map_location='cpu', weights_only=True)
    except Exception as error:  # a damaged file fails in many ways: zip, pickle, end of file, ...
        if isinstance(error, pickle.UnpicklingError) and 'GLOBAL' in str(error):
            raise ValueError(f'{path} is refused: it holds a pickled object, not only tensors and plain values') from None
        raise ValueError(f'{path} cannot be read: damaged, or no checkpoint at all ({type(error).__name__})') from None
    for key in ('model', 'model_config', 'config', 'step'):
        check(isinstance(checkpoint, dict) and key in checkpoint, f'{path} is no checkpoint of train.py: it has no {key!r}')
    return checkpoint

def load_run(folder, device='cpu', checkpoint=None):
    """(model, task, config) of a run; the config also says which "checkpoint" was read, and its "step"."""
    folder = Path(folder)
    check(folder.is_dir(), f'run folder {folder} does not exist')
    found = [name for name in ('best.pt', 'last.pt') if (folder / name).is_file()]
    check(checkpoint or found, f'run folder {folder} holds no checkpoint, neither best.pt nor last.pt')
    path = folder / (checkpoint or found[0])
    saved = read_checkpoint(path)
    config = {**saved['config'], 'checkpoint': path.name, 'step': saved['step']}
    try:
        model = tra.Decoder(tra.Config(**saved['model_config']))
        model.load_state_dict(saved['model'])
        name, train_length = config['task'], config['train_length']
    except (TypeError, KeyError, RuntimeError) as error:
        raise ValueError(f'{path} does not fit this code: {str(error)[:200]}') from None
    task = make_task(name, train_length, **{key: config[key] for key in make_task.__kwdefaults__ if key in config})
    return model.to(device).eval(), task, config

# ----------------------------------------------------------------------------------------------------------------------
# scoring

def evaluate(model, task, split, length, n=None, device='cpu', autocast=None, mistakes=None, progress=None):
    """
    A row of the table: n sequences of a split and length, or for wikitext the first n tokens of a split in windows of that
    length. autocast is a context manager such as torch.autocast('cuda', torch.bfloat16). The model keeps its mode, and no
    random number is drawn, so a training run goes on as if nothing had been. A list of mistakes gets those of the first
    wrong sequences; progress is called with the number of tokens just done.
    """
    def run(idx, targets):
        return predict(model, idx, targets, device, autocast or nullcontext(), progress)
    n = n or default_n(task, split, length)
    batch_tokens = 2 ** 14 if torch.device(device).type == 'cpu' else 2 ** 16
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            if task.name == 'wikitext':
                return evaluate_text(run, task, split, length, n, batch_tokens)
            return evaluate_sequences(run, task, split, length, n, batch_tokens, mistakes)
    finally:
        model.train(was_training)

def default_n(task, split, length):
    return len(task.tokens(split)) - 1 if task.name == 'wikitext' else min(1000, max(2, 2 ** 18 // length))

def predict(model, idx, targets, device, autocast, progress=None):
    """
    What the model says at each scored position, always with the true tokens before it: the likeliest token (B, T), -1 where
    nothing is scored, and the loss (B, T), 0 there. Long sequences are read in chunks through the KV cache, and the head sees
    scored positions only, some at a time: memory is the cache and one chunk, whatever the length and the vocabulary.
    """
    B, T = idx.shape
    chunk = chunk_size(model.config, B, T)
    cache = model.new_cache() if T > chunk else None
    some = max(1, 2 ** 24 // model.config.vocab_size)
    idx, targets = torch.as_tensor(idx, device=device), torch.as_tensor(targets, device=device)
    said, loss = torch.full((B, T), -1), torch.zeros(B, T, dtype=torch.float64)
    for start in range(0, T, chunk):
        part = slice(start, min(start + chunk, T))
        scored = targets[:, part] >= 0
        said_here, loss_here = [], []
        with autocast:
            x = model.trunk(idx[:, part], cache)[scored]                    # (scored, C)
            for x, target in zip(x.split(some), targets[:, part][scored].split(some)):
                logits = model.head(x)
                logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
                said_here.append(logits.argmax(-1).cpu())
                loss_here.append(F.cross_entropy(logits, target, reduction='none').cpu())
        said[:, part][scored.cpu()] = torch.cat(said_here)
        loss[:, part][scored.cpu()] = torch.cat(loss_here).double()
        if progress:
            progress(B * (part.stop - part.start))
    return said.numpy(), loss.numpy()

def chunk_size(config, B, T):
    """
    How many tokens of each sequence to read at a time. TRA's kernel holds no matrix of chunk x T numbers; rope and nope hold
    one, a mask, and the other baselines one for every head and sequence.
    """
    if config.attn == 'tra':
        return 4096
    row = T if config.attn in ('rope', 'nope') else B * config.n_head * T
    return min(4096, max(16, 2 ** 24 // row))

def evaluate_sequences(run, task, split, length, n, batch_tokens, mistakes):
    """
    exact_match: the share of sequences that are right at every scored position. token_error: the share of wrong positions
    among all that are scored. upper95: the rule of three. If no sequence in n is wrong, then with 95% confidence fewer than
    3 / n of all are, since a higher rate would show in n draws more than 95% of the time: (1 - 3 / n)^n is about 0.05.
    """
    done = right = tokens = wrong_tokens = 0
    total = 0.0
    for idx, targets in task.eval_batches(split, length, n, batch_tokens):
        said, loss = run(idx, targets)
        wrong = said != targets                                             # both are -1 where nothing is scored
        for i in np.nonzero(wrong.any(1))[0]:
            if mistakes is not None and len(mistakes) < 10:
                positions = (np.nonzero(wrong[i])[0] + 1).tolist()          # the target of t is the token at t + 1
                mistakes.append({'split': split, 'length': length, 'sequence': done + int(i), 'wrong': len(positions),
                                 'positions': positions[:100], 'text': marked(task, idx[i], said[i], positions)})
        done += len(idx)
        right += int((~wrong.any(1)).sum())
        tokens += int((targets >= 0).sum())
        wrong_tokens += int(wrong.sum())
        total += float(loss.sum())
    return {'split': split, 'length': length, 'n': done, 'exact_match': right / done, 'token_error': wrong_tokens / tokens,
            'upper95': min(1.0, 3 / done) if right == done else None, 'tokens': tokens, 'loss': total / tokens}

def marked(task, tokens, said, positions, before=70, after=10):
    """
    The text around the first wrong token and, below it, what was said instead:

        w1i0i1r1w0i1r0
               ^     ^  said 0 1
    """
    start, stop = max(0, positions[0] - before), min(len(tokens), positions[0] + after)
    text, marks = '...' if start else '', ''
    here = [t for t in positions if t < stop]
    for t in range(start, stop):
        if t in here:  # large alphabets print Chinese characters, two columns wide
            marks = marks.ljust(sum(2 if c >= '\u2e80' else 1 for c in text)) + '^'
        text += task.decode(tokens[t:t + 1])
    answers = ' '.join(task.decode(said[t - 1:t]) or '(padding)' for t in here)
    return f'{text}{"..." if task.decode(tokens[stop:]) else ""}\n{marks}  said {answers}'

def evaluate_text(run, task, split, window, n, batch_tokens):
    """
    Perplexity of the tokens 1 .. n; token 0 has nothing before it. The text is cut into windows that do not overlap, the last
    one shorter, and each token is predicted from those before it in its own window, the first of a window from one. So every
    window size scores the same tokens, each once; what a longer window gains is context.

    bits_per_byte shares the loss among the bytes that the tokens stand for, by the split's mean of bytes per token: exact for
    byte models and for whole splits. by_position bins the loss by visible tokens: 1, 2, 3-4, 5-8, ...
    """
    task.last_start(split, window)                                          # complains of a window longer than the text
    data = task.tokens(split)
    n = min(n, len(data) - 1)
    sums, counts = np.zeros(window), np.zeros(window, dtype=np.int64)       # by position in the window
    whole, step = n - n % window, max(1, batch_tokens // window) * window
    cuts = [(start, min(start + step, whole), window) for start in range(0, whole, step)]
    for start, stop, width in cuts + [(whole, n, n - whole)] * (whole < n):
        x = np.array(data[start:stop + 1], dtype=np.int64)
        loss = run(x[:-1].reshape(-1, width), x[1:].reshape(-1, width))[1]
        sums[:width] += loss.sum(0)
        counts[:width] += len(loss)
    loss = float(sums.sum() / n)
    edges = [0] + [2 ** i for i in range((window - 1).bit_length() + 1)]
    bins = [{'first': a + 1, 'last': min(b, window), 'loss': float(sums[a:b].sum() / counts[a:b].sum())}
            for a, b in zip(edges, edges[1:]) if counts[a:b].any()]
    bytes_per_token = task.meta['bytes'][split] / task.meta['tokens'][split]
    return {'split': split, 'window': window, 'perplexity': math.exp(loss) if loss < 709 else math.inf, 'tokens': n,
            'bits_per_byte': loss / math.log(2) / bytes_per_token, 'loss': loss, 'by_position': bins}

# ----------------------------------------------------------------------------------------------------------------------
# tables

def share(x):
    """Three decimals, but more where they would turn "almost none" into 0 or "almost all" into 1."""
    if x in (0, 1) or f'{x:.3f}' not in ('0.000', '1.000'):
        return f'{x:.3f}'
    return f'{x:.1e}' if x < 0.5 else f'{x:.6f}'

# a row's metrics: key, name and how to write it; pictures show the first that a row has
METRICS = {'exact_match': ('exact match', share), 'token_error': ('token error', share),
           'perplexity': ('perplexity', '{:.2f}'.format), 'bits_per_byte': ('bits per byte', '{:.3f}'.format)}

def format_table(rows):
    """The rows of one run, as evaluate returns them, for people: splits and lengths down, metrics across."""
    return format_settings([('', [rows])])

def format_settings(settings):
    """
    Tables for [(label, [rows of a run, rows of its next seed, ...]), ...]. One setting: splits and lengths down, its metrics
    across. Several: a table for each metric, settings down, splits and lengths across.
    """
    every = [row for _, runs in settings for rows in runs for row in rows]
    if not every:
        return 'nothing measured yet'
    size = 'window' if 'window' in every[0] else 'length'
    splits = list(dict.fromkeys(row['split'] for row in every))
    places = sorted({(row['split'], row[size]) for row in every}, key=lambda x: (splits.index(x[0]), x[1]))
    metrics = {key: name for key, (name, _) in METRICS.items() if key in every[0]}
    cells = {(place, label): [row for rows in runs for row in rows if (row['split'], row[size]) == place]
             for label, runs in settings for place in places}
    some = [next(cells[place, label][0] for label, _ in settings if cells[place, label]) for place in places]
    counts = {'tokens' if size == 'window' else 'scored': [f"{row['tokens']:,}" for row in some]}
    if size == 'length':
        counts = {'sequences': [f"{row['n']:,}" for row in some], **counts}
        # of those settings in which no seed was ever wrong
        perfect = [any(cells[place, label] and all(row['upper95'] is not None for row in cells[place, label])
                       for label, _ in settings) for place in places]
        counts['error below'] = [f"{min(1, 3 / row['n']):.2g}" if x else '-' for row, x in zip(some, perfect)]

    def write(key, rows):
        values = [row[key] for row in rows]
        spread = f' ± {statistics.stdev(values):.3f}' if len(values) > 1 else ''
        return METRICS[key][1](statistics.mean(values)) + spread if values else '-'
    if len(settings) == 1:
        columns = [[metrics[key], *(write(key, cells[place, settings[0][0]]) for place in places)] for key in metrics]
        columns = [['split', *(split for split, _ in places)], [size, *(f'{length:,}' for _, length in places)],
                   *([name, *column] for name, column in counts.items()), *columns]
        return render(list(zip(*columns)))
    texts = []
    for key, name in metrics.items():
        lines = [['', *(f'{split} {length:,}' for split, length in places)]]
        lines += [[label, *(write(key, cells[place, label]) for place in places)] for label, _ in settings]
        lines += [[count, *column] for count, column in counts.items() if count != 'error below' or key == 'exact_match']
        texts.append(f'{name}:\n\n{render(lines)}')
    return '\n\n'.join(texts)

def render(lines):
    """A table that is aligned for the eye and is Markdown too: the first column to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*lines)]
    rows = [' | '.join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(line, widths))) for line in lines]
    rule = '|'.join('-' * (w + 1) + ':-'[i == 0] for i, w in enumerate(widths))
    return '\n'.join([f'| {rows[0]} |', f'|{rule}|', *(f'| {row} |' for row in rows[1:])])

# what may differ between the seeds of one setting
SAME = {'seed', 'out_dir', 'resume', 'overwrite', 'log_interval', 'eval_interval', 'save_interval', 'eval_n', 'final_n',
        'eval_lengths', 'data_dir', 'device', 'dtype', 'compile', 'checkpoint', 'step'}

def group(results):
    """[(label, results)]: the runs of each setting, called by their attention and what sets them apart from most others."""
    groups = {}
    for result in results:
        groups.setdefault(json.dumps(result['config'], sort_keys=True), []).append(result)
    configs, labels = [json.loads(key) for key in groups], []
    keys = [k for k in dict.fromkeys(k for c in configs for k in c) if any(c.get(k) != configs[0].get(k) for c in configs)]
    for config, members in zip(configs, groups.values()):
        rare = [k for k in keys if k != 'attn' and 2 * sum(c.get(k) == config.get(k) for c in configs) <= len(configs)]
        label = ', '.join([config['attn'], *(f'{k}={config.get(k)}' for k in rare)])
        if len(label) > 40:  # too much differs to say: the folder has the better name
            label = Path(members[0]['run']).name
        labels.append(label + (f' ({len(members)} seeds)' if len(members) > 1 else ''))
    return list(zip(labels, groups.values()))

# ----------------------------------------------------------------------------------------------------------------------
# pictures

BLUE, COLOURS = '#1f5fa8', ['#d9622b', '#3a9a5b', '#8a5fb0', '#c2415f', '#8c6d31', '#4aa3b5', '#777777']    # blue is TRA's

def pyplot():
    try:
        import matplotlib
    except ImportError:
        raise ValueError('pictures need matplotlib: pip install matplotlib') from None
    matplotlib.use('Agg')  # files only: a server has no screen
    import matplotlib.pyplot as plt
    plt.rcParams.update({'font.size': 11, 'axes.spines.top': False, 'axes.spines.right': False, 'axes.edgecolor': '#555555',
                         'axes.titleweight': 'bold', 'axes.titlesize': 12, 'legend.frameon': False, 'savefig.dpi': 160})
    return plt

def plot_lengths(settings, train_lengths, path):
    """
    The first metric against length: a panel for each split, a line for each setting, a band from its worst seed to its best.
    For wikitext one more panel has the loss by position in the longest window.
    """
    plt = pyplot()
    every = [row for _, runs in settings for rows in runs for row in rows]
    size = 'window' if 'window' in every[0] else 'length'
    metric = next(key for key in METRICS if key in every[0])
    if size == 'window' and all(math.isclose(row['loss'], row['bits_per_byte'] * math.log(2)) for row in every):
        metric = 'bits_per_byte'  # byte models: a token is a byte
    splits, lengths = list(dict.fromkeys(row['split'] for row in every)), sorted({row[size] for row in every})
    panels = [(split, size, metric) for split in splits] + [(splits[-1], 'by_position', 'loss')] * (size == 'window')
    fig, axes = plt.subplots(1, len(panels), figsize=(max(6.4, 1 + 3.5 * len(panels)), 3.9), squeeze=False, layout='constrained',
                             sharey=size == 'length')
    others = iter(COLOURS * len(settings))
    for n, (label, runs) in enumerate(settings):
        is_tra, taken = re.match(r'tra\b', label), any(re.match(r'tra\b', name) for name, _ in settings[:n])
        colour = BLUE if is_tra and not taken else next(others)
        for ax, (split, x, y) in zip(axes[0], panels):
            points = {}  # x: the values of all seeds
            for row in (row for rows in runs for row in rows if row['split'] == split):
                if x == size:
                    points.setdefault(row[x], []).append(row[y])
                elif row[size] == lengths[-1]:
                    for b in row['by_position']:
                        points.setdefault(math.sqrt(b['first'] * b['last']), []).append(b['loss'])
            at = sorted(points)
            ax.plot(at, [statistics.mean(points[p]) for p in at], 'o-', color=colour, label=label, lw=2.2, ms=5.5,
                    zorder=2 + 1 / (n + 1))  # the first on top
            ax.fill_between(at, [min(points[p]) for p in at], [max(points[p]) for p in at], color=colour, alpha=0.15, lw=0)
    for ax, (split, x, y) in zip(axes[0], panels):
        ticks = sorted({*lengths, *train_lengths}) if x == size else [p for p in (1, 8, 64, 512, 4096) if p <= lengths[-1]]
        ax.set_xscale('log', base=2)
        ax.set_xticks(ticks[::math.ceil(len(ticks) / 6)])
        ax.xaxis.set_major_formatter(lambda t, _: f'{t:g}' if t < 10000 else f'{t / 1000:.0f}k')
        ax.minorticks_off()
        ax.set_xlabel(x if x == size else 'tokens visible')
        ax.grid(axis='y', color='#e6e6e6')
        ax.set_title(split if x == size else f'{split}, in windows of {lengths[-1]}', pad=18, loc='left')
        for length in train_lengths:
            ax.axvline(length, color='#555555', lw=1, ls=(0, (4, 3)), zorder=1)
            ax.text(length, 1.01, f'trained at {length}', transform=ax.get_xaxis_transform(), ha='center', fontsize=9,
                    color='#555555')
        if size == 'length':
            ax.set_ylim(-0.03, 1.03)
        elif x == size and max(row[y] for row in every) > 4 * min(row[y] for row in every):
            ax.set_yscale('log', subs=[2, 5])
            ax.yaxis.set(major_formatter='{x:g}', minor_formatter='{x:g}')
    axes[0, 0].set_ylabel(METRICS[metric][0])
    if size == 'window':
        axes[0, -1].set_ylabel('loss (nats)')
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc='outside lower center', ncols=min(4, len(settings)))
    fig.savefig(path, bbox_inches='tight', pad_inches=0.15)
    plt.close(fig)

@torch.no_grad()
def attention_parts(model, idx):
    """
    For each layer what attention does with idx (1, T): weights (H, T, T); of TRA also keep and count (H, T, T), and gate
    (H, T), the factor by which a weight shrinks for each kept key.
    """
    inputs, layers, c = [], [], model.config
    hooks = [block.attn.register_forward_pre_hook(lambda _, args: inputs.append(args[0])) for block in model.blocks]
    with torch.compiler.set_stance('force_eager'):  # compiling takes longer than a few tokens do
        model(idx)
    for hook in hooks:
        hook.remove()
    for x, attn in zip(inputs, (block.attn for block in model.blocks)):
        T, parts = x.size(1), {}
        q, k, _ = (y.view(1, T, c.n_head, -1).transpose(1, 2) for y in attn.qkv(x).chunk(3, -1))  # (1, H, T, D)
        q, k = (F.rms_norm(y, y.shape[-1:], eps=1e-6) for y in (q, k))
        eye = torch.eye(T, device=x.device, dtype=x.dtype).expand(1, c.n_head, T, T)
        if c.attn in ('tra', 'fot'):
            log_gate = F.logsigmoid(attn.gate(x)).transpose(1, 2)                                 # (1, H, T)
        if c.attn == 'tra':
            parts = tra.tra_dense(q, k, eye, log_gate, c.tra_sparsity, c.tra_distance, return_parts=True)[1]
            parts.update({'gate': log_gate.exp()} if c.tra_distance else {})
        elif c.attn == 'rope':  # the weights are what attention puts out if the identity is its values
            parts['weights'] = tra.nope(tra.rotate(q, 0, c.rope_theta), tra.rotate(k, 0, c.rope_theta), eye)
        elif c.attn == 'fot':
            parts['weights'] = tra.fot(q, k, eye, log_gate.cumsum(-1))
        elif c.attn == 'cope':
            parts['weights'] = tra.cope(q, k, eye, attn.table)
        else:
            parts['weights'] = getattr(tra, c.attn)(q, k, eye)
        layers.append({name: part[0].float().cpu().numpy() for name, part in parts.items()})
    return layers

def plot_attention(rows, title, path):
    """
    Rows of (name, labels of the tokens, attention_parts of a layer), a panel for each head: queries down, keys across, the weight
    as colour; TRA's counts and gates as numbers.
    """
    plt = pyplot()
    from matplotlib.colors import LinearSegmentedColormap
    T, H = max(len(labels) for _, labels, _ in rows), max(len(parts['weights']) for _, _, parts in rows)
    any_tra, any_gate = (any(key in parts for _, _, parts in rows) for key in ('keep', 'gate'))
    numbers = T <= 24
    blues = LinearSegmentedColormap.from_list('', ['#e3eefa', '#6fa8dc', BLUE, '#0b2f5e'])
    oranges = LinearSegmentedColormap.from_list('', ['#fff3e6', '#f5a623'])
    cell = 0.36 if numbers else max(0.1, 8.6 / T)  # inches
    side, font = cell * (T + 2), min(12, 60 * cell)
    fig, axes = plt.subplots(len(rows), H, squeeze=False, layout='constrained',
                             figsize=(max(7, H * (side + 0.5) + 1), len(rows) * (side + 0.4) + 1.2))
    for n, (name, labels, parts) in enumerate(rows):
        T, tra_run, gated = len(labels), 'keep' in parts, 'gate' in parts
        for ax in axes[n, len(parts['weights']):]:
            ax.axis('off')
        for h, ax in enumerate(axes[n, :len(parts['weights'])]):
            weights = parts['weights'][h]
            keep = parts['keep'][h] > 0 if tra_run else np.tri(T) > 0
            image = np.ones((T, T + 2, 4))                                  # keys, a gap, the gate
            image[:, :T] = blues(weights)
            image[:, :T][~keep] = (0.92, 0.92, 0.92, 1)
            image[:, :T][np.tri(T) == 0] = 1                                # the future is blank
            if gated:
                image[:, T + 1] = oranges(parts['gate'][h])
                ax.text(T + 1.5, -0.2, 'gate', ha='center', fontsize=11, color='#b06f00')
            ax.pcolormesh(image, edgecolors='white', lw=0.6)
            if tra_run:
                kept = keep.sum() / np.tri(T).sum()
                ax.text(T, max(0.5, T / 16), f'keeps {kept:.0%}', ha='right', va='center', fontsize=12, color='#777777')
            for i in range(T if tra_run and numbers else 0):
                for j in np.nonzero(keep[i])[0]:
                    ax.text(j + 0.5, i + 0.52, f"{parts['count'][h, i, j]:.0f}/{i - j + 1}", ha='center', va='center',
                            fontsize=8, color='white' if weights[i, j] > 0.4 else '#333333')
                if gated:
                    ax.text(T + 1.5, i + 0.52, f"{parts['gate'][h, i]:.2f}", ha='center', va='center', fontsize=8)
            ax.set(xlim=(0, T + 2), ylim=(T, 0), aspect='equal')
            ax.set_title(f'{name}, head {h + 1}', loc='left', fontsize=14)
            turn = 90 if max(map(len, labels)) > 2 else 0
            ax.set_xticks(np.arange(T) + 0.5, labels, fontsize=font, family='monospace', rotation=turn)
            ax.set_yticks(np.arange(T) + 0.5, labels, fontsize=font, family='monospace')
            ax.tick_params(length=0, pad=2)
            ax.spines[:].set_visible(False)
    bar = fig.colorbar(plt.cm.ScalarMappable(cmap=blues), ax=axes, shrink=min(1, 4 / (side * len(rows))), aspect=18, pad=0.01)
    bar.set_label('attention weight', fontsize=13)
    bar.outline.set_visible(False)
    notes = ['a row is a query, a column a key'] + ['grey: dropped'] * any_tra
    notes += ['2/7: the 2nd kept key, and 7th of all, back from the query'] * (any_tra and numbers)
    notes += ['gate: what is left of a weight for each kept key further back'] * any_gate
    fig.suptitle(title, fontsize=18, fontweight='bold')
    fig.supxlabel('    '.join(notes) if side * H > 18 else '\n'.join(notes), fontsize=13, color='#555555')
    fig.savefig(path, dpi=min(160, 3200 / fig.get_figwidth()), bbox_inches='tight', pad_inches=0.2)
    plt.close(fig)

# ----------------------------------------------------------------------------------------------------------------------
# the benchmark

def clock(functions, repeats, device):
    """best time in ms of each function, interleaved so that a busy moment of the machine falls on all of them alike"""
    best = [math.inf] * len(functions)
    for repeat in range(repeats + 1):  # the first one warms up and compiles
        for n, function in enumerate(functions):
            if device == 'cuda':
                torch.cuda.synchronize()
            start = time.perf_counter()
            function()
            if device == 'cuda':
                torch.cuda.synchronize()
            if repeat:
                best[n] = min(best[n], 1e3 * (time.perf_counter() - start))
    return best

def peak_mb(function, device):
    """what a call adds to the peak memory, in MB; None where the system does not tell"""
    if device == 'cuda':
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        function()
        return (torch.cuda.max_memory_allocated() - before) / 2 ** 20
    try:
        ctypes.CDLL('libc.so.6').malloc_trim(0)  # so that memory freed earlier is not silently used again
        Path('/proc/self/clear_refs').write_text('5')  # resets the peak
    except OSError:
        return None
    status = lambda key: int(re.search(key + r':\s+(\d+)', Path('/proc/self/status').read_text())[1]) / 1024
    before = status('VmRSS')
    function()
    return status('VmHWM') - before

def attention_inputs(B, T, device, log_gate=None, H=4, D=64):
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, H, T, D, generator=rng) for _ in range(3))
    q, k = F.rms_norm(q, (D,)), F.rms_norm(k, (D,))
    gate = F.logsigmoid(torch.randn(B, H, T, generator=rng)) if log_gate is None else torch.full((B, H, T), log_gate)
    return [x.to(device).requires_grad_() for x in (q, k, v, gate)]

PROFILE = {'baddbmm': 'matmuls', 'CompiledFxGraph': 'compiled tile functions', 'addmm': 'compiled tile functions',
           'aten::mm': 'compiled tile functions', 'aten::copy_': 'copies', 'Dynamo Cache Lookup': "torch.compile's guards"}

def bench(args):
    """What TRA costs, beside the formula as it stands and beside torch's fused attention (SDPA), which does less."""
    device, quick = args.device, args.quick
    sdpa = lambda q, k, v, _: F.scaled_dot_product_attention(q, k, v, is_causal=True)
    blockwise = lambda *xs: tra.tra_blockwise(*xs, bound=8.1)  # as the model calls it: sqrt(D), and a little for rounding
    result = {'torch': torch.__version__, 'device': device, 'threads': torch.get_num_threads(), 'kernel': [], 'step': [],
              'forgetful': [], 'generate': []}
    say = lambda what: print(f'measuring {what}', file=sys.stderr, flush=True)

    def backward(function, xs):
        dout = torch.ones_like(xs[2])
        return lambda: torch.autograd.grad(function(*xs), xs if function is not sdpa else xs[:3], dout)

    xs = attention_inputs(2, 300, device)
    result['max_error'] = max(float((a - b).detach().abs().max()) for a, b in zip(
        [blockwise(*xs), *backward(blockwise, xs)()], [tra.tra_dense(*xs), *backward(tra.tra_dense, xs)()]))

    for T in (64, 128) if quick else (256, 512, 1024, 2048, 4096, 8192, 16384, 32768):
        say(f'attention, T = {T}')
        xs = attention_inputs(max(1, (512 if quick else 8192) // T), T, device)
        functions = {'blockwise': blockwise, 'sdpa': sdpa}
        if T > 16384:
            del functions['sdpa']   # takes a minute
        repeats = 2 if quick else 12 if T <= 2048 else 4

        def measure(functions, repeats):
            with torch.no_grad():
                forward = clock([lambda f=f: f(*xs) for f in functions.values()], repeats, device)
            both = clock([backward(f, xs) for f in functions.values()], repeats, device)
            memory = [peak_mb(backward(f, xs), device) for f in functions.values()]
            return [dict(zip(functions, x)) for x in (forward, both, memory)]
        forward, both, memory = measure(functions, repeats)
        if T <= 2048:  # apart: it frees gigabytes, after which the others would have to ask the system for memory again
            for x, dense in zip((forward, both, memory), measure({'dense': tra.tra_dense}, 2)):
                x.update(dense)
        result['kernel'].append({'T': T, 'batch': len(xs[0]), 'forward_ms': forward, 'forward_backward_ms': both,
                                 'peak_mb': memory})

    say('the early exit where nothing is forgotten')
    T = 128 if quick else 2048
    xs = attention_inputs(4, T, device, log_gate=0.0)

    def full_walk(*xs):
        with patch.object(tra.Tiling, 'may_stop', lambda tiling, d: False):
            return blockwise(*xs)
    looking, blind = clock([backward(blockwise, xs), backward(full_walk, xs)], 2 if quick else 12, device)
    result['exit'] = {'T': T, 'looking_ms': looking, 'full_walk_ms': blind}

    if device == 'cpu':
        say('where the time goes')
        os.environ.setdefault('KINETO_LOG_LEVEL', '6')  # the profiler would announce itself
        T = 128 if quick else 1024
        run = backward(blockwise, attention_inputs(8, T, device))
        run()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            for _ in range(2 if quick else 8):
                run()
        times = Counter()
        for event in profile.key_averages():
            times[next((what for name, what in PROFILE.items() if name in event.key), 'rest')] += event.self_cpu_time_total
        result['profile'] = {'T': T, 'share': {x: times[x] / times.total() for x in dict.fromkeys([*PROFILE.values(), 'rest'])}}

    for name, size, batch in (('mini', (4, 4, 256), 1 if quick else 8), ('medium', (8, 8, 512), 1 if quick else 4)):
        say(f'a training step, {name}')
        steps = []
        for attn in ('tra', 'rope'):
            torch.manual_seed(0)
            model = tra.Decoder(tra.Config(256, *size, dropout=0.0, attn=attn)).to(device)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
            idx = torch.randint(256, (batch, 256), device=device)

            def step(model=model, optimizer=optimizer, idx=idx):
                model(idx, idx)[1].backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            steps.append(step)
        ours, rope = clock(steps, 2 if quick else 10, device)
        result['step'].append({'size': name, 'layers_heads_width': size, 'batch': batch, 'tra_ms': ours, 'rope_ms': rope})

    for T in (512, 1024) if quick else (4096, 8192, 16384, 32768, 65536):
        say(f'gates that forget, T = {T}')
        xs = [x.detach() for x in attention_inputs(1, T, device, log_gate=-2.0)]
        functions = [lambda: blockwise(*xs)] + ([lambda: sdpa(*xs)] if T <= 16384 else [])
        times = clock(functions, 2 if quick else 5, device) + [None]
        result['forgetful'].append({'T': T, 'blockwise_ms': times[0], 'sdpa_ms': times[1]})

    for context in (256,) if quick else (1024, 8192, 32768):
        say(f'cached generation after {context} tokens')
        steps = []
        for attn in ('tra', 'rope'):
            torch.manual_seed(0)
            model = tra.Decoder(tra.Config(256, dropout=0.0, attn=attn)).to(device).eval()
            cache = model.new_cache()
            with torch.no_grad():
                for part in torch.randint(256, (1, context), device=device).split(1024, 1):
                    model.trunk(part, cache)
            token = torch.zeros(1, 1, dtype=torch.long, device=device)
            steps.append(torch.no_grad()(lambda model=model, token=token, cache=cache: model(token, cache=cache)))
        ours, rope = clock(steps, 10 if quick else 60, device)
        result['generate'].append({'context': context, 'tra': 1e3 / ours, 'rope': 1e3 / rope})
    as_json = json.dumps(result)
    print(as_json if args.json else bench_report(result), flush=True)
    if args.out:
        Path(args.out).write_text((as_json if args.out.endswith('.json') else bench_report(result)) + '\n')

def bench_report(result):
    """The result of bench, for people."""
    cell = lambda x, form='.0f': '-' if x is None else format(x, form)
    kernel = [['T', 'batch', 'dense', 'blockwise', 'SDPA', 'dense / blockwise', 'blockwise / SDPA', 'forward: dense', 'blockwise',
               'SDPA', 'MB: dense', 'blockwise', 'SDPA']]
    for row in result['kernel']:
        times, forward, memory = ([row[key].get(name) for name in ('dense', 'blockwise', 'sdpa')]
                                  for key in ('forward_backward_ms', 'forward_ms', 'peak_mb'))
        kernel.append([f"{row['T']:,}", str(row['batch']), *map(cell, times), cell(times[0] and times[0] / times[1], '.1f'),
                       cell(times[2] and times[1] / times[2], '.2f'), *map(cell, forward), *map(cell, memory)])
    profile = [f"Where the time goes at T = {result['profile']['T']:,}, forward + backward: " + ', '.join(
        f'{what} {share:.0%}' for what, share in result['profile']['share'].items())] if 'profile' in result else []
    never = (f"Gates that never forget, T = {result['exit']['T']:,}, forward + backward: with the early exit "
             f"{result['exit']['looking_ms'] / result['exit']['full_walk_ms']:.2f} times the time without it")
    step = [['size', 'layers / heads / width', 'batch', 'TRA', 'RoPE', 'TRA / RoPE']]
    for row in result['step']:
        step.append([row['size'], ' / '.join(map(str, row['layers_heads_width'])), str(row['batch']), cell(row['tra_ms']),
                     cell(row['rope_ms']), cell(row['tra_ms'] / row['rope_ms'], '.2f')])
    forgetful = [['T', 'blockwise', 'SDPA']]
    forgetful += [[f"{row['T']:,}", cell(row['blockwise_ms']), cell(row['sdpa_ms'])] for row in result['forgetful']]
    first, last = result['forgetful'][0], result['forgetful'][-1]
    exponent = math.log(last['blockwise_ms'] / first['blockwise_ms']) / math.log(last['T'] / first['T'])
    generate = [['context', 'TRA', 'RoPE']]
    generate += [[f"{row['context']:,}", cell(row['tra']), cell(row['rope'])] for row in result['generate']]
    return '\n\n'.join([
        f"torch {result['torch']}, {result['device']}, {result['threads']} threads; blockwise against dense, fp32, outputs and "
        f"gradients: largest difference {result['max_error']:.1e}",
        'Attention, fp32, H=4, D=64, random gates: forward + backward in ms, forward alone, MB that forward + backward add:',
        render(kernel), never, *profile, 'A training step (forward, backward, AdamW) in ms, window 256, vocabulary 256, RoPE with fused attention:',
        render(step), 'Forward in ms with gates that forget (log_gate = -2), one sequence, H=4, D=64:', render(forgetful),
        f'blockwise grows as T^{exponent:.2f}', 'Cached generation, mini, one sequence, untrained, tokens per second:', render(generate)])

# ----------------------------------------------------------------------------------------------------------------------
# the command line

class Progress:
    """How far the work is and the time left, on stderr: a line rewritten in place on a terminal, one every 10 s elsewhere."""
    def __init__(self, total):
        self.total, self.done, self.weight, self.label = total, 0.0, 1.0, ''
        self.begun = self.shown = time.monotonic()

    def __call__(self, tokens):
        self.done += tokens * self.weight
        now, terminal = time.monotonic(), sys.stderr.isatty()
        if now - self.shown > (0.5 if terminal else 10):
            self.shown = now
            left = timedelta(seconds=round((now - self.begun) * max(0, self.total / self.done - 1)))
            line = f'{self.done / self.total:4.0%} | eta {left} | {self.label}'
            print(line[:79].ljust(79), end='\r' if terminal else '\n', file=sys.stderr, flush=True)

def cost(config, length):
    """Work for a token, roughly: the layers' own is constant, attention's grows with the length; TRA stops looking early."""
    return 1 if config.attn == 'tra' else 1 + length / (10 * config.n_embd)

def parse_lengths(text, train_length):
    lengths = []
    for part in text.split(','):
        match = re.fullmatch(r'\s*(\d+)(x?)\s*', part)
        check(match, f'--lengths={text}: {part!r} is neither a length such as 512 nor a multiple such as 8x')
        lengths.append(int(match[1]) * (train_length if match[2] else 1))
    return list(dict.fromkeys(lengths))

def load_runs(args):
    """[{'result', 'model', 'task'}] of the folders; a JSON file of results has them measured already, and no model."""
    runs = []
    for name in args.runs:
        if name.endswith('.json'):
            check(args.attention is None and args.sample is None, f'{name} holds results, no model: name the run itself')
            for result in read_results(name):
                wanted = args.lengths and parse_lengths(args.lengths, result['train_length'])
                size = lambda row: row.get('length', row.get('window'))
                held = sorted({row['split'] for row in result['rows']}), sorted({size(row) for row in result['rows']})
                result['rows'] = [row for row in result['rows'] if (not args.split or row['split'] in args.split.split(','))
                                  and (not wanted or size(row) in wanted)]
                check(result['rows'], f"{name} holds no such split and length: {result['run']} has {', '.join(held[0])} at "
                                      f"{', '.join(map(str, held[1]))}")
                runs.append({'result': result})
            continue
        model, task, config = load_run(name, args.device, args.checkpoint)
        result = {'run': name, 'task': task.name, 'attn': model.config.attn, 'seed': config.get('seed'),
                  'train_length': task.train_length, 'checkpoint': config['checkpoint'], 'step': config['step'],
                  'config': {key: value for key, value in config.items() if key not in SAME}, 'rows': [], 'mistakes': []}
        runs.append({'result': result, 'model': model, 'task': task})
    first = runs[0]['result']
    for result in (run['result'] for run in runs):
        check(result['task'] == first['task'],
              f"runs of different tasks: {first['run']} is {first['task']}, {result['run']} is {result['task']}")
    return runs

def read_results(path):
    try:
        saved = json.loads(Path(path).read_text(encoding='utf-8'))
        check(not isinstance(saved, dict) or 'kernel' not in saved, 'it is one of --bench')
        results = saved['runs']
        wanted = {'run', 'task', 'attn', 'seed', 'train_length', 'checkpoint', 'step', 'config', 'rows', 'mistakes'}
        check(results and all(wanted <= set(result) for result in results), 'runs are missing')
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f'{path} is no result of eval.py RUN --out=FILE.json: {error}') from None
    return results

def plan(args, runs):
    """[(run, split, length, n, tokens)], each tried out, so that a length that cannot be is not found hours later."""
    cells = []
    for run in (run for run in runs if 'model' in run):
        task = run['task']
        splits = args.split.split(',') if args.split else ['test'] if task.name == 'wikitext' else task.splits
        lengths = parse_lengths(args.lengths, task.train_length) if args.lengths else task.lengths
        if args.plot is not None and not args.lengths and len(lengths) == 1:
            lengths = parse_lengths('1x,2x,4x,8x,16x', task.train_length)  # one point is no picture
        for split in splits:
            for length in lengths:
                width = next(task.eval_batches(split, length, 1))[0].shape[1]
                n = args.n or default_n(task, split, length)
                if task.name == 'wikitext':
                    n, width = min(max(n, *lengths), default_n(task, split, length)), 1
                cells.append((run, split, length, n, n * width))
    return cells

def measure(args, runs, cells):
    """Fills the results of the runs; False if Ctrl-C came first."""
    costs = [tokens * cost(run['model'].config, length) for run, _, length, _, tokens in cells]
    progress = Progress(sum(costs))
    try:
        for (run, split, length, n, tokens), work in zip(cells, costs):
            result, mistakes = run['result'], []
            progress.weight, progress.label = work / tokens, f"{result['run']}: {split}, length {length}"
            row = evaluate(run['model'], run['task'], split, length, n, args.device, None, mistakes, progress)
            result['rows'].append(row)
            result['mistakes'].append(mistakes)
    except KeyboardInterrupt:
        return False
    finally:
        if sys.stderr.isatty():
            print(' ' * 79, end='\r', file=sys.stderr, flush=True)
        for result in (run['result'] for run in runs if 'model' in run):  # one of each split and length, then a second, ...
            result['mistakes'] = [m for some in zip_longest(*result['mistakes']) for m in some if m][:args.mistakes]
    return True

def report(results, settings, finished):
    lines = [] if finished else ['stopped early: this is what was done', '']
    for r in results:
        lines.append('{run}: {task}, {attn}, trained at {train_length}, seed {seed} ({checkpoint}, step {step})'.format(**r))
    lines += ['', format_settings(settings), '']
    if any(row.get('upper95') is not None for r in results for row in r['rows']):
        lines.append('error below: where no sequence is wrong, the share of wrong ones is below this with 95% confidence')
    if any(len(runs) > 1 for _, runs in settings):
        lines.append('±: standard deviation over seeds')
    for r in results:
        for m in r['mistakes']:
            lines.append('\n{}: {split}, length {length}, sequence {sequence}, {wrong} wrong\n'.format(r['run'], **m))
            lines += ['    ' + line for line in m['text'].splitlines()]
    return '\n'.join(lines).rstrip()

def make_table(args):
    runs = load_runs(args)
    cells = plan(args, runs)
    if args.plot is not None:
        pyplot()  # if it is missing, say so before the work
    finished = measure(args, runs, cells)
    results = [run['result'] for run in runs]
    settings = [(label, [result['rows'] for result in members]) for label, members in group(results)]
    as_json = ',\n'.join(json.dumps(result, ensure_ascii=False) for result in results)  # a line for each run
    as_json = '{"runs": [\n' + as_json + ('\n]}' if finished else '\n], "interrupted": true}')
    as_text = report(results, settings, finished)
    print(as_json if args.json else as_text, flush=True)
    if args.out:
        Path(args.out).write_text((as_json if args.out.endswith('.json') else as_text) + '\n', encoding='utf-8')
    if args.plot is not None and any(r['rows'] for r in results):
        path = args.plot or (Path(args.runs[0]).with_suffix('.png') if args.runs[0].endswith('.json') else Path(args.runs[0]) / 'eval.png')
        plot_lengths(settings, sorted({r['train_length'] for r in results}), path)
        print(f'wrote {path}', file=sys.stderr)
    return 0 if finished else 130

def draw_attention(args):
    """Draws what the runs attend to in a text of the task's tokens, or in sequence number TEXT of a split."""
    rows = []
    for run in load_runs(args):
        task, model = run['task'], run['model']
        if args.attention.isdecimal():
            length = parse_lengths(args.lengths, task.train_length)[0] if args.lengths else min(24, task.train_length)
            *_, (idx, _) = task.eval_batches(args.split or task.splits[0], length, int(args.attention) + 1)
            tokens = [t for t in idx[-1].tolist() if task.decode([t])]  # all but padding
        else:
            tokens = task.encode(args.attention)
        check(1 <= len(tokens) <= 96, f'--attention={args.attention} has {len(tokens)} tokens: a picture shows 1 to 96')
        labels = [task.decode([t]).replace(' ', '␣').replace('\n', '\\n').replace('$', r'\$') for t in tokens]
        layers = attention_parts(model, torch.tensor([tokens], device=args.device))
        rows += [(f'{model.config.attn}, layer {n}', labels, parts) for n, parts in enumerate(layers, 1)]
    path = args.plot or Path(args.runs[0]) / 'attention.png'
    plot_attention(rows, f'{task.name}: ' + ' and '.join(args.runs), path)
    print(f'wrote {path}', file=sys.stderr)

def sample(args):
    """Continues a text: tasks with a right answer by the likeliest token, language by chance."""
    for run in load_runs(args):
        task, language = run['task'], run['task'].name == 'wikitext'
        tokens = task.encode(args.sample)
        check(tokens, '--sample needs at least one token to continue')
        torch.manual_seed(args.seed)
        temperature = args.temperature if args.temperature is not None else 0.8 if language else 0.0
        out = run['model'].generate(torch.tensor([tokens], device=args.device), args.tokens or (200 if language else 16),
                                    temperature, args.top_k)
        text = task.decode(out[0].tolist())
        answer = {'run': run['result']['run'], 'prompt': args.sample, 'text': text}
        if args.json:
            print(json.dumps(answer, ensure_ascii=False))
        else:
            print(text if len(args.runs) == 1 else f"{answer['run']}: {text}")

def check_flags(args):
    check(args.runs or args.bench, 'which run? name a folder that train.py wrote; python eval.py -h explains')
    for name, least in (('n', 1), ('mistakes', 0), ('tokens', 1), ('top_k', 1), ('temperature', 0), ('seed', 0)):
        value = getattr(args, name)
        check(value is None or value >= least, f'--{name}={value} must be at least {least}')
    for name, endings in (('out', ('.md', '.json')), ('plot', ('.png',))):
        if path := getattr(args, name):
            check(path.endswith(endings), f'--{name}={path} must end in {" or ".join(endings)}')
            check(Path(path).absolute().parent.is_dir(), f'--{name}={path}: there is no such folder')
    try:
        torch.zeros(1, device=args.device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f'--device={args.device} cannot be used: {str(error).splitlines()[0]}') from None

def keep_freed_memory():
    """
    glibc gives large blocks back to the system when they are freed. To ask for them again, page by page, can cost more than what
    is then done with them: let it keep them.
    """
    try:
        libc = ctypes.CDLL('libc.so.6')
        libc.mallopt(-3, 2 ** 30)               # M_MMAP_THRESHOLD: what is smaller comes from the heap ...
        libc.mallopt(-1, 2 ** 31 - 1)           # M_TRIM_THRESHOLD: ... and stays there
    except (OSError, AttributeError):
        pass                                    # not Linux, or another C library

class Parser(argparse.ArgumentParser):
    def error(self, message):                   # argparse would print the usage first
        self.exit(2, f'eval.py: {" ".join(message.split())}; python eval.py -h explains\n')

def main():
    parser = Parser(prog='eval.py', description=__doc__, allow_abbrev=False,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add('runs', nargs='*', metavar='RUN', help='a folder that train.py wrote')
    add('--checkpoint', metavar='FILE', help='which file of the folder (best.pt, or last.pt if there is none)')
    add('--device', default='cuda' if torch.cuda.is_available() else 'cpu', help='cpu, cuda, cuda:1, ... (%(default)s)')
    add('--split', help='one or several, with commas (all of them; wikitext: test)')
    add('--lengths', help='1x,8x or 512,4096: multiples of the training length, or lengths (those of the paper)')
    add('--n', type=int, help='sequences for each split and length; wikitext: tokens')
    add('--mistakes', type=int, default=3, metavar='N', help='how many wrong sequences to show for each run (3)')
    add('--json', action='store_true', help='JSON, and nothing else on stdout')
    add('--out', metavar='FILE', help='also write the result to FILE.md or FILE.json')
    add('--plot', metavar='FILE.png', help='draw the metric against length; --plot alone: eval.png in the first run')
    add('--attention', metavar='TEXT', help='draw the attention on a text, or on sequence number TEXT of a split')
    add('--bench', action='store_true', help='time and memory of the kernel beside the dense formula and fused attention')
    add('--quick', action='store_true', help='... a few sizes only, to see that it works')
    add('--sample', metavar='TEXT', help='continue a text')
    add('--tokens', type=int, metavar='N', help='... by so many tokens (16; wikitext: 200)')
    add('--temperature', type=float, metavar='T', help='... 0 always takes the likeliest (0; wikitext: 0.8)')
    add('--top_k', type=int, metavar='K', help='... drawn from the K likeliest')
    add('--seed', type=int, default=0, help='... drawn with this seed (0)')
    # "--plot RUN" means --plot, then a run: the file needs an =
    args = parser.parse_args(['--plot=' if arg == '--plot' else arg for arg in sys.argv[1:]])
    if not args.bench:                          # which shows the kernel as it is without
        keep_freed_memory()
    try:
        check_flags(args)
        command = bench if args.bench else draw_attention if args.attention is not None else sample if args.sample is not None else make_table
        sys.exit(command(args))
    except (ValueError, OSError, MemoryError) as error:
        parser.exit(2, f'eval.py: {" ".join(str(error).split())}\n')
    except KeyboardInterrupt:
        parser.exit(130, '\nstopped\n')

if __name__ == '__main__':
    main()
