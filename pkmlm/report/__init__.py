"""What people see: `usage_report` and `compare` read what runs keep, `equal` compares runs at equal amounts; `tables`,
`plots` and `page` show the results.

Sweeps and the commands use this folder; it may import measure/ and what is below.
"""
