"""The benches of `atoll bench`, and the reference arms of `atoll sim`: in the repository, not in the wheel."""
