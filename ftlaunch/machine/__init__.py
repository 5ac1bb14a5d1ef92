"""What this machine can do: probes, each with a time limit and in a process of its own, measurements, and what fits."""
