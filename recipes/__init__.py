"""Recipes: their schema, the pipeline that runs them, the command line, and the shipped files."""
