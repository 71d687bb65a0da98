"""Encoding what the worker trained: where it is done, and how the local weights of a round become a payload."""
