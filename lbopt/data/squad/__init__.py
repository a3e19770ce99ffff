"""SQuAD v1.1: questions whose answers are stretches of a text."""
