# Copy on a CPU: up to 16 symbols in training, up to 96 in the test.
#
#     python train.py config/copy_cpu.py

task = 'copy'
train_length = 16
n_symbols = 96
repeats = False                     # a symbol tells its place; where symbols repeat, it takes several to tell
n_layer = 2
n_head = 8                          # heads of 16
n_embd = 128
dropout = 0.0
keep_at_start = True
batch_size = 64
max_iters = 1000
learning_rate = 2e-4                # a larger one learns as fast, then loses keys again that it had kept
eval_interval = 500
save_interval = 500
eval_lengths = (1, 2, 3, 4, 6)      # buckets 1-16, 17-32, 33-48, 49-64, 81-96
