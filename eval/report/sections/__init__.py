"""The sections of the report, one file each with one function: results in, a `Section` out."""
