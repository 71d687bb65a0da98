"""Typed unary calls between two peers on one long-lived stream, and single requests on their own stream."""
