"""What the build of the site adds to Sphinx."""
