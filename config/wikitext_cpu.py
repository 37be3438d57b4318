# A language model of bytes on a CPU: WikiText-2, window 128; tested at windows up to 4096.
#
#     python data.py wikitext2 --tokenizer=bytes
#     python train.py config/wikitext_cpu.py
#
# On one core of an AMD EPYC, the other busy too: 6 minutes. Bits per byte of the test set, seed 0:
# 2.156 at window 128, 2.125 at 4096 (--attn=fot: 2.120, 2.090).

task = 'wikitext'
dataset = 'wikitext2'
tokenizer = 'bytes'
train_length = 128
n_layer = 4
n_head = 4
n_embd = 128
dropout = 0.0
batch_size = 32
max_iters = 600
learning_rate = 1e-3
log_interval = 50
eval_interval = 200
save_interval = 200
eval_n = 16_384                     # bytes
final_n = 65_536
eval_lengths = (1, 2, 4, 8, 16, 32)
