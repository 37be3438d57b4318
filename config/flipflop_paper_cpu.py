# Flip-flop with the paper's model and length on a CPU: fewer steps, a smaller batch.
#
#     python train.py config/flipflop_paper_cpu.py
#
# On one core of an AMD EPYC (AVX-512), the other one busy too: 7 minutes. Exact match on val,
# sparse, dense, nonstationary 1.000 at 512, 2,048 and 8,192 tokens, seeds 14 to 17.

task = 'flipflop'
train_length = 512
n_layer = 4
n_head = 4
n_embd = 256
dropout = 0.0                       # so short a run has nothing to overfit
batch_size = 8
max_iters = 250
learning_rate = 1e-3
beta2 = 0.95                        # in so short a run a shorter memory is steadier
log_interval = 20
eval_interval = 125
save_interval = 25
eval_n = 64
final_n = 50                        # sequences of each split and length
eval_lengths = (1, 4)
