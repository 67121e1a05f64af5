"""What puts a learner's functions into the engine: a file for each part of it."""
