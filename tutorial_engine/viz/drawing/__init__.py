"""Introduced in notebook 01. What pictures are made of, and what they have in common.

Scenes and their parts, charts, looks, lanes, pools. Knows no single picture.
"""
