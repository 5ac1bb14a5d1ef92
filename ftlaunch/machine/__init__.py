"""What this machine can do: probes, measured bandwidths, predictions. Its first room is the doctor, still to come."""
