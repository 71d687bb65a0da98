"""Encoding what the worker trained: the local weights of a round become a payload."""
