"""The commands around a node's web page."""
