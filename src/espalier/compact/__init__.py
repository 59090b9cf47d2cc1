"""The compact model: a plan of what stays, its application to a copy, and keeping the result on disk.

Gates and compact are one layer whose files use each other, so neither package imports its files here.
"""
