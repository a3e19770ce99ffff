"""What must see each replica's gradient before the mean: agvm, low-bit and compressed reductions, PowerSGD."""
