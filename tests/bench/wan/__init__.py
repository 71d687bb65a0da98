"""`bench wan`: nodes behind slow links, beside hivemind's averager."""
