"""Hosts on a small internet of Linux network namespaces, some behind home routers."""
