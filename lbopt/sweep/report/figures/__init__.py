"""The figures of a study: each module makes one section of the page, or says that there is nothing to draw."""
