"""The least and the largest values of a recipe's keys."""

import math

LARGEST_SIZE = 2**31 - 1
MOST_PARAMETERS = 2**40
MOST_SLOTS = 2**31  # with more than one rank, which exchange slot numbers as int32

# The least and largest whole numbers where they are not 1 and LARGEST_SIZE; the intervals of other numbers
# are (low, low included, high, high included).
LEAST = {
    "model.hash.extra_bits": 0,
    "optim.warmup_steps": 0,
    "optim.values.warmup_steps": 0,
    "optim.tables.warmup_steps": 0,
    "train.seed": 0,
    "eval.every": 0,
    "eval.recalibrate": 0,
    "checkpoint.keep": 2,
}
MOST = {"model.layers": 10_000, "model.hash.bits": 16, "model.hash.extra_bits": 15, "train.seed": 2**63 - 1}
RATE = (0.0, False, 1000.0, True)  # more is a slip of the pen, and would soon overflow
DECAY = (0.0, True, 1e30, True)  # times a rate it is finite in fp32
FROM_ZERO = (0.0, True, math.inf, False)
FROM_ZERO_BELOW_ONE = (0.0, True, 1.0, False)
INTERVALS = {
    "model.rotary_fraction": (0.0, False, 1.0, True),
    "model.dropout": FROM_ZERO_BELOW_ONE,
    "model.hash.temperature": (1e-30, True, math.inf, False),  # 2 / t must be finite in fp32
    "optim.lr": RATE,
    "optim.betas": FROM_ZERO_BELOW_ONE,
    "optim.eps": (1e-30, True, math.inf, False),  # less is 0 in fp32: an unread row would give 0 / 0
    "optim.final_lr": (0.0, True, 1.0, True),
    "optim.weight_decay": DECAY,
    "optim.values.weight_decay": DECAY,
    "optim.tables.weight_decay": DECAY,
    "optim.clip": FROM_ZERO,
    "optim.keys.lr_scale": (0.0, True, 1000.0, True),
    "optim.values.lr": RATE,
    "optim.values.betas": FROM_ZERO_BELOW_ONE,
    "optim.values.clip": FROM_ZERO,
    "optim.tables.lr_scale": RATE,
    "optim.tables.betas": FROM_ZERO_BELOW_ONE,
    "optim.tables.clip": FROM_ZERO,
}
