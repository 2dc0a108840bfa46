"""The law of this project: a recipe alone decides the training; the cluster only decides who computes what.

The planner predicts with these modules and the worker trains with them, so both compute the same answer. They are pure: no I/O, no clock, no
randomness but the seeded order. They import the standard library only and run on Python 3.9, because they are shipped to the nodes.

    order                which rows are trained in which step (seed and number of rows decide)
    assignment, packing  which rank computes which rows, in which forward passes (speeds, limits and shares decide; the sum stays the same)
    limits, speed        what a rank can hold and how fast it computes
    learning_rate        the learning rate of a global batch
    checkpoint_interval  after which steps a checkpoint is due
    padding              whether a model's config allows rows without padding
    model_chance         which numbers of a model's config.json are rates of dropout or noise
    wire_bytes           how much of a gradient goes over the wire
"""
