# Copy on a CPU: up to 16 symbols in training, up to 96 in the test.
#
#     python train.py config/copy_cpu.py
#
# On one core of an AMD EPYC (AVX-512): 2 minutes. Exact match, seeds 200 and 201: 1.000 at 1-16
# symbols, 0.995 and 0.989 at 49-64, 0.889 and 0.836 at 81-96 (a bias of 0.25, results/start.json).

task = 'copy'
train_length = 16
n_symbols = 96
repeats = False                     # a symbol tells its place; with repeats it takes several
n_layer = 2
n_head = 8                          # small ones, where it matters what is dropped
n_embd = 128
dropout = 0.0
batch_size = 64
max_iters = 1000
learning_rate = 2e-4                # larger ones lost keys again that the first layer had kept
eval_interval = 500
save_interval = 500
eval_lengths = (1, 2, 3, 4, 6)      # buckets 1-16, 17-32, 33-48, 49-64, 81-96
