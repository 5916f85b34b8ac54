"""Studies on Slurm: the command `study submit`, scripts of jobs, and sbatch."""
