"""The worker's part in folds: payloads are verified, sets are applied and checked, whole or slice by slice."""
