"""
Does what was learned on short sequences hold on long ones? Tables and pictures from trained runs.

    python eval.py out/flipflop-cpu                                   the splits and lengths of the paper
    python eval.py out/tra out/rope --lengths=1x,8x,64x --n=100       runs side by side, at multiples of the training length
    python eval.py out/copy-* --plot                                  exact match against length, as a picture in the first run
    python eval.py out/flipflop-cpu --attention=w1i0i1r1              what each head keeps, as a picture in the run
    python eval.py out/flipflop-cpu --sample=w1i0r --tokens=1         what the model says next
    python eval.py out/flipflop-cpu --json | jq .runs[0].rows         for programs

Runs that differ in nothing but the seed are one setting: the table shows their mean and standard deviation.

A length is in tokens for flipflop; for copy, induct and instruct it is the largest number of symbols of a bucket as wide as
the training range (data.py); for wikitext it is the window. --n is sequences for each split and length, by default as many as
make 2^18 tokens, but 2 to 1000; for wikitext it is tokens of text, by default all, and at least the largest window.

--json and --out=FILE.json give

    {"runs": [{"run", "task", "attn", "seed", "train_length", "rows": [
        {"split", "length", "n", "exact_match", "token_error", "upper95"}          synthetic tasks
        {"split", "window", "perplexity", "bits_per_byte", "tokens"} ]}]}          wikitext

where upper95 is null if a sequence was wrong. Beyond that, a run has "checkpoint" and "step" (which file was read and how far
it was trained) and "mistakes" (the first few, by split, length, sequence, and position, expected and said of the wrong tokens),
a row has "loss" (nats a scored token), of synthetic tasks also "tokens" (scored), of wikitext "by_position" (loss by the number
of visible tokens, first to last), and "interrupted": true stands beside "runs" if Ctrl-C ended the work early.
"""
import argparse
import json
import math
import os
import pickle
import re
import statistics
import sys
import time
import warnings
from contextlib import nullcontext
from datetime import timedelta
from itertools import zip_longest
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import tra
from data import make_task

# ----------------------------------------------------------------------------------------------------------------------
# checkpoints

def read_checkpoint(path):
    """
    The dict that train.py saved. weights_only admits tensors and plain values and nothing else: a file that holds any other
    pickled object, which could run code when loaded, is refused.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f'{path} is missing')
    try:
        with warnings.catch_warnings(action='ignore'):
            checkpoint = torch.load(path, map_location='cpu', weights_only=True)
    except Exception as error:  # a damaged file can fail in any way: zip, pickle, struct, key, memory
        if isinstance(error, pickle.UnpicklingError) and 'GLOBAL' in str(error):
            raise ValueError(f'{path} is refused: it holds a pickled object, not only tensors and plain values') from None
        raise ValueError(f'{path} cannot be read ({type(error).__name__}): the file is damaged or no checkpoint') from None
    missing = [key for key in ('model', 'model_config', 'config', 'step')
               if not isinstance(checkpoint, dict) or key not in checkpoint]
    if missing:
        raise ValueError(f'{path} is not a checkpoint of train.py: it has no {", ".join(missing)}')
    return checkpoint


def load_run(folder, device='cpu', checkpoint=None):
    """(model, task, config) of a run folder; config gets "checkpoint" and "step", which say what was read."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f'run folder {folder} does not exist')
    names = [checkpoint] if checkpoint else [name for name in ('best.pt', 'last.pt') if (folder / name).is_file()]
    if not names:
        raise ValueError(f'run folder {folder} holds no checkpoint: neither best.pt nor last.pt')
    saved = read_checkpoint(folder / names[0])
    config = {**saved['config'], 'checkpoint': names[0], 'step': saved['step']}
    try:
        model = tra.Decoder(tra.Config(**saved['model_config']))
        model.load_state_dict(saved['model'])
        settings = {key: config[key] for key in make_task.__kwdefaults__ if key in config}
        name, train_length = config['task'], config['train_length']
    except (TypeError, KeyError, RuntimeError) as error:
        raise ValueError(f'{folder / names[0]} does not fit this version of the code: {str(error)[:200]}') from None
    return model.to(device).eval(), make_task(name, train_length, **settings), config


# ----------------------------------------------------------------------------------------------------------------------
# scoring

def predict(model, idx, targets, device='cpu', autocast=None, progress=None):
    """
    What the model says at every scored position, each seen with the true tokens before it: the likeliest token (B, T), -1
    where nothing is scored, and the loss in nats (B, T), 0 there.

    Long sequences go through the KV cache chunk by chunk, and the head sees scored positions only, a few at a time: memory
    is that of the cache plus one chunk, whatever the length and the vocabulary.
    """
    B, T = idx.shape
    chunk = chunk_size(model.config, B, T)
    cache = model.new_cache() if T > chunk else None
    rows = max(1, 2 ** 24 // model.config.vocab_size)
    idx, targets = (torch.as_tensor(x, device=device) for x in (idx, targets))
    guess = torch.full_like(targets, -1)
    loss = torch.zeros(B, T, dtype=torch.float64 if model.head.weight.dtype == torch.float64 else torch.float32,
                       device=device)
    for start in range(0, T, chunk):
        part = slice(start, min(start + chunk, T))
        where = targets[:, part] >= 0
        guesses, losses = [], []
        with autocast or nullcontext():
            scored = model.trunk(idx[:, part], cache)[where]                # (scored, C)
            for x, target in zip(scored.split(rows), targets[:, part][where].split(rows)):
                logits = model.head(x).to(loss.dtype)
                guesses.append(logits.argmax(-1))
                losses.append(F.cross_entropy(logits, target, reduction='none'))
        guess[:, part][where] = torch.cat(guesses)
        loss[:, part][where] = torch.cat(losses).to(loss.dtype)
        if progress:
            progress(B * (part.stop - start))
    return guess.cpu().numpy(), loss.double().cpu().numpy()


def chunk_size(config, B, T):
    """
    Tokens of each sequence in one forward pass. TRA's kernel needs no T x T matrix, so any size will do; the baselines hold
    one with a row for each token of the chunk, rope and nope a single one, the others one for each head and sequence.
    """
    if config.attn == 'tra':
        return 4096
    row = T if config.attn in ('rope', 'nope') else B * config.n_head * T
    return min(4096, max(16, 2 ** 24 // row))


def evaluate(model, task, split, length, n=None, device='cpu', autocast=None, mistakes=None, progress=None):
    """
    One row of the table: n sequences of one split and length of a synthetic task, or the first n tokens of a split of
    wikitext in windows of that length. n=None: see default_n. autocast: a context manager such as torch.autocast('cuda',
    torch.bfloat16). The model keeps its mode, and no random number is drawn, so training goes on as if nothing had happened.
    mistakes, a list, receives the wrong sequences; progress is called with the number of tokens just done.
    """
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            function = evaluate_text if task.name == 'wikitext' else evaluate_sequences
            return function(model, task, split, length, n or default_n(task, split, length), device, autocast, mistakes,
                            progress)
    finally:
        model.train(was_training)


def default_n(task, split, length):
    """All tokens of a text; else up to 1000 sequences, fewer from 262 tokens on to hold a cell to 2^18 tokens, but at least 2."""
    return len(task.tokens(split)) - 1 if task.name == 'wikitext' else min(1000, max(2, 2 ** 18 // length))


def batch_tokens(device):
    return 2 ** 14 if torch.device(device).type == 'cpu' else 2 ** 16


def evaluate_sequences(model, task, split, length, n, device, autocast, mistakes, progress):
    """
    exact_match: the share of sequences with the right token at every scored position. token_error: the share of wrong ones
    among all scored positions. upper95: where no sequence was wrong in n, the rate of wrong sequences is below 3 / n with
    95% confidence (the rule of three: 0.95 = 1 - (1 - 3/n)^n, nearly); None where some were.
    """
    done = right = tokens = wrong_tokens = 0
    total_loss = 0.0
    for idx, targets in task.eval_batches(split, length, n, batch_tokens(device)):
        guess, loss = predict(model, idx, targets, device, autocast, progress)
        wrong = guess != targets                                            # both are -1 where nothing is scored
        if mistakes is not None:
            mistakes += [{'split': split, 'length': length, 'sequence': done + i, 'tokens': idx[i], 'targets': targets[i],
                          'guess': guess[i]} for i in np.nonzero(wrong.any(1))[0][:3]]
        done += len(idx)
        right += int((~wrong.any(1)).sum())
        tokens += int((targets >= 0).sum())
        wrong_tokens += int(wrong.sum())
        total_loss += float(loss.sum())
    return {'split': split, 'length': length, 'n': done, 'exact_match': right / done, 'token_error': wrong_tokens / tokens,
            'upper95': min(1.0, 3 / done) if right == done else None, 'tokens': tokens, 'loss': total_loss / tokens}


def evaluate_text(model, task, split, window, n, device, autocast, mistakes, progress):
    """
    Perplexity of tokens 1 .. n of a split (token 0 has nothing before it). The text is cut into windows that do not overlap, the
    last one shorter, and a token is predicted from those before it in its own window: so at every window size the same tokens
    are scored, each once. The first of a window has one token of context, and long windows have fewer such poor places: that
    is what a model that can use a long context gains.

    bits_per_byte divides the same loss by the bytes of text that the scored tokens stand for, at the split's mean of bytes a
    token: exact for byte models, where it is 1, and comparable between tokenizers. by_position: mean loss by how many tokens
    of the window were visible, in bins 1, 2-3, 4-7, ...
    """
    data = task.tokens(split)
    n = min(n, len(data) - 1)
    task.last_start(split, window)                                          # complains of a window that cannot be
    sums, counts = np.zeros(window), np.zeros(window, dtype=np.int64)       # by position in the window
    rows = max(1, batch_tokens(device) // window) * window
    whole = n - n % window
    cuts = [(a, min(a + rows, whole), window) for a in range(0, whole, rows)] + [(whole, n, n - whole)] * (whole < n)
    for start, stop, width in cuts:
        x = np.asarray(data[start:stop + 1], dtype=np.int64)
        _, loss = predict(model, x[:-1].reshape(-1, width), x[1:].reshape(-1, width), device, autocast, progress)
        sums[:width] += loss.sum(0)
        counts[:width] += len(loss)
    loss = sums.sum() / n
    edges = [2 ** i - 1 for i in range(window.bit_length() + 1)]
    bins = [{'first': a + 1, 'last': min(b, window), 'loss': sums[a:b].sum() / counts[a:b].sum()}
            for a, b in zip(edges, edges[1:]) if counts[a:b].any()]
    bytes_per_token = task.meta['bytes'][split] / task.meta['tokens'][split]
    return {'split': split, 'window': window, 'perplexity': math.exp(loss), 'bits_per_byte': loss / math.log(2) / bytes_per_token,
            'tokens': n, 'loss': loss, 'by_position': bins}


# ----------------------------------------------------------------------------------------------------------------------
# tables

def share(x):
    """Three decimals, but more where they would turn "almost none" into 0 or "almost all" into 1."""
    if x in (0, 1) or f'{x:.3f}' not in ('0.000', '1.000'):
        return f'{x:.3f}'
    return f'{x:.1e}' if x < 0.5 else f'{x:.6f}'


# what is measured, by its key in a row: its name, and how a number is written; the first that a row has is what plots show
METRICS = {'exact_match': ('exact match', share), 'token_error': ('token error', share),
           'perplexity': ('perplexity', '{:.2f}'.format), 'bits_per_byte': ('bits per byte', '{:.3f}'.format)}


def format_table(rows):
    """The rows of one run, as evaluate returns them, for people."""
    return format_settings([('', [rows])])


def format_settings(settings):
    """
    Tables for [(label, [rows of one run, rows of the next seed, ...]), ...]: splits and lengths down; across, the metrics of
    one setting, or several settings with a table for each metric.
    """
    every = [row for _, runs in settings for rows in runs for row in rows]
    if not every:
        return 'nothing measured yet'
    size = size_key(every)
    splits = list(dict.fromkeys(row['split'] for row in every))
    places = sorted({(splits.index(row['split']), row[size]) for row in every})
    metrics = [key for key in METRICS if key in every[0]]

    def table(columns):  # a column is (name, rows of each run, metric)
        lines = []
        for split, length in places:
            here = [row for row in every if (row['split'], row[size]) == (splits[split], length)]
            line = [splits[split], f'{length}']
            if size == 'length':
                bound = [f"{row['upper95']:.2g}" for row in here if row['upper95'] is not None]
                line += [f"{here[0]['n']}", f"{here[0]['tokens']:,}", bound[0] if bound else '-']
            else:
                line += [f"{here[0]['tokens']:,}"]
            for _, runs, key in columns:
                mean, spread = summary([row[key] for rows in runs for row in rows if row in here])
                line.append('-' if mean is None else METRICS[key][1](mean) + (f' ± {spread:.3f}' if len(runs) > 1 else ''))
            lines.append(line)
        middle = ['sequences', 'scored', 'error below'] if size == 'length' else ['tokens']
        return render(['split', size, *middle, *(name for name, _, _ in columns)], lines)

    if len(settings) == 1:
        return table([(METRICS[key][0], settings[0][1], key) for key in metrics])
    return '\n\n'.join(f'{METRICS[key][0]}:\n\n' + table([(name, runs, key) for name, runs in settings]) for key in metrics)


def size_key(rows):
    return 'window' if 'window' in rows[0] else 'length'


def summary(values):
    """mean and standard deviation"""
    return (statistics.mean(values) if values else None), (statistics.stdev(values) if len(values) > 1 else 0.0)


def render(header, lines):
    """A table that is aligned for the eye and valid Markdown: the first column to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(header, *lines)]
    def join(cells):
        return '| ' + ' | '.join([cells[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(cells[1:], widths[1:]))]) + ' |'
    rule = '|'.join(['-' * (widths[0] + 2), *('-' * (w + 1) + ':' for w in widths[1:])])
    return '\n'.join([join(header), f'|{rule}|', *map(join, lines)])


SAME = ('seed', 'out_dir', 'device', 'dtype', 'compile', 'resume', 'checkpoint', 'step')  # may differ between two seeds

def group(runs):
    """[(label, runs)]: runs whose configs differ in SAME alone are one setting, called by what sets it apart from the others."""
    settings = {}
    for run in runs:
        key = json.dumps({k: v for k, v in run['config'].items() if k not in SAME}, sort_keys=True, default=str)
        settings.setdefault(key, []).append(run)
    configs = [json.loads(key) for key in settings]
    apart = [k for k in dict.fromkeys(k for c in configs for k in c) if any(c.get(k) != configs[0].get(k) for c in configs)]
    labels = []
    for config, members in zip(configs, settings.values()):
        label = ', '.join(str(config.get(k)) if k == 'attn' else f'{k}={config.get(k)}' for k in apart) or config['attn']
        if len(label) > 40:  # too much differs to tell: the folder's name is the best name
            label = Path(members[0]['run']).name
        labels.append(label + (f' ({len(members)} seeds)' if len(members) > 1 else ''))
    return list(zip(labels, settings.values()))


def marked(task, mistake, before=70, after=10):
    """
    The text around the first wrong token and, below it, what was said instead:

        w1i0i1r1w0i1r0
               ^     ^  said 0 1
    """
    wrong = wrong_places(mistake)
    start, stop = max(0, wrong[0] - before), wrong[0] + after
    wrong = [t for t in wrong if t < stop]
    line, marks = '...' if start else '', ''
    for t in range(start, min(stop, len(mistake['tokens']))):
        if t in wrong:
            marks = marks.ljust(columns(line)) + '^'
        line += task.decode(mistake['tokens'][t:t + 1])
    said = ' '.join(task.decode([mistake['guess'][t - 1]]) or 'padding' for t in wrong)
    return f'    {line}{"..." if stop < len(mistake["tokens"]) else ""}\n    {marks}  said {said}'


def wrong_places(mistake):
    """where the tokens stand that were not predicted: the target of position t is the token at t + 1"""
    return (np.nonzero(mistake['guess'] != mistake['targets'])[0] + 1).tolist()


def columns(text):
    return sum(2 if '\u2e80' <= c else 1 for c in text)  # large alphabets print Chinese characters, two columns wide


# ----------------------------------------------------------------------------------------------------------------------
# pictures

BLUE, COLOURS = '#1f5fa8', ['#d9622b', '#3a9a5b', '#8a5fb0', '#c2415f', '#8c6d31', '#4aa3b5', '#777777']

def pyplot():
    try:
        import matplotlib
    except ImportError:
        raise ValueError('pictures need matplotlib: pip install matplotlib') from None
    matplotlib.use('Agg')  # a file is all we want, and a server has no screen
    import matplotlib.pyplot as plt
    plt.rcParams.update({'font.size': 11, 'axes.spines.top': False, 'axes.spines.right': False, 'axes.edgecolor': '#555555',
                         'axes.titleweight': 'bold', 'axes.titlesize': 12, 'legend.frameon': False, 'savefig.dpi': 160})
    return plt


def plot_lengths(settings, train_lengths, path):
    """The first metric against length, a panel for each split and a line for each setting; a band spans its seeds."""
    plt = pyplot()
    every = [row for _, runs in settings for rows in runs for row in rows]
    size = size_key(every)
    key = next(k for k in METRICS if k in every[0])
    splits = list(dict.fromkeys(row['split'] for row in every))
    panels = [(split, size, key) for split in splits] + ([(splits[-1], 'by_position', 'loss')] if size == 'window' else [])
    fig, axes = plt.subplots(1, len(panels), figsize=(1 + 3.5 * len(panels), 3.9), squeeze=False, layout='constrained',
                             sharey=size == 'length')
    colours = iter(COLOURS * len(settings))
    for label, runs in settings:
        colour = BLUE if label.startswith('tra') and BLUE not in [x.get_color() for x in axes[0, 0].lines] else next(colours)
        for ax, (split, x, y) in zip(axes[0], panels):
            points = {}  # x: values of the seeds
            for rows in runs:
                rows = [row for row in rows if row['split'] == split]
                if x == 'by_position' and rows:  # the longest window has every position
                    rows = [{x: math.sqrt(b['first'] * b['last']), y: b['loss']} for b in rows[-1]['by_position']]
                for row in rows:
                    points.setdefault(row[x], []).append(row[y])
            where = sorted(points)
            ax.plot(where, [statistics.mean(points[p]) for p in where], 'o-', color=colour, label=label, lw=2.2, ms=5.5,
                    clip_on=False, zorder=3)
            ax.fill_between(where, [min(points[p]) for p in where], [max(points[p]) for p in where], color=colour, alpha=0.15, lw=0)
    for ax, (split, x, y) in zip(axes[0], panels):
        ax.set_xscale('log', base=2)
        lengths = sorted({row[size] for row in every} | set(train_lengths))
        ticks = lengths if x == size else [1, 8, 64, 512, 4096]
        while len(ticks) > 7:
            ticks = ticks[::2]
        ax.set_xticks([t for t in ticks if t <= lengths[-1]])
        ax.xaxis.set_major_formatter(lambda t, _: f'{t:g}' if t < 10000 else f'{t / 1000:.0f}k')
        ax.minorticks_off()
        ax.set_xlabel(x if x == size else 'tokens visible in the window')
        ax.grid(axis='y', color='#e6e6e6')
        ax.set_axisbelow(True)
        for length in sorted(train_lengths):
            ax.axvline(length, color='#555555', lw=1, ls=(0, (4, 3)), zorder=1)
            ax.text(length, 1.005, f'trained at {length}', transform=ax.get_xaxis_transform(), ha='center', va='bottom', fontsize=9, color='#555555')
        ax.set_title(split if x == size else f'{split}, window {lengths[-1]}', pad=18, loc='left')
    for ax in axes[0, :len(splits)]:
        if size == 'length':
            ax.set_ylim(-0.03, 1.03)
        elif max(row[key] for row in every) > 4 * min(row[key] for row in every):
            ax.set_yscale('log')
    axes[0, 0].set_ylabel(METRICS[key][0])
    if size == 'window':
        axes[0, -1].set_ylabel('loss (nats a token)')
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc='outside lower center', ncols=min(4, len(settings)))
    fig.savefig(path)
    plt.close(fig)


@torch.no_grad()
def attention_parts(model, idx):
    """
    For each layer, what its attention does with idx (1, T): weights (H, T, T), and for TRA also keep, count (H, T, T) and
    gate (H, T), the factor that a weight shrinks by with every kept key.
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
        one = torch.eye(T, device=x.device, dtype=x.dtype).expand(1, c.n_head, T, T)
        if c.attn in ('tra', 'fot'):
            log_gate = F.logsigmoid(attn.gate(x)).transpose(1, 2)                                 # (1, H, T)
        if c.attn == 'tra':
            _, parts = tra.tra_dense(q, k, one, log_gate, c.tra_sparsity, c.tra_distance, return_parts=True)
            if c.tra_distance:
                parts['gate'] = log_gate.exp()
        # with the identity for values, what attention puts out are its weights
        elif c.attn == 'rope':
            parts['weights'] = tra.nope(tra.rotate(q, 0, c.rope_theta), tra.rotate(k, 0, c.rope_theta), one)
        elif c.attn == 'fot':
            parts['weights'] = tra.fot(q, k, one, log_gate.cumsum(-1))
        elif c.attn == 'cope':
            parts['weights'] = tra.cope(q, k, one, attn.table)
        else:
            parts['weights'] = {'nope': tra.nope, 'alibi': tra.alibi}[c.attn](q, k, one)
        layers.append({name: x[0].cpu() for name, x in parts.items()})
    return layers


def plot_attention(model, tokens, labels, title, path):
    """A panel for each layer and head: queries down, keys across, coloured by weight."""
    plt = pyplot()
    from matplotlib.colors import LinearSegmentedColormap
    layers, T, H = attention_parts(model, torch.tensor([tokens], device=model.head.weight.device)), len(tokens), model.config.n_head
    gated, sparse = 'gate' in layers[0], 'keep' in layers[0]
    cell = 0.36 if T <= 24 else max(0.1, 0.36 * 24 / T)  # inches
    blues = LinearSegmentedColormap.from_list('', ['#e3eefa', '#6fa8dc', '#1f5fa8', '#0b2f5e'])
    oranges = LinearSegmentedColormap.from_list('', ['#fff3e6', '#f5a623'])
    side = cell * (T + 2)
    fig, axes = plt.subplots(len(layers), H, figsize=(H * (side + 0.45) + 0.4, len(layers) * (side + 0.55) + 1.2), squeeze=False,
                             layout='constrained')
    for n, parts in enumerate(layers):
        for h in range(H):
            ax, weights = axes[n, h], parts['weights'][h]
            for i in range(T):
                for j in range(i + 1):
                    kept = not sparse or bool(parts['keep'][h, i, j])
                    weight = float(weights[i, j])
                    ax.add_patch(plt.Rectangle((j, i), 1, 1, lw=0.6, ec='white', fc=blues(weight) if kept else '#ececec'))
                    if kept and sparse and T <= 24:
                        ax.text(j + 0.5, i + 0.52, f"{parts['count'][h, i, j]:.0f}/{i - j + 1}", ha='center', va='center',
                                fontsize=7, color='white' if weight > 0.4 else '#333333')
                if gated:
                    gate = float(parts['gate'][h, i])
                    ax.add_patch(plt.Rectangle((T + 0.4, i), 1.4, 1, lw=0.6, ec='white', fc=oranges(gate)))
                    if T <= 24:
                        ax.text(T + 1.1, i + 0.52, f'{gate:.2f}', ha='center', va='center', fontsize=7, color='#333333')
            if gated:
                ax.text(T + 1.1, -0.25, 'gate', ha='center', va='bottom', fontsize=8, color='#b06f00')
            if sparse:
                keeps = 2 * float(parts['keep'][h].sum()) / (T * (T + 1))
                ax.text(T - 0.2, 0.5, f'keeps {keeps:.0%}', ha='right', va='center', fontsize=9, color='#777777')
            ax.set(xlim=(0, T + 1.8 if gated else T), ylim=(T, 0), aspect='equal', title=f'layer {n + 1}, head {h + 1}')
            font = min(9, 60 * cell)
            turn = 90 if max(map(len, labels)) > 2 else 0
            ax.set_xticks(np.arange(T) + 0.5, labels, fontsize=font, family='monospace', rotation=turn)
            ax.set_yticks(np.arange(T) + 0.5, labels, fontsize=font, family='monospace')
            ax.tick_params(length=0, pad=2)
            ax.spines[:].set_visible(False)
    bar = fig.colorbar(plt.cm.ScalarMappable(cmap=blues, norm=plt.Normalize(0, 1)), ax=axes, shrink=min(1, 3 / (side * len(layers))), aspect=18,
                       label='attention weight', pad=0.01)
    bar.outline.set_visible(False)
    note = 'each row is a query, each column a key'
    if sparse and T <= 24:
        note += '  ·  2/7: the 2nd kept key, counted back from the query, 7 tokens away'
    if sparse:
        note += '  ·  grey: dropped'
    if gated:
        note += '  ·  gate: what remains of a weight with each kept key further back'
    fig.suptitle(title, fontsize=14, fontweight='bold')
    fig.supxlabel(note, fontsize=10, color='#555555')
    fig.savefig(path)
    plt.close(fig)


# ----------------------------------------------------------------------------------------------------------------------
# the command line

class Progress:
    """What is under way and the time left, on stderr: one line rewritten in place on a terminal, one every 10 s elsewhere."""

    def __init__(self, total):
        self.total, self.done, self.weight, self.label = total, 0.0, 1.0, ''
        self.begun = self.shown = time.monotonic()

    def __call__(self, tokens):
        self.done += tokens * self.weight
        now, terminal = time.monotonic(), sys.stderr.isatty()
        if now - self.shown < (0.5 if terminal else 10):
            return
        self.shown = now
        left = (now - self.begun) * max(0, self.total / self.done - 1)
        line = f'{self.label} | {self.done / self.total:.0%} of all | eta {timedelta(seconds=round(left))}'
        print(line.ljust(79), end='\r' if terminal else '\n', file=sys.stderr, flush=True)

    def clear(self):
        if sys.stderr.isatty():
            print(' ' * 79, end='\r', file=sys.stderr, flush=True)


def cost(config, length):
    """The work of a token: layers do as much for every token, attention looks back over all; TRA stops looking early."""
    return 1 if config.attn == 'tra' else 1 + length / (10 * config.n_embd)


def parse_lengths(text, task):
    if text is None:
        return task.lengths
    lengths = []
    for part in text.split(','):
        match = re.fullmatch(r'\s*(\d+)(x?)\s*', part)
        if not match:
            raise ValueError(f'--lengths={text}: {part!r} is neither a length such as 512 nor a multiple such as 8x')
        lengths.append(int(match[1]) * (task.train_length if match[2] else 1))
    return tuple(dict.fromkeys(lengths))


def load_runs(args):
    runs = []
    for folder in args.runs:
        model, task, config = load_run(folder, args.device, args.checkpoint)
        runs.append({'run': folder, 'task': task, 'model': model, 'config': config, 'rows': [], 'mistakes': []})
        if task.name != runs[0]['task'].name:
            raise ValueError(f"runs of different tasks do not share a table: {args.runs[0]} is {runs[0]['task'].name}, "
                             f'{folder} is {task.name}')
    return runs


def plan(args, runs):
    """[(run, split, length, n, tokens)], all checked, so that what cannot be is said before the work and not in its middle."""
    cells = []
    for run in runs:
        task = run['task']
        splits = args.split.split(',') if args.split else ['test'] if task.name == 'wikitext' else task.splits
        text = args.lengths
        if text is None and args.plot is not None and len(task.lengths) == 1:
            text = '1x,2x,4x,8x,16x'  # one point is no picture
        lengths = parse_lengths(text, task)
        for split in splits:
            for length in lengths:
                width = next(iter(task.eval_batches(split, length, 1)))[0].shape[1]
                n = args.n or default_n(task, split, length)
                if task.name == 'wikitext':  # every window scores the same tokens, so all have to fill the largest
                    n, width = min(max(n, *lengths), default_n(task, split, length)), 1
                cells.append((run, split, length, n, n * width))
    return cells


def measure(args, runs, cells):
    """Fills the rows and mistakes of the runs; False if Ctrl-C ended it early."""
    weights = [cost(run['model'].config, length) for run, _, length, _, _ in cells]
    progress = Progress(sum(weight * tokens for weight, (*_, tokens) in zip(weights, cells)))
    try:
        for weight, (run, split, length, n, _) in zip(weights, cells):
            progress.weight, progress.label = weight, f"{run['run']}: {split}, length {length}"
            mistakes = []
            run['rows'].append(evaluate(run['model'], run['task'], split, length, n, args.device, mistakes=mistakes,
                                        progress=progress))
            run['mistakes'].append(mistakes[:args.mistakes])
    except KeyboardInterrupt:
        return False
    finally:
        progress.clear()
        for run in runs:  # a few from each split and length are worth more than many of the first
            run['mistakes'] = [m for some in zip_longest(*run['mistakes']) for m in some if m][:args.mistakes]
    return True


def as_text(runs, settings, finished):
    lines = []
    for run in runs:
        c = run['config']
        lines.append(f"{run['run']}: {run['task'].name}, {c['attn']}, trained at {run['task'].train_length}, seed {c.get('seed')} "
                     f"({c['checkpoint']} of step {c['step']})")
    if not finished:
        lines.append('stopped early: this is what was done')
    lines += ['', format_settings([(label, [run['rows'] for run in members]) for label, members in settings])]
    notes = []
    if any(row.get('upper95') for run in runs for row in run['rows']):
        notes.append('error below: where no sequence was wrong, at most this share is, with 95% confidence (3 / sequences)')
    if any(len(members) > 1 for _, members in settings):
        notes.append('±: standard deviation over seeds')
    lines += ['', *notes] if notes else []
    for run in runs:
        for m in run['mistakes']:
            scored = int((m['targets'] >= 0).sum())
            lines += ['', f"mistake of {run['run']}: {m['split']}, length {m['length']}, sequence {m['sequence']}, "
                          f"{len(wrong_places(m))} of {scored} wrong", '', marked(run['task'], m)]
    return '\n'.join(lines) + '\n'


def as_json(runs, finished):
    result = []
    for run in runs:
        c, task = run['config'], run['task']
        mistakes = []
        for m in run['mistakes']:
            wrong = [{'position': t, 'expected': task.decode(m['tokens'][t:t + 1]), 'said': task.decode([m['guess'][t - 1]])}
                     for t in wrong_places(m)]
            mistakes.append({'split': m['split'], 'length': m['length'], 'sequence': m['sequence'], 'wrong': wrong[:10]})
        result.append({'run': str(run['run']), 'task': task.name, 'attn': c['attn'], 'seed': c.get('seed'), 'train_length': task.train_length,
                       'checkpoint': c['checkpoint'], 'step': c['step'], 'rows': run['rows'], 'mistakes': mistakes})
    return json.dumps({'runs': result, **({} if finished else {'interrupted': True})}, indent=2, ensure_ascii=False) + '\n'


def table(args):
    runs = load_runs(args)
    cells = plan(args, runs)
    if args.plot is not None:
        pyplot()  # before the work, in case it is missing
    finished = measure(args, runs, cells)
    settings = group(runs)
    if args.out:
        Path(args.out).write_text(as_json(runs, finished) if args.out.endswith('.json') else as_text(runs, settings, finished))
    print(as_json(runs, finished) if args.json else as_text(runs, settings, finished), end='', flush=True)
    if args.plot is not None and any(run['rows'] for run in runs):
        path = args.plot or os.path.join(args.runs[0], 'eval.png')
        plot_lengths([(label, [run['rows'] for run in members]) for label, members in settings],
                     {run['task'].train_length for run in runs}, path)
        print(f'wrote {path}', file=sys.stderr)
    return 0 if finished else 130


def attention(args):
    """Draws the attention of each run on one sequence: text that the task can read, or an index into a split."""
    for run in load_runs(args):
        task = run['task']
        if args.attention.isdecimal():
            split = args.split or task.splits[0]
            length = parse_lengths(args.lengths or str(min(24, task.train_length)), task)[0]
            *_, (idx, _) = task.eval_batches(split, length, int(args.attention) + 1)
            tokens = [t for t in idx[-1].tolist() if task.decode([t])]  # padding prints as nothing
        else:
            tokens = task.encode(args.attention)
        if not 1 <= len(tokens) <= 96:
            raise ValueError(f'--attention={args.attention} has {len(tokens)} tokens: a picture can show 1 to 96')
        labels = [task.decode([t]).replace(' ', '␣').replace('\n', '\\n') for t in tokens]
        path = args.plot or os.path.join(run['run'], 'attention.png')
        plot_attention(run['model'], tokens, labels, f"{task.name}, {run['config']['attn']}: {task.decode(tokens)[:60]}", path)
        print(f'wrote {path}', file=sys.stderr)
    return 0


def sample(args):
    """Continues a text. Tasks with one right answer are read greedily, text is drawn at random."""
    for run in load_runs(args):
        task, text = run['task'], run['task'].name == 'wikitext'
        tokens = task.encode(args.sample)
        if not tokens:
            raise ValueError('--sample needs at least one token to continue')
        torch.manual_seed(args.seed)
        out = run['model'].generate(torch.tensor([tokens], device=args.device), args.tokens or (200 if text else 16),
                                    args.temperature if args.temperature is not None else (0.8 if text else 0), args.top_k)
        new = task.decode(out[0].tolist())
        if args.json:
            print(json.dumps({'run': run['run'], 'prompt': args.sample, 'text': new}, ensure_ascii=False))
        else:
            print((f"{run['run']}: " if len(args.runs) > 1 else '') + new)
    return 0


class Parser(argparse.ArgumentParser):
    def error(self, message):                   # argparse would print the usage first
        self.exit(2, f'eval.py: {" ".join(message.split())}; python eval.py -h explains\n')


def main():
    parser = Parser(prog='eval.py', description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument('runs', nargs='*', metavar='RUN', help='folders that train.py wrote')
    parser.add_argument('--checkpoint', help='best.pt or last.pt of the folder (best.pt, if there is one)')
    parser.add_argument('--device', default='cuda' if torch.cuda.is_available() else 'cpu', help='cpu, cuda, ... (what is there)')
    parser.add_argument('--split', help='one or more, with commas (all; wikitext: test)')
    parser.add_argument('--lengths', help='1x,8x or 512,4096: multiples of the training length, or lengths (those of the paper)')
    parser.add_argument('--n', type=int, help='sequences for each split and length; wikitext: tokens')
    parser.add_argument('--mistakes', type=int, default=3, help='how many to show of each run (3)')
    parser.add_argument('--json', action='store_true', help='JSON on stdout, and nothing else there')
    parser.add_argument('--out', metavar='FILE', help='write the result to FILE.md or FILE.json as well')
    parser.add_argument('--plot', metavar='FILE.png', help='draw the metric against length (--plot alone: eval.png in the first run)')
    parser.add_argument('--attention', metavar='TEXT', help='draw the attention on a text, or on sequence number TEXT of a split')
    parser.add_argument('--sample', metavar='TEXT', help='continue a text')
    parser.add_argument('--tokens', type=int, help='by so many tokens (16; wikitext: 200)')
    parser.add_argument('--temperature', type=float, help='0 takes the likeliest token (0; wikitext: 0.8)')
    parser.add_argument('--top_k', type=int, help='draw from the likeliest only')
    parser.add_argument('--seed', type=int, default=1337, help='of the drawing (1337)')
    # --plot takes its file with = only: what follows "--plot " is a run
    args = parser.parse_args(['--plot=' if arg == '--plot' else arg for arg in sys.argv[1:]])
    try:
        check_flags(args)
        if args.attention is not None:
            sys.exit(attention(args))
        if args.sample is not None:
            sys.exit(sample(args))
        sys.exit(table(args))
    except (ValueError, OSError, MemoryError) as error:
        parser.exit(2, f'eval.py: {" ".join(str(error).split())}\n')
    except KeyboardInterrupt:
        parser.exit(130, '\nstopped\n')


def check_flags(args):
    if not args.runs:
        raise ValueError('which run? give one or more folders that train.py wrote; python eval.py -h explains')
    for name, least in (('n', 1), ('mistakes', 0), ('tokens', 1), ('top_k', 1), ('temperature', 0)):
        if getattr(args, name) is not None and getattr(args, name) < least:
            raise ValueError(f'--{name}={getattr(args, name)} must be at least {least}')
    for name, path, endings in (('out', args.out, ('.md', '.json')), ('plot', args.plot, ('.png',))):
        if path:
            if not path.endswith(endings):
                raise ValueError(f'--{name}={path} must end in {" or ".join(endings)}')
            if not Path(path).absolute().parent.is_dir():
                raise ValueError(f'--{name}={path}: its folder does not exist')
    try:
        torch.zeros(1, device=args.device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f'--device={args.device} cannot be used here: {str(error).splitlines()[0]}') from None


if __name__ == '__main__':
    main()
