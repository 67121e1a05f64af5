"""Introduced in notebook 01. What makes a notebook a lesson: predictions, checks, and the build.

The engine never imports it.
"""
