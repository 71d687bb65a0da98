"""`atoll sim --virtual`: the protocol's machines on virtual time, with faults and liars, judged by an oracle."""
