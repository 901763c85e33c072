"""Ray: a script that submits a job, and what the job runs on the cluster."""
