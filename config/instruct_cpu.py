# Instructions (copy, reverse, first, last, count, parity) on a CPU: up to 8 symbols in training, up
# to 48 in the test.
#
#     python train.py config/instruct_cpu.py
#
# On one core of an AMD EPYC (AVX-512): 4 minutes. Exact match, seed 0, with --keep_at_start=False:
# 0.91 at 0-8 symbols, 0.34 at 41-48, where only first and last are left (--attn=rope: 1.00, 0.09).

task = 'instruct'
train_length = 8
n_symbols = 48
repeats = False
n_layer = 4                         # with 2, copy and reverse were not learned in this time
n_head = 4
n_embd = 128
dropout = 0.0
batch_size = 64
max_iters = 2000
learning_rate = 1e-3
beta2 = 0.95                        # as in flipflop_cpu.py
eval_interval = 500
save_interval = 500
final_n = 200                       # sequences of each split and length
eval_lengths = (1, 2, 3, 4, 6)      # buckets 0-8, 9-16, 17-24, 25-32, 41-48
