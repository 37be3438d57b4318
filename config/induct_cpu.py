# Induction on a CPU: which symbol followed this one? Up to 16 symbols in training, up to 96 in the
# test.
#
#     python train.py config/induct_cpu.py
#
# On one core of an AMD EPYC (AVX-512): 2 minutes. Exact match, seeds 200 and 201: 1.000 at 2-16
# symbols, 0.772 and 0.768 at 49-64, 0.711 and 0.700 at 81-96 (a bias of 0.25, results/start.json).

task = 'induct'
train_length = 16
n_symbols = 26
repeats = True                      # the latest counts; False, with n_symbols = 96: unique keys
n_layer = 2
n_head = 2
n_embd = 128
dropout = 0.0
batch_size = 128
max_iters = 1000
learning_rate = 2e-4
eval_interval = 500
save_interval = 500
eval_lengths = (1, 2, 3, 4, 6)      # buckets 2-16, 17-32, 33-48, 49-64, 81-96
