"""Mutation testing: apply small defects to the source one at a time, and count how many the tests notice."""
