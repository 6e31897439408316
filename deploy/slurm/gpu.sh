#!/bin/bash
# One batch job on the GPUs of one node: sbatch gpu.sh job.toml
#SBATCH --job-name=daskrr-gpu
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gres=gpu:1
#SBATCH --cpus-per-task=8
#SBATCH --mem=64G
#SBATCH --time=01:00:00
#SBATCH --signal=B:TERM@120
#SBATCH --output=%x-%j.log
# SLURM sets CUDA_VISIBLE_DEVICES, and a local cluster has one worker for each GPU that is named there.
exec daskrr run "${1:?which job file}" --cluster local --device cuda
