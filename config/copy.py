# Copy as in the paper: up to 50 symbols, a separator, and the same symbols again; tested up to 300.
#
#     python train.py config/copy.py
#
# Time and result: sized for one A40; not run here. The paper trains for about 100k steps of 128. It
# does not state alphabet or learning rate as far as we know: those are ours.

task = 'copy'
train_length = 50
n_symbols = 26
# the model is that of train.py
batch_size = 128
max_iters = 100_000
learning_rate = 3e-4
eval_interval = 2000
eval_lengths = (1, 2, 3, 4, 5, 6)   # buckets 1-50, 51-100, ..., 251-300
