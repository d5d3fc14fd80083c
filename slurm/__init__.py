"""Job scripts for SLURM clusters: templates that also work by hand, and filling them in, submitting and watching them.

Takes plain values and imports nothing else of eyas. What a recipe means for a job is `eyas.recipes.slurm_jobs`.
"""
