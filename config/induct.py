# Induction as in the paper: up to 50 symbols, a separator and one of them; answer the symbol that
# followed it. Tested up to 300.
#
#     python train.py config/induct.py
#
# Time and result: sized for one A40; not run here. The paper trains for about 100k steps of 128. It
# does not state alphabet or learning rate as far as we know: those are ours. One answer a sequence
# is a thin signal: --n_queries=8 asks eight, for faster learning.

task = 'induct'
train_length = 50
n_symbols = 26
n_queries = 1
# the model is that of train.py
batch_size = 128
max_iters = 100_000
learning_rate = 3e-4
eval_interval = 2000
eval_lengths = (1, 2, 3, 4, 5, 6)   # buckets 2-50, 51-100, ..., 251-300
