"""What is made of the lessons: notebooks, figures, pages, slides, handouts, scores, the site."""
