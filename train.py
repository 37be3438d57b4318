"""
Train a model on one of the tasks of data.py.

    python train.py config/flipflop_cpu.py                       the demonstration: about a minute
    python train.py config/flipflop_cpu.py --attn=rope --seed=1  any setting: --key=value
    python train.py config/flipflop.py                           the paper's run, for one A40
    python train.py config/flipflop.py --resume=True             goes on where it was cut short
    torchrun --nproc_per_node=4 train.py config/flipflop.py      several GPUs, the same batch
    python -i train.py config/flipflop_cpu.py                    leaves model, optimizer and source
                                                                 to poke at, and errors whole

`python train.py -h` lists every setting, and with a config file its values. Such a file holds
assignments like those below; flags win over files.

A run leaves in out_dir: last.pt to resume from, best.pt with the lowest error on val, of which the
final table is and eval.py's, config.json, and metrics.jsonl with one JSON object for every
log_interval steps and each evaluation.
"""

import ast
import difflib
import json
import math
import operator
import os
import shlex
import signal
import sys
import time
from contextlib import suppress
from dataclasses import fields
from datetime import timedelta
from pathlib import Path

from data import (atomic, check, keep_freed_memory, make_task, one_line_errors, pick_machine,
                  read_checkpoint, save_checkpoint)

one_line_errors('train.py')                     # before torch, which takes a while

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from eval import METRICS, evaluate, format_table
from tra import Config, Decoder

def settings():
    return {key: value for key, value in globals().items()
            if key[0] != '_' and isinstance(value, (int, float, str, tuple))}

# -----------------------------------------------------------------------------
# Settings. The defaults are the paper's flip-flop run.
# run
out_dir = 'auto'            # where to keep the run; auto: out/FILE-attn-seed, then other flags
resume = False              # go on from out_dir/last.pt
overwrite = False           # start over in an out_dir that holds a run, which is lost
log_interval = 100          # steps between log lines
eval_interval = 1000        # steps between evaluations, each followed by a save
save_interval = 1000        # most steps that a killed run can lose
eval_n = 256                # sequences of each split in those evaluations (wikitext: tokens)
final_n = 1000              # the same in the final table; 0: as many as eval.py takes
eval_lengths = (1, 4)       # lengths in the final table, as multiples of train_length
# machine
device = 'auto'             # auto, cpu, cuda, cuda:1, mps
dtype = 'auto'              # auto, float32 or bfloat16 (autocast; the weights stay float32)
compile = 'auto'            # auto, True or False: torch.compile of the whole model
data_dir = 'data'           # wikitext: where data.py has put it
MAY_CHANGE = set(settings())    # by a resumed run; what follows makes it another run
# task
task = 'flipflop'           # flipflop, copy, induct, instruct or wikitext
train_length = 512          # flipflop: tokens; wikitext: window; the others: most symbols
p_ignore = 0.8              # flipflop: how often to ignore
n_symbols = 26              # copy, induct, instruct: size of the alphabet
repeats = True              # copy, induct, instruct: may a symbol come twice
vary_alphabet = False       # copy, induct, instruct: train on parts of it, 2 symbols to all
n_queries = 1               # induct: keys asked for in a sequence
dataset = 'wikitext103'     # wikitext: wikitext103 or wikitext2
tokenizer = 'gpt2'          # wikitext: gpt2 or bytes
# model
n_layer = 4                 # blocks
n_head = 4                  # attention heads in a block
n_embd = 256                # width
mlp_ratio = 2               # hidden size of the MLP, in widths
dropout = 0.01              # on attention weights and on the MLP's hidden layer
attn = 'tra'                # tra, rope, nope, alibi, nape, cope, fot or stick
tra_threshold = 0.0         # cosine that a kept key is above, in the last layer; the paper's: 0
tra_sparsity = True         # False: ablation, every key is kept
tra_distance = True         # False: ablation, distance does not count
rope_theta = 500_000.0      # base of the rotary angles
cope_npos = 64              # positions that CoPE can tell apart
pre_norm = True             # False: the blocks of the authors' notebook
keep_at_start = True        # False: a plain start, which drops half of all keys by chance
# training: AdamW, linear warm-up, cosine decay
seed = 0                    # of weights, data and dropout
batch_size = 64             # sequences in a micro-batch, all processes together
gradient_accumulation_steps = 1     # micro-batches in a step: 4 of 16 are 1 of 64 in less memory
max_iters = 20_000          # steps; a resumed run may change it
learning_rate = 1e-4        # at its highest, after the warm-up
warmup_ratio = 0.05         # share of the steps spent warming up
min_lr_ratio = 0.0          # where the cosine ends, as a share of learning_rate
weight_decay = 0.01         # on matrices only: not on biases and norms
beta1 = 0.9                 # of AdamW
beta2 = 0.999               # of AdamW
grad_clip = 1.0             # largest norm of the gradient; 0: any
# -----------------------------------------------------------------------------
DEFAULTS = settings()

# -----------------------------------------------------------------------------
# reading them: files win over defaults, flags over files, in whatever order they are given

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
             ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv}

def literal(node):
    """The value of a literal, or of arithmetic such as 4 * 64. Nothing is executed."""
    if isinstance(node, (ast.Tuple, ast.List)):
        return tuple(map(literal, node.elts))
    if isinstance(node, ast.BinOp):
        return OPERATORS[type(node.op)](literal(node.left), literal(node.right))
    return ast.literal_eval(node)

def read_value(key, node):
    """A literal that is of the default's kind and in range."""
    value, many = literal(node), isinstance(DEFAULTS[key], tuple)
    if key == 'compile' and isinstance(value, bool):
        return value
    kind = int if many else type(DEFAULTS[key])
    values = value if many and isinstance(value, (tuple, list)) else [value]
    values = tuple(float(x) if kind is float and type(x) is int else x for x in values)
    least = int(kind is int and key not in ('seed', 'final_n'))
    check(values and all(type(x) is kind and (kind is str or least <= x < 2 ** 63) for x in values),
          'of another kind, or out of range')
    return values if many else values[0]

def parse(source, path=None):
    """{key: value} of the assignments in a config file, or of a flag written as one."""
    found = {}
    try:
        lines = ast.parse(source, path or 'command line').body
    except SyntaxError as error:
        raise ValueError(error) from None
    for line in lines:
        where = f'{path}:{line.lineno}' if path else 'command line'
        if isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant):
            continue                                            # a docstring
        check(isinstance(line, ast.Assign) and [type(x) for x in line.targets] == [ast.Name],
              f'{where}: not like batch_size = 32: {ast.unparse(line)[:60]}')
        key = line.targets[0].id
        near = difflib.get_close_matches(key, DEFAULTS, 1, 0)[0]
        check(key in DEFAULTS, f'{where}: unknown setting {key!r}, did you mean {near!r}?')
        try:
            found[key] = read_value(key, line.value)
        except (ValueError, TypeError, KeyError, ArithmeticError):
            raise ValueError(f'{where}: {key} wants a value like {DEFAULTS[key]!r}, '
                             f'not {ast.unparse(line.value)}') from None
    return found

files, flags, config = [], {}, dict(DEFAULTS)
words = iter([word for word in sys.argv[1:] if word not in ('-h', '--help')])
for word in words:
    if not word.startswith('-'):
        files.append(word)
        continue
    key, equals, text = word.lstrip('-').partition('=')
    text = text if equals else next(words, '--')
    check(not text.startswith('--'), f'{word} needs a value')
    flags[key.replace('-', '_')] = text
for path in files:
    config |= parse(Path(path).read_bytes(), path)
for key, text in flags.items():
    if text.lower() in ('true', 'false'):
        text = text.capitalize()
    elif isinstance(DEFAULTS.get(key), str):
        text = repr(text)
    config |= parse(f'{key} = ({text})')
if config['out_dir'] == 'auto':
    name = Path(files[-1]).stem if files and 'task' not in flags else config['task']
    apart = set(flags) - MAY_CHANGE - {'task', 'attn', 'seed', 'max_iters'}
    config['out_dir'] = '-'.join([f'out/{name}', config['attn'], str(config['seed']),
                                  *(f'{key}={config[key]}' for key in flags if key in apart)])
if {'-h', '--help'} & set(sys.argv):
    print(__doc__.strip())
    left = dict(config)
    for line in Path(__file__).read_text().splitlines():        # keys and comments as above
        key, comment = line.partition(' = ')[0], line.partition('# ')[2]
        if key in left:
            kind, value = type(DEFAULTS[key]).__name__, repr(left.pop(key))
            print(f'  --{key:<28}{kind:<7}{value:<15} {comment}')
        elif left and line.startswith('# '):
            print(comment)
    sys.exit()
globals().update(config)

# -----------------------------------------------------------------------------
# setup: what can be wrong is found here, before anything is written

# torchrun tells each process which one it is, and of how many
rank, world = int(os.environ.get('RANK', 0)), int(os.environ.get('WORLD_SIZE', 1))
ddp = world > 1
check(0 <= rank < world, f'RANK is {rank} and WORLD_SIZE {world}: torchrun sets both')
check(batch_size % world == 0,
      f'batch_size {batch_size} must be divisible by the number of processes, {world}')
check(max(warmup_ratio, min_lr_ratio) <= 1, 'warmup_ratio and min_lr_ratio are shares, at most 1')
check(not (resume and overwrite), 'resume goes on with a run, overwrite throws it away: choose one')
check(out_dir, 'out_dir is empty: name a folder')
source = make_task(task, train_length, **{key: config[key] for key in make_task.__kwdefaults__})
eval_splits = [split for split in source.splits if split != 'test']     # test is for the end
final_splits = ['test'] if task == 'wikitext' else source.splits
for length in eval_lengths:                                 # complains of one that cannot be
    next(iter(source.eval_batches(final_splits[0], length * train_length, 1)))
model_config = Config(vocab_size=source.vocab_size, **{
    field.name: config[field.name] for field in fields(Config) if field.name in config})
machine = pick_machine(device, dtype, compile)
device, dtype, compile, autocast = machine.device, machine.dtype, machine.compile, machine.autocast
config.update(device=device, dtype=dtype, compile=compile)
identity = {key: value for key, value in config.items() if key not in MAY_CHANGE}

folder = Path(out_dir)                                      # several machines have to share it
last, metrics = folder / 'last.pt', folder / 'metrics.jsonl'
held = [name for name in ('last.pt', 'best.pt', 'config.json', metrics.name)
        if (folder / name).exists()]
check(resume or overwrite or not held, f'{folder} already holds a run ({", ".join(held)}): '
      '--resume=True goes on with it, --overwrite=True starts over, --out_dir=... leaves it alone')
keep_freed_memory()
torch.manual_seed(seed)
raw_model = Decoder(model_config).to(device)    # not compiled, not wrapped: to save and to evaluate
matrices = [p for p in raw_model.parameters() if p.dim() >= 2]
vectors = [p for p in raw_model.parameters() if p.dim() < 2]
optimizer = torch.optim.AdamW(
    [{'params': matrices}, {'params': vectors, 'weight_decay': 0.0}], weight_decay=weight_decay,
    lr=learning_rate, betas=(beta1, beta2), fused=device.startswith(('cuda', 'cpu')))

step, best, logged = 0, math.inf, 0             # logged: bytes of metrics.jsonl
if resume:          # no generator to restore: data and dropout follow from (seed, step, rank)
    checkpoint = read_checkpoint(last)
    saved, given = checkpoint['model_config'] | checkpoint['config'], vars(model_config) | identity
    for key in saved | given:
        old, new = saved.get(key, DEFAULTS.get(key)), given.get(key, 'unknown here')
        check(old == new or key == 'max_iters', f'{last} has {key}={old!r}, but now it is {new!r}: '
              'resume with the settings of that run, or choose another --out_dir')
    try:
        raw_model.load_state_dict(checkpoint['model'])
        state = checkpoint['optimizer']['state']
        optimizer.load_state_dict(optimizer.state_dict() | {'state': state})
        step, best, logged = checkpoint['step'], float(checkpoint['best']), checkpoint['logged']
        check(state, 'it has no moments')
        check(0 < step <= max_iters, f'step {step} is beyond max_iters {max_iters}')
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f'{last} cannot be resumed: {error!r}') from None

if rank == 0:
    folder.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl                            # held for as long as the process lives
        fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError) as error:     # Windows; a disk that has no locks
        check(not isinstance(error, BlockingIOError),
              f'another process is training in {folder}: choose another --out_dir')
model = torch.compile(raw_model) if compile else raw_model
if ddp:
    cuda = device.startswith('cuda')
    # while rank 0 evaluates, the others wait for it in the next step: that must not time out
    dist.init_process_group('nccl' if cuda else 'gloo', timeout=timedelta(hours=4))
    idle = attn == 'tra' and not tra_distance   # the gate gets no gradient then
    model = DistributedDataParallel(model, device_ids=[device] if cuda else None,
                                    find_unused_parameters=idle)

stop = 0                                        # the signal that asked for it

def say(text):
    """To whoever listens. If nobody does any more, as when tee has died, the run saves and ends."""
    global stop
    try:
        if rank == 0:
            print(text, flush=True)
    except OSError:
        stop = stop or signal.SIGPIPE

say(machine.why)
say('changed: ' + ' '.join(f'{key}={x!r}' for key, x in config.items() if x != DEFAULTS[key]))
tokens = source.batch(seed, 0, 1)[0].size * batch_size * gradient_accumulation_steps
parameters = sum(p.numel() for p in raw_model.parameters())
say(f'{parameters:,} parameters | {tokens:,} tokens a step | processes: {world} | {folder}')
if device == 'cpu' and parameters * tokens * max_iters > 1e14:      # hours
    say(f'this is sized for a GPU; on a CPU, python train.py config/{task}_cpu.py takes minutes')

def get_lr(step):
    """Of the update after `step` updates: linear warm-up, then half a cosine."""
    warmup = round(warmup_ratio * max_iters)
    if step < warmup:
        return learning_rate * (step + 1) / warmup
    done = (step - warmup) / max(1, max_iters - warmup)     # 0 to 1
    return learning_rate * (min_lr_ratio + (1 - min_lr_ratio) * (1 + math.cos(math.pi * done)) / 2)

def batches(step):
    """
    This process's micro-batches: (idx, targets, their share of the step's scored tokens). Every
    process makes the whole batch and keeps its rows, so the batch does not depend on how it is
    dealt; losses weighted by the shares add up to the mean over all scored tokens. Short sequences
    go together, each micro-batch cut after its last scored token: what follows changes no loss.
    """
    idx, targets = source.batch(seed, step, batch_size * gradient_accumulation_steps)
    scored = targets >= 0
    used = scored.shape[1] - scored[:, ::-1].argmax(1)      # tokens up to the last scored one
    mine = np.argsort(used, kind='stable')[rank::world]
    for rows in np.split(mine, gradient_accumulation_steps):
        part = np.s_[rows, :used[rows].max()]
        share = float(scored[part].sum() / scored.sum())
        pair = [torch.from_numpy(x[part]) for x in (idx, targets)]
        if device.startswith('cuda'):                       # pinned: no need to wait for the copy
            pair = [x.pin_memory() for x in pair]
        yield *(x.to(device, non_blocking=True) for x in pair), share

def save(name):
    save_checkpoint(folder / name, {
        'model': raw_model.state_dict(), 'optimizer': optimizer.state_dict(), 'step': step,
        'best': best, 'logged': logged, 'model_config': vars(model_config), 'config': identity,
        'run': {key: config[key] for key in config if key in MAY_CHANGE}})

def log(entries):
    global logged
    with open(metrics, 'a') as f:
        f.writelines(json.dumps(entry) + '\n' for entry in entries)
        logged = f.tell()

def begin():
    """Make the folder that of this run, without what was logged after the checkpoint."""
    if not resume:              # an old run is given away once the new one has saved a step
        save('last.pt')
        (folder / 'best.pt').unlink(missing_ok=True)
    with open(metrics, 'a') as f:
        f.truncate(min(logged, f.tell()))
    with atomic(folder / 'config.json') as f:
        f.write(json.dumps(config, indent=2).encode())

def summary(rows):
    """Evaluations in one line: val@128 1.000, sparse@128 0.998 exact match"""
    size, key = ('window', 'perplexity') if task == 'wikitext' else ('length', 'exact_match')
    name, write = METRICS[key]
    return ', '.join(f'{row["split"]}@{row[size]} {write(row[key])}' for row in rows) + f' {name}'

def command(**changes):
    """The command line of this run, changed; None: without this flag."""
    here = os.environ.get('LOCAL_WORLD_SIZE')
    changed = flags | {'resume': None, 'overwrite': None} | changes
    words = [sys.argv[0], *files, *(f'--{k}={v}' for k, v in changed.items() if v is not None)]
    return (f'torchrun --nproc_per_node={here} ' if ddp else 'python ') + shlex.join(words)

def on_signal(number, _):
    global stop
    stop = stop or number
    if not ddp:                                 # else torchrun's signal follows yours
        signal.signal(number, signal.SIG_DFL)
        with suppress(OSError):                 # tee has died of the same Ctrl-C
            os.write(2, b'\nstopping after this step; a second time stops at once, unsaved\n')

# -----------------------------------------------------------------------------
# the loop

for number in (signal.SIGINT, signal.SIGTERM, getattr(signal, 'SIGHUP', signal.SIGTERM)):
    if signal.getsignal(number) != signal.SIG_IGN:          # nohup ignores SIGHUP
        signal.signal(number, on_signal)
if resume:
    if rank == 0:
        begin()
    say(f'resumed {last} at step {step}' + ': the run is complete' * (step == max_iters))
    if max_iters != saved['max_iters']:
        say(f'max_iters was {saved["max_iters"]} and is {max_iters}: the learning rate follows it')
if step < max_iters and (compile or attn == 'tra'):
    say('compiling: this takes a while the first time, then it is cached')
began = shown = time.monotonic()                            # shown: the last log line
first, shown_step, stopping = step + 1, step, False

model.train()
while step < max_iters and not stopping:
    # One step. Nothing in it waits for the GPU: numbers are fetched to be shown or before a save.
    lr = get_lr(step)
    for group in optimizer.param_groups:
        group['lr'] = lr
    dropout_seed = np.random.SeedSequence([seed, step, rank]).generate_state(1)[0]
    torch.manual_seed(int(dropout_seed))
    loss = torch.zeros((), device=device)
    for micro, (x, y, share) in enumerate(batches(step)):
        if ddp:                                             # gradients meet in the last backward
            model.require_backward_grad_sync = micro == gradient_accumulation_steps - 1
        with autocast:
            part = model(x, y)[1] * share
        (part * world).backward()                           # processes average, we want the sum
        loss += part.detach()
    torch.nn.utils.clip_grad_norm_(raw_model.parameters(), grad_clip or math.inf)
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    if ddp:                                                 # loss of all; was any told to stop
        report = torch.stack([loss, torch.full_like(loss, stop)])
        dist.all_reduce(report)
        loss = report[0]

    # what is due
    logging = step % log_interval == 0
    evaluating = step % eval_interval == 0 or step == max_iters
    stopping = stop > 0
    if ddp:                     # all or none; to ask a GPU at every step would slow it
        stopping = (device == 'cpu' or logging) and report[1].item() > 0
    saving = evaluating or stopping or step == 1 or step % save_interval == 0
    since = step - first        # also told at 0, 1, 2, 4, 8, ...: there is an eta soon
    telling = logging or (since < log_interval and since & (since - 1) == 0)
    if telling or saving:       # a weight that is not finite stays so: found here at the latest
        if not all(torch.isfinite(x).all() for x in (loss, *raw_model.parameters())):
            sys.exit(f'train.py: loss or weights are not finite at step {step}, so the run stops; '
                     f'{last} is as it was; try a lower learning_rate')
    if rank > 0:
        continue
    if step == 1:
        begin()
    if telling:
        loss, now = loss.item(), time.monotonic()
        ms = 1000 * (now - shown) / (step - shown_step)
        eta = timedelta(seconds=round(ms * (max_iters - step) / 1000))
        pace = f'{ms:.0f} ms/step | eta {eta}' if since else f'first step in {ms / 1000:.0f} s'
        if logging:
            log([{'step': step, 'loss': loss, 'lr': lr, 'ms': round(ms, 1)}])
        say(f'step {step}/{max_iters} | loss {loss:.4f} | lr {lr:.1e} | {pace}')
        shown, shown_step = now, step
    if evaluating:
        rows = [evaluate(raw_model, source, split, train_length, eval_n, device, autocast)
                for split in eval_splits]
        log({'step': step, **row} for row in rows)
        error = rows[0]['loss' if task == 'wikitext' else 'token_error']        # on val
        better = error <= best                              # of equals the later: it learned longer
        if better:
            best = error
            save('best.pt')
        say(f'step {step}/{max_iters} | {summary(rows)}' + ' | best so far' * better)
    if saving:
        save('last.pt')
        shown, shown_step = time.monotonic(), step          # ms/step is of training alone

# -----------------------------------------------------------------------------
# the table, of the file that eval.py takes

stop = stop or (stopping and signal.SIGTERM)                # told by another process
if rank == 0 and not stop:
    for number in (signal.SIGINT, signal.SIGTERM):          # there is nothing left to save
        signal.signal(number, signal.SIG_DFL)
    say('training is complete; evaluating best.pt')
    chosen = read_checkpoint(folder / 'best.pt')
    raw_model.load_state_dict(chosen['model'])
    rows = [evaluate(raw_model, source, split, x * train_length, final_n or None, device, autocast)
            for split in final_splits for x in eval_lengths]
    log({'step': chosen['step'], 'final': True, **row} for row in rows)
    say(f'\n{format_table(rows)}\n\nfinal | {task} | {attn} | seed {seed} | best.pt, '
        f'step {chosen["step"]} | {summary(rows)} | {time.monotonic() - began:.0f} s')
    say(f'saved in {folder}: last.pt, best.pt, config.json, metrics.jsonl. To try next:')
    if attn == 'tra':
        say('  ' + command(out_dir=None, attn='rope'))
    say(f'  python eval.py {shlex.quote(out_dir)} --lengths=1x,2x,4x')
if ddp:
    dist.barrier()
    dist.destroy_process_group()
if stop:
    say(f'{signal.Signals(stop).name}: stopped after step {step}, saved in {last}. To go on:')
    say('  ' + command(resume=True))
    sys.exit(128 + stop)
