PATIENCE = 300.0  # seconds until a process counts as hung: a busy disk or machine may hold one for a minute
