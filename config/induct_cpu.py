# Induction on a CPU: which symbol followed this one? Up to 16 symbols in training, up to 96 in the test.
#
#     python train.py config/induct_cpu.py
#
# On one core of an AMD EPYC (AVX-512): 5 to 6 minutes. Exact match, mean of seeds 0 and 1: 0.97 at 2-16 symbols, 0.78 at 49-64,
# 0.73 at 81-96 (--attn=rope, seed 0: 1.00, 0.51, 0.20).

task = 'induct'
train_length = 16
n_symbols = 26
repeats = True                      # the latest place of a key counts; False, with n_symbols = 48, makes every key unique
n_layer = 2
n_head = 4
n_embd = 128
dropout = 0.0
batch_size = 128
max_iters = 3000
learning_rate = 1e-3
beta2 = 0.95                        # chosen with unique symbols, where seed 0 of TRA did better than with 0.999
eval_interval = 500
save_interval = 500
eval_lengths = (1, 2, 3, 4, 6)      # buckets 2-16, 17-32, 33-48, 49-64, 81-96
