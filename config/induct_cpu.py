# Induction on up to 20 symbols on a CPU, tested up to 60. Eight keys a sequence instead of one: eight times the signal.
#
#     python train.py config/induct_cpu.py

task = 'induct'
train_length = 20
n_symbols = 26
n_queries = 8
n_layer = 2
n_head = 4
n_embd = 128
batch_size = 64
max_iters = 2000
learning_rate = 1e-3
eval_interval = 500
save_interval = 500
eval_lengths = (1, 2, 3)            # buckets 2-20, 21-40, 41-60
