#!/bin/bash
# One batch job that holds everything: sbatch one-shot.sh job.toml
#SBATCH --job-name=daskrr
#SBATCH --ntasks=16
#SBATCH --mem-per-cpu=4G
#SBATCH --time=01:00:00
#SBATCH --signal=B:TERM@120
#SBATCH --output=%x-%j.log
# SLURM sends SIGTERM two minutes before the time is over, to this process alone: exec lets daskrr have it. It stops its
# workers and ends with code 143; the next submission goes on where it was.
exec daskrr run "${1:?which job file}" --cluster slurm-runner
