"""The `README.md` of an exported folder: what the weights are, by the run and by the exporting node's log."""

import re
from collections import Counter
from collections.abc import Sequence

from atoll.protocols.errors import counted
from atoll.protocols.ids import Digest
from atoll.protocols.local.control_messages import RoundStatus
from atoll.protocols.run.run_spec import RunSpec

MODEL_CARD = "README.md"
MOST_AUTHORS = 50


def model_card(
    spec: RunSpec, round_: int, state: Digest, rows: Sequence[RoundStatus], *, is_average: bool = False
) -> str:
    """The card of the weights after `round_`. `rows`: what the node's log has of the run, oldest first. Pure.

    `is_average`: the weights are an average of the node's own.
    """
    facts = model_facts(spec, round_, state, rows, is_average=is_average)
    table = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    most = _authors(_seen(rows, round_)).most_common(MOST_AUTHORS)
    named = "\n".join(f"- {_code(who)}: {counted(n, 'round')}" for who, n in most)
    return _TEXT.format(
        name=plain_text(spec.name),
        table=table,
        who_has_it=_AVERAGED if is_average else _AGREED,
        authors=f"\n## Contributors\n\n{named}\n" if named else "",
    )


def model_facts(
    spec: RunSpec, round_: int, state: Digest, rows: Sequence[RoundStatus], *, is_average: bool = False
) -> dict[str, str]:
    """What is known of the weights after `round_`: subjects, and Markdown. Arguments as of `model_card`. Pure."""
    seen = _seen(rows, round_)
    authors = _authors(seen)
    measured = [
        f"{row.val_bpb:.4f} bits per byte after round {n}" for n, row in seen.items() if row.val_bpb is not None
    ]
    return {
        "run": f"{_code(spec.name)}, id {_code(spec.id.hex())}, owner {_code(spec.owner)}",
        "round": f"{round_ + 1} of {spec.outer.rounds} rounds are in these weights"
        + (", an average of final states" if is_average else ""),
        "state digest": _code(state.hex()),
        "parameters": f"{spec.model.base.parameters:,}{_adapters(spec)}",
        "context": f"{spec.model.context} tokens, tokenizer {_code(spec.data.tokenizer)}",
        "data": f"{_code(spec.data.source)}, digest {_code(spec.data.digest.hex() or 'none')}",
        "tokens": f"{sum(row.tokens for row in seen.values()):,} by this node; each contributor has its own",
        "evaluation": f"{measured[-1]}, {_EVALUATED[is_average]}" if measured else "none in the log of this node",
        "contributors": counted(len(authors), "member") if authors else "not in the log of this node",
    }


def _adapters(spec: RunSpec) -> str:
    """What of the parameters a LoRA run trained."""
    if not spec.model.lora_rank:
        return ""
    return f", of which adapters of rank {spec.model.lora_rank} were trained: {spec.model.parameters:,}"


def _seen(rows: Sequence[RoundStatus], round_: int) -> dict[int, RoundStatus]:
    return {row.round: row for row in rows if row.round <= round_}


def _authors(seen: dict[int, RoundStatus]) -> Counter[str]:
    return Counter(author for row in seen.values() if row.final for author in row.contributors)


_AGREED = "Members that have the same state digest after this round have these weights, bit for bit."
_EVALUATED = {False: "on the run's validation text", True: "of the newest state; the average was not measured"}
_AVERAGED = "The average is that of the exporting node: no other member need have it, nor its digest."
_TEXT = """---
library_name: transformers
pipeline_tag: text-generation
tags: [atoll]
---
# {name}

Weights of a run of atoll: its members trained one model together, without a central server.

| | |
|---|---|
{table}

{who_has_it}
{authors}
## Licence

Not stated: the owner of the run says under which licence these weights may be used. The text that
they were trained on may have a licence of its own.

## Use

    from transformers import pipeline
    print(pipeline("text-generation", "PATH")("Once upon a time")[0]["generated_text"])

or, with atoll, `atoll chat --from-hf PATH`."""


def plain_text(text: str) -> str:
    """A stranger's text without what Markdown, HTML or a table would obey."""
    return re.sub(r"[^\w .,:/@+-]", "?", text)


def _code(text: str) -> str:
    return f"`{plain_text(text)}`"
