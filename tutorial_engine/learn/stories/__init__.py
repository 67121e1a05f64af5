"""What the notebooks show beside the exercises: planted mistakes, and other engines' ways."""
