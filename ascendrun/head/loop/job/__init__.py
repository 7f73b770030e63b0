"""One live job: survey, start, leases, copies of its files, end."""
