# Flip-flop on a CPU, the demonstration: a small TRA model learns to remember the last bit written.
#
#     python train.py config/flipflop_cpu.py
#
# On 2 CPU cores (AMD EPYC, AVX-512): 60 s from the command to the end, 35 to 38 s once the kernel
# is compiled and cached. Exact match 1.000 on val, sparse, dense, nonstationary, 24 seeds of 24.

task = 'flipflop'
train_length = 128
n_layer = 2
n_head = 4
n_embd = 128
dropout = 0.0                       # so short a run has nothing to overfit
batch_size = 32
max_iters = 150
learning_rate = 1e-3
beta2 = 0.95                        # in so short a run a shorter memory is steadier
log_interval = 25
eval_interval = 150
save_interval = 75
final_n = 200                       # sequences of each split and length
eval_lengths = (1, 4)
