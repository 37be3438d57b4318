"""
Does what was learned on short sequences hold on long ones? Tables and pictures of train.py's runs.

    python eval.py out/RUN                                  the splits and lengths of the paper
    python eval.py out/TRA out/ROPE --lengths=1x,8x,64x     multiples of the training length
    python eval.py out/RUN --split=sparse --lengths=4096    some splits, a length of your own
    python eval.py out/TRA out/ROPE --plot                  eval.png: the metric against length
    python eval.py out/TRA --attention=w1i0i1r1 --heads=2.4 attention.png: what a head looks at
    python eval.py out/RUN --sample=w1i0r --tokens=1        what the model says next
    python eval.py out/RUN --out=result.json                eval.py result.json prints it again
    python eval.py out/COPY out/INDUCT ...                  several tasks: one column for each
    python eval.py --bench                                  what the kernel costs on this machine

Runs that differ in nothing but the seed are one setting, shown as mean and standard deviation.
Of a run best.pt is read, the weights with the lowest error on val, as for train.py's last table.

A length is in tokens for flipflop; for copy, induct and instruct it is the most symbols of a bucket
(data.py); for wikitext it is the window. --n is sequences for each split and length: by default as
many as make 2^18 tokens, but from 2 to 1000. For wikitext it is tokens of text: by default all, and
never less than the largest window.
"""
import argparse
import ctypes
import json
import math
import re
import statistics
import sys
import time
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path

from data import (Parser, Progress, atomic, check, keep_freed_memory, make_task, one_line_errors,
                  pick_machine, read_checkpoint)

if __name__ == '__main__':
    one_line_errors('eval.py')      # before torch, which takes a while

import numpy as np
import torch
import torch.nn.functional as F

import tra

# -----------------------------------------------------------------------------
# scoring

def evaluate(model, task, split, length, n=None, device='cpu', autocast=None, mistakes=None,
             progress=None):
    """
    A row of the table: n sequences of a split and length, or for wikitext the first n tokens of a
    split in windows of that length. The model keeps its mode, and no random number is drawn. The
    list of mistakes gets the first ones; progress is called with the number of tokens just done.
    """
    was_training = model.training
    run = partial(predict, model.eval(), device, autocast or nullcontext(), progress)
    n, batch_tokens = n or default_n(task, split, length), 2 ** (14 if device == 'cpu' else 16)
    batch_tokens = min(batch_tokens, 2 ** 28 // task.vocab_size)        # logits of at most a GB
    try:
        if task.name == 'wikitext':
            return evaluate_text(run, task, split, length, n, batch_tokens)
        mistakes = [] if mistakes is None else mistakes
        return evaluate_sequences(run, task, split, length, n, batch_tokens, mistakes)
    finally:
        model.train(was_training)

def default_n(task, split, length):
    if task.name == 'wikitext':
        return len(task.tokens(split)) - 1
    return min(1000, max(2, 2 ** 18 // length))

@torch.no_grad()
def predict(model, device, autocast, progress, idx, targets):
    """
    What the model says at each scored position, always with the true tokens before it: the
    likeliest token (B, T), -1 where nothing is scored, and the loss (B, T), 0 there. Long sequences
    are read in chunks through the KV cache: memory is the cache and one chunk.
    """
    B, T = idx.shape
    chunk = chunk_size(model.config, B, T)
    cache = model.new_cache() if T > chunk else None
    said, loss = np.full((B, T), -1), np.zeros((B, T))
    for part in (slice(start, start + chunk) for start in range(0, T, chunk)):
        scored = targets[:, part] >= 0
        with autocast:
            x = model.trunk(torch.as_tensor(idx[:, part], device=device), cache)
            logits = model.head(x[torch.as_tensor(scored, device=device)])      # (scored, V)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        target = torch.as_tensor(targets[:, part][scored], device=device)
        said[:, part][scored] = logits.argmax(-1).cpu()
        loss[:, part][scored] = F.cross_entropy(logits, target, reduction='none').cpu()
        if progress:
            progress(scored.size)
    return said, loss

def chunk_size(config, B, T):
    """
    How many tokens of each sequence to read at a time. TRA's kernel holds no matrix of chunk x T
    numbers; rope and nope hold one, a mask, and the others one for every head and sequence.
    """
    if config.attn == 'tra':
        return 4096
    row = T if config.attn in ('rope', 'nope') else B * config.n_head * T
    return min(4096, max(16, 2 ** 24 // row))

def evaluate_sequences(run, task, split, length, n, batch_tokens, mistakes):
    """
    exact_match: the share of sequences that are right at every scored position. token_error: the
    share of wrong positions among all that are scored. upper95: the rule of three. If no sequence
    in n is wrong, fewer than 3 / n of all are, with 95% confidence: (1 - 3 / n)^n is about 0.05.
    """
    errors, tokens, total = [], 0, 0.0                  # errors: wrong tokens of each sequence
    for idx, targets in task.eval_batches(split, length, n, batch_tokens):
        said, loss = run(idx, targets)
        wrong = said != targets                         # both are -1 where nothing is scored
        for i in np.flatnonzero(wrong.any(1))[:10 - len(mistakes)]:
            at = (np.flatnonzero(wrong[i]) + 1).tolist()        # t predicts the token at t + 1
            mistakes.append({'split': split, 'length': length, 'sequence': len(errors) + int(i),
                             'wrong': len(at), 'positions': at[:100],
                             'text': marked(task, idx[i], said[i], at)})
        errors += wrong.sum(1).tolist()
        tokens += int((targets >= 0).sum())
        total += float(loss.sum())
    right = errors.count(0)
    return {'split': split, 'length': length, 'n': n, 'exact_match': right / n,
            'token_error': sum(errors) / tokens, 'upper95': min(1.0, 3 / n) if right == n else None,
            'tokens': tokens, 'loss': total / tokens}

def marked(task, tokens, said, positions, before=70, after=10):
    """The text around the first wrong token and, below it, marks and what was said instead."""
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
    Perplexity of the tokens 1 .. n. The text is cut into windows that do not overlap, the last one
    shorter, and each token is predicted from those before it in its own window, the first from one.
    So every window size scores the same tokens, each once; what a longer one gains is context.
    bits_per_byte takes the split's mean of bytes per token: exact for byte models and whole splits.
    by_position bins the loss by visible tokens: 1, 2, 3-4, 5-8, ...
    """
    next(task.eval_batches(split, window, 1))           # complains of a window beyond the text
    data = task.tokens(split)
    n = min(n, len(data) - 1)
    sums, counts = np.zeros(window), np.zeros(window, dtype=np.int64)   # by position
    whole, step = n - n % window, max(1, batch_tokens // window) * window
    cuts = [(start, min(start + step, whole), window) for start in range(0, whole, step)]
    for start, stop, width in cuts + [(whole, n, n - whole)] * (whole < n):
        x = np.array(data[start:stop + 1], dtype=np.int64)
        loss = run(x[:-1].reshape(-1, width), x[1:].reshape(-1, width))[1]
        sums[:width] += loss.sum(0)
        counts[:width] += len(loss)
    loss = float(sums.sum() / n)
    edges = [0] + [2 ** i for i in range((window - 1).bit_length() + 1)]
    bins = [{'first': a + 1, 'last': min(b, window),
             'loss': float(sums[a:b].sum() / counts[a:b].sum())}
            for a, b in zip(edges, edges[1:]) if counts[a:b].any()]
    bytes_per_token = task.meta['bytes'][split] / task.meta['tokens'][split]
    return {'split': split, 'window': window, 'tokens': n, 'loss': loss, 'by_position': bins,
            'perplexity': math.exp(min(loss, 700)),     # a float holds no more
            'bits_per_byte': loss / math.log(2) / bytes_per_token}

# -----------------------------------------------------------------------------
# tables

def share(x):
    """Three decimals, or more where they would turn "almost none" into 0, "almost all" into 1."""
    if x in (0, 1) or f'{x:.3f}' not in ('0.000', '1.000'):
        return f'{x:.3f}'
    return f'{x:.1e}' if x < 0.5 else f'{x:.6f}'

# a row's metrics: key, name and how to write it
METRICS = {'exact_match': ('exact match', share), 'token_error': ('token error', share),
           'perplexity': ('perplexity', '{:.2f}'.format),
           'bits_per_byte': ('bits per byte', '{:.3f}'.format)}

def place(row):
    """(split, length), of wikitext (split, window)"""
    return row['split'], row.get('window', row.get('length'))

def format_table(rows):
    """The rows of one run, as evaluate returns them, for people."""
    return format_settings([('', [{'rows': rows}])])

def format_settings(settings):
    """
    Tables for [(label, [result of a run, of the next seed, ...]), ...]. One setting: splits and
    lengths down, metrics across. Several: a table for each metric, settings down.
    """
    cells = {}                      # {(number of the setting, place): a row of each seed}
    for n, (_, runs) in enumerate(settings):
        for row in (row for run in runs for row in run['rows']):
            cells.setdefault((n, place(row)), []).append(row)
    splits = list(dict.fromkeys(split for _, (split, _) in cells))
    places = sorted({x for _, x in cells}, key=lambda x: (splits.index(x[0]), x[1]))
    keys = next(iter(cells.values()))[0]
    text = 'window' in keys
    def span(key, x):
        """'50', or '50 to 1,000' where runs differ; the bound of settings that were never wrong"""
        values = [row[key] for (_, where), rows in cells.items() if where == x for row in rows
                  if all(other[key] is not None for other in rows)]
        form = '{:.2g}' if key == 'upper95' else '{:,}'
        ends = dict.fromkeys(form.format(end(values)) for end in (min, max) if values)
        return ' to '.join(ends) or '-'
    def write(key, n, x):
        values = [row[key] for row in cells.get((n, x), ())]
        spread = f' ± {statistics.stdev(values):.3f}' if len(values) > 1 else ''
        return METRICS[key][1](statistics.mean(values)) + spread if values else '-'
    counts = {'n': 'sequences', 'tokens': 'tokens' if text else 'scored', 'upper95': 'error below'}
    foot = [[name, *(span(key, x) for x in places)] for key, name in counts.items() if key in keys]
    tables = {METRICS[key][0]: [[label, *(write(key, n, x) for x in places)]
                                for n, (label, _) in enumerate(settings)]
              for key in METRICS if key in keys}
    if len(settings) == 1:
        lines = [['split', *(split for split, _ in places)],
                 ['window' if text else 'length', *(f'{length:,}' for _, length in places)],
                 *foot, *([name, *line[1:]] for name, [line] in tables.items())]
        return render(list(zip(*lines)))
    head = ['', *(f'{split} {length:,}' for split, length in places)]
    return '\n\n'.join(f'{name}:\n\n' + render([head, *lines, *foot[:None if n == 0 else 2]])
                       for n, (name, lines) in enumerate(tables.items()))   # the bound once

def format_summary(results):
    """
    A table for runs of several tasks: attentions down, tasks across, each at its longest length,
    as the mean over splits and seeds. The best of a column is bold.
    """
    longest, cells = {}, {}         # {task: length}, {(label, task): values}
    for result in results:
        here = max(place(row)[1] for row in result['rows'])
        longest[result['task']] = max(here, longest.get(result['task'], 0))
    for result in results:
        label = ', '.join([result['attn'], *(
            f'{key}={x}' for key, x in result['config'].items()
            if key.startswith('tra_') and x != getattr(tra.Config, key))])
        cells.setdefault((label, result['task']), []).extend(
            row.get('bits_per_byte', row.get('exact_match')) for row in result['rows']
            if place(row)[1] == longest[result['task']]
            and (result['task'], row['split'] == 'val') != ('instruct', False))     # val is the mix
    mean = {cell: statistics.mean(values) for cell, values in cells.items() if values}
    def write(label, task):
        best = (min if task == 'wikitext' else max)(
            x for (_, other), x in mean.items() if other == task)
        text = share(mean[label, task]) if (label, task) in mean else '-'
        return f'**{text}**' if text == share(best) else text
    head = ['', *(f'{task} {length:,}' for task, length in longest.items())]
    return render([head, *([label, *(write(label, task) for task in longest)]
                           for label in dict.fromkeys(label for label, _ in cells))])

def render(lines):
    """A table aligned for the eye that is Markdown too: first column left, numbers right."""
    first, *rest = (max(map(len, column)) for column in zip(*lines))
    rule = '|'.join(['-' * (first + 2), *('-' * (w + 1) + ':' for w in rest)])
    form = ' | '.join([f'{{:<{first}}}', *(f'{{:>{w}}}' for w in rest)])
    head, *body = (f'| {form.format(*line)} |' for line in lines)
    return '\n'.join([head, f'|{rule}|', *body])

def group(results):
    """[(label, results)]: the runs of each setting, named by what sets it apart from most."""
    groups = {}
    for result in results:
        key = json.dumps([result['config'], unfinished(result)], sort_keys=True)
        while result['seed'] in (run['seed'] for run in groups.get(key, ())):
            key += ' again'         # a seed twice is not two seeds
        groups.setdefault(key, []).append(result)
    configs = [runs[0]['config'] for runs in groups.values()]
    keys = dict.fromkeys(key for config in configs for key in config if key != 'attn')
    values = {key: [config.get(key) for config in configs] for key in keys}
    labels = []
    for n, (run, *_) in enumerate(groups.values()):     # rare values, of at most half the settings
        apart = [f'{key}={x[n]}' for key, x in values.items() if 2 * x.count(x[n]) <= len(x)]
        labels.append(', '.join([run['attn'], *apart]) + unfinished(run))
    settings = []
    for label, runs in zip(labels, groups.values()):
        if len(label) > 40 or labels.count(label) > 1:  # then the folder has the better name
            label = Path(runs[0]['run']).name + unfinished(runs[0])
        settings.append((label + f' ({len(runs)} seeds)' * (len(runs) > 1), runs))
    return settings

def unfinished(result):
    """' (step 500 of 2000)', or nothing for a run that is complete"""
    steps, goal = result.get('trained'), result['config'].get('max_iters')
    return f' (step {steps} of {goal})' if steps and goal and steps < goal else ''

# -----------------------------------------------------------------------------
# pictures

# an attention has one colour in all pictures (Okabe and Ito's, which colour-blind eyes tell apart)
COLOURS = {'tra': '#0072B2', 'rope': '#D55E00', 'alibi': '#E69F00', 'cope': '#CC79A7',
           'fot': '#009E73', 'nape': '#56B4E9', 'stick': '#000000', 'nope': '#8A8A8A'}
GREY = '#555555'

def pyplot():
    try:
        import matplotlib
    except ImportError:
        raise ValueError('pictures need matplotlib: pip install matplotlib') from None
    matplotlib.use('Agg')  # files only: a server has no screen
    import matplotlib.pyplot as plt
    plt.rcParams.update({'font.size': 11, 'axes.spines.top': False, 'axes.spines.right': False,
                         'axes.edgecolor': GREY, 'axes.titleweight': 'bold', 'axes.titlesize': 12,
                         'legend.frameon': False, 'legend.handlelength': 3, 'savefig.dpi': 160,
                         'text.parse_math': False})
    return plt

def plot_lengths(settings, path):
    """
    Exact match against length, or for wikitext bits per byte: a panel for each split, a line for
    each setting, a band from its worst seed to its best. One more panel has wikitext by position in
    the longest window. Settings of one attention share its colour and differ in their dashes.
    """
    plt = pyplot()
    runs = [run for _, seeds in settings for run in seeds]
    train_lengths, rows = {run['train_length'] for run in runs}, sum((r['rows'] for r in runs), [])
    longest, text = max(place(row)[1] for row in rows), 'window' in rows[0]
    metric = 'bits_per_byte' if text else 'exact_match'
    panels = {}                     # {title: {number of the setting: {x: [of each seed]}}}
    for n, row in ((n, row) for n, (_, seeds) in enumerate(settings) for run in seeds
                   for row in run['rows']):
        split, length = place(row)
        points = [(split, length, row[metric])]
        for b in row['by_position'] if text and length == longest else ():
            bits = b['loss'] / row['loss'] * row[metric]
            points.append((f'{split}, window {length}', b['last'], bits))
        for title, x, y in points:
            panels.setdefault(title, {}).setdefault(n, {}).setdefault(x, []).append(y)

    wide = 2 if len(panels) == 4 else min(3, len(panels))   # a README is 800 pixels wide
    deep = math.ceil(len(panels) / wide)
    fig, axes = plt.subplots(deep, wide, figsize=(max(6.4, 1 + 3 * wide), 0.8 + 3.1 * deep),
                             squeeze=False, layout='constrained', sharey=not text)
    for ax in axes.flat[len(panels):]:
        ax.remove()
    attentions = [seeds[0]['attn'] for _, seeds in settings]
    if len(set(attentions)) == len(settings):   # then its name is enough
        settings = [(attn, seeds) for attn, (_, seeds) in zip(attentions, settings)]
    colours = [COLOURS.get(attn, '#7A5C1E') for attn in attentions]
    lines = {}                      # by their names
    for ax, (title, of_settings) in zip(axes.flat, panels.items()):
        for n, points in of_settings.items():
            label, colour, at = settings[n][0], colours[n], sorted(points)
            low, middle, high = ([f(points[x]) for x in at] for f in (min, statistics.mean, max))
            dashes = ('-', '--', ':', '-.')[colours[:n].count(colour) % 4]
            [lines[label]] = ax.plot(at, middle, 'o', ls=dashes, color=colour, lw=2.2, ms=5.5,
                                     label=label, zorder=2 + 1 / (n + 1))   # the first on top
            ax.fill_between(at, low, high, color=colour, alpha=0.15, lw=0)
        for length in train_lengths:
            ax.axvline(length, color=GREY, lw=1, ls=(0, (4, 3)), zorder=1)
            ax.text(length, 1.01, f'trained at {length}', transform=ax.get_xaxis_transform(),
                    ha='center', fontsize=9, color=GREY)
        ticks = sorted(train_lengths.union(*of_settings.values()))
        ax.set_xscale('log', base=2)
        ax.set(xticks=ticks[::math.ceil(len(ticks) / 6)], ylabel=METRICS[metric][0],
               xlabel='length' if not text else 'tokens visible' if ',' in title else 'window')
        ax.xaxis.set_major_formatter(lambda t, _: f'{t:g}' if t < 10000 else f'{t / 1000:.0f}k')
        ax.minorticks_off()
        ax.set_title(f"{runs[0]['task']}, {title}", pad=18, loc='left')
        ax.grid(axis='y', color='#e6e6e6')
        if not text:
            ax.set_ylim(-0.03, 1.03)
            ax.label_outer()
    named = ax.get_legend_handles_labels()[0]
    if len(named) == len(lines) <= 5 and max(map(len, lines)) < 12:     # named where they end
        fig.draw_without_rendering()            # now the points have their places
        ends = [ax.transData.transform(line.get_xydata()[-1])[1] for line in named]
        above = -math.inf
        for height, line in sorted(zip(ends, named), key=lambda pair: pair[0]):
            above = max(height, above + 0.2 * fig.dpi)      # of two that end together, one moves up
            shift = 72 / fig.dpi * (above - height)
            ax.annotate(line.get_label(), line.get_xydata()[-1], (8, shift), va='center',
                        textcoords='offset points', color=line.get_color(), fontsize=13,
                        fontweight='bold')
    else:
        columns = max(1, min(4, len(lines), 96 // (8 + max(map(len, lines)))))
        fig.set_figheight(fig.get_figheight() + len(lines) / columns / 4)
        fig.legend(lines.values(), lines, loc='outside lower center', ncols=columns)
    fig.savefig(path, bbox_inches='tight', pad_inches=0.15)
    plt.close(fig)

@torch.no_grad()
def attention_parts(model, idx):
    """
    For each layer what attention does with idx (1, T): weights (H, T, T); of TRA also keep and
    count (H, T, T), and gate (H, T), the factor by which a weight shrinks for each kept key.
    """
    inputs, layers, T = [], [], idx.size(1)
    hooks = [block.attn.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
             for block in model.blocks]
    with torch.compiler.set_stance('force_eager'):  # compiling takes longer than a few tokens do
        model(idx)
        for x, attn, hook in zip(inputs, (block.attn for block in model.blocks), hooks):
            hook.remove()
            q, k, v, *more = attn.project(x)
            # the weights are what attention puts out if the identity is its values
            eye = torch.eye(T, device=v.device, dtype=v.dtype).expand(*v.shape[:2], T, T)
            parts = {'weights': attn.attend(q, k, eye, *more)}
            if model.config.attn == 'tra':          # undecayed, the weight of a kept key is not 0
                log_gate, *rest = more
                keep = attn.attend(q, k, eye, torch.zeros_like(log_gate), *rest) > 0
                parts |= {'keep': keep, 'count': keep.flip(-1).cumsum(-1).flip(-1)}
                parts |= {'gate': log_gate.exp()} if model.config.tra_distance else {}
            layers.append({name: part[0].float().cpu().numpy() for name, part in parts.items()})
    return layers

def plot_attention(panels, wide, title, path):
    """
    Panels (name, labels of the tokens, parts of one head), so many in a row: queries down, keys
    across, the weight as colour; TRA's counts and gates as numbers.
    """
    plt = pyplot()
    from matplotlib.colors import LinearSegmentedColormap
    blues = LinearSegmentedColormap.from_list('', ['#e3eefa', '#6fa8dc', '#0072B2', '#0b2f5e'])
    oranges = LinearSegmentedColormap.from_list('', ['#fff3e6', '#E69F00'])
    most, deep = max(len(labels) for _, labels, _ in panels), math.ceil(len(panels) / wide)
    small = most <= 24                                      # numbers can be read
    cell = 0.36 if small else max(0.1, 8.6 / most)          # inches
    side = cell * (most + 2)
    fig, axes = plt.subplots(deep, wide, squeeze=False, layout='constrained', figsize=(
        max(7, wide * (side + 0.5) + 1), deep * (side + 0.4) + 1.2))
    for ax in axes.flat[len(panels):]:
        ax.axis('off')
    notes = ['a row is a query, a column a key']
    for ax, (name, labels, parts) in zip(axes.flat, panels):
        T, weights, past = len(labels), parts['weights'], np.tri(len(labels)) > 0
        keep = parts.get('keep', past) > 0
        image = np.ones((T, T + 2, 4))                      # keys, a gap, the gate
        image[:, :T] = blues(weights)
        image[:, :T][~keep] = (0.92, 0.92, 0.92, 1)
        image[:, :T][~past] = 1                             # the future is blank
        write = partial(ax.text, ha='center', va='center', fontsize=8 if T > 9 else 11)
        if 'keep' in parts:
            ax.text(T, T / 16, f'keeps {keep.sum() / past.sum():.0%} of the keys', ha='right',
                    va='top', color='#777777')
            notes += ['grey: dropped'] + ['1/4: the 1st kept key, and 4th of all, back'] * small
            for i, j in np.argwhere(keep & small):
                write(j + 0.5, i + 0.52, f"{parts['count'][i, j]:.0f}/{i - j + 1}",
                      color='white' if weights[i, j] > 0.4 else '#333333')
        if 'gate' in parts:
            image[:, T + 1] = oranges(parts['gate'])
            ax.text(T + 1.5, -0.2, 'gate', ha='center', color='#b06f00')
            notes.append('gate: factor on a weight for each kept key further back')
            for i, gate in enumerate(parts['gate'][:most * small]):
                write(T + 1.5, i + 0.52, f'{gate:.2f}')
        ax.spines[:].set_visible(False)
        ax.pcolormesh(image, edgecolors='white', lw=0.6)
        ax.set(xlim=(0, T + 2), ylim=(T, 0), aspect='equal')
        ax.set_title(name, loc='left', fontsize=14)
        ticks = {'ticks': np.arange(T) + 0.5, 'labels': labels, 'fontsize': min(12, 60 * cell),
                 'family': 'monospace'}
        ax.set_xticks(**ticks, rotation=90 if max(map(len, labels)) > 2 else 0)
        ax.set_yticks(**ticks)
        ax.tick_params(length=0, pad=2)
    fig.colorbar(plt.cm.ScalarMappable(cmap=blues), ax=axes, aspect=18, pad=0.01,
                 shrink=min(1, 4 / (side * deep)), label='attention weight')
    fig.suptitle(title, fontsize=18, fontweight='bold')
    fig.supxlabel(('    ' if side * wide > 18 else '\n').join(dict.fromkeys(notes)), color=GREY)
    fig.savefig(path, dpi=min(160, 3200 / fig.get_figwidth()), bbox_inches='tight', pad_inches=0.2)
    plt.close(fig)

# -----------------------------------------------------------------------------
# the benchmark: what TRA costs, beside the plain formula and torch's fused attention

BENCH = {                                               # the sizes of each table
    'kernel': (256, 512, 1024, 2048, 4096, 8192, 16384, 32768), 'tokens': 8192,
    'forgetful': (4096, 8192, 16384, 32768, 65536), 'generate': (1024, 8192, 32768),
    'step': ((4, 4, 256, 8, 0.0), (4, 4, 256, 8, 0.01), (8, 8, 512, 4, 0.0), (8, 8, 512, 4, 0.01)),
    'longest': {'never': 16384, 'SDPA': 16384, 'dense': 2048},      # to wait for
    'repeats': 60, 'seconds': 20}                       # of a line, whichever ends first

def clock(functions, device):
    """{name: best time in ms}, interleaved: a busy moment falls on all alike; ratios to the last"""
    def wait():
        if torch.device(device).type != 'cpu':          # a GPU answers before it is done
            torch.accelerator.synchronize(device)
    for function in functions.values():
        function()                                      # warms up and compiles
    best, end = dict.fromkeys(functions, math.inf), time.perf_counter() + BENCH['seconds']
    for repeat in range(BENCH['repeats']):
        for name, function in functions.items():
            wait()
            start = time.perf_counter()
            function()
            wait()
            best[name] = min(best[name], 1e3 * (time.perf_counter() - start))
        if repeat > 1 and time.perf_counter() > end:
            break
    *others, last = best
    return best | {f'{name} / {last}': best[name] / best[last] for name in others}

def peak_mb(function, device):
    """What a call adds to the peak memory, in MB; None where the system does not tell."""
    if torch.device(device).type == 'cuda':
        torch.cuda.reset_peak_memory_stats(device)
        peak = lambda: torch.cuda.max_memory_allocated(device) / 2 ** 20
    else:
        status = Path('/proc/self/status')
        peak = lambda: int(re.search(r'VmHWM:\s+(\d+)', status.read_text())[1]) / 2 ** 10
        try:
            ctypes.CDLL('libc.so.6').malloc_trim(0)     # or memory freed earlier is used in silence
            Path('/proc/self/clear_refs').write_text('5')       # the peak is what there is now
        except (OSError, AttributeError):               # not Linux, or another C library
            return None
    before = peak()
    function()
    return peak() - before

def attention_inputs(B, T, machine, H=4, D=64):
    """q, k, v and random gates, as the model would have them on this machine"""
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, H, T, D, generator=rng) for _ in range(3))
    gate = F.logsigmoid(torch.randn(B, H, T, generator=rng))
    xs = [x.to(getattr(torch, machine.dtype)) for x in (F.rms_norm(q, [D]), F.rms_norm(k, [D]), v)]
    return [x.to(machine.device).requires_grad_() for x in (*xs, gate)]

blockwise = partial(tra.tra_blockwise, bound=8.1)       # sqrt(D) and a little, as the model says
sdpa = partial(F.scaled_dot_product_attention, is_causal=True)

def both_ways(function, *xs):
    """Forward and backward, to be called again and again."""
    def run():
        out = function(*xs)
        return out, *torch.autograd.grad(out, xs, torch.ones_like(out))
    return run

def kernel(machine, T):
    """
    Attention, H=4, D=64, forward + backward of at least 8192 tokens in ms, by length: blockwise
    with random gates and with gates that never forget (no early exit), and MB that it adds:
    """
    *qkv, gate = attention_inputs(max(1, BENCH['tokens'] // T), T, machine)
    never = torch.zeros_like(gate, requires_grad=True)
    return {'random': both_ways(blockwise, *qkv, gate), 'never': both_ways(blockwise, *qkv, never),
            'dense': both_ways(tra.tra_dense, *qkv, gate), 'SDPA': both_ways(sdpa, *qkv)}

def forgetful(machine, T):
    """Forward in ms with gates that forget (log_gate = -2), one sequence, H=4, D=64, by length:"""
    *qkv, gate = (x.detach() for x in attention_inputs(1, T, machine))
    return {'blockwise': partial(blockwise, *qkv, gate.fill_(-2)), 'SDPA': partial(sdpa, *qkv)}

def step(machine, size):
    """
    A training step as train.py makes it, in ms, window 256, vocabulary 256, RoPE with fused
    attention, by layers, heads, width, batch and dropout:
    """
    layers, heads, width, batch, dropout = size
    idx = torch.randint(256, (batch, 256)).to(machine.device)
    def stepper(attn):
        raw_model = tra.Decoder(tra.Config(vocab_size=256, n_layer=layers, n_head=heads, attn=attn,
                                           n_embd=width, dropout=dropout)).to(machine.device)
        model = torch.compile(raw_model) if machine.compile else raw_model
        optimizer = torch.optim.AdamW(raw_model.parameters(), lr=1e-4,
                                      fused=machine.device.startswith(('cuda', 'cpu')))
        def run():
            with machine.autocast:
                loss = model(idx, idx)[1]
            loss.backward()
            torch.nn.utils.clip_grad_norm_(raw_model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return run
    return {'TRA': stepper('tra'), 'RoPE': stepper('rope')}

def generate(machine, context):
    """Cached generation, 4 layers, width 256, one sequence, ms a token, by what is in the cache:"""
    @torch.no_grad()
    def read(model, cache, idx):
        with machine.autocast:
            model.head(model.trunk(idx, cache)[:, -1])
    def reader(attn):
        model = tra.Decoder(tra.Config(vocab_size=256, dropout=0.0, attn=attn))
        model, cache = model.to(machine.device).eval(), model.new_cache()
        for part in torch.randint(256, (1, context)).to(machine.device).split(1024, 1):
            read(model, cache, part)
        return partial(read, model, cache, part[:, :1])
    return {'TRA': reader('tra'), 'RoPE': reader('rope')}

TABLES = kernel, forgetful, step, generate

def bench(args):
    device = args.machine.device
    xs = attention_inputs(2, 300, pick_machine(device, 'float32'))
    pairs = zip(both_ways(blockwise, *xs)(), both_ways(tra.tra_dense, *xs)())
    result = {'torch': torch.__version__, 'threads': torch.get_num_threads(),
              'machine': args.machine.why,
              'max_error': max(float((a - b).detach().abs().max()) for a, b in pairs)}
    for table in TABLES:
        rows = result[table.__name__] = []
        for size in BENCH[table.__name__]:
            print(f'measuring: {table.__name__} {size}', file=sys.stderr, flush=True)
            torch.manual_seed(0)
            runs = {name: run for name, run in table(args.machine, size).items()
                    if size <= BENCH['longest'].get(name, size)}
            rows.append({'size': size, **clock(runs, device)})
            if table is kernel:
                rows[-1] |= {f'MB {name}': peak_mb(run, device) for name, run in runs.items()}
    publish(args, json.dumps(result), bench_report(result))

def bench_report(result):
    """The result of bench, for people."""
    def cell(x):
        if isinstance(x, float):
            return f'{x:.2f}' if x < 10 else f'{x:,.0f}'
        return f'{x:,}' if isinstance(x, int) else ', '.join(map(str, x)) if x else '-'
    words = ['torch {torch}, {threads} threads, {machine}; blockwise against dense, float32, '
             'outputs and gradients: largest difference {max_error:.1e}'.format(**result)]
    for table in TABLES:
        rows = result[table.__name__]
        cells = [[cell(row.get(key)) for key in rows[0]] for row in rows]
        words += [' '.join(table.__doc__.split()), render([list(rows[0]), *cells])]
    first, *_, last = result['forgetful']
    power = math.log(last['blockwise'] / first['blockwise'], last['size'] / first['size'])
    return '\n\n'.join([*words, f'With gates that forget blockwise grows as T^{power:.2f}'])

# -----------------------------------------------------------------------------
# the command line

def load_run(folder, device='cpu', checkpoint=None, data_dir=None):
    """(result, model, task) of a run; the result is what --json gives, still without rows."""
    best, last = Path(folder) / 'best.pt', Path(folder) / 'last.pt'
    path = Path(folder) / checkpoint if checkpoint else best if best.is_file() else last
    saved = read_checkpoint(path)
    config, trained = {**saved['run'], **saved['config']}, saved['step']
    config['data_dir'] = data_dir or config.get('data_dir', 'data')
    try:
        model = tra.Decoder(tra.Config(**saved['model_config']))
        model.load_state_dict(saved['model'])
        task = make_task(config['task'], config['train_length'],
                         **{key: config[key] for key in make_task.__kwdefaults__ if key in config})
        if trained < config.get('max_iters', 0) and last.is_file():     # best.pt may be old
            trained = max(trained, read_checkpoint(last)['step'])
    except (TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise ValueError(f'{path} does not fit this code: {str(error)[:200]}') from None
    result = {'run': str(folder), 'task': task.name, 'attn': model.config.attn,
              'seed': config.get('seed'), 'train_length': task.train_length,
              'checkpoint': path.name, 'step': saved['step'], 'trained': trained,
              'config': {key: x for key, x in saved['config'].items() if key != 'seed'},
              'rows': [], 'mistakes': [], 'interrupted': True}      # until all rows are there
    return result, model.to(device).eval(), task

def read_results(path):
    """The results in a file of --out."""
    try:
        runs = json.loads(Path(path).read_text(encoding='utf-8'), parse_constant=int)['runs']
        check(any(run['rows'] for run in runs), 'nothing was measured')
        report(runs, group(runs))   # to try what will be done with it finds what cannot be done
        for run, row in ((run, row) for run in runs for row in run['rows']):
            math.log(run['train_length'] * place(row)[1]) + run['step'] + row['loss']
            [b['last'] + b['loss'] for b in row.get('by_position', ())]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f'{path} is no result of eval.py RUN --out=FILE.json: {error}') from None
    return runs

def chosen(args, splits, lengths, train_length):
    """The splits and lengths that the flags ask for, or else these."""
    if args.lengths:
        parts = {part: re.fullmatch(r'\s*(\d+)(x?)\s*', part) for part in args.lengths.split(',')}
        check(all(parts.values()), f'--lengths={args.lengths} has a part that is neither a length '
                                   'such as 512 nor a multiple such as 8x')
        lengths = [int(x[1]) * (train_length if x[2] else 1) for x in parts.values()]
    return args.split.split(',') if args.split else splits, list(dict.fromkeys(lengths))

def load_runs(args):
    """[(result, model, task)] of the folders; a JSON file has results, but no model."""
    runs = []
    for name in args.runs:
        if not name.endswith('.json'):
            runs.append(load_run(name, args.machine.device, args.checkpoint, args.data_dir))
            continue
        check(args.attention is None and args.sample is None,
              f'{name} holds results, no model: name the run itself')
        for result in read_results(name):
            splits, lengths = zip(*map(place, result['rows'])) if result['rows'] else ((), ())
            splits, lengths = chosen(args, splits, lengths, result['train_length'])
            result['rows'] = [row for row in result['rows'] if place(row)[0] in splits
                              and place(row)[1] in lengths]
            runs.append((result, None, None))
    results = [result for result, *_ in runs]
    one = args.plot is None and args.attention is None
    check(one or len({result['task'] for result in results}) == 1, 'a picture is of one task: '
          + ', '.join('{run} is {task}'.format(**result) for result in results))
    keys = {json.dumps([str(Path(r['run']).resolve()), r['seed'], r['config']]) for r in results}
    check(len(keys) == len(runs), f'a run is there twice: {", ".join(args.runs)}')
    return runs

def plan(args, task):
    """[(split, length, n, tokens)], tried out: a length that cannot be is not found hours later."""
    lengths = task.lengths
    if args.plot is not None and len(lengths) == 1:         # one point is no picture
        lengths = [task.train_length * 2 ** i for i in range(5)]
    splits = ['test'] if task.name == 'wikitext' else task.splits
    splits, lengths = chosen(args, splits, lengths, task.train_length)
    numbers = args.n if len(args.n) > 1 else (args.n or [None]) * len(lengths)
    check(len(numbers) == len(lengths),
          f'--n has {len(numbers)} numbers for {len(lengths)} lengths: give one, or one for each')
    for split, (length, n) in product(splits, zip(lengths, numbers)):
        width = next(task.eval_batches(split, length, 1))[0].shape[1]
        n = n or default_n(task, split, length)
        if task.name == 'wikitext':
            n, width = max(n, *lengths), 1
        yield split, length, n, n * width

def make_table(args):
    if args.plot is not None:
        pyplot()    # if it is missing, say so before the work
    runs = load_runs(args)
    results = [result for result, *_ in runs]
    plans = [list(plan(args, task)) if task else [] for *_, task in runs]
    check(any(plans) or any(result['rows'] for result in results), 'no such split and length')
    try:
        with Progress(sum(tokens for cells in plans for *_, tokens in cells)) as progress:
            for (result, model, task), cells in zip(runs, plans):
                wrong = []
                for split, length, n, _ in cells:
                    progress.label, mistakes = f"{result['run']}: {split}, length {length}", []
                    row = evaluate(model, task, split, length, n, args.machine.device,
                                   args.machine.autocast, mistakes, progress)
                    check(math.isfinite(row['loss']), f'{progress.label}: the loss is not finite')
                    result['rows'].append(row)
                    wrong += enumerate(mistakes)    # show one of each place, then a second, ...
                    wrong.sort(key=lambda pair: pair[0])
                    result['mistakes'] = [mistake for _, mistake in wrong[:args.mistakes]]
                if cells:
                    del result['interrupted']
    finally:        # Ctrl-C, no memory, ...: what is done is not lost
        if any(result['rows'] for result in results):
            settings = group(results)
            publish(args, '{"runs": [\n' + ',\n'.join(map(json.dumps, results)) + '\n]}',
                    report(results, settings))
            if args.plot is not None:
                path = Path(args.runs[0])
                path = path.with_suffix('.png') if path.suffix == '.json' else path / 'eval.png'
                plot_lengths(settings, args.plot or path)
                print(f'wrote {args.plot or path}', file=sys.stderr)

def publish(args, as_json, as_text):
    """Writes the file of --out, then speaks: nobody may be listening."""
    if args.out:
        with atomic(args.out) as f:
            f.write(((as_json if args.out.endswith('.json') else as_text) + '\n').encode())
    print(as_json if args.json else as_text, flush=True)

def report(results, settings):
    early = any('interrupted' in result for result in results)
    lines = ['stopped early: this is what was done', ''] * early
    lines += ['{run}: {task}, {attn}{}, trained at {train_length}, seed {seed} ({checkpoint}, step '
              '{step})'.format(unfinished(r), **r) for r in results]
    one = len({result['task'] for result in results}) == 1
    lines += ['', format_settings(settings) if one else format_summary(results), '']
    if any(row.get('upper95') is not None for r in results for row in r['rows']):
        lines.append('error below: where no sequence is wrong, the share of wrong ones is below '
                     'this with 95% confidence')
    if any(len(runs) > 1 for _, runs in settings):
        lines.append('±: standard deviation over seeds')
    for r, m in ((r, m) for r in results for m in r['mistakes']):
        lines.append('\n{}: {split}, length {length}, sequence {sequence}, {wrong} wrong\n'
                     .format(r['run'], **m))
        lines += ['    ' + line for line in m['text'].splitlines()]
    return '\n'.join(lines).rstrip()

def draw_attention(args):
    """What the runs attend to in a text, or in sequence number TEXT of a split."""
    panels = []
    for result, model, task in load_runs(args):
        tokens, H = args.attention, model.config.n_head
        if tokens.isdecimal():
            length = min(24, task.train_length)
            places = chosen(args, task.splits, [length], task.train_length)
            *_, (idx, _) = task.eval_batches(*next(zip(*places)), int(tokens) + 1)
            tokens = [t for t in idx[-1].tolist() if task.decode([t])]  # all but padding
        else:
            tokens = task.encode(tokens)
        check(1 <= len(tokens) <= 96,
              f'--attention={args.attention} has {len(tokens)} tokens: a picture shows 1 to 96')
        labels = [repr(task.decode([t]))[1:-1].replace(' ', '␣') for t in tokens]
        layers = attention_parts(model, torch.tensor([tokens], device=args.machine.device))
        heads = {f'{n}.{h}': (f'{model.config.attn}, layer {n}, head {h}', labels,
                              {key: part[h - 1] for key, part in parts.items()})
                 for n, parts in enumerate(layers, 1) for h in range(1, H + 1)}
        names = args.heads.split(',') if args.heads else list(heads)
        check(set(names) <= set(heads), f'--heads={args.heads}: {result["run"]} has {len(layers)} '
                                        f'layers of {H} heads, 1.1 to {len(layers)}.{H}')
        panels += [heads[name] for name in names]
    path = args.plot or Path(args.runs[0]) / 'attention.png'
    plot_attention(panels, len(panels) if args.heads else H,
                   f'{task.name}: ' + ' and '.join(args.runs), path)
    print(f'wrote {path}', file=sys.stderr)

def sample(args):
    """Continues a text: tasks with a right answer by the likeliest token, language by chance."""
    for result, model, task in load_runs(args):
        tokens = task.encode(args.sample)
        check(tokens, '--sample needs at least one token to continue')
        torch.manual_seed(args.seed)
        most, heat = (200, 0.8) if task.name == 'wikitext' else (16, 0.0)
        heat = heat if args.temperature is None else args.temperature
        idx = torch.tensor([tokens], device=args.machine.device)
        with args.machine.autocast:
            out = model.generate(idx, args.tokens or most, heat, args.top_k)
        answer = {'run': result['run'], 'prompt': args.sample, 'text': task.decode(out[0].tolist())}
        text = answer['text'] if len(args.runs) == 1 else '{run}: {text}'.format(**answer)
        print(json.dumps(answer) if args.json else text, flush=True)

def check_flags(args):
    check(args.runs or args.bench, 'which run? name a folder that train.py wrote')
    numbers = [] if args.n is None else args.n.split(',')
    check(all(x.isdecimal() and int(x) > 0 for x in numbers),
          f'--n={args.n} must be whole numbers of at least 1')
    args.n = [int(x) for x in numbers]
    least = {'mistakes': 0, 'tokens': 1, 'top_k': 1, 'temperature': 0, 'seed': 0}
    for name, value in ((name, getattr(args, name)) for name in least):
        check(value is None or value >= least[name],
              f'--{name}={value} must be at least {least[name]}')
    for name, endings in (('out', ('.md', '.json')), ('plot', ('.png',))):
        if path := getattr(args, name):
            check(path.endswith(endings), f'--{name}={path} must end in {" or ".join(endings)}')
            check(Path(path).absolute().parent.is_dir(), f'--{name}={path}: no such folder')
    check(args.heads is None or args.attention is not None, '--heads is for --attention=TEXT')

def main():
    parser = Parser(prog='eval.py', description=__doc__,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add('runs', nargs='*', metavar='RUN', help='a folder of train.py, or a FILE.json of --out')
    add('--checkpoint', help='which file of the folder (best.pt, or last.pt if there is none)')
    add('--data_dir', help='wikitext: where data.py has put it (where it was in training)')
    add('--device', default='auto', help='cpu, cuda, cuda:1, mps (auto: as in train.py)')
    add('--dtype', default='auto', help='float32 or bfloat16 (auto: as in train.py)')
    add('--split', help='one or several, with commas (all of them; wikitext: test)')
    add('--lengths', help="512,4096 or, times the training length, 1x,8x (the paper's)")
    add('--n', help='sequences for each split and length, or 1000,16 for each of two lengths; '
        'wikitext: tokens')
    add('--mistakes', type=int, default=3, help='how many wrong sequences to show of each run (3)')
    add('--json', action='store_true', help='JSON, and nothing else on stdout')
    add('--out', help='also write the result to FILE.md or FILE.json')
    add('--plot', help='FILE.png: the metric against length; --plot alone: eval.png in the run')
    add('--attention', help='draw the attention on a text, or on sequence number N of a split')
    add('--heads', help='... of some heads: 2.4,1.1 are layer 2, head 4 and layer 1, head 1')
    add('--bench', action='store_true', help='time and memory: kernel, training step, generation')
    add('--sample', help='continue a text')
    add('--tokens', type=int, help='... by so many tokens (16; wikitext: 200)')
    add('--temperature', type=float, help='... 0 always takes the likeliest (0; wikitext: 0.8)')
    add('--top_k', type=int, help='... drawn from the so many likeliest')
    add('--seed', type=int, default=0, help='... drawn with this seed (0)')
    # "--plot RUN" means --plot, then a run: the file needs an =
    args = parser.parse_args(['--plot=' if arg == '--plot' else arg for arg in sys.argv[1:]])
    check_flags(args)
    args.machine = pick_machine(args.device, args.dtype)
    keep_freed_memory()
    if args.attention is not None:
        return draw_attention(args)
    if args.sample is not None:
        return sample(args)
    return bench(args) if args.bench else make_table(args)

if __name__ == '__main__':
    main()
