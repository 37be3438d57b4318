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

import signal
signal.signal(signal.SIGINT, signal.SIG_DFL)    # nothing to save yet: Ctrl-C just ends

import ast
import difflib
import io
import json
import math
import operator
import os
import shlex
import sys
import textwrap
import time
import tokenize
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
    return {key: value for key, value in globals().items() if key[0] != '_'
            and isinstance(value, (bool, int, float, str, tuple, type(None)))}

# -----------------------------------------------------------------------------
# Settings. The defaults are the paper's flip-flop run.
# run
out_dir = None              # where to keep the run; None: out/NAME-attn-seed, NAME of file or task
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
tra_sparsity = True         # False: ablation, every key is kept
tra_distance = True         # False: ablation, distance does not count
rope_theta = 500_000.0      # base of the rotary angles
cope_npos = 64              # positions that CoPE can tell apart
pre_norm = True             # False: the blocks of the authors' notebook
keep_at_start = False       # True: start so that TRA keeps every key; other attentions start alike
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
# settings from files and flags

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
             ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Pow: operator.pow}
NO_LITERAL = (ValueError, TypeError, SyntaxError, ArithmeticError, RecursionError)

def literal(node):
    """The value of a literal, or of arithmetic on numbers such as 4 * 64. Nothing is executed."""
    if isinstance(node, (ast.Tuple, ast.List)):
        return tuple(literal(x) for x in node.elts)
    if not isinstance(node, ast.BinOp):
        return ast.literal_eval(node)
    left, right, kind = literal(node.left), literal(node.right), type(node.op)
    check({type(left), type(right)} <= {int, float} and kind in OPERATORS, 'not arithmetic')
    check(kind is not ast.Pow or max(abs(left), abs(right)) <= 100, 'too large')
    return OPERATORS[kind](left, right)

def default_of(key, where):
    near = difflib.get_close_matches(key, DEFAULTS, 1, 0.5)
    hint = f', did you mean {near[0]!r}?' if near else '; -h lists all'
    check(key in DEFAULTS, f'{where}: unknown setting {key!r}{hint}')
    return DEFAULTS[key]

def typed(key, value, where):
    """The value, if it is of the default's type; else a complaint that says where it was found."""
    default = default_of(key, where)
    kind = str if default is None else type(default)
    if (default is None and value is None) or (key == 'compile' and isinstance(value, bool)):
        return value
    if kind is float and type(value) is int:
        value = float(min(value, 10 ** 300))
    if kind is tuple:                                           # of ints; one alone will do
        value = value if isinstance(value, tuple) else (value,)
        check(value and all(type(x) is int for x in value),
              f'{where}: {key} wants whole numbers like {default}, not {value}')
    finite = kind is not float or (type(value) is float and math.isfinite(value))
    check(type(value) is kind and finite,
          f'{where}: {key} wants {kind.__name__}, like {default!r}, not {value!r}')
    check(kind is not int or abs(value) < 2 ** 63, f'{where}: {key} must be below 2 ** 63')
    return value

def read_file(path):
    """{key: value} of a file of assignments, which is parsed and never executed."""
    path, found = Path(path), {}
    check(path.is_file(), f'there is no config file {path}')
    try:
        body = ast.parse(path.read_bytes()).body
    except NO_LITERAL as error:
        place = f'{path}:{getattr(error, "lineno", 1)}'
        raise ValueError(f'{place}: {getattr(error, "msg", error)}') from None
    for line in body:
        where = f'{path}:{line.lineno}'
        if isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant):
            continue                                            # a docstring
        key = getattr(line.targets[0], 'id', '') if isinstance(line, ast.Assign) else ''
        check(key and len(line.targets) == 1, f'{where}: a config file has lines like '
              f'batch_size = 32, not {ast.unparse(line).splitlines()[0]!r}')
        try:
            value = literal(line.value)
        except NO_LITERAL:
            raise ValueError(f'{where}: {key} wants a plain value or arithmetic on such, not '
                             f'{ast.unparse(line.value)!r}') from None
        found[key] = typed(key, value, where)
    return found

def read_flag(key, text):
    value = {'true': True, 'false': False, 'none': None}.get(text.lower(), text)
    if value is text and not isinstance(DEFAULTS[key], (str, type(None))):
        try:
            value = literal(ast.parse(text, mode='eval').body)
        except NO_LITERAL:
            pass                                                # typed will complain of the text
    return typed(key, value, f'--{key}={text}')

def read_settings(argv):
    """All settings: defaults, then files, then flags, in any order; the files; the flags."""
    files, flags, found, argv = [], {}, dict(DEFAULTS), list(argv)
    while argv:
        arg = argv.pop(0)
        if not arg.startswith('-'):
            files.append(arg)
            continue
        key, equals, text = arg.lstrip('-').partition('=')
        default = default_of(key, arg)
        if not equals:
            example = not default if isinstance(default, bool) else default
            check(argv and not argv[0].startswith('--'),
                  f'--{key} needs a value, as in --{key}={example}')
            text = argv.pop(0)
        flags[key] = text
    for path in files:
        found.update(read_file(path))
    for key, text in flags.items():
        found[key] = read_flag(key, text)
    if found['out_dir'] is None:
        name = Path(files[-1]).stem if files and 'task' not in flags else found['task']
        found['out_dir'] = f'out/{name}-{found["attn"]}-{found["seed"]}'
    return found, files, flags

def print_help(config):
    """The settings with their values in config and the comments that stand beside them above."""
    print(__doc__.strip())
    left, source = dict(config), io.StringIO(Path(__file__).read_text())
    for token in tokenize.generate_tokens(source.readline):
        if token.type != tokenize.COMMENT:
            continue
        key, comment = token.line.partition(' = ')[0], token.string.strip('# -')
        if key in left:
            kind = 'str' if DEFAULTS[key] is None else type(DEFAULTS[key]).__name__
            print(f'  --{key:<28}{kind:<7}{left.pop(key)!r:<15} {comment}')
        elif left and token.start[1] == 0:                      # a heading, or a rule
            print(comment)

arguments = [arg for arg in sys.argv[1:] if arg not in ('-h', '--help')]
config, files, flags = read_settings(arguments)
if len(arguments) < len(sys.argv) - 1:
    print_help(config)
    sys.exit()
globals().update(config)

# -----------------------------------------------------------------------------
# setup: what can be wrong is found here, before anything is written

# torchrun tells each process which one it is, and of how many
rank, world = int(os.environ.get('RANK', 0)), int(os.environ.get('WORLD_SIZE', 1))
ddp = world > 1
check(0 <= rank < world, f'RANK is {rank} and WORLD_SIZE {world}: torchrun sets both')
for keys, least, most in (
        ('batch_size gradient_accumulation_steps max_iters log_interval', 1, math.inf),
        ('eval_interval save_interval eval_n eval_lengths', 1, math.inf),
        ('seed learning_rate weight_decay grad_clip final_n', 0, math.inf),
        ('warmup_ratio min_lr_ratio', 0, 1), ('beta1 beta2', 0, 0.999999)):
    for key in keys.split():
        value = min(eval_lengths) if key == 'eval_lengths' else config[key]
        limits = f'at least {least}' + f' and at most {most}' * (most < math.inf)
        check(least <= value <= most, f'{key} must be {limits}, not {value}')
check(batch_size % world == 0,
      f'batch_size {batch_size} must be divisible by the number of processes, {world}')
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
check(last.exists() or not resume,
      f'nothing to resume: {last} does not exist; leave out --resume to start')
folder.mkdir(parents=True, exist_ok=True)
if rank == 0:
    try:
        import fcntl                                        # held for as long as the process lives
        fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError) as error:                 # Windows; a disk that has no locks
        check(not isinstance(error, BlockingIOError),
              f'another process is training in {folder}: choose another --out_dir')
checkpoint = read_checkpoint(last) if resume else None
if checkpoint:
    saved, given = checkpoint['model_config'] | checkpoint['config'], vars(model_config) | identity
    for key in {**saved, **given}:
        check(key in given, f'{last} has a setting {key!r}, which this train.py does not know')
        old, new = saved.get(key, DEFAULTS.get(key)), given[key]    # a new setting had its default
        check(old == new or key == 'max_iters', f'{last} has {key}={old!r}, but {new!r} was given: '
              'resume with the settings of that run, or choose another --out_dir')
    check(0 < checkpoint['step'] <= max_iters,
          f'{last} is at step {checkpoint["step"]}, beyond max_iters {max_iters}')

# -----------------------------------------------------------------------------
# model and optimiser, the same in every process

stop = 0                                                    # the signal that asked for it

def say(text):
    """To whoever listens. If nobody does any more, as when tee has died, the run saves and ends."""
    global stop
    try:
        if rank == 0:
            print(text, flush=True)
    except OSError:
        stop = stop or signal.SIGPIPE

say(machine.why)
say(textwrap.fill('config: ' + ' '.join(f'{key}={value!r}' for key, value in config.items()), 100,
                  break_long_words=False, break_on_hyphens=False, subsequent_indent='        '))
keep_freed_memory()
torch.manual_seed(seed)
raw_model = Decoder(model_config).to(device)    # not compiled, not wrapped: to save and to evaluate
matrices = [p for p in raw_model.parameters() if p.dim() >= 2]
vectors = [p for p in raw_model.parameters() if p.dim() < 2]
optimizer = torch.optim.AdamW(
    [{'params': matrices}, {'params': vectors, 'weight_decay': 0.0}], weight_decay=weight_decay,
    lr=learning_rate, betas=(beta1, beta2), fused=device.startswith(('cuda', 'cpu')))
idle = attn == 'tra' and not tra_distance       # the gate gets no gradient then
step, best = 0, math.inf
if checkpoint:      # no generator to restore: data and dropout follow from (seed, step, rank)
    try:
        raw_model.load_state_dict(checkpoint['model'])
        state = checkpoint['optimizer']['state']
        optimizer.load_state_dict({**optimizer.state_dict(), 'state': state})
        step, best = checkpoint['step'], float(checkpoint['best'])
        check(idle or len(state) == len(matrices + vectors), 'moments are missing')
        for p, state in optimizer.state.items():
            for moment in (state['exp_avg'], state['exp_avg_sq']):
                check(moment.shape == p.shape and moment.isfinite().all(), 'damaged moments')
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f'{last} cannot be resumed, it does not fit: {error!r}') from None
model = torch.compile(raw_model) if compile else raw_model
if ddp:
    cuda = device.startswith('cuda')
    # while rank 0 evaluates, the others wait for it in the next step: that must not time out
    dist.init_process_group('nccl' if cuda else 'gloo', timeout=timedelta(hours=4))
    model = DistributedDataParallel(model, device_ids=[device] if cuda else None,
                                    find_unused_parameters=idle)
tokens = source.batch(seed, 0, 1)[0].size * batch_size * gradient_accumulation_steps
parameters = sum(p.numel() for p in raw_model.parameters())
say(f'{parameters:,} parameters | {tokens:,} tokens a step | processes: {world} | {folder}')
if device == 'cpu' and parameters * tokens > 1e10:          # seconds a step
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
    This process's part of a step: micro-batches (idx, targets, share of the step's scored tokens).

    Every process makes the batch of the whole step, which takes a millisecond, and keeps its own
    rows. So the batch does not depend on how many processes and micro-batches it is dealt to; and
    weighted by their shares, the losses add up to the mean over all scored tokens, although some
    rows have more of them than others.
    """
    idx, targets = source.batch(seed, step, batch_size * gradient_accumulation_steps)
    scored = (targets >= 0).sum()
    parts = (np.split(x[rank::world], gradient_accumulation_steps) for x in (idx, targets))
    for idx, targets in zip(*parts):
        share = float((targets >= 0).sum() / scored)
        pair = [torch.from_numpy(np.ascontiguousarray(x)) for x in (idx, targets)]
        if device.startswith('cuda'):                       # pinned: no need to wait for the copy
            pair = [x.pin_memory() for x in pair]
        yield *(x.to(device, non_blocking=True) for x in pair), share

def save(name):
    save_checkpoint(folder / name, {
        'model': raw_model.state_dict(), 'optimizer': optimizer.state_dict(), 'step': step,
        'best': best, 'model_config': vars(model_config), 'config': identity,
        'run': {key: config[key] for key in config if key in MAY_CHANGE}})

def log(entries):
    with open(metrics, 'a') as f:
        f.writelines(json.dumps(entry) + '\n' for entry in entries)

def begin():
    """
    Make the folder that of this run. Not before its first step is done and saved: until then an
    old run, which overwrite gives away, may be all there is. In a resumed run, drop what was logged
    after the checkpoint, so that the file is that of a run never stopped.
    """
    kept = []
    if not resume:
        save('last.pt')
        (folder / 'best.pt').unlink(missing_ok=True)
    elif metrics.exists():
        for line in metrics.read_text(errors='replace').splitlines():
            try:
                entry = json.loads(line)
                if entry['step'] <= step and 'final' not in entry:
                    kept.append(line + '\n')
            except (ValueError, LookupError, TypeError):    # killed in the middle of a line
                pass
    with atomic(metrics) as f:
        f.write(''.join(kept).encode())
    with atomic(folder / 'config.json') as f:
        f.write(json.dumps(config, indent=2).encode())

def summary(rows):
    """Evaluations in one line: val@128 1.000, sparse@128 0.998 exact match"""
    size, key = ('window', 'perplexity') if task == 'wikitext' else ('length', 'exact_match')
    name, write = METRICS[key]
    return ', '.join(f'{row["split"]}@{row[size]} {write(row[key])}' for row in rows) + f' {name}'

def command(without, **changes):
    """The command line of this run, changed."""
    here = os.environ.get('LOCAL_WORLD_SIZE')
    words = ['torchrun', f'--nproc_per_node={here}'] if ddp else ['python']
    kept = {key: text for key, text in flags.items() if key not in without} | changes
    words += [sys.argv[0], *files, *(f'--{key}={text}' for key, text in kept.items())]
    return shlex.join(words)

def on_signal(number, _):
    global stop
    stop = stop or number
    if not ddp:                                             # else torchrun's signal follows yours
        signal.signal(number, signal.SIG_DFL)
        try:
            os.write(2, b'\nstopping after this step; a second time stops at once, unsaved\n')
        except OSError:
            pass                                            # tee has died of the same Ctrl-C

# -----------------------------------------------------------------------------
# the loop

for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, on_signal)
if hasattr(signal, 'SIGHUP') and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:     # no nohup
    signal.signal(signal.SIGHUP, on_signal)
if checkpoint:
    if rank == 0:
        begin()
    say(f'resumed {last} at step {step}' + ': the run is complete' * (step == max_iters))
if step < max_iters and (compile or attn == 'tra'):
    say('compiling: this takes a while the first time, then it is cached')
broken = torch.zeros((), dtype=torch.long, device=device)   # the first step that was not finite
began = shown = time.monotonic()                            # shown: the last log line
clock, shown_step, saved_step, stopping = None, step, step, 0

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
    norm = torch.nn.utils.clip_grad_norm_(raw_model.parameters(), grad_clip or math.inf)
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    if ddp:                                                 # loss of all; was any told to stop
        report = torch.stack([loss, torch.full_like(loss, stop)])
        dist.all_reduce(report)
        loss = report[0]
    broken = torch.where((broken == 0) & ~torch.isfinite(loss + norm), step, broken)

    # what is due
    logging = step % log_interval == 0
    evaluating = step % eval_interval == 0 or step == max_iters
    stopping = stop
    if ddp:                     # all or none; to ask a GPU at every step would slow it
        asked = (device == 'cpu' or logging) and report[1] > 0
        stopping = (stop or signal.SIGTERM) if asked else 0
    saving = evaluating or stopping or step == 1 or step % save_interval == 0
    now = time.monotonic()      # a line is also due when time has doubled: soon, and rarely later
    telling = logging or clock is None or now - clock >= 2 * (shown - clock)
    if telling or saving:
        finite = not saving or all(torch.isfinite(p).all() for p in raw_model.parameters())
        if broken or not finite:
            good = f'{last} of step {saved_step}' if saved_step else 'none'
            print(f'train.py: loss, gradient or weights are not finite at step '
                  f'{int(broken) or step}, so the run stops; the last good checkpoint is {good}; '
                  'try a lower learning_rate', file=sys.stderr)
            sys.exit(1)
    if rank == 0 and step == 1:
        begin()
    if rank == 0 and telling:
        last_loss, now = loss.item(), time.monotonic()
        ms = 1000 * (now - shown) / max(1, step - shown_step)
        if clock is None:
            pace = f'first step done after {now - began:.0f} s'
        else:
            left = (now - clock) / max(1, step - clock_step) * (max_iters - step)
            pace = f'{ms:.0f} ms/step | eta {timedelta(seconds=round(left))}'
        if logging:             # the file depends on steps alone, not on how fast they were
            log([{'step': step, 'loss': last_loss, 'lr': lr, 'ms': round(ms, 1)}])
        say(f'step {step}/{max_iters} | loss {last_loss:.4f} | lr {lr:.1e} | {pace}')
        shown, shown_step = now, step
    if rank == 0 and evaluating:
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
        saved_step = step
        if rank == 0:
            save('last.pt')
        shown, shown_step = time.monotonic(), step          # ms/step is of training, eta of all
    if clock is None:                                       # once compiled
        clock, clock_step = time.monotonic(), step

# -----------------------------------------------------------------------------
# the table, of the file that eval.py takes

if rank == 0 and not stop:
    for number in (signal.SIGINT, signal.SIGTERM):          # there is nothing left to save
        signal.signal(number, signal.SIG_DFL)
    name = 'best.pt' if (folder / 'best.pt').exists() else 'last.pt'
    say(f'training is complete; evaluating {name}')
    chosen, scored = read_checkpoint(folder / name), Decoder(model_config).to(device)
    scored.load_state_dict(chosen['model'])
    rows = [evaluate(scored, source, split, x * train_length, final_n or None, device, autocast)
            for split in final_splits for x in eval_lengths]
    log({'step': chosen['step'], 'final': True, **row} for row in rows)
    say(f'\n{format_table(rows)}\n')
    say(f'final | {task} | {attn} | seed {seed} | {name}, step {chosen["step"]} | {summary(rows)}'
        f' | {time.monotonic() - began:.0f} s')
    say(f'saved in {folder}: last.pt, best.pt, config.json, metrics.jsonl. To try next:')
    if attn == 'tra':
        say('  ' + command(('resume', 'overwrite', 'out_dir'), attn='rope'))
    say(f'  python eval.py {shlex.quote(out_dir)} --lengths=1x,2x,4x,8x,16x')
if ddp:
    dist.barrier()
    dist.destroy_process_group()
if stop or stopping:
    stop = stop or stopping
    say(f'{signal.Signals(stop).name}: stopped after step {step}, saved in {last}. To go on:')
    say('  ' + command(('resume', 'overwrite'), resume=True))
    sys.exit(128 + stop)
