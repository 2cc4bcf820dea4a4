"""A run as a job of SLURM, Kubernetes or Vertex AI: `job.py` checks it and writes the file, with the other modules."""
