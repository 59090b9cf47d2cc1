"""Gates on any model: placed by hand or found, masked at their consumers, counted exactly.

Gates and compact are one layer whose files use each other, so neither package imports its files here.
"""
