"""The worker's part in privacy: how often each sequence was used, on the disk before it is used."""
