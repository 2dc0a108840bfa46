"""Names of what a rank holds in memory: the plan estimates these items and the worker's dry run measures them."""

from __future__ import annotations

BASE_WEIGHTS = "base weights"
PLACES = "places of streamed layers"
CASTED_WEIGHTS = "16-bit copies of the weights (autocast)"
ADAPTERS = "adapters"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer"
GATHERED = "gathered weights"  # of a model that is divided over ranks
EXCHANGED = "gradients on their way"  # of such a model
ACTIVATIONS = "saved activations"
WORKING_SET = "one layer's working set"
DEQUANTISATION = "dequantisation buffer"
LOGITS = "logits"  # estimated: beyond the room that a layer's work takes later
MESSAGES = "messages between stages"  # of a pipeline
HELD = "held by others"  # on the card, before the run starts
STEP = "optimizer's step"  # and the embeddings' gradient; estimated: beyond the room that the layers took

# Logits of one chunk of the fused loss. Its cross entropy holds 12 bytes for each (log-probabilities and two gradients in fp32): 0.2 GB.
CHUNK_LOGITS = 2**24
