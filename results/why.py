"""
Where does a model of copy or induct go wrong?

    python results/why.py out/RUN [LENGTH [SEQUENCES [LAYER THRESHOLD]]]

copy: tokens and errors by how many of the symbols just written tell the place: 2 if the last two
occur together once, or always before the same symbol. induct: by how far back the answer lies, and
by how often the key occurs. For TRA also how many keys the answers keep, layer by layer; and with
LAYER and THRESHOLD all of it again, with that layer keeping only scores above the threshold.
One JSON object, as in results/why.json.
"""
import json
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import numpy as np
import torch

from eval import attention_parts, load_run

def context(source, place):
    """How many symbols before `place` leave one symbol that can follow."""
    for k in range(place + 1):
        before = source[place - k:place]
        if len({source[i + k] for i in range(len(source) - k) if source[i:i + k] == before}) == 1:
            return k
    return place

def reasons(task, tokens, position):
    """What might explain a mistake at a scored position: [(name, value)]"""
    separator = task.chars.index('|')
    source = tokens[:tokens.index(separator)]
    if task.name == 'copy':
        return [('context', context(source, position - len(source)))]
    places = [i for i, x in enumerate(source[:-1]) if x == tokens[position]]
    back = 2 ** int(np.log2(len(source) - places[-1]))
    return [('answer back', f'{back} to {2 * back - 1}'), ('key occurs', min(len(places), 9))]

run, length, n, layer, threshold = [*sys.argv[1:], *['300', '100', '1', '0'][len(sys.argv) - 2:]]
result, model, task = load_run(run)
if float(threshold):
    model.blocks[int(layer) - 1].attn.threshold = float(threshold)
seen, wrong, right, kept = Counter(), Counter(), 0, []
with torch.no_grad():
    for idx, targets in task.eval_batches('val', int(length), int(n), batch_tokens=2 ** 14):
        guesses, scored = model(torch.from_numpy(idx))[0].argmax(-1).numpy(), targets >= 0
        right += int(((guesses == targets) | ~scored).all(1).sum())
        for b, t in np.argwhere(scored):
            for reason in reasons(task, idx[b].tolist(), int(t)):
                seen[reason] += 1
                wrong[reason] += int(guesses[b, t] != targets[b, t])
        if model.config.attn == 'tra' and not kept:         # of the first sequence
            at = np.flatnonzero(scored[0])
            kept = [round(float((parts['keep'][:, at].sum(-1) / (at + 1)).mean()), 3)
                    for parts in attention_parts(model, torch.from_numpy(idx[:1]))]
rows = [{'by': by, 'value': value, 'tokens': seen[by, value], 'wrong': wrong[by, value],
         'error': round(wrong[by, value] / seen[by, value], 4)}
        for by, value in sorted(seen, key=lambda x: (x[0], int(str(x[1]).split()[0])))]
keys = 'run', 'task', 'attn', 'seed', 'train_length', 'step', 'config'
print(json.dumps({key: result[key] for key in keys} | {
    'length': int(length), 'layer': int(layer), 'threshold': float(threshold),
    'exact_match': right / int(n), 'kept': kept, 'rows': rows}))
