"""The compact model: a plan of what stays, its application to a copy, and keeping the result on disk."""
