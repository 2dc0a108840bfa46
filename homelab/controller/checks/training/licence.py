"""Models whose pages on the hub ask for a licence to be accepted: a node without a token cannot download them."""

from __future__ import annotations

from fnmatch import fnmatchcase

# Patterns of hub ids in lower case, and whose terms stand at the gate. Taken from the model pages ("You need to agree to share your
# contact information", "Access Llama ...") as they were in 2025. Only families that are gated as a whole are here: a model that is
# missing costs a clear message of the download, one too many would stop a launch for nothing.
GATED = {
    "meta-llama/*": "Meta's Llama licence",
    "google/gemma-2b*": "Google's Gemma terms",
    "google/gemma-7b*": "Google's Gemma terms",
    "google/gemma-1.1-*": "Google's Gemma terms",
    "google/gemma-2-*": "Google's Gemma terms",
    "google/gemma-3-*": "Google's Gemma terms",
    "google/gemma-3n-*": "Google's Gemma terms",
    "google/codegemma-*": "Google's Gemma terms",
    "google/paligemma-*": "Google's Gemma terms",
    "mistralai/codestral-22b-*": "Mistral's non-production licence",
    "mistralai/mistral-large-instruct-*": "Mistral's research licence",
    "mistralai/ministral-8b-instruct-2410": "Mistral's research licence",
    "coherelabs/c4ai-command-*": "Cohere's licence (CC-BY-NC)",
    "cohereforai/c4ai-command-*": "Cohere's licence (CC-BY-NC)",
    "bigcode/starcoder": "the BigCode OpenRAIL-M agreement",
    "tiiuae/falcon-180b*": "TII's Falcon 180B licence",
}


def gate_of(name: str) -> str | None:
    """The owner of the terms that must be accepted before this hub id can be downloaded; None when none are known."""
    return next((terms for pattern, terms in GATED.items() if fnmatchcase(name.lower(), pattern)), None)
