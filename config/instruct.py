# Follow an instruction (copy, reverse, first, last, count, parity) on up to 50 symbols; tested up
# to 500.
#
#     python train.py config/instruct.py
#
# Time and result: sized for one A40; not run here. The set of instructions is ours, as are alphabet
# and learning rate; steps and batch are those of the paper's copy task.

task = 'instruct'
train_length = 50
n_symbols = 26
# the model is that of train.py
batch_size = 128
max_iters = 100_000
learning_rate = 3e-4
eval_interval = 2000
eval_lengths = (1, 2, 4, 6, 8, 10)  # buckets 0-50, 51-100, 151-200, ..., 451-500
