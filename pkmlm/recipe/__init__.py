"""What to do: the recipe's keys (schema), reading them from YAML (load), and what must hold between them (check)."""
