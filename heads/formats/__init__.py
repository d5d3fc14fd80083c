"""Readers and writers of head directories, one file per format."""
