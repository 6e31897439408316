#!/bin/bash
# One batch job for each line of a list of stores: sbatch --array=1-$(wc -l < stores.txt)%4 array.sh stores.txt
#SBATCH --job-name=daskrr-array
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=8
#SBATCH --mem-per-cpu=4G
#SBATCH --time=01:00:00
#SBATCH --signal=B:TERM@120
#SBATCH --output=%x-%A-%a.log
store=$(sed -n "${SLURM_ARRAY_TASK_ID}p" "${1:?which list of stores}")
exec daskrr score "$store" "${store%.zarr}-scores.zarr" --workers "$SLURM_CPUS_PER_TASK" \
    --kernel gaussian --length-scale median --ridge 1e-3 --landmarks 300 --certify --seed 0
