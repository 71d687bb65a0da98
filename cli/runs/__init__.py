"""`atoll run`: makes runs, lists and shows them, finds public ones, deletes one of this home."""
