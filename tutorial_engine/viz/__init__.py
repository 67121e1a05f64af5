"""Introduced in notebook 01. Everything that draws. The engine never imports it.

Pictures are pure functions of what the engine returned or recorded: nothing is drawn by hand. Each
notebook imports its views from their modules.
"""
