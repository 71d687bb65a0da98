"""Performs what the round and finality machines decide: fetches, asks the worker, publishes."""
