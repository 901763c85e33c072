"""Jobs on clusters and runs on hosts: Slurm, Kubernetes, SkyPilot, Ray, ssh. Training needs none of it."""
