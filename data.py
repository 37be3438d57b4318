"""
The data that models learn from and are tested on. Four tasks are made up on the spot, one is text:

    flipflop   remember the last bit written            w1i0i1w0r0
    copy       say the same again                       abc|abc
    induct     what followed this symbol?               abcd|bc
    instruct   do what the first token says             <abc|cba.
    wikitext   predict the next token of Wikipedia

See some of it:

    python data.py show flipflop --split=sparse --n=3 --length=32 --seed=1
    python data.py show instruct --n=5 --length=8 --json

Get the text, once (into ./data; a zip or folder you already have will do):

    python data.py wikitext103
    python data.py wikitext2 --tokenizer=bytes --from=path/to/wikitext-2

Every batch is a pair (idx, targets) of int64 arrays (B, T). targets[b, t] is the token to predict
after seeing idx[b, :t+1], or -1, printed as - below, where nothing is scored. Training batches
depend on (seed, step) alone; evaluation sets are fixed, whatever the settings of the training.
"""

import argparse
import atexit
import ctypes
import difflib
import hashlib
import io
import json
import os
import re
import stat
import string
import sys
import time
import warnings
import zipfile
import zlib
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from itertools import count, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Callable, NamedTuple

import numpy as np

# -----------------------------------------------------------------------------
# what the three scripts share

def check(ok, message):
    if not ok:
        raise ValueError(message)

def one_line_errors(prog, stopped='stopped'):
    """
    From here on, what a user can cause ends the program with one line on stderr and exit code 2;
    other exceptions keep their traceback, and python -i shows it for all.
    """
    def hook(kind, error, trace):
        text = ' '.join(str(error).split()) or kind.__name__
        if issubclass(kind, RuntimeError) and re.search(
                'out of memory|enough memory|allocate memory|size calculation overflowed', text):
            kind = MemoryError                          # torch has none
        if issubclass(kind, BrokenPipeError):           # `| head -1` has seen enough
            code, text = 128 + 13, ''
        elif issubclass(kind, KeyboardInterrupt):
            code, text = 130, '\n' + stopped
        elif issubclass(kind, MemoryError):
            code, text = 2, f'{prog}: this does not fit in memory: {text[:200]}'
        elif issubclass(kind, (ValueError, OSError)):
            code, text = 2, f'{prog}: {text}'
        else:
            return sys.__excepthook__(kind, error, trace)
        with suppress(OSError):                         # nobody may listen
            if text and os.environ.get('LOCAL_RANK', '0') == '0':
                print(text, file=sys.stderr, flush=True)
        sys.exit(code)
    def last_words():
        try:
            sys.stdout.flush()
        except (OSError, ValueError):                   # else Python complains of it at the end
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    atexit.register(last_words)
    if hasattr(sys.stdout, 'reconfigure'):
        sys.stdout.reconfigure(errors='replace')        # an output that has no ± shows a ?
    if not sys.flags.interactive:
        sys.excepthook = hook

class Parser(argparse.ArgumentParser):
    def __init__(self, **options):
        super().__init__(allow_abbrev=False, **options)

    def error(self, message):                           # argparse would print the usage first
        raise ValueError(f'{message}; python {self.prog} -h explains')

class Progress:
    """
    How far the work is and the time left, on stderr: a line rewritten in place on a terminal, a new
    one every 10 s elsewhere. Called with the amount just done. The label may change on the way.
    """
    def __init__(self, total, label='', unit='', done=0):
        self.total, self.label, self.unit, self.done, self.first = total, label, unit, done, done
        self.begun = self.shown = time.monotonic()

    def __call__(self, amount):
        self.done += amount
        now, terminal = time.monotonic(), sys.stderr.isatty()
        if now - self.shown < (0.5 if terminal else 10):
            return
        self.shown, total = now, max(self.total, self.done, 1)
        rate = max(self.done - self.first, 1) / (now - self.begun)
        left = timedelta(seconds=round(min((total - self.done) / rate, 1e9)))
        line = f'{self.done / total:4.0%} | eta {left} | {self.label}'
        if self.unit:                                   # MB, say: amounts in millions
            line += f' | {self.done / 1e6:.1f} of {total / 1e6:.1f} {self.unit}'
        print(line[:79].ljust(79), end='\r' if terminal else '\n', file=sys.stderr, flush=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if sys.stderr.isatty():
            print(' ' * 79, end='\r', file=sys.stderr, flush=True)

@contextmanager
def atomic(path):
    """Whoever looks at path sees the old file or, if nothing failed, the new one: never half."""
    path = Path(path)
    temporary = path.with_name(path.name + '.tmp')
    try:
        with open(temporary, 'wb') as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise

def save_checkpoint(path, checkpoint):
    import torch                                        # here: data.py show does without
    try:
        with atomic(path) as f:
            torch.save(checkpoint, f)
    except (OSError, RuntimeError) as error:            # torch's own word for a full disk
        raise OSError(f'cannot write {path}: {error}') from error

def read_checkpoint(path):
    """
    What train.py saved: 'model' (weights), 'model_config' (tra.Config), 'config' (the settings that
    make a run what it is), 'run' (the others), 'step', and what it takes to resume. Only tensors
    and plain values are read: other pickled objects could run code as they are loaded.
    """
    import torch
    run = Path(path).parent
    if not Path(path).is_file():
        runs = [other.parent.name for other in run.parent.glob(f'*/{Path(path).name}')]
        near = difflib.get_close_matches(run.name, runs, 1)
        raise ValueError(f'{path} is missing' + ''.join(f', did you mean {run.with_name(x)}?'
                                                        for x in near))
    try:
        with warnings.catch_warnings(action='ignore'):
            checkpoint = torch.load(path, map_location='cpu', weights_only=True)
    except Exception as error:      # a damaged file fails in many ways: zip, pickle, end of file
        reason = ('is refused: it holds a pickled object' if 'GLOBAL' in str(error) else
                  f'cannot be read: damaged, or no checkpoint ({type(error).__name__})')
        raise ValueError(f'{path} {reason}') from None
    fields = {'model': dict, 'model_config': dict, 'config': dict, 'run': dict, 'step': int}
    for key, kind in fields.items():
        check(isinstance(checkpoint, dict) and isinstance(checkpoint.get(key), kind),
              f'{path} is no checkpoint: it has no {key!r}, or its {key!r} is no {kind.__name__}')
    for name, weight in checkpoint['model'].items():
        check(isinstance(weight, torch.Tensor) and weight.isfinite().all(),
              f'{path} is damaged: weight {name!r} is not a tensor of finite numbers')
    return checkpoint

def pick_machine(device='auto', dtype='auto', compile='auto'):
    """
    Where to compute and how: device ('cpu', 'cuda:0', ...), dtype, compile, autocast (a context to
    run the model in) and why, a line that says so. Training and evaluation choose alike.
    """
    import torch
    told = {'device': device, 'dtype': dtype, 'compile': compile}
    check(':' not in device or int(os.environ.get('WORLD_SIZE', 1)) == 1,
          f'device {device!r} is for one process: torchrun deals the GPUs')
    if device == 'auto':
        device = 'cuda' if torch.cuda.is_available() else 'cpu'
    if device == 'cuda':
        device = f'cuda:{os.environ.get("LOCAL_RANK", 0)}'
    try:
        if device.startswith('cuda'):
            check(torch.cuda.is_available(), 'torch finds no CUDA')
            torch.cuda.set_device(device)               # first, or each process opens GPU 0 as well
            torch.set_float32_matmul_precision('high')  # TF32
        torch.zeros(1, device=device).tolist()          # a meta tensor has no number to show
    except Exception as error:      # too few GPUs, no such kind: torch raises one of many
        raise ValueError(f'device {device!r} does not work here: {error}'.splitlines()[0]) from None
    kind = torch.device(device).type
    if dtype == 'auto':
        has_it = kind == 'cuda' and torch.cuda.is_bf16_supported(including_emulation=False)
        dtype = 'bfloat16' if has_it else 'float32'
    if compile == 'auto':
        compile = kind == 'cuda'
    chosen = {'device': device, 'dtype': dtype, 'compile': compile}
    for key, choices in (('dtype', ('float32', 'bfloat16')), ('compile', (True, False))):
        check(chosen[key] in choices, f'{key} {chosen[key]!r} is unknown: auto or one of {choices}')
    reasons = {'device': 'CUDA if there is any', 'dtype': 'bfloat16 if the GPU has it',
               'compile': "pays on CUDA; TRA's kernel is compiled anyway"}
    why = ' | '.join(f'{key} {value} ({reasons[key] if told[key] == "auto" else "as told"})'
                     for key, value in chosen.items())
    autocast = torch.autocast(kind, torch.bfloat16, enabled=dtype == 'bfloat16')
    return SimpleNamespace(**chosen, why=why, autocast=autocast)

def keep_freed_memory():
    """glibc returns large freed blocks to the system: to get them back, page by page, is slow."""
    with suppress(OSError, AttributeError):     # not Linux, or another C library
        libc = ctypes.CDLL('libc.so.6')
        libc.mallopt(-3, 2 ** 30)               # M_MMAP_THRESHOLD: smaller ones come from the heap
        libc.mallopt(-1, 2 ** 31 - 1)           # M_TRIM_THRESHOLD: and stay there

# -----------------------------------------------------------------------------
# flip-flop (Liu et al. 2023, arXiv 2306.00946): ids 0 1 are the bits, 2 3 4 the instructions

WRITE, IGNORE, READ = 2, 3, 4
P_IGNORE = {'val': 0.8, 'sparse': 0.98, 'dense': 0.1}      # the published splits

def flipflop(rng, n, lo, length, split, p_ignore, **_):
    """
    Pairs of an instruction and a bit: write it, ignore it, or read: the one written last.

        tokens   w 1 i 0 r 1 i 1 w 0 r 0
        targets  - - - - 1 - - - - - 0 -

    The first instruction is w, the last is r; the others are i with p_ignore, else w or r with
    equal chance. In the nonstationary split each eighth of a sequence draws its own p_ignore from
    the published three.
    """
    check(length >= 4 and length % 2 == 0, f'flipflop length {length} must be even and at least 4')
    pairs = length // 2
    if split == 'nonstationary':
        p = rng.choice(list(P_IGNORE.values()), (n, 8))
        p_ignore = p[:, np.arange(pairs) * 8 // pairs]      # (n, pairs)
    elif split != 'train':
        p_ignore = P_IGNORE[split]
    u = rng.random((n, pairs))
    instruction = np.where(u < p_ignore, IGNORE, np.where(u < (1 + p_ignore) / 2, WRITE, READ))
    instruction[:, 0], instruction[:, -1] = WRITE, READ
    bit = rng.integers(0, 2, (n, pairs))
    read = instruction == READ
    writes = np.where(instruction == WRITE, np.arange(pairs), 0)
    last_write = np.maximum.accumulate(writes, axis=1)      # the largest index so far
    bit = np.where(read, np.take_along_axis(bit, last_write, axis=1), bit)
    idx = np.stack((instruction, bit), axis=2).reshape(n, length)
    targets = np.stack((np.where(read, bit, -1), np.full_like(bit, -1)), axis=2)
    return idx, targets.reshape(n, length)

# -----------------------------------------------------------------------------
# copy, induct and instruct: n sequences of lo to hi symbols each, padded on the right to the width
# that hi needs. With S symbols, token ids 0 to S-1 are the symbols, S is the separator |, S+1 is
# padding. Every task is called with all settings of make_task and takes those it has a use for.

SYMBOLS = string.ascii_letters + ''.join(map(chr, range(0x4e00, 0x9fa6)))   # past Z: Chinese

def draw(rng, n, lo, hi, n_symbols, repeats, vary=False):
    """
    Symbols (n, hi), how many of them each row uses (n,), and the separator, a part for pack. vary:
    a row has an alphabet of its own, 2 symbols to all, so that most of its symbols come often.
    """
    check(repeats or hi <= n_symbols,
          f'repeats=False needs n_symbols, now {n_symbols}, to be at least the length {hi}')
    if repeats:
        x = rng.integers(0, rng.integers(2, n_symbols + 1, (n, 1)) if vary else n_symbols, (n, hi))
    if vary or not repeats:
        order = rng.permuted(np.tile(np.arange(n_symbols), (n, 1)), axis=1)
        x = np.take_along_axis(order, x, axis=1) if repeats else order[:, :hi]
    return x, rng.integers(lo, hi + 1, n), (np.full((n, 1), n_symbols), 1, False)

def pack(parts, pad):
    """
    Lay ragged parts side by side. A part is (tokens (n, w), how many of them each row uses, is it
    an answer). Answers are scored: the position before an answer token has it as its target.
    """
    n, width = len(parts[0][0]), sum(tokens.shape[1] for tokens, *_ in parts)
    idx, targets = np.full((n, width), pad), np.full((n, width), -1)
    end = np.zeros(n, dtype=int)                        # where each row has got to
    for tokens, used, answer in parts:
        used = np.broadcast_to(used, n)
        row, col = np.nonzero(np.arange(tokens.shape[1]) < used[:, None])
        idx[row, end[row] + col] = tokens[row, col]
        if answer:
            targets[row, end[row] + col - 1] = tokens[row, col]
        end = end + used
    return idx, targets

def copy(rng, n, lo, hi, n_symbols, repeats, vary_alphabet, **_):
    """
    Symbols, separator, the same symbols again.

        tokens   a b c | a b c
        targets  - - - a b c -
    """
    x, size, sep = draw(rng, n, lo, hi, n_symbols, repeats, vary_alphabet)
    return pack([(x, size, False), sep, (x, size, True)], pad=n_symbols + 1)

def induct(rng, n, lo, hi, n_symbols, repeats, vary_alphabet, n_queries, **_):
    """
    Symbols, separator, then a key: which symbol followed it? If the key stands there more than
    once, its latest place counts (b is followed by d here). n_queries asks as many keys in a row,
    each followed by its answer:

        tokens   a b c b d | b d a b
        targets  - - - - - - d - b -

    The last symbol has no successor, so it is never a key; the first symbol differs from it, so
    there always is a key.
    """
    x, size, sep = draw(rng, n, lo, hi, n_symbols, repeats, vary_alphabet)
    last = x[np.arange(n), size - 1]
    if repeats:
        x[:, 0] = (last + rng.integers(1, n_symbols, n)) % n_symbols
    place = np.arange(hi)
    usable = (place < size[:, None]) & (x != last[:, None])                 # (n, hi)
    parts = [(x, size, False), sep]
    for _ in range(n_queries):
        # the largest of random numbers picks one usable place, all with equal chance
        pick = np.where(usable, rng.random((n, hi)), -1).argmax(axis=1)
        key = x[np.arange(n), pick]
        latest = np.where(usable & (x == key[:, None]), place, -1).max(axis=1)
        answer = x[np.arange(n), latest + 1]
        parts += [(key[:, None], 1, False), (answer[:, None], 1, True)]
    return pack(parts, pad=n_symbols + 1)

INSTRUCTIONS = '=<^$#%'         # token ids S+2 to S+7, and what they ask for:
KINDS = ('copy', 'reverse', 'first', 'last', 'count', 'parity')
ANSWERS = '+01.'                # tick, even, odd, end: token ids S+8 to S+11

def instruct(rng, n, lo, hi, n_symbols, repeats, vary_alphabet, split, **_):
    """
    An instruction, symbols, separator, what the instruction asks for, and an end token:

        copy      = a b c | a b c .     first    ^ a b c | a .     count    # a b c | + + + .
                  - - - - a b c . -              - - - - a . -              - - - - + + + . -
        reverse   < a b c | c b a .     last     $ a b c | c .     parity   % a b c | 1 .
                  - - - - c b a . -              - - - - c . -              - - - - 1 . -

    Parity is 0 for an even number of symbols and 1 for an odd one. Of no symbols, all but parity
    answer just the end. Every sequence draws its instruction, but each has a split of its own too.
    """
    first_mark = n_symbols + 2
    tick, even, end = (first_mark + (INSTRUCTIONS + ANSWERS).index(c) for c in '+0.')
    x, used, sep = draw(rng, n, lo, hi, n_symbols, repeats, vary_alphabet)
    size = used[:, None]                                                    # (n, 1) to meet x
    kind = (np.full((n, 1), KINDS.index(split)) if split in KINDS else
            rng.integers(0, len(KINDS), (n, 1)))
    _, is_reverse, is_first, is_last, is_count, is_parity = (kind == k for k in range(len(KINDS)))
    place = np.arange(hi)
    source = np.select([is_reverse, is_last], [size - 1 - place, size - 1], place)
    answer = np.take_along_axis(x, np.maximum(source, 0), axis=1)           # x[source]
    answer = np.select([is_count, is_parity], [tick, even + size % 2], answer)
    answered = np.select([is_first | is_last, is_parity], [np.minimum(size, 1), 1], size)[:, 0]
    parts = [(first_mark + kind, 1, False), (x, used, False), sep, (answer, answered, True),
             (np.full((n, 1), end), 1, True)]
    return pack(parts, pad=n_symbols + 1)

def wikitext(rng, n, lo, length, split, tokens, **_):
    """
    Windows of the text, for evaluation spaced evenly over it, whatever the seed.

        tokens   Once upon a
        targets  upon a time
    """
    last = len(tokens[split]) - length - 1
    check(last >= 0, f'length {length} is beyond the {len(tokens[split])} tokens of {split}')
    starts = (rng.integers(0, last + 1, n) if split == 'train' else
              np.linspace(0, last, n).astype(np.int64))
    x = tokens[split][starts[:, None] + np.arange(length + 1)].astype(np.int64)
    return x[:, :-1], x[:, 1:]

# -----------------------------------------------------------------------------
# a task: its vocabulary, its endless training stream, its fixed evaluation sets

class Task(NamedTuple):
    number: int                 # its own for ever: all its streams and sets follow from it
    generate: Callable          # (rng, n, lo, hi, split=..., **settings) -> idx, targets
    fewest: int = 1             # symbols
    splits: tuple = ('val',)    # for evaluation; new ones go last, sets follow from the place too
    n_lengths: int = 6          # of the evaluation: 1, 2, ... times the training length
    marks: str = ''             # what there is besides symbols, separator and padding

TASKS = {
    'flipflop': Task(0, flipflop, splits=(*P_IGNORE, 'nonstationary'), n_lengths=1),
    'copy': Task(1, copy),
    'induct': Task(2, induct, fewest=2),
    'instruct': Task(3, instruct, 0, ('val', *KINDS), 10, INSTRUCTIONS + ANSWERS),
    'wikitext': Task(4, wikitext, splits=('val', 'test')),
}
assert len({task.number for task in TASKS.values()}) == len(TASKS), 'a task needs its own number'
TRAIN, EVAL = 0, 1      # first number of every key: no evaluation set is ever trained on

def make_task(name, train_length, *, p_ignore=0.8, n_symbols=26, repeats=True, vary_alphabet=False,
              n_queries=1, data_dir='data', dataset='wikitext103', tokenizer='gpt2'):
    """
    train_length is tokens per sequence for flipflop, the window for wikitext, and the largest
    number of symbols for the others. Those are tested in buckets as wide as the training range:
    after training to 50, length 100 means 51 to 100.
    """
    settings = dict(locals())
    check(name in TASKS, f'task {name!r} is unknown: choose from {", ".join(TASKS)}')
    check(0 <= p_ignore <= 1, f'p_ignore {p_ignore} is a probability: choose it between 0 and 1')
    check(2 <= n_symbols <= len(SYMBOLS),
          f'n_symbols {n_symbols} must be between 2 and {len(SYMBOLS)}')
    check(repeats or not vary_alphabet, 'vary_alphabet=True goes with repeats=True only')
    check(n_queries >= 1, f'n_queries {n_queries} must be at least 1')
    task = (WikiText if name == 'wikitext' else Source)(name, train_length, settings)
    task.batch(seed=0, step=0, batch_size=1)    # a length that cannot be fails here, not later
    return task

class Source:
    def __init__(self, name, train_length, settings):
        self.name, self.train_length, self.settings = name, train_length, settings
        self.number, self.generate, self.fewest, self.splits, n_lengths, marks = TASKS[name]
        n_symbols, repeats = settings['n_symbols'], settings['repeats']
        # how each token id prints, padding as nothing
        self.chars = (list('01wir') if name == 'flipflop' else
                      [*SYMBOLS[:n_symbols], '|', '', *marks])
        self.vocab_size = len(self.chars)
        lengths = (train_length * i for i in range(1, n_lengths + 1))
        most = max(n_symbols, train_length)
        self.lengths = tuple(length for length in lengths if repeats or length <= most)

    def sample(self, key, n, length, split):
        at_least = max(1, self.fewest)
        check(length >= at_least, f'{self.name} length {length} must be at least {at_least}')
        lo = length - self.train_length + 1 if length > self.train_length else 0
        settings = self.settings | {'split': split}
        settings['vary_alphabet'] &= split == 'train'       # tests have the whole alphabet
        return self.generate(np.random.default_rng(key), n, max(lo, self.fewest), length,
                             **settings)

    def batch(self, seed, step, batch_size):
        key = [TRAIN, self.number, seed, step]
        return self.sample(key, batch_size, self.train_length, 'train')

    def eval_batches(self, split, length, n, batch_tokens=65536, seed=0):
        """The first n sequences of a fixed set, in batches of at most batch_tokens (or one)."""
        check(split in self.splits,
              f'split {split!r} of {self.name} is unknown: choose from {", ".join(self.splits)}')
        def rows():
            # in chunks that depend on the length alone: neither n nor batch_tokens changes them
            chunk_size = n if self.name == 'wikitext' else max(1, 16384 // max(1, length))
            for chunk in count():
                key = [EVAL, self.number, self.splits.index(split), length, chunk, seed]
                yield from zip(*self.sample(key, chunk_size, length, split))
        batch = []
        for i, row in enumerate(islice(rows(), n)):
            batch.append(row)
            if i == n - 1 or (len(batch) + 1) * len(row[0]) > batch_tokens:
                idx, targets = zip(*batch)
                yield np.stack(idx), np.stack(targets)
                batch = []

    def decode(self, tokens):
        return ''.join(self.chars[t] for t in tokens if t >= 0)

    def encode(self, text):
        for c in text:
            check(c in self.chars, f'{c!r} is not a token of {self.name}, whose tokens are '
                                   f'{"".join(self.chars)[:80]}')
        return [self.chars.index(c) for c in text]

class WikiText(Source):
    def __init__(self, name, train_length, settings):
        super().__init__(name, train_length, settings)
        where = [settings[key] for key in ('dataset', 'data_dir', 'tokenizer')]
        folder, self.meta = find_bins(*where)
        check(self.meta, f'no complete data in {folder}: run python data.py '
                         '{} --data_dir={} --tokenizer={}'.format(*where))
        self.vocab_size, self.lengths = self.meta['vocab_size'], (128, 256, 512, 1024, 2048, 4096)
        settings['tokens'] = {}
        for split in BINS:
            settings['tokens'][split] = np.memmap(folder / f'{split}.bin', np.uint16, 'r')
            most = settings['tokens'][split].max()
            check(most < self.vocab_size, f'{folder}/{split}.bin is damaged: token {most} in a '
                                          f'vocabulary of {self.vocab_size}; remove {folder}')

    def tokens(self, split):
        return self.settings['tokens'][split]

    def decode(self, tokens):
        return load_tokenizer(self.settings['tokenizer'])[2]([int(t) for t in tokens if t >= 0])

    def encode(self, text):
        return load_tokenizer(self.settings['tokenizer'])[1](text)

# -----------------------------------------------------------------------------
# WikiText: download, verify, tokenise

HUB = 'https://huggingface.co/datasets'
SOURCES = {
    'wikitext103': {
        'sha256': '91c00ae287f0d699e18605c84afc9e45c192bc6b7797ff8837e5474655a33794',
        'mirrors': ['https://wikitext.smerity.com/wikitext-103-raw-v1.zip',
                    f'{HUB}/mattdangerw/wikitext-103-raw/resolve/main/wikitext-103-raw-v1.zip']},
    'wikitext2': {
        'sha256': 'ef7edb566e3e2b2d31b29c1fdb0c89a4cc683597484c3dc2517919c615435a11',
        'mirrors': [f'{HUB}/ggml-org/ci/resolve/main/wikitext-2-raw-v1.zip',
                    'https://wikitext.smerity.com/wikitext-2-raw-v1.zip']},
}
TOKENIZERS = ('gpt2', 'bytes')
BINS = {'train': 'train', 'val': 'valid', 'test': 'test'}       # our split: theirs, in wiki.X.raw
USER_AGENT = 'nanoTRA-data/1.0'         # one mirror refuses Python's default
TIMEOUT = (10, 30)                      # seconds to connect, and without a byte: a stalled server
TRIES = 6                               # in a row that bring nothing new, of all mirrors
BACKOFF = 1.0                           # seconds before the second try, doubling

def load_tokenizer(name):
    """(vocab_size, encode(text) -> list of int, decode(list of int) -> text)"""
    if name == 'bytes':
        return 256, lambda text: list(text.encode()), lambda x: bytes(x).decode(errors='replace')
    try:
        import tiktoken
        gpt2 = tiktoken.get_encoding('gpt2')
    except (ImportError, OSError, ValueError) as error:
        raise ValueError('cannot load the gpt2 tokenizer: pip install tiktoken; if offline, set '
                         'TIKTOKEN_CACHE_DIR; or use --tokenizer=bytes') from error
    return gpt2.n_vocab, gpt2.encode_ordinary, gpt2.decode

def sha256(path):
    with open(path, 'rb') as f:
        return hashlib.file_digest(f, 'sha256').hexdigest()

def fetch(url, part, have):
    """One try to download url into part, which has some bytes of it already."""
    import requests
    headers = {'User-Agent': USER_AGENT, 'Accept-Encoding': 'identity',
               'Range': f'bytes={have}-' if have else None}
    with requests.get(url, headers=headers, stream=True, timeout=TIMEOUT) as answer:
        if answer.status_code == 416:           # nothing after what we have: see the checksum
            return
        answer.raise_for_status()
        if answer.status_code != 206:           # the server ignores Range and sends all again
            have = 0
        total = have + int(answer.headers.get('Content-Length', 0))
        with (open(part, 'ab' if have else 'wb') as f,
              Progress(total, part.stem, 'MB', have) as progress):
            for block in answer.iter_content(1 << 16):
                f.write(block)
                progress(len(block))
    check(progress.done >= total, 'the connection closed early')

def download(dataset, data_dir):
    """The path of the official zip. Mirrors take turns, each going on from what is there."""
    import requests
    mirrors, expected = list(SOURCES[dataset]['mirrors']), SOURCES[dataset]['sha256']
    path = Path(data_dir) / mirrors[0].rsplit('/', 1)[-1]
    if path.exists() and sha256(path) == expected:
        return path
    part = path.with_name(path.name + '.part')
    part.parent.mkdir(parents=True, exist_ok=True)
    failures, best, tries = {}, -1, 0
    while mirrors and tries < TRIES:
        url = mirrors.pop(0)
        have = part.stat().st_size if part.exists() else 0
        best, tries = max(best, have), 1 if have > best else tries + 1
        print(f'downloading {url}', flush=True)
        try:
            fetch(url, part, have)
            if sha256(part) == expected:
                os.replace(part, path)
                return path
            part.unlink()
            failures[url] = 'a file with the wrong sha256'
            mirrors += [url] if have else []        # perhaps what was there before was wrong
        except (requests.RequestException, ValueError) as error:    # ValueError: odd headers
            failures[url] = str(error)[:100]
            print(failures[url], flush=True)
            time.sleep(BACKOFF * 2 ** (tries - 1))
            mirrors.append(url)
    raise ValueError(f'no mirror delivered {dataset}: {failures}; if you have it, use --from=PATH')

def find_texts(path):
    """{split: (name, size, function that opens it)} of a zip or a folder. Nothing is extracted."""
    if path.is_dir():
        files = [(p.name, p.stat().st_size, partial(open, p, 'rb')) for p in path.iterdir()]
    else:
        archive = zipfile.ZipFile(path)
        members = archive.infolist()
        check(not any(stat.S_ISLNK(x.external_attr >> 16) for x in members), f'{path} holds a link')
        for x in members:
            inside = not re.search(r'^[/\\]|:|(^|[/\\])\.\.([/\\]|$)', x.filename)
            check(inside, f'{path} holds {x.filename!r}, a path outside its own folder')
        files = [(Path(x.filename).name, x.file_size, partial(archive.open, x)) for x in members]
    texts = {}
    for split, theirs in BINS.items():
        names = (f'wiki.{theirs}.raw', f'wiki.{theirs}.tokens')
        found = [file for file in files if file[0] in names and file[1] > 0]
        check(len(found) == 1, f'{path} must have one {" or ".join(names)}, not {len(found)}')
        texts[split] = found[0]
    return texts

def pieces(stream, size=1 << 20):
    """
    The text in pieces of about size characters, so that memory stays bounded. Cuts fall where
    GPT-2's pattern ends a token whatever surrounds it, so the pieces give the tokens of the whole:
    before white space that follows none, and between a letter and punctuation.
    """
    text, rest = io.TextIOWrapper(stream, 'utf-8', newline=''), []
    while block := text.read(size):
        cut = re.match(r'(?s).*(?:\S(?=[ \n])|[^\W\d_](?=[!-/、。，！？]))', block)
        rest.append(cut[0] if cut else block)
        if cut:
            yield ''.join(rest)
            rest = [block[cut.end():]]
    yield ''.join(rest)

def find_bins(dataset, data_dir, tokenizer):
    """The folder that prepare writes, and its meta.json, or None unless all of it is there."""
    for what, name, names in (('dataset', dataset, SOURCES), ('tokenizer', tokenizer, TOKENIZERS)):
        check(name in names, f'{what} {name!r} is unknown: choose from {", ".join(names)}')
    folder = Path(data_dir) / f'{dataset}-{tokenizer}'
    try:
        meta = json.loads((folder / 'meta.json').read_text())
        whole = meta['vocab_size'] > 0 and all(
            meta['bytes'][split] > 0 and
            (folder / f'{split}.bin').stat().st_size == 2 * meta['tokens'][split] for split in BINS)
    except (OSError, ValueError, KeyError, TypeError):
        return folder, None
    return folder, meta if whole else None

def prepare(dataset, tokenizer='gpt2', data_dir='data', source=None):
    """Write train.bin, val.bin and test.bin (uint16), then meta.json: the folder is complete."""
    folder, meta = find_bins(dataset, data_dir, tokenizer)
    if meta:
        print(f'{folder} is already there: {meta["tokens"]} tokens; remove it to make it again')
        return
    vocab_size, encode, _ = load_tokenizer(tokenizer)       # before the download, in case it fails
    path = Path(source) if source else download(dataset, data_dir)
    meta = {'dataset': dataset, 'tokenizer': tokenizer, 'vocab_size': vocab_size,
            'source': 'local' if source else SOURCES[dataset]['sha256'], 'tokens': {}, 'bytes': {}}
    try:
        texts = find_texts(path)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / 'meta.json').unlink(missing_ok=True)
        for split, (name, size, open_text) in texts.items():
            with (open_text() as stream, atomic(folder / f'{split}.bin') as f,
                  Progress(size, f'tokenising {name}', 'MB') as progress):
                for piece in pieces(stream):
                    f.write(np.array(encode(piece), dtype=np.uint16).tobytes())
                    progress(len(piece.encode()))
                meta['tokens'][split], meta['bytes'][split] = f.tell() // 2, progress.done
            print(f'wrote {folder}/{split}.bin: {meta["tokens"][split]:,} tokens of '
                  f'{meta["bytes"][split]:,} bytes of text', flush=True)
    except (UnicodeDecodeError, zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        raise ValueError(f'{path} cannot be read: {error}') from error
    with atomic(folder / 'meta.json') as f:
        f.write(json.dumps(meta, indent=2).encode())

# -----------------------------------------------------------------------------
# command line

def boolean(text):
    return ('false', 'true').index(text.lower()) == 1

def main():
    parser = Parser(prog='data.py', description=__doc__,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest='command', required=True, metavar='command')
    add_command = partial(commands.add_parser,                  # adds the defaults to the help:
                          formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for dataset in SOURCES:
        add = add_command(dataset, help=f'get {dataset} and tokenise it').add_argument
        add('--from', dest='source', metavar='PATH', help='not the network but a zip or folder '
            'with wiki.{train,valid,test}.{raw,tokens}')
        add('--tokenizer', default='gpt2', help=' or '.join(TOKENIZERS))
        add('--data_dir', default='data', help='where the zip and the tokens go')
    add = add_command('show', help='print samples of a task').add_argument
    add('task', choices=TASKS)
    add('--split', default='train', help='train, val; also test, or sparse, dense, nonstationary')
    add('--n', type=int, default=5, help='how many samples')
    add('--length', type=int, default=32, help='tokens (flipflop, wikitext) or most symbols')
    add('--train_length', type=int, help='100 after training on 50 is the bucket 51 to 100')
    add('--seed', type=int, default=0, help='of train; of other splits 0 is the set of eval.py')
    add('--json', action='store_true', help='one JSON object a line, with tokens and targets')
    for key, default in make_task.__kwdefaults__.items():
        kind = boolean if isinstance(default, bool) else type(default)
        add(f'--{key}', type=kind, default=default, help='as in train.py')
    args = parser.parse_args()
    if args.command in SOURCES:
        return prepare(args.command, args.tokenizer, args.data_dir, args.source)
    settings = {key: getattr(args, key) for key in make_task.__kwdefaults__}
    task = make_task(args.task, args.train_length or args.length, **settings)
    batches = ([task.batch(args.seed, 0, args.n)] if args.split == 'train' else
               task.eval_batches(args.split, args.length, args.n, seed=args.seed))
    for tokens, targets in (row for batch in batches for row in zip(*batch)):
        text = task.decode(tokens).replace('\n', '\\n')            # one sample, one line
        sample = {'tokens': tokens.tolist(), 'targets': targets.tolist(), 'text': text}
        print(json.dumps(sample, ensure_ascii=False) if args.json else text)

if __name__ == '__main__':
    one_line_errors('data.py', 'stopped; the same command goes on from here')
    main()
