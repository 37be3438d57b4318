# Language modelling as in the paper: WikiText-103, GPT-2 tokens, window 128; tested at windows up
# to 4096.
#
#     python data.py wikitext103
#     python train.py config/wikitext.py
#
# Time and result: sized for one A40; not run here. The paper reports 178 minutes on an A40 for 20k
# steps of its medium TRA model at window 256; this is 100k steps at window 128. The learning rate
# is ours: we do not know the paper's.

task = 'wikitext'
dataset = 'wikitext103'
train_length = 128
n_layer = 8
n_head = 8
n_embd = 512
dropout = 0.01
batch_size = 64
max_iters = 100_000
learning_rate = 3e-4
eval_interval = 2000
eval_n = 65_536
final_n = 0                         # all of test
eval_lengths = (1, 2, 4, 8, 16, 32)
