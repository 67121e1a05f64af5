"""Tools of the repository: they need the checkout, and the package does not need them."""
