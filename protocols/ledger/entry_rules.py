"""Rules that decide which ledger entries count in a run. Every node ignores all others."""

from msgspec import UNSET

from atoll.protocols.errors import DecodeError
from atoll.protocols.ledger import records
from atoll.protocols.ledger.ownership import splits
from atoll.protocols.run.experts import check_bitmap
from atoll.protocols.run.run_spec import RunSpec
from atoll.protocols.run.sections.variants.staleness import legal_age


def is_lawful(spec: RunSpec, entry: records.Entry) -> bool:
    """Return whether an entry counts in this run.

    The base of a contribution is older than its round by no more than `pace.stale` allows.
    A run that may reduce rounds needs the root of each payload's rows, so only sliced contributions count there;
    a run with audits needs verdicts, so only audited ones do.
    Other runs cannot fold a set that holds a Reduction. A bitmap of experts must name experts of the run.
    Nobody excludes the run's owner or itself. What the owner writes holds; of others it is a vote.
    Only a run that keeps the payloads of final rounds can take work out of them.
    Summaries are named in runs with `history`, in the first attempt of the rounds that it says.
    """
    match entry.body:
        case records.PartContribution(experts=experts):
            return _is_bitmap(experts, splits(spec))
        case records.StaleContribution(round=number, age=age):
            return legal_age(spec.pace.stale, number, age)
        case records.Contribution():
            is_audited = isinstance(entry.body, records.AuditedContribution)
            is_sliced = isinstance(entry.body, records.SlicedContribution)
            return (is_sliced, is_audited) == (spec.reduce is not None, spec.audit is not UNSET)
        case records.Reduction() | records.ReductionFault() | records.Unanswered():
            return spec.reduce is not None
        case records.Exclude(peer=peer):
            can_excise = bool(spec.pace.excise_rounds) or not isinstance(entry.body, records.Excise)
            return can_excise and peer not in (spec.owner, entry.author)
        case records.ExcisingProposal(round=number, excised=excised):
            first = number - (spec.pace.excise_rounds or 0)
            return all(first <= one.since < number and one.peer != spec.owner for one in excised)
        case records.ExcludingProposal(excluded=excluded):
            return spec.owner not in excluded
        case records.SummaryProposal(round=number, ballot=ballot):
            return bool(spec.history and spec.history.summarized(number) is not None) and ballot.attempt == 0
    return True


def _is_bitmap(experts: bytes, count: int) -> bool:
    try:
        check_bitmap(experts, count)
    except DecodeError:
        return False
    return True
