# Flip-flop as in the paper: remember the last bit written, in 512 tokens of distraction.
#
#     python train.py config/flipflop.py
#
# Time: sized for one A40; not run here. The paper reports 66 minutes on an A40 for 20k steps of a
# tiny TRA model of window 256. Expected: exact match 1.000 on val, sparse and dense. That is what
# the paper reports for its model, and the authors' notebook for 25k steps at this learning rate.

task = 'flipflop'
train_length = 512
n_layer = 4
n_head = 4
n_embd = 256
dropout = 0.01
batch_size = 64
max_iters = 20_000
learning_rate = 1e-4
eval_lengths = (1, 4)
