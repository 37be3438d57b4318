"""
Train a model on one of the tasks of data.py.

    python train.py config/flipflop_cpu.py                            the demonstration: about a minute on a laptop
    python train.py config/flipflop_cpu.py --attn=rope --seed=1       any setting below: --key=value or --key value
    python train.py config/flipflop.py                                the paper's run, sized for one A40
    python train.py config/flipflop.py --resume=True                  goes on where it was stopped, killed or unplugged
    torchrun --nproc_per_node=4 train.py config/flipflop.py           several GPUs; the batch stays the same

`python train.py -h` lists every setting. A config file holds assignments like those below; flags win over files.

A run leaves in out_dir: last.pt to resume from, best.pt with the lowest error on val, config.json, and metrics.jsonl with one
JSON object for each log line and each evaluation.
"""

import ast
import difflib
import json
import math
import os
import re
import shlex
import signal
import sys
import textwrap
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from data import atomic, check, make_task
from eval import METRICS, evaluate, format_table, keep_freed_memory, read_checkpoint
from tra import Config, Decoder

# -----------------------------------------------------------------------------
# Settings. The defaults are the paper's flip-flop run.
# run
out_dir = None              # where the run is kept; None: out/NAME-attn-seed, NAME that of the config file or task
resume = False              # go on from out_dir/last.pt
overwrite = False           # start over in an out_dir that holds a run, which is lost
seed = 0                    # of weights, data and dropout
log_interval = 100          # steps between log lines
eval_interval = 1000        # steps between evaluations, each followed by a save
save_interval = 1000        # most steps that a killed run can lose
eval_n = 256                # sequences of each split in those evaluations (wikitext: tokens)
final_n = 1000              # the same in the final table; 0: as many as eval.py takes
eval_lengths = (1, 4)       # lengths in the final table, as multiples of train_length
# task
task = 'flipflop'           # flipflop, copy, induct, instruct or wikitext
train_length = 512          # flipflop: tokens; wikitext: window; the others: most symbols
p_ignore = 0.8              # flipflop: how often to ignore
n_symbols = 26              # copy, induct, instruct: size of the alphabet
repeats = True              # copy, induct, instruct: may a symbol come twice
n_queries = 1               # induct: keys asked for in a sequence
dataset = 'wikitext103'     # wikitext: wikitext103 or wikitext2
tokenizer = 'gpt2'          # wikitext: gpt2 or bytes
data_dir = 'data'           # wikitext: where data.py has put it
# model
n_layer = 4                 # blocks
n_head = 4                  # attention heads in a block
n_embd = 256                # width
mlp_ratio = 2               # hidden size of the MLP, in widths
dropout = 0.01              # on attention weights and on the MLP's hidden layer
attn = 'tra'                # tra, rope, nope, alibi, cope or fot
tra_sparsity = True         # False: ablation, every key is kept
tra_distance = True         # False: ablation, distance does not count
rope_theta = 500_000.0      # base of the rotary angles
cope_npos = 64              # positions that CoPE can tell apart
pre_norm = True             # False: the blocks of the authors' notebook
keep_at_start = False       # True: initialised so that TRA keeps every key at first; other attentions start alike
# optimiser: AdamW, linear warm-up, cosine decay
batch_size = 64             # sequences in a micro-batch, all processes together
gradient_accumulation_steps = 1     # micro-batches in a step: 4 of 16 are 1 of 64 in less memory
max_iters = 20_000          # steps
learning_rate = 1e-4        # at its highest, after the warm-up
warmup_ratio = 0.05         # share of the steps spent warming up
min_lr_ratio = 0.0          # where the cosine ends, as a share of learning_rate
weight_decay = 0.01         # on matrices only: not on biases and norms
beta1 = 0.9                 # of AdamW
beta2 = 0.999               # of AdamW
grad_clip = 1.0             # largest norm of the gradient; 0: any
# machine
device = 'auto'             # auto, cpu, cuda, cuda:1, mps
dtype = 'auto'              # auto, float32 or bfloat16 (autocast; the weights stay float32)
compile = 'auto'            # auto, True or False: torch.compile of the whole model
# -----------------------------------------------------------------------------

DEFAULTS = {key: value for key, value in list(globals().items())
            if key[0] != '_' and isinstance(value, (bool, int, float, str, tuple, type(None)))}
# what a resumed run may change; anything else would make it another run
MAY_CHANGE = {'out_dir', 'resume', 'overwrite', 'log_interval', 'eval_interval', 'save_interval', 'eval_n', 'final_n',
              'eval_lengths', 'data_dir', 'max_iters', 'device', 'dtype', 'compile'}
# torchrun tells each process which one it is, and of how many
rank, local_rank = int(os.environ.get('RANK', 0)), int(os.environ.get('LOCAL_RANK', 0))
world = int(os.environ.get('WORLD_SIZE', 1))

# -----------------------------------------------------------------------------
# settings from files and flags

def default_of(key, where):
    near = difflib.get_close_matches(key, DEFAULTS, 1, 0.5)
    check(key in DEFAULTS, f'{where}: unknown setting {key!r}' + (f', did you mean {near[0]!r}?' if near else '; -h lists all'))
    return DEFAULTS[key]

def typed(key, value, where):
    """The value, if it is of the default's type; else a complaint that says where it was found."""
    default = default_of(key, where)
    kind = str if default is None else type(default)
    if (default is None and value is None) or (key == 'compile' and isinstance(value, bool)):
        return value
    if kind is float and type(value) is int:
        value = float(value)
    if kind is tuple:                                           # of ints; one alone will do
        value = tuple(value) if isinstance(value, (tuple, list)) else (value,)
        check(value and all(type(x) is int for x in value), f'{where}: {key} wants whole numbers like {default}, not {value}')
    check(type(value) is kind and not (kind is float and not math.isfinite(value)),
          f'{where}: {key} wants {kind.__name__}, like {default!r}, not {value!r}')
    return value

def read_file(path):
    """{key: value} of a file of assignments, which is parsed and never executed."""
    path, settings = Path(path), {}
    check(path.is_file(), f'there is no config file {path}')
    try:
        body = ast.parse(path.read_bytes()).body
    except SyntaxError as error:
        raise ValueError(f'{path}:{error.lineno}: {error.msg}') from None
    for line in body:
        where = f'{path}:{line.lineno}'
        if isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant):
            continue                                            # a docstring
        check(isinstance(line, ast.Assign) and len(line.targets) == 1 and isinstance(line.targets[0], ast.Name),
              f'{where}: a config file has lines like batch_size = 32, not {ast.unparse(line).splitlines()[0]!r}')
        key = line.targets[0].id
        try:
            value = ast.literal_eval(line.value)
        except (ValueError, TypeError):
            raise ValueError(f'{where}: {key} wants a plain value, not {ast.unparse(line.value)!r}') from None
        settings[key] = typed(key, value, where)
    return settings

def read_flag(key, text):
    default, value = DEFAULTS[key], {'true': True, 'false': False, 'none': None}.get(text.lower(), text)
    if isinstance(default, str) and key != 'compile':
        value = text
    elif value is text and default is not None:
        try:
            value = ast.literal_eval(text)
        except (ValueError, TypeError, SyntaxError):
            pass                                                # typed will complain of the text
    return typed(key, value, f'--{key}={text}')

def read_settings(argv):
    """All settings: defaults, then files, then flags, in whatever order they come. Also the files and flags as given."""
    files, flags, settings, argv = [], {}, dict(DEFAULTS), list(argv)
    while argv:
        arg = argv.pop(0)
        if arg in ('-h', '--help'):
            print(help_text())
            sys.exit(0)
        if not arg.startswith('-'):
            files.append(arg)
            continue
        key, equals, text = arg.lstrip('-').partition('=')
        default = default_of(key, arg)
        if not equals:
            check(argv and not argv[0].startswith('--'), f'--{key} needs a value, as in --{key}={not default if isinstance(default, bool) else default}')
            text = argv.pop(0)
        flags[key] = text
    for path in files:
        settings.update(read_file(path))
    for key, text in flags.items():
        settings[key] = read_flag(key, text)
    if settings['out_dir'] is None:
        name = Path(files[-1]).stem if files and 'task' not in flags else settings['task']
        settings['out_dir'] = f'out/{name}-{settings["attn"]}-{settings["seed"]}'
    return settings, files, flags

def help_text():
    """The settings as they stand above, comments included."""
    lines = [__doc__.strip(), '']
    for line in re.split(r'(?m)^# -+\n', Path(__file__).read_text())[1].splitlines()[1:]:
        if match := re.match(r'(\w+) = (.*?) +# (.*)', line):
            key, default, comment = match.groups()
            kind = 'str' if DEFAULTS[key] is None else type(DEFAULTS[key]).__name__
            line = f'  --{key:<28}{kind:<7}{default:<15}{comment}'
        lines.append(line.removeprefix('# '))
    return '\n'.join(lines)

def check_settings():
    for least, keys in ((1, 'batch_size gradient_accumulation_steps max_iters log_interval eval_interval save_interval eval_n'),
                        (0, 'seed learning_rate weight_decay grad_clip final_n warmup_ratio min_lr_ratio beta1 beta2')):
        for key in keys.split():
            check(globals()[key] >= least, f'{key} must be at least {least}, not {globals()[key]}')
    check(max(warmup_ratio, min_lr_ratio) <= 1, f'warmup_ratio {warmup_ratio} and min_lr_ratio {min_lr_ratio} must be at most 1')
    check(max(beta1, beta2) < 1, f'beta1 {beta1} and beta2 {beta2} must be below 1')
    check(seed < 2 ** 63, f'seed {seed} must be below 2 ** 63')
    check(min(eval_lengths) >= 1, f'eval_lengths must be at least 1, not {eval_lengths}')
    check(batch_size % world == 0, f'batch_size {batch_size} must be divisible by the number of processes, {world}')
    check(not (resume and overwrite), 'resume goes on with a run, overwrite throws it away: choose one')

def choose_machine():
    """device, dtype and compile, and why"""
    why = dict.fromkeys(('device', 'dtype', 'compile'), 'as told')
    where, precision, whole = device, dtype, compile
    if device == 'auto':
        where = 'cuda' if torch.cuda.is_available() else 'cpu'
        why['device'] = 'found one' if where == 'cuda' else 'no CUDA found'
    try:
        torch.zeros(1, device=where)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f'device {where!r} does not work here: {str(error).splitlines()[0]}') from None
    if dtype == 'auto':
        has_it = where.startswith('cuda') and torch.cuda.is_bf16_supported(including_emulation=False)
        precision, why['dtype'] = ('bfloat16', 'the GPU has it') if has_it else ('float32', 'no GPU with bfloat16')
    check(precision in ('float32', 'bfloat16'), f'dtype {dtype!r} is unknown: choose auto, float32 or bfloat16')
    if compile == 'auto':
        whole = where.startswith('cuda')
        why['compile'] = 'pays on CUDA' if whole else "pays on CUDA only; TRA's kernel is compiled anyway"
    check(isinstance(whole, bool), f'compile {compile!r} is unknown: choose auto, True or False')
    print0(f'device {where} ({why["device"]}) | dtype {precision} ({why["dtype"]}) | compile {whole} ({why["compile"]})')
    return where, precision, whole

# -----------------------------------------------------------------------------
# parts of a run

def print0(text):
    if rank == 0:
        print(text, flush=True)

def fail(error, code=2):
    if local_rank == 0:
        print(f'train.py: {" ".join(str(error).split())}', file=sys.stderr, flush=True)
    sys.exit(code)

def get_lr(step):
    """Of the update after `step` updates: linear warm-up, then half a cosine."""
    warmup = round(warmup_ratio * max_iters)
    if step < warmup:
        return learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, max_iters - warmup)     # 0 to 1
    return learning_rate * (min_lr_ratio + (1 - min_lr_ratio) * (1 + math.cos(math.pi * progress)) / 2)

def batches(source, step):
    """
    This process's part of a step: micro-batches (idx, targets, share of the step's scored tokens).

    Every process makes the batch of the whole step, which takes a millisecond, and keeps its own rows. So the batch does not
    depend on how many processes and micro-batches it is dealt to; and weighted by their shares, the losses add up to the mean
    over all scored tokens, although some rows have more of them than others.
    """
    idx, targets = source.batch(seed, step, batch_size * gradient_accumulation_steps)
    scored = (targets >= 0).sum()
    parts = (np.split(x[rank::world], gradient_accumulation_steps) for x in (idx, targets))
    for idx, targets in zip(*parts):
        share = float((targets >= 0).sum() / scored)
        pair = [torch.from_numpy(np.ascontiguousarray(x)) for x in (idx, targets)]
        if device.startswith('cuda'):                           # from pinned memory the copy need not be waited for
            pair = [x.pin_memory() for x in pair]
        yield *(x.to(device, non_blocking=True) for x in pair), share

def open_run(folder, config, model_config):
    """The checkpoint to resume from, or None for a new run."""
    last = folder / 'last.pt'
    if not resume:
        check(overwrite or not (last.exists() or (folder / 'best.pt').exists()), f'{folder} already holds a run: '
              '--resume=True goes on with it, --overwrite=True starts over, --out_dir=... leaves it alone')
        return None
    check(last.exists(), f'nothing to resume: {last} does not exist; leave out --resume to start')
    checkpoint = read_checkpoint(last)
    for saved, given in ((checkpoint['model_config'], vars(model_config)), (checkpoint['config'], config)):
        for key in given:
            old = saved.get(key, DEFAULTS.get(key))             # a setting younger than the checkpoint had its default
            check(key in MAY_CHANGE or old == given[key], f'{last} has {key}={old!r}, but {given[key]!r} was given: resume with '
                  'the settings of that run, or choose another --out_dir')
    check('optimizer' in checkpoint and 'best' in checkpoint, f'{last} cannot be resumed: it has no optimizer state')
    check(checkpoint['step'] <= max_iters, f'{last} is at step {checkpoint["step"]}, beyond max_iters {max_iters}')
    return checkpoint

def keep_metrics(path, step):
    """Drop what was logged after the checkpoint, so that the file is that of a run never stopped."""
    kept = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:                            # killed in the middle of a line
            continue
        if entry['step'] <= step and 'final' not in entry:
            kept.append(line + '\n')
    with atomic(path) as f:
        f.write(''.join(kept).encode())

def summary(rows):
    """Evaluations in one line: val@128 1.000, sparse@128 0.998 exact match"""
    size, key = ('window', 'perplexity') if task == 'wikitext' else ('length', 'exact_match')
    name, write = METRICS[key]
    return ', '.join(f'{row["split"]}@{row[size]} {write(row[key])}' for row in rows) + f' {name}'

def command(files, flags, **changes):
    """The command line of this run, changed."""
    launcher = f'torchrun --nproc_per_node={os.environ.get("LOCAL_WORLD_SIZE", world)}' if world > 1 else 'python'
    flags = {key: text for key, text in flags.items() if key not in ('resume', 'overwrite')} | changes
    return shlex.join([*launcher.split(), sys.argv[0], *files, *(f'--{key}={x}' for key, x in flags.items())])

# -----------------------------------------------------------------------------

def main():
    global device
    begun, stop = time.monotonic(), 0                           # stop: the signal that asked for it

    def on_signal(number, _):
        nonlocal stop
        stop = number
        if world == 1:                                          # else torchrun's signal would follow yours and be the second
            signal.signal(number, signal.SIG_DFL)
            os.write(2, b'\nstopping after this step; a second time stops at once, without saving\n')
    signal.signal(signal.SIGINT, on_signal)
    signal.signal(signal.SIGTERM, on_signal)

    # what can be wrong with the settings is found here, before anything is written
    try:
        config, files, flags = read_settings(sys.argv[1:])
        globals().update(config)
        check_settings()
        source = make_task(task, train_length, p_ignore=p_ignore, n_symbols=n_symbols, repeats=repeats, n_queries=n_queries,
                           data_dir=data_dir, dataset=dataset, tokenizer=tokenizer)
        eval_splits = [split for split in source.splits if split != 'test']     # test is for the end
        final_splits = ['test'] if task == 'wikitext' else source.splits
        for length in eval_lengths:
            next(iter(source.eval_batches(final_splits[0], length * train_length, 1)))      # complains of one that cannot be
        model_config = Config(source.vocab_size, n_layer, n_head, n_embd, mlp_ratio, dropout, attn, tra_sparsity, tra_distance,
                              rope_theta, cope_npos, pre_norm, keep_at_start)
        folder = Path(out_dir)
        checkpoint = open_run(folder, config, model_config)     # several machines have to share the folder
        config['device'], config['dtype'], config['compile'] = choose_machine()
        folder.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        fail(error)
    globals().update(config)
    print0(textwrap.fill('config: ' + ' '.join(f'{key}={value!r}' for key, value in config.items()), 120,
                         break_long_words=False, break_on_hyphens=False, subsequent_indent='        '))

    # model and optimiser, the same in every process
    keep_freed_memory()
    if device == 'cuda':
        device = f'cuda:{local_rank}'
    if device.startswith('cuda'):
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision('high')              # TF32
    torch.manual_seed(seed)
    raw_model = Decoder(model_config).to(device)                # not compiled, not wrapped: the one to save and to evaluate
    matrices = [p for p in raw_model.parameters() if p.dim() >= 2]
    vectors = [p for p in raw_model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW([{'params': matrices}, {'params': vectors, 'weight_decay': 0.0}], weight_decay=weight_decay,
                                  lr=learning_rate, betas=(beta1, beta2), fused=device.startswith(('cuda', 'cpu')))
    step, best = 0, math.inf
    if checkpoint:  # there is no generator or place in a stream to restore: data and dropout follow from (seed, step, rank)
        try:
            raw_model.load_state_dict(checkpoint['model'])
            optimizer.load_state_dict(checkpoint['optimizer'])
        except (RuntimeError, ValueError, KeyError) as error:
            fail(f'{folder}/last.pt does not fit the model: {error}')
        step, best = checkpoint['step'], checkpoint['best']
    model = torch.compile(raw_model) if compile else raw_model
    if world > 1:
        # while rank 0 evaluates, the others wait for it in the next step: that must not time out
        dist.init_process_group('nccl' if device.startswith('cuda') else 'gloo', timeout=timedelta(hours=4))
        model = DistributedDataParallel(model, device_ids=[local_rank] if device.startswith('cuda') else None,
                                        find_unused_parameters=attn == 'tra' and not tra_distance)  # the gate idles then
    autocast = torch.autocast(device.split(':')[0], torch.bfloat16) if dtype == 'bfloat16' else nullcontext()
    tokens = source.batch(seed, 0, 1)[0].size * batch_size * gradient_accumulation_steps
    parameters = sum(p.numel() for p in raw_model.parameters())
    print0(f'{parameters:,} parameters | {tokens:,} tokens a step | {world} process{"es" * (world > 1)} | {folder}')
    if device == 'cpu' and parameters * tokens > 1e10:          # seconds a step
        print0(f'this is sized for a GPU; on a CPU, python train.py config/{task}_cpu.py takes minutes')

    def log(entries):
        with open(folder / 'metrics.jsonl', 'a') as f:
            f.writelines(json.dumps(entry) + '\n' for entry in entries)

    def save(name):
        """Tensors and plain values only. Whoever looks finds the old file or the new one, never half of it."""
        with atomic(folder / name) as f:
            torch.save({'model': raw_model.state_dict(), 'optimizer': optimizer.state_dict(), 'step': step, 'best': best,
                        'config': config, 'model_config': vars(model_config)}, f)

    if rank == 0:
        try:
            if checkpoint:
                keep_metrics(folder / 'metrics.jsonl', step)
            else:                                               # that the disk is full is better known now than in an hour
                for name in ('best.pt', 'metrics.jsonl'):
                    (folder / name).unlink(missing_ok=True)
                save('last.pt')
            with atomic(folder / 'config.json') as f:
                f.write(json.dumps(config, indent=2).encode())
        except (OSError, RuntimeError) as error:
            fail(f'cannot write to {folder}: {error}')
    if checkpoint:
        print0(f'resumed {folder}/last.pt at step {step}' + ': the run is complete' * (step == max_iters))

    clock = None                                                # when the steps began that count for the ETA: once compiled
    if step < max_iters and (compile or attn == 'tra'):
        print0('compiling: this takes a while the first time, then it is cached')
    if step < max_iters and device == 'cpu' and not compile:
        # a step may take long: one pass over a few sequences compiles the kernel, a second tells how long a step will take
        few = max(1, batch_size // world // 16)
        x, y = (torch.from_numpy(array) for array in source.batch(seed, step, few))
        for _ in range(2):
            clock = time.monotonic()
            with autocast:
                raw_model(x, y)[1].backward()
            optimizer.zero_grad()
        estimate = (time.monotonic() - clock) * batch_size * gradient_accumulation_steps / world / few
        if estimate > 1:                                        # else a log line will tell soon
            print0(f'about {estimate:.0f} s/step at a first guess | eta {timedelta(seconds=round(estimate * (max_iters - step)))}')
        clock, clock_step = time.monotonic(), step
    shown, shown_step, patience = time.monotonic(), step, 10    # the last log line, and seconds until another is overdue
    broken = torch.zeros((), dtype=torch.long, device=device)   # the first step that was not finite; 0: none
    saved_step, stopping = step, 0

    model.train()
    while step < max_iters and not stopping:
        # One step. Nothing in it waits for the GPU: numbers are fetched only to be shown or before a save.
        lr = get_lr(step)
        for group in optimizer.param_groups:
            group['lr'] = lr
        torch.manual_seed(int(np.random.SeedSequence([seed, step, rank]).generate_state(1)[0]))     # for dropout
        loss = torch.zeros((), device=device)
        for micro, (x, y, share) in enumerate(batches(source, step)):
            if world > 1:                                       # gradients meet in the last backward pass of the step
                model.require_backward_grad_sync = micro == gradient_accumulation_steps - 1
            with autocast:
                part = model(x, y)[1] * share
            (part * world).backward()                           # where the processes average, we want the sum
            loss += part.detach()
        norm = torch.nn.utils.clip_grad_norm_(raw_model.parameters(), grad_clip or math.inf)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if world > 1:                                           # the loss of all, and whether any was asked to stop
            report = torch.stack([loss, torch.full_like(loss, stop)])
            dist.all_reduce(report)
            loss = report[0]
        broken = torch.where((broken == 0) & ~torch.isfinite(loss + norm), step, broken)
        if clock is None:
            loss.item()                                         # waits for the first step, which compiled
            clock, clock_step = time.monotonic(), step
            print0(f'first step done after {clock - shown:.0f} s')
            shown, shown_step = clock, clock_step

        # what is due
        logging = step % log_interval == 0
        overdue = time.monotonic() - shown > patience           # slow steps are shown in between
        evaluating = step % eval_interval == 0 or step == max_iters
        stopping = stop
        if world > 1:                                           # all stop or none; to ask a GPU at every step would slow it
            stopping = (stop or signal.SIGTERM) if (device == 'cpu' or logging) and report[1] > 0 else 0
        saving = evaluating or stopping or step % save_interval == 0
        if logging or overdue or saving:
            if broken or (saving and not all(torch.isfinite(p).all() for p in raw_model.parameters())):
                fail(f'loss, gradient or weights are not finite at step {int(broken) or step}, so the run stops; the last good '
                     f'checkpoint is {folder}/last.pt of step {saved_step}; try a lower learning_rate', code=1)
        if rank == 0 and (logging or overdue):
            last_loss, now = loss.item(), time.monotonic()
            ms = 1000 * (now - shown) / max(1, step - shown_step)
            eta = timedelta(seconds=round((now - clock) / max(1, step - clock_step) * (max_iters - step)))
            print0(f'step {step}/{max_iters} | loss {last_loss:.4f} | lr {lr:.1e} | {ms:.0f} ms/step | eta {eta}')
            shown, shown_step, patience = now, step, 60
            if logging:                                         # the file depends on steps alone, not on how fast they were
                log([{'step': step, 'loss': last_loss, 'lr': lr, 'ms': round(ms, 1)}])
        if rank == 0 and evaluating:
            rows = [evaluate(raw_model, source, split, train_length, eval_n, device, autocast) for split in eval_splits]
            log({'step': step, **row} for row in rows)
            error = rows[0]['perplexity' if task == 'wikitext' else 'token_error']      # on val
            print0(f'step {step}/{max_iters} | {summary(rows)}' + ' | best so far' * (error <= best))
            if error <= best:                                   # of equals the later, which has learned for longer
                best = error
                save('best.pt')
        if saving:
            saved_step = step
            if rank == 0:
                save('last.pt')
            shown, shown_step = time.monotonic(), step          # ms/step is of training alone, the ETA of everything

    if rank == 0 and not stopping:                              # the table, of the last weights
        signal.signal(signal.SIGINT, signal.SIG_DFL)            # there is nothing left to save
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        print0('training is complete; evaluating')
        rows = [evaluate(raw_model, source, split, length * train_length, final_n or None, device, autocast)
                for split in final_splits for length in eval_lengths]
        log({'step': step, 'final': True, **row} for row in rows)
        print0(f'\n{format_table(rows)}\n')
        print0(f'final | {task} | {attn} | seed {seed} | step {step} | {summary(rows)} | {time.monotonic() - begun:.0f} s')
        print0(f'saved in {folder}: last.pt, best.pt, config.json, metrics.jsonl. To try next:')
        if attn == 'tra':
            flags.pop('out_dir', None)
            print0('  ' + command(files, flags, attn='rope'))
        print0(f'  python eval.py {shlex.quote(str(folder))} --lengths=1x,2x,4x,8x,16x')
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()
    if stopping:
        print0(f'{signal.Signals(stopping).name}: stopped after step {step}, saved in {folder}/last.pt. To go on:')
        print0('  ' + command(files, flags, resume=True))
        sys.exit(128 + stopping)

if __name__ == '__main__':
    main()
