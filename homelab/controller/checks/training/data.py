"""data: files that must already lie on the nodes are there and the same everywhere, and what is in the data can be trained on."""

from __future__ import annotations

import math
import posixpath
import re
from collections.abc import Iterator

from homelab.controller.base.hint import Command, Hint, chain, homelab
from homelab.controller.base.node_words import advice
from homelab.controller.base.units import decimal_size, listed
from homelab.controller.checks.check import Problem, check, subject
from homelab.controller.checks.evidence import Evidence, answered, lacks_recipe, majority
from homelab.controller.config.cluster import Node
from homelab.controller.config.recipe import TrainRecipe
from homelab.controller.facts.node import Facts
from homelab.controller.facts.node_commands import copy_between, on_node, path_word
from homelab.shared.protocol.row_forms import LABELLED, OF_OBJECTIVES
from homelab.shared.protocol.worker_messages import FileSample

MOST_TRUNCATED = 0.10
FAR_TOO_LONG = 10  # times seq_len: next to nothing of such a sample is trained on
_ROW = re.compile(r", ((?:line|row) \d+)")


@check("data.there", "data files that must be on the node are there", worst="fail", sees="data", is_certain=True)
def there(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """fail where a file that has to lie on the nodes is missing."""
    for role, path in evidence.data.items():
        file = facts.data.get(role)
        if file is not None and file.found:
            continue
        problem = (file.problem if file else None) or "it does not exist"
        message = f"{role} file {path}: {problem}"
        _, like = _common(evidence, role)
        if like:
            yield Problem("fail", message, fix=_copy(evidence, like[0], node, path))
        else:
            hint = f'copy it to {path_word(path)} on every node, or edit the recipe: a path beside it is shipped ([data] {role} = "FILE")'
            yield Problem("fail", message, hint)


@check("data.same", "data files are the same on every node, by sha256", worst="fail", sees="data")
def same(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """fail where a file has another content than on most nodes (sha256)."""
    for role, path in evidence.data.items():
        file = facts.data.get(role)
        digest = file.sha256 if file is not None and file.found else None
        common, like = _common(evidence, role)
        if digest and digest != common:
            message = f"{role} file {path} differs from that of {listed(like)} (sha256 {digest[:12]}, there {str(common)[:12]})"
            yield Problem("fail", message, fix=_copy(evidence, like[0], node, path))


def _common(evidence: Evidence, role: str) -> tuple[str | None, list[str]]:
    """The digest that most nodes have, and who they are."""
    digests = {
        node.name: digest
        for node, facts in answered(evidence)
        if role in facts.data and facts.data[role].found and (digest := facts.data[role].sha256)
    }
    common = majority(digests, evidence.head) if digests else None
    return common, [name for name, digest in digests.items() if digest == common]


def _copy(evidence: Evidence, source: str, node: Node, path: str) -> Command:
    make_folder = on_node(node, f"mkdir -p {path_word(posixpath.dirname(path))}")
    return chain(make_folder, copy_between(evidence.cluster.node(source), path, node, path))


@check("data.parses", "every checked row can be read, and has a form that the worker knows", worst="fail", sees="sample")
def parses(evidence: Evidence) -> Iterator[tuple[str, Problem]]:
    """fail where the worker would refuse a row. It is the cluster's matter: the file is the same everywhere, or data.same says so."""
    for role, file in _sampled(evidence):
        if file.rows_bad and evidence.sample is not None:
            first, *others = file.rows_bad
            more = f"; also {listed(_row(other.where) for other in others)}" if others else ""
            hint = advice(evidence.sample.node, first.hint) or f"fix the file, or edit the recipe: [data] {role} = another file"
            kind = "data" if first.where.startswith("hub:") else "file"
            yield "", Problem("fail", f"{role} {kind} {first.where}: {first.message}{more}", hint)


def _row(where: str) -> str:
    """ "line 80" of a place in a file."""
    match = _ROW.search(where)
    return match[1] if match else where.rpartition(", ")[2]


@check("data.truncated", f"at most {MOST_TRUNCATED:.0%} of the samples are longer than seq_len", worst="warn", sees="sample")
def truncated(evidence: Evidence) -> Iterator[tuple[str, Problem]]:
    """warn where more than a tenth of the samples are longer than seq_len: their ends are never trained on."""
    for role, file in _sampled(evidence):
        if file.tokens_sampled and file.rows_longer > MOST_TRUNCATED * file.tokens_sampled:
            seq_len = _seq_len(evidence)
            cut = "teach nothing: answers are compared whole" if file.form in OF_OBJECTIVES else "are cut at the end"
            message = (
                f"{file.rows_longer / file.tokens_sampled:.0%} of the samples of the {role} file are longer than seq_len {seq_len} and {cut} "
                f"(the longest has {file.longest_tokens} tokens, half of them more than {file.median_tokens})"
            )
            enough = -(-file.longest_tokens // 64) * 64
            hint = Hint(
                "edit the recipe: [train] seq_len = {} fits all of them ({} says whether there is memory), or split long samples",
                enough,
                homelab("plan"),
            )
            if file.longest_tokens > FAR_TOO_LONG * seq_len:
                hint = Hint("edit the recipe: raise [train] seq_len ({} says how much fits), or split long samples", homelab("plan"))
            yield "", Problem("warn", message, hint)
        elif file.tokens_sampled and file.longest_at and file.longest_tokens > FAR_TOO_LONG * _seq_len(evidence):
            message = (
                f"a sample of the {role} file has {file.longest_tokens} tokens, of which seq_len {_seq_len(evidence)} keeps "
                f"{_seq_len(evidence) / file.longest_tokens:.1%}: {file.longest_at}"
            )
            yield "", Problem("warn", message, "split it into several samples, or take it out if it came in by mistake")


@check("data.loss", "each sample has tokens to learn within seq_len", worst="fail", sees="sample")
def loss(evidence: Evidence) -> Iterator[tuple[str, Problem]]:
    """fail when no sample has text with loss within seq_len; warn when a tenth has no token with loss, or any has an empty answer."""
    for role, file in _sampled(evidence):
        if role == "train" and file.rows_mute:
            yield "", _mute(file)
        if role == "train" and file.tokens_sampled > 1 and file.answers_good in (0, file.tokens_sampled) and file.form == LABELLED:
            one, other = ("good", "bad") if file.answers_good else ("bad", "good")
            message = (
                f"all {file.tokens_sampled} answers of the train file that were read are {one}: nothing says what a {other} one looks like"
            )
            fix = "remove [objective] to learn them as they stand, or " if one == "good" else ""
            yield "", Problem("warn", message, f"{fix}add {other} answers to the file")
        if role != "train" or file.rows_silent <= MOST_TRUNCATED * file.tokens_sampled:
            continue
        every = file.rows_silent == file.tokens_sampled
        share = "no sample" if every else f"{1 - file.rows_silent / file.tokens_sampled:.0%} of the samples"
        message = f"{share} of the train file {'has' if every else 'have'} a token that is trained within seq_len {_seq_len(evidence)}"
        hint = "edit the recipe: raise [train] seq_len so that the answers fit" + (
            "" if file.form in OF_OBJECTIVES else ", or set [data] completion_only = false"
        )
        yield ("", Problem("fail" if every and file.whole and file.tokens_sampled == file.rows_read else "warn", message, hint))


def _mute(file: FileSample) -> Problem:
    """Only the end of the answer carries loss: such a sample teaches to say nothing."""
    taught = file.tokens_sampled - file.rows_silent - file.rows_mute
    every = taught == 0 and file.whole and file.tokens_sampled == file.rows_read
    problem = (
        "no sample of the train file has an answer"
        if taught == 0
        else (f"{file.rows_mute} of {file.tokens_sampled} samples of the train file have an empty answer")
    )
    message = f"{problem}: only the end of the answer is trained, so the model learns to say nothing (the first: {file.mute_at})"
    hint = "fill in the answers, or take these rows out" + ("; edit the recipe if the answers are in another column" if every else "")
    return Problem("fail" if every else "warn", message, hint)


@check("data.enough", "the data fills at least one global batch", worst="warn", sees="sample")
def enough(evidence: Evidence) -> Iterator[tuple[str, Problem]]:
    """warn where the data does not fill one global batch: it trains, but every step is a whole epoch on fewer samples than asked for."""
    recipe = evidence.recipe
    assert isinstance(recipe, TrainRecipe)
    for role, file in _sampled(evidence):
        if role != "train" or not file.whole or file.rows_bad or not file.rows_read:
            continue
        rows, unit = file.rows_read, "samples"
        if recipe.data.eval is None and recipe.data.eval_fraction > 0:
            rows -= min(max(round(rows * recipe.data.eval_fraction), 1), rows - 1)
            unit = "samples without the held-out ones"
        if recipe.data.packing and file.tokens_sampled:
            tokens = file.kept_tokens / file.tokens_sampled * rows
            rows, unit = (math.ceil(tokens / recipe.train.seq_len), f"packed rows of {recipe.train.seq_len} tokens, about")
        if rows < recipe.train.global_batch:
            message = (
                f"the train file has {rows} {unit}, less than one global batch of {recipe.train.global_batch}: every step is a whole epoch"
            )
            yield ("", Problem("warn", message, f"edit the recipe: [train] global_batch = {rows} or less, or add more data"))


def _sampled(evidence: Evidence) -> Iterator[tuple[str, FileSample]]:
    """The files that were looked into, by role."""
    if isinstance(evidence.recipe, TrainRecipe) and evidence.sample is not None:
        yield from sorted(evidence.sample.files.items(), reverse=True)  # train before eval


def _seq_len(evidence: Evidence) -> int:
    assert isinstance(evidence.recipe, TrainRecipe)
    return evidence.recipe.train.seq_len


def _needs(evidence: Evidence) -> str | None:
    if evidence.recipe is None:
        return lacks_recipe(evidence)
    if not evidence.data and (evidence.sample is None or not evidence.sample.files):
        refused = f" (not read: {evidence.sample.refused})" if evidence.sample is not None and evidence.sample.refused else ""
        of_hub = evidence.recipe.data is not None and evidence.recipe.data.train.startswith("hub:")
        return f"no data has to be on the nodes: {'every node downloads it' if of_hub else 'files are shipped'}{refused}"
    return None


@subject("data", "the data is there, the same everywhere, and can be trained on", after="model", needs=_needs)
def _summary(evidence: Evidence, node: Node, facts: Facts) -> str:
    sizes = [f"{role} {decimal_size(facts.data[role].size_bytes or 0)}" for role in evidence.data if role in facts.data]
    of_hub = evidence.recipe is not None and evidence.recipe.data is not None and evidence.recipe.data.train.startswith("hub:")
    parts = [", ".join(sizes) if evidence.data else "downloaded by every node" if of_hub else "shipped"]
    for role, file in _sampled(evidence):
        if file.tokens_sampled and role == "train":
            at = f" ({_row(file.longest_at)})" if file.longest_at else ""
            parts.append(f"{file.read_as or file.form}, {file.median_tokens} tokens a sample, at most {file.longest_tokens}{at}")
        if file.unused:
            parts.append(f"{role}: of {file.tokens_sampled} rows, these keys are not used: {', '.join(file.unused)}")
        if file.revision:
            parts.append(f"{role}: revision {file.revision[:12]} of the hub, {file.rows_read} rows read")
        elif file.unread:
            parts.append(f"{role}: {file.unread}")
    if evidence.sample is not None and evidence.sample.refused:
        parts.append(f"not read: {evidence.sample.refused}")
    return "; ".join(parts)
