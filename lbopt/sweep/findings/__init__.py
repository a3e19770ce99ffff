"""What a study found, from its rows alone."""
