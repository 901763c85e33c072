"""Kubernetes: manifests of jobs."""
