"""The hot loops: `reference` defines them, `ops` chooses an implementation and knows their gradients."""
