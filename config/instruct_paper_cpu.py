# Instructions with the paper's model and lengths on a CPU: fewer steps, a smaller batch.
#
#     python train.py config/instruct_paper_cpu.py
#
# On one core of an AMD EPYC, the other busy too: 12 minutes. Exact match at 0-50 symbols, seed 10:
# copy 0.80, reverse 0.45, first, last, count 1.00; at 451-500 first 0.95, last 1.00, copy 0.

task = 'instruct'
train_length = 50
n_symbols = 26
n_layer = 4
n_head = 4
n_embd = 256
dropout = 0.0                       # so short a run has nothing to overfit
batch_size = 8
gradient_accumulation_steps = 2     # 16 in all: short sequences go together, which is faster
max_iters = 2000
learning_rate = 4e-4
beta2 = 0.95                        # in so short a run a shorter memory is steadier
log_interval = 100
eval_interval = 500
save_interval = 100
eval_n = 128
final_n = 60                        # sequences of each split and length
eval_lengths = (1, 2, 6, 10)        # buckets 0-50, 51-100, 251-300, 451-500
