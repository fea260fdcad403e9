"""A recipe for every layer, chosen under a budget of bits by how much the model's output depends on it: `kvant tune`."""
