"""Introduced in notebook 01. Pictures. A file has the name of what a notebook imports from it.

A view asks `run` for facts and draws with `drawing`. Knows no explorer.
"""
