"""Data sets are brought into the form in which training reads them."""
