"""Introduced in notebook 01. Facts of recorded runs, which views and explorers ask for.

Who, when, which blocks, which tokens. Draws nothing.
"""
