"""What a check is, and the checks of each notebook's exercises."""
